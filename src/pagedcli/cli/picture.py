"""--picture of trace and simulate: the flags, and the file for slides and papers."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pagedcli.cli.options import option
from pagedcli.errors import UsageError
from pagedcli.files import whole_file, writing
from pagedcli.printable import plural
from pagedcli.records import size
from pagedcli.show.drawing import Picture, Shape, Theme
from pagedcli.show.raster import check_ending, write_picture
from pagedcli.show.terminal import ProgressLine, say

Topic = Literal["pool", "request", "prefixes", "waste"]
_PANEL = "Pictures"
PICTURE_HELP = (
    "Draw a picture: .svg or .png of --step, .gif of --steps. With --follow, the block tables of that request."
)
OF_HELP = (
    "What to draw. pool: blocks and block tables; request: timeline of the one in --follow; prefixes: prefix tree with"
    " hits; waste: contiguous against paged. Default: pool."
)
ShapeOption = Annotated[
    Shape | None,
    option("--shape", help="Format. slide: 16:9; column: width of a paper's column. Default: slide.", panel=_PANEL),
]
ThemeOption = Annotated[
    Theme | None,
    option("--theme", help="Colours; auto: follow the viewer, light in .png and .gif. Default: auto.", panel=_PANEL),
]


@dataclass(frozen=True, slots=True)
class PictureOptions:
    """What they ask for."""

    file: Path
    of: Topic
    shape: Shape
    theme: Theme

    @classmethod
    def of_flags(
        cls, file: Path | None, *, of: Topic | None = None, shape: Shape | None = None, theme: Theme | None = None
    ) -> "PictureOptions | None":
        """None without --picture. Raises: UsageError."""
        if file is None:
            for name, given in (("--of", of), ("--shape", shape), ("--theme", theme)):
                if given is not None:
                    raise UsageError(f"{name} needs --picture", hint="for example --picture pool.svg")
            return None
        check_ending(file)
        return cls(file, of or "pool", shape or Shape.SLIDE, theme or Theme.AUTO)


def write_file(options: PictureOptions, frames: Iterator[Picture], *, overwrite: bool) -> None:
    """Write the picture, or the frames of a film. Raises: UsageError."""
    path = options.file
    with writing(path), whole_file(path, overwrite=overwrite) as file:
        num_frames = write_picture(file, path.suffix, _counted(frames, path), options.theme)
        num_bytes = file.tell()
    steps = f"{plural(num_frames, 'step')}, " if path.suffix == ".gif" else ""
    say(f"{path}: {steps}{size(num_bytes)}")


def _counted(frames: Iterator[Picture], path: Path) -> Iterator[Picture]:
    """The frames; how many there are so far is shown while they are drawn."""
    line = ProgressLine(line_every_s=5.0)
    for number, frame in enumerate(frames, 1):
        line.show(partial("{}: {} drawn in {:.0f} s".format, path, plural(number, "step")))
        yield frame
    line.close()
