"""`trace RUN --picture`: what a recorded run looked like at a step, or as a whole."""

from collections.abc import Iterator
from pathlib import Path

from pagedcli.cli.picture import PictureOptions, write_file
from pagedcli.errors import UsageError
from pagedcli.events import StepScheduled
from pagedcli.files import check_files
from pagedcli.show.drawing import Picture
from pagedcli.show.pool_picture import PrefixLetters, pool_picture
from pagedcli.show.run_pictures import life_picture, tree_picture, waste_picture
from pagedcli.show.terminal import say_notes
from pagedcli.trace.files import TraceReader
from pagedcli.trace.fold import fold, pool_fold
from pagedcli.trace.state import PoolState
from pagedcli.views.names import NamedRequest
from pagedcli.views.prefix_tree import PrefixTree
from pagedcli.views.request_life import RequestLife
from pagedcli.views.step_choice import StepChoice


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
