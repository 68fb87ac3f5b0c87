"""Pictures as files: SVG as it is drawn; PNG and GIF made of it by resvg-py and Pillow, the extra `pictures`."""

import io
import math
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from pagedcli.errors import UsageError
from pagedcli.show.drawing import Picture, Theme, all_colours, colours_of

ENDINGS = (".svg", ".png", ".gif")
_WIDTH = {".png": 2560, ".gif": 800}  # pixels; of a narrow picture half as many
_NARROW = 800
_FRAME_MS, _LAST_FRAME_MS = 400, 2000
_NUM_COLOURS = 128
_NEAR = 24.0  # Pillow looks colours up in steps of 4, and would take a mixture this near for a colour itself
_TEXT_ONLY = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="20"><text y="15" font-size="15">{}</text></svg>'
)


def write_picture(file: BinaryIO, ending: str, frames: Iterable[Picture], theme: Theme) -> int:
    """Write one picture, or for .gif any number of them. Returns how many. Raises: UsageError without the extra."""
    if ending == ".svg":
        (picture,) = frames
        file.write(picture.svg(theme).encode())
        return 1
    check_fonts()
    if ending == ".png":
        (picture,) = frames
        file.write(_png(picture, theme, _WIDTH[".png"]))
        return 1
    return _write_gif(file, frames, theme)


def check_ending(path: Path) -> str:
    """The ending of a picture's name. Raises: UsageError for another, or without what PNG and GIF need."""
    if path.suffix not in ENDINGS:
        raise UsageError(f"--picture cannot write {path}", hint="its name must end in .svg, .png or .gif")
    if path.suffix != ".svg" and None in map(find_spec, ("PIL", "resvg_py")):
        hint = "pip install 'pagedcli[pictures]', or write .svg"
        raise UsageError(f"{path.suffix} needs resvg-py and Pillow, which are not installed", hint=hint)
    return path.suffix


def _png(picture: Picture, theme: Theme, width: int) -> bytes:
    fixed = Theme.DARK if theme is Theme.DARK else Theme.LIGHT
    return _rendered(picture.svg(fixed), width if picture.width > _NARROW else width // 2)


def _rendered(svg: str, width: int) -> bytes:
    import resvg_py

    return bytes(resvg_py.svg_to_bytes(svg_string=svg, width=width))


def check_fonts() -> None:
    """Raises: UsageError on a machine without fonts, where text would be left out in silence."""
    blank, drawn = (_rendered(_TEXT_ONLY.format(word), 40) for word in ("", "text"))
    if blank == drawn:
        hint = "install one, e.g. DejaVu Sans, or write .svg"
        raise UsageError("this machine has no fonts to draw text with", hint=hint)


def _write_gif(file: BinaryIO, frames: Iterable[Picture], theme: Theme) -> int:
    """All frames have one palette: then only what changes between them is written."""
    from PIL import Image

    def drawn(picture: Picture) -> Image.Image:
        return Image.open(io.BytesIO(_png(picture, theme, _WIDTH[".gif"]))).convert("RGB")

    exact = [tuple(bytes.fromhex(colour[1:])) for colour in colours_of(theme)]
    mixed = drawn(all_colours()).quantize(_NUM_COLOURS, dither=Image.Dither.NONE).getpalette() or []
    far = [
        each for each in zip(*[iter(mixed)] * 3, strict=True) if all(math.dist(each, other) > _NEAR for other in exact)
    ]
    palette = Image.new("P", (1, 1))
    palette.putpalette([value for colour in (*exact, *far) for value in colour])
    images = [drawn(frame).quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    durations = [_FRAME_MS] * (len(images) - 1) + [_LAST_FRAME_MS]
    images[0].save(file, "GIF", save_all=True, append_images=images[1:], duration=durations, loop=0)
    return len(images)
