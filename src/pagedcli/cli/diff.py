"""`pagedcli diff`: why one run's hit rate differs from another's."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagedcli.cli.decoder import TokenizerOption, recorded_tokenizer
from pagedcli.cli.options import PLAN_KEYS, ConfigFile, Flags, FormatOption, config_flags, option
from pagedcli.cli.partings import request_verdicts
from pagedcli.cli.prompt_scan import PROMPT_KEYS, prompt_model
from pagedcli.config import LoadedConfig, load_config
from pagedcli.errors import EXIT_BAD_ROWS, UsageError
from pagedcli.files import TRACE, check_files
from pagedcli.kvevents.capture import is_capture
from pagedcli.line_files import LineReader
from pagedcli.printable import plural
from pagedcli.show.pages import write_page
from pagedcli.show.tables import Format, print_sentences, print_tables
from pagedcli.show.terminal import ProgressLine, say
from pagedcli.verdicts import Verdict

if TYPE_CHECKING:
    from pagedcli.batch.tokenizer import Tokenizer
    from pagedcli.simulation.difference import Comparison, Side

_SIDES_HELP = "A trace, a recording of `attach`, or a prompt file."
_PAGE_HELP = "Also write an HTML page."
_KINDS = {"trace": "a recorded run", "recording": "a recording of KV events", "prompts": "a prompt file"}


@config_flags(*PLAN_KEYS, *PROMPT_KEYS)
def diff(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help=_SIDES_HELP, show_default=False)],
    after: Annotated[
        Path, typer.Argument(metavar="AFTER", help="The other one, of the same kind.", show_default=False)
    ],
    *,
    output_file: Annotated[Path | None, option("-o", "--output-file", metavar="PAGE.html", help=_PAGE_HELP)] = None,
    tokenizer: TokenizerOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing page.")] = False,
    config: ConfigFile = None,
    format_: FormatOption = Format.TABLE,
    flags: Flags,
) -> None:
    """Explain why the hit rate changed between two runs, as a sum of causes.

    Other prompts, another order, block size, pool, number of sequences, checkpoints, restarts or routing: one thing is
    swapped at a time in the simulator, and the parts add up to the change. What a file cannot show is listed as not
    visible. Two prompt files are compared as this machine would run them, with the configuration given here; recordings
    of `attach` without tokens when both were made with the same --key. See docs/diff.md.

    \b
    Examples:
      pagedcli diff monday.jsonl.zst friday.jsonl.zst
      pagedcli diff monday.jsonl.zst friday.jsonl.zst -o why.html
      pagedcli diff before.jsonl after.jsonl --format json | jq .causes
      pagedcli diff prompts-v1.jsonl prompts-v2.jsonl -m ./Qwen3-8B --num-gpu-blocks-override 4000

    Exit codes: 0 success, 1 a trace or recording is damaged, 2 wrong usage, 3 some lines of a prompt file are bad.
    """  # fmt: skip
    check_files({"BEFORE": before, "AFTER": after}, {"the page": output_file}, overwrite=overwrite)
    kinds = [_kind(path) for path in (before, after)]
    if kinds[0] != kinds[1]:
        raise UsageError(
            f"{before} is {_KINDS[kinds[0]]}, {after} is {_KINDS[kinds[1]]}", hint="compare two of the same kind"
        )
    if flags and kinds[0] != "prompts":
        names = ", ".join("--" + key.partition(".")[2].replace("_", "-") for key in flags)
        raise UsageError(f"{names}: only for prompt files; {_KINDS[kinds[0]]} has its own configuration")
    raise typer.Exit(_compare(kinds[0], before, after, load_config(config, flags), tokenizer, output_file, format_))


def _compare(
    kind: str,
    before: Path,
    after: Path,
    loaded: LoadedConfig,
    tokenizer: str | None,
    output_file: Path | None,
    format_: Format,
) -> int:
    """Compare two of a kind, and print what differs. Returns the exit code."""
    from pagedcli.simulation import difference_tables as tables
    from pagedcli.simulation.difference import Comparison
    from pagedcli.simulation.sides import captured_sides, recorded_sides

    text, outcomes = None, None
    if kind == "trace":
        sides, outcomes = recorded_sides((before, after))
        text = recorded_tokenizer(after, tokenizer)
    elif kind == "recording":
        sides = captured_sides((before, after))
    else:
        sides, text = _prompt_sides(loaded, before, after)
    decode = None if text is None else text.decode
    for side in sides:
        for note in side.workload.notes:
            say(f"note: {side.name}: {note}")
    progress = ProgressLine(line_every_s=5.0)
    found = Comparison(*sides, lambda done, runs: progress.show(lambda _: f"simulated {done} of {plural(runs, 'run')}"))
    progress.close()
    shown = [tables.causes_table(found, in_full=format_ in (Format.CSV, Format.JSON)), tables.measures_table(found)]
    if found.details["prompts"] and "prompts" not in found.hidden:
        shown.append(tables.prompts_table(found, decode))
    if found.sides[1].hits is not None and "prompts" not in found.hidden:
        shown.append(tables.losses_table(found, {} if outcomes is None else outcomes.of_requests(decode)))
    if output_file is not None:
        write_page(output_file, tables.page(found, shown))
    if format_ in (Format.TABLE, Format.MD):
        print_sentences([tables.sentence(found), ""])
    if format_ is Format.CSV:
        shown = shown[:1]
    elif format_ is Format.JSON:  # the measures are among the facts
        del shown[1]
    print_tables(shown, format_, facts=tables.facts(found), verdicts=_verdicts(found, text))
    return EXIT_BAD_ROWS if any(side.workload.num_bad for side in sides) else 0


def _verdicts(found: "Comparison", tokenizer: "Tokenizer | None") -> list[Verdict] | None:
    """Where the later prompts part, if they lost hits and their tokens are known."""
    if "prompts" not in found.parts or found.parts["prompts"]["hit_rate"] >= 0:
        return None
    side = found.sides[1]
    return request_verdicts(side.requests, side.limits, tokenizer)


def _kind(path: Path) -> str:
    if path.is_dir():
        return "prompts"
    line = next(iter(LineReader(path, "trace")), b"")
    if line.startswith(TRACE.beginning):
        return "trace"
    return "recording" if is_capture(path) else "prompts"


def _prompt_sides(loaded: LoadedConfig, *paths: Path) -> "tuple[tuple[Side, Side], Tokenizer]":
    """Two prompt files, as this machine would run them, and their tokenizer."""
    from pagedcli.batch.prompts import limits_without_pool, open_prompts
    from pagedcli.planning.decide import decide
    from pagedcli.planning.machine import this_machine
    from pagedcli.planning.step_time import load_step_time
    from pagedcli.simulation.difference import Side
    from pagedcli.simulation.sources import read_prompts

    folder, spec = prompt_model(loaded, None)
    if spec is None:
        raise UsageError(f"{folder} has no config.json, which says how large a block is", hint="name a model with -m")
    decision = decide(loaded.config.engine, spec, this_machine(free_memory=True))
    plan, limits = decision.expected_plan, limits_without_pool(loaded.config.engine, spec)
    step_time, sides = load_step_time(decision.time_key), []
    for path in paths:
        prompts = open_prompts(loaded, str(path), folder, limits)
        workload = read_prompts(str(path), prompts)
        sides.append(Side(path.name, workload, plan, step_time=step_time))
    return (sides[0], sides[1]), prompts.tokenizer
