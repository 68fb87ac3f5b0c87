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
MUTED = "bright_black"  # for what matters less; Rich's `dim` has too little contrast


def contrast(first: tuple[int, int, int], second: tuple[int, int, int]) -> float:
    """WCAG's contrast ratio of two colours, between 1 and 21. Source: WCAG 2.2, relative luminance."""
    low, high = sorted(_luminance(*colour) for colour in (first, second))
    return (high + 0.05) / (low + 0.05)


def _luminance(*channels: int) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (each / 255 for each in channels)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
