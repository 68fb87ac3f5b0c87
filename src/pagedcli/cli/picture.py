"""`trace RUN --picture`: what a recorded run looked like at a step, or as a whole, as a file for slides and papers."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pagedcli.cli.options import option
from pagedcli.errors import UsageError
from pagedcli.events import StepScheduled
from pagedcli.files import check_files, whole_file, writing
from pagedcli.printable import plural
from pagedcli.show.drawing import Picture, Shape, Theme
from pagedcli.show.pool_picture import PrefixLetters, pool_picture
from pagedcli.show.raster import check_ending, write_picture
from pagedcli.show.run_pictures import life_picture, tree_picture, waste_picture
from pagedcli.show.tables import size
from pagedcli.show.terminal import ProgressLine, say, say_notes
from pagedcli.trace.files import TraceReader
from pagedcli.trace.fold import fold, pool_fold
from pagedcli.trace.state import PoolState
from pagedcli.views.names import NamedRequest
from pagedcli.views.prefix_tree import PrefixTree
from pagedcli.views.request_life import RequestLife
from pagedcli.views.step_choice import StepChoice

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


def draw_run(
    trace: Path, options: PictureOptions, steps: StepChoice, follow: NamedRequest | None, *, overwrite: bool
) -> None:
    """Write the picture of a recorded run. Raises: UsageError for a subject without its step or request."""
    is_film = options.file.suffix == ".gif"
    of_step = options.of in ("pool", "waste")
    if options.of == "request" and follow is None:
        raise UsageError("--of request needs --follow", hint="for example --follow code-Mirano")
    if not of_step and (is_film or steps != StepChoice()):
        raise UsageError(
            f"--of {options.of} shows the whole run", hint="leave out --step and --steps, and write .svg or .png"
        )
    if of_step and not is_film and steps.last != steps.first:
        raise UsageError(f"{options.file.suffix} shows one step", hint="--step N chooses it; --steps A-B needs a .gif")
    check_files({"the trace": trace}, {"--picture": options.file}, overwrite=overwrite)
    reader = TraceReader(trace)
    frames = _of_steps(reader, options, steps, follow) if of_step else iter([_of_run(reader, options, follow)])
    write_file(options, frames, overwrite=overwrite)
    say_notes(reader.notes)


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


def _of_steps(
    reader: TraceReader, options: PictureOptions, steps: StepChoice, follow: NamedRequest | None
) -> Iterator[Picture]:
    folding, letters, last = pool_fold(), PrefixLetters(), None
    for event in folding.steps(reader):
        if not isinstance(event, StepScheduled):
            continue
        last = event.step
        if steps.shows(event.step):
            yield _of_step(folding.state, options, letters, follow)
        if steps.is_over(event.step):
            return
    if last is None or last < steps.first:
        known = "it has no steps" if last is None else f"the last one is {last}"
        raise UsageError(f"{reader.path} has no step {steps.first}: {known}")


def _of_step(state: PoolState, options: PictureOptions, letters: PrefixLetters, follow: NamedRequest | None) -> Picture:
    if options.of == "waste":
        return waste_picture(state, shape=options.shape)
    seq_ids = None if follow is None else follow.seq_ids
    return pool_picture(state, follow=seq_ids, shape=options.shape, letters=letters)


def _of_run(reader: TraceReader, options: PictureOptions, follow: NamedRequest | None) -> Picture:
    if follow is None:
        tree = PrefixTree()
        state = fold(reader, tree)
        return tree_picture(tree, state.block_size, shape=options.shape)
    life = RequestLife(follow)
    state = fold(reader, life)
    return life_picture(follow.name, life.finish(state), shape=options.shape)
