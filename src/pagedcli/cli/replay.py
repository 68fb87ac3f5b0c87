"""`pagedcli replay`: step through a recorded run, in either direction."""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, cast

import msgspec
import typer

from pagedcli.cli.block import replay_block
from pagedcli.cli.dump_kv import Dump, DumpKv, Every, Steps, table_width
from pagedcli.cli.options import config_flags, option
from pagedcli.cli.picture import PictureFlags, PictureOptions, draw_run
from pagedcli.cli.recording import is_recording, replay_capture
from pagedcli.errors import TraceError, UsageError
from pagedcli.events import BlockEvicted, StepFinished, StepScheduled
from pagedcli.files import check_files, whole_file, writing
from pagedcli.printable import plural, printable_json
from pagedcli.show.perfetto import export_perfetto
from pagedcli.show.step_tables import StepConsole, StepPrinter
from pagedcli.show.tables import Format, print_sentences
from pagedcli.show.terminal import TerminalJson, is_interactive, say, say_notes
from pagedcli.trace.check import check_trace
from pagedcli.trace.files import TraceReader
from pagedcli.trace.fold import pool_fold
from pagedcli.trace.state import PoolState
from pagedcli.views.moment import Moment, Replay
from pagedcli.views.names import NamedRequest, find_request
from pagedcli.views.stats import pool_counts
from pagedcli.views.step_choice import StepChoice

StepFormat = Literal["table", "json", "md"]
TraceFile = Annotated[Path, typer.Argument(metavar="TRACE.jsonl[.zst]", help="Trace or KV events written by --record.")]
_BLOCK_HELP = "Print who holds block N, what it contains, and its story, at --step or at the end."
_FOLLOW_HELP = (
    "Highlight one request, by its id or its row's index (the id takes precedence), or one sequence (seq:31)."
)
Follow = Annotated[str | None, option(metavar="ID", help=_FOLLOW_HELP)]


@dataclass(frozen=True, slots=True)
class ReplayFlags:
    """The flags of `replay`, apart from those of pictures."""

    step: Annotated[int | None, option(metavar="N", help="Print the tables of step N and exit.")] = None
    block: Annotated[int | None, option(metavar="N", min=0, help=_BLOCK_HELP)] = None
    follow: Follow = None
    no_live: Annotated[bool, typer.Option("--no-live", help="The same as --dump-kv without a file.")] = False
    dump_kv: DumpKv = None
    steps: Steps = None
    every: Every = 1
    check: Annotated[bool, typer.Option("--check", help="Verify that the whole trace is consistent.")] = False
    export: Annotated[Literal["perfetto"] | None, option(help="Export the run, e.g. for ui.perfetto.dev.")] = None
    output_file: Annotated[
        str | None, option("-o", "--output-file", help="Output file of --export. Default: stdout.")
    ] = None
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output file.")] = False
    format_: Annotated[StepFormat, typer.Option("--format", help="Output format.")] = "table"

    def check_together(self, picture: PictureOptions | None) -> None:
        """Raises: UsageError for flags that exclude each other."""
        others = self.check or self.export is not None or self.dump_kv is not None or self.no_live
        if self.output_file is not None and self.export is None:
            raise UsageError("-o needs --export")
        if self.check and self.format_ == "md":
            raise UsageError("--check does not print --format md", hint="use table or json")
        if picture is not None and (others or self.block is not None or self.format_ != "table"):
            raise UsageError("--picture is combined with --step, --steps, --every and --follow only")
        if self.block is not None and (others or self.follow is not None or self.steps is not None):
            raise UsageError("--block is combined with --step and --format only")


@config_flags()
def replay(trace: TraceFile, *, flags: ReplayFlags, drawn: PictureFlags) -> None:
    """Step through a recorded run, forward and backward. Needs no model and no GPU.

    On a terminal it opens an application: . and , step, space plays, p / e / m jump to the next preemption, eviction or
    prefix miss (P / E / M: the previous one), a number goes to that step, Enter tells the story of a sequence or a
    block, ? shows all keys. Otherwise, and with NO_COLOR or TERM=dumb, it prints one line per step. Each step shows
    the cache as its forward pass sees it. For recordings of `pagedcli attach`, each message is a step.

    \b
    Examples:
      pagedcli replay run.jsonl.zst
      pagedcli replay run.jsonl --step 812 --follow code-Mirano
      pagedcli replay run.jsonl --block 37 --step 100
      pagedcli replay run.jsonl --check
      pagedcli replay run.jsonl --export perfetto -o run.json    (open at ui.perfetto.dev)
      pagedcli replay run.jsonl --dump-kv --steps 100-120 | less -S
      pagedcli replay run.jsonl --dump-kv kv.parquet    (every step as data: sequences, blocks, lookups, hit rates)
      pagedcli replay run.jsonl --dump-kv --format json | jq .blocks
      pagedcli replay run.jsonl --step 75 --picture pool.svg
      pagedcli replay run.jsonl --steps 0-80 --picture pool.gif
      pagedcli replay run.jsonl --picture life.svg --of request --follow code-Mirano

    Exit codes: 0 success, 1 the trace is inconsistent or damaged, 2 wrong usage.
    """  # fmt: skip
    dump = Dump.of(flags.dump_kv, flags.steps, flags.every, step=flags.step)
    picture = PictureOptions.of_flags(drawn.picture, of=drawn.of, shape=drawn.shape, theme=drawn.theme)
    flags.check_together(picture)
    given = {name: getattr(flags, name) for name in ("check", "follow", "export", "dump_kv", "steps", "block")}
    if is_recording(trace, **given, picture=drawn.picture):
        replay_capture(trace, flags.step, as_json=flags.format_ == "json", every_step=flags.no_live)
        return
    request = None if flags.follow is None else find_request(TraceReader(trace), flags.follow, str(trace))
    if picture is not None:
        draw_run(trace, picture, dump.chosen, request, overwrite=flags.overwrite)
    elif flags.block is not None:
        replay_block(trace, flags.block, flags.step, Format(flags.format_))
    elif flags.check:
        _check(trace, flags.format_)
    elif flags.export is not None:
        _export(trace, flags.output_file, overwrite=flags.overwrite)
    elif dump.file is not None:
        _write_tables(trace, dump, overwrite=flags.overwrite)
    elif dump.as_tables or dump.chooses or flags.no_live or flags.format_ != "table":
        _print_steps(trace, dump.chosen, request, flags.format_)
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
    from pagedcli.app.pool_players import ReplayPlayer
    from pagedcli.cli.cures import told_of_recording

    reader = TraceReader(trace)
    say(f"reading {trace} ...")
    past = Replay(reader, follow=follow)
    judge = partial(told_of_recording, trace)
    PoolApp(ReplayPlayer(past), f"pagedcli replay {trace.name}", judge=judge).show()
    say_notes(reader.notes)
    if past.damage is not None:
        raise TraceError(past.damage)
