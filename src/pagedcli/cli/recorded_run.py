"""A recorded run as the subject of `pagedcli trace`: its steps, in either direction. Needs no model and no GPU."""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, cast

import msgspec
import typer

from pagedcli.app.pool_players import ReplayPlayer
from pagedcli.batch.lines import copied, is_live, live_beginning
from pagedcli.cli.block import print_block
from pagedcli.cli.cures import told_of_recording
from pagedcli.cli.dump_kv import Dump, DumpKv, Every, Steps, table_width
from pagedcli.cli.options import option
from pagedcli.cli.picture import OF_HELP, PICTURE_HELP, PictureOptions, ShapeOption, ThemeOption, Topic
from pagedcli.cli.recording import is_recording, replay_capture
from pagedcli.cli.run_picture import draw_run
from pagedcli.errors import TraceError, UsageError
from pagedcli.events import BlockEvicted, StepFinished, StepScheduled
from pagedcli.files import beginning_of, check_files, whole_file, writing
from pagedcli.kvevents.capture import is_capture, is_capture_line
from pagedcli.printable import plural, printable_json
from pagedcli.show.perfetto import export_perfetto
from pagedcli.show.step_tables import StepConsole, StepPrinter
from pagedcli.show.tables import Format, print_sentences
from pagedcli.show.terminal import TerminalJson, is_interactive, say, say_notes
from pagedcli.trace.check import check_trace
from pagedcli.trace.files import TraceReader, parts
from pagedcli.trace.fold import pool_fold
from pagedcli.trace.state import PoolState
from pagedcli.views.moment import Moment, Replay
from pagedcli.views.names import NamedRequest, find_request
from pagedcli.views.stats import pool_counts
from pagedcli.views.step_choice import StepChoice

StepFormat = Literal["table", "json", "md"]
TraceFile = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE.jsonl[.zst]", help="Trace or KV events, written by --record; - is stdin.", callback=copied
    ),
]
_BLOCK_HELP = "Print the owners, content and history of block N, at --step or at the end."
_FOLLOW_HELP = "Highlight one request, by its id or else its row index, or one sequence (seq:31)."
_view, _recorded = (partial(option, panel=panel) for panel in ("View", "Recorded runs"))


@dataclass(frozen=True, slots=True)
class ViewFlags:
    """The flags that say what is shown of a run, live or recorded."""

    follow: Annotated[str | None, _view(metavar="ID", help=_FOLLOW_HELP)] = None
    step: Annotated[int | None, _view(metavar="N", help="Print only the tables of step N.")] = None
    dump_kv: DumpKv = None
    steps: Steps = None
    every: Every = 1
    format_: Annotated[StepFormat, _view("--format", help="Format of the tables.", show_default=True)] = "table"

    @property
    def dump(self) -> Dump:
        """What --dump-kv and the choice of steps ask for. Raises: UsageError."""
        return Dump.of(self.dump_kv, self.steps, self.every, step=self.step)


@dataclass(frozen=True, slots=True)
class RecordedFlags:
    """The flags that only a recorded run takes."""

    block: Annotated[int | None, _recorded(metavar="N", min=0, help=_BLOCK_HELP)] = None
    check: Annotated[bool, _recorded("--check", help="Verify that the whole trace is consistent.")] = False
    export: Annotated[
        Literal["perfetto"] | None, _recorded(help="Export the run to the file -o, e.g. for ui.perfetto.dev.")
    ] = None
    picture: Annotated[Path | None, _recorded(metavar="FILE", help=PICTURE_HELP)] = None
    of: Annotated[Topic | None, _recorded(help=OF_HELP)] = None
    shape: ShapeOption = None
    theme: ThemeOption = None

    def check_with(self, view: ViewFlags, picture: PictureOptions | None) -> None:
        """Raises: UsageError for flags that exclude each other."""
        others = self.check or self.export is not None or view.dump_kv is not None
        if self.check and view.format_ == "md":
            raise UsageError("--check does not print --format md", hint="use table or json")
        if picture is not None and (others or self.block is not None or view.format_ != "table"):
            raise UsageError("--picture can be combined only with --step, --steps, --every and --follow")
        if self.block is not None and (others or view.follow is not None or view.steps is not None):
            raise UsageError("--block can be combined only with --step and --format")


def recorded_file(name: str) -> Path | None:
    """The file of the recorded run, or of the recorded KV events, that the input of `trace` is; None: it is prompts.

    Raises: UsageError or TraceError if it cannot be read.
    """
    path = Path(name)
    if is_live(name):
        begins = b"" if name == "-" and sys.stdin.isatty() else live_beginning(name)
        is_recorded = begins.startswith(b'{"event"') or is_capture_line(begins.partition(b"\n")[0])
        return copied(path) if is_recorded else None
    if not path.name.endswith((".jsonl", ".jsonl.zst")):
        return None
    found = next(iter(parts(path)), path)  # a killed run leaves another name
    is_recorded = found.is_file() and (beginning_of(found, 64).startswith(b'{"event"') or is_capture(found))
    return path if is_recorded else None


def look_at(
    trace: Path, view: ViewFlags, flags: RecordedFlags, *, output_file: str | None = None, overwrite: bool = False
) -> None:
    """Open a recorded run in the application, or print, check, draw or export it. Raises: UsageError or TraceError."""
    dump = view.dump
    picture = PictureOptions.of_flags(flags.picture, of=flags.of, shape=flags.shape, theme=flags.theme)
    if output_file is not None and flags.export is None:
        raise UsageError("-o needs --export: a recorded run has no rows to write")
    flags.check_with(view, picture)
    given = {name: getattr(flags, name) for name in ("check", "export", "block", "picture")}
    if is_recording(trace, **given, follow=view.follow, dump_kv=view.dump_kv or None, steps=view.steps):
        replay_capture(trace, view.step, as_json=view.format_ == "json", every_step=dump.as_tables)
        return
    request = None if view.follow is None else find_request(TraceReader(trace), view.follow, str(trace))
    if picture is not None:
        draw_run(trace, picture, dump.chosen, request, overwrite=overwrite)
    elif flags.block is not None:
        print_block(trace, flags.block, view.step, None, Format(view.format_))
    elif flags.check:
        _check(trace, view.format_)
    elif flags.export is not None:
        _export(trace, output_file, overwrite=overwrite)
    elif dump.file is not None:
        _write_tables(trace, dump, overwrite=overwrite)
    elif dump.as_tables or dump.chooses or view.format_ != "table":
        _print_steps(trace, dump.chosen, request, view.format_)
    elif is_interactive():
        _play(trace, request)
    else:
        _print_lines(trace, request)


def _check(trace: Path, format_: StepFormat) -> None:
    result = check_trace(TraceReader(trace))
    counts = pool_counts(result.state)
    if format_ == "json":
        facts = {
            "ok": True, "num_events": result.num_events, "num_steps": result.num_steps,
            "blocks": counts, "notes": result.notes,
        }  # fmt: skip
        print(printable_json(msgspec.json.encode(facts)).decode())
        return
    say_notes(result.notes)
    length = f"{plural(result.num_events, 'event')} in {plural(result.num_steps, 'step')}"
    pool = f"in use {counts['in_use']:,} + cached {counts['cached']:,} + empty {counts['empty']:,}"
    print_sentences([f"{trace}: ok, {length}; at the end {pool} = {plural(counts['total'], 'block')}"])


def _export(trace: Path, output_file: str | None, *, overwrite: bool) -> None:
    reader = TraceReader(trace)
    if output_file in (None, "-"):
        on_terminal = cast(BinaryIO, TerminalJson(sys.stdout.buffer))
        export_perfetto(reader, on_terminal if sys.stdout.isatty() else sys.stdout.buffer)
    else:
        path = Path(str(output_file))
        check_files({"the trace": trace}, {"the export": path}, overwrite=overwrite)
        with writing(path), whole_file(path, overwrite=overwrite) as file:
            export_perfetto(reader, file)
        say(f"{path}: open it at https://ui.perfetto.dev")
    say_notes(reader.notes)


def _print_steps(trace: Path, chosen: StepChoice, follow: NamedRequest | None, format_: StepFormat) -> None:
    reader = TraceReader(trace)
    printer = StepPrinter(StepConsole(), follow=follow, chosen=chosen, format=Format(format_), width=table_width())
    for event in printer.fold.steps(reader):
        printer.show(event)
        if isinstance(event, StepScheduled) and chosen.is_over(event.step):
            return
    say_notes(reader.notes)
    if chosen.first and not printer.num_printed:
        raise no_such_step(chosen, str(trace), printer.moment.state)


def no_such_step(chosen: StepChoice, where: str, state: PoolState) -> UsageError:
    """The error for a step after the last one."""
    return UsageError(f"{where} has no step {chosen.first}: the last one is {state.step_number}")


def _write_tables(trace: Path, dump: Dump, *, overwrite: bool) -> None:
    files = dump.named_files(overwrite=overwrite)
    assert files is not None, "a file was named"
    check_files({"the trace": trace}, files.paths, overwrite=overwrite)
    reader = TraceReader(trace)
    with files.written() as folding:
        for event in folding.steps(reader):
            if isinstance(event, StepScheduled) and dump.chosen.is_over(event.step):
                break
    say_notes(reader.notes)


def _print_lines(trace: Path, follow: NamedRequest | None) -> None:
    reader, moment = TraceReader(trace), Moment(follow=follow)
    for event in pool_fold(moment).steps(reader):
        if isinstance(event, BlockEvicted):
            continue  # the events of one step share a line
        for line in moment.new_words():
            print(line)
        if isinstance(event, StepFinished):
            print(moment.line())
    say_notes(reader.notes)


def _play(trace: Path, follow: NamedRequest | None) -> None:
    from pagedcli.app.pool_app import PoolApp

    reader = TraceReader(trace)
    say(f"reading {trace} ...")
    past = Replay(reader, follow=follow)
    judge = partial(told_of_recording, trace)
    PoolApp(ReplayPlayer(past), f"pagedcli trace {trace.name}", judge=judge).show()
    say_notes(reader.notes)
    if past.damage is not None:
        raise TraceError(past.damage)
