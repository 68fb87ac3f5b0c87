"""The colours of the application. Each is at least 4.5 times as bright as the panels (WCAG's contrast ratio); that of
empty blocks 7 times."""

from rich.terminal_theme import TerminalTheme

_BLACK, _RED, _GREEN, _YELLOW = (18, 18, 18), (255, 120, 120), (110, 210, 110), (255, 215, 95)
_BLUE, _MAGENTA, _CYAN, _WHITE = (120, 170, 255), (240, 140, 255), (95, 205, 235), (224, 224, 224)
_GREY = (160, 160, 160)
# what names such as `green` stand for: `bright_black` is the colour of empty blocks
ANSI = TerminalTheme(
    _BLACK,
    _WHITE,
    [_BLACK, _RED, _GREEN, _YELLOW, _BLUE, _MAGENTA, _CYAN, _WHITE],
    [_GREY, _RED, _GREEN, _YELLOW, _BLUE, _MAGENTA, _CYAN, (255, 255, 255)],
)
MUTED = "bright_black"  # Rich's `dim` has too little contrast
