"""`pagedcli diff`: what differs between two runs, and what each difference changes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagedcli.answers.survey import prompt_model
from pagedcli.cli.cures import find_cures
from pagedcli.cli.decoder import TokenizerOption, recorded_tokenizer
from pagedcli.cli.options import PLAN_KEYS, PROMPT_KEYS, ConfigFile, Flags, FormatOption, config_flags, option
from pagedcli.config import LoadedConfig, load_config
from pagedcli.errors import EXIT_BAD_ROWS, UsageError
from pagedcli.files import TRACE, check_files
from pagedcli.kvevents.capture import is_capture
from pagedcli.line_files import LineReader
from pagedcli.planning.prompt_sample import PromptSample
from pagedcli.show.pages import write_page
from pagedcli.show.tables import Format, print_sentences, print_tables
from pagedcli.show.terminal import say, working

if TYPE_CHECKING:
    from pagedcli.answers.cures import Cure
    from pagedcli.batch.tokenizer import Tokenizer
    from pagedcli.simulation.difference import Comparison, Side

_SIDES_HELP = "A trace, or a prompt file."
_PAGE_HELP = "Also write an HTML page."
_KINDS = {True: "a recorded run", False: "a prompt file"}


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
    """List what differs between two runs, with the change of the hit rate that each difference makes alone.

    Other prompts, outputs, order, block size, pool, policy, number of sequences, checkpoints or limits: the earlier run
    is simulated with one difference at a time; what they change only together is said as "together". Two prompt files
    are compared as this machine would run them, with the configuration given here. See docs/diff.md.

    \b
    Examples:
      pagedcli diff monday.jsonl.zst friday.jsonl.zst
      pagedcli diff monday.jsonl.zst friday.jsonl.zst -o why.html
      pagedcli diff before.jsonl after.jsonl --format json | jq .causes
      pagedcli diff prompts-v1.jsonl prompts-v2.jsonl -m ./Qwen3-8B --num-gpu-blocks-override 4000

    Exit codes: 0 success, 1 a trace is damaged, 2 wrong usage, 3 some lines of a prompt file are bad.
    """  # fmt: skip
    check_files({"BEFORE": before, "AFTER": after}, {"the page": output_file}, overwrite=overwrite)
    are_traces = [_is_trace(path) for path in (before, after)]
    if are_traces[0] != are_traces[1]:
        kinds = [_KINDS[each] for each in are_traces]
        raise UsageError(f"{before} is {kinds[0]}, {after} is {kinds[1]}", hint="compare two of the same kind")
    if flags and are_traces[0]:
        names = ", ".join("--" + key.partition(".")[2].replace("_", "-") for key in flags)
        raise UsageError(f"{names}: only for prompt files; a recorded run has its own configuration")
    loaded = load_config(config, flags)
    raise typer.Exit(_compare(before, after, loaded if not are_traces[0] else None, tokenizer, output_file, format_))


def _compare(
    before: Path,
    after: Path,
    loaded: LoadedConfig | None,
    tokenizer: str | None,
    output_file: Path | None,
    format_: Format,
) -> int:
    """Compare two recorded runs, or with a configuration two prompt files. Returns the exit code."""
    from pagedcli.simulation import difference_tables as tables
    from pagedcli.simulation.difference import Comparison, recorded_sides

    no_prompts = None
    if loaded is None:
        *sides, no_prompts = recorded_sides(before, after)
        text = recorded_tokenizer(after, tokenizer)
    else:
        sides, text = _prompt_sides(loaded, before, after)
    for side in sides:
        for note in side.workload.notes:
            say(f"note: {side.name}: {note}")
    with working("simulating"):
        found = Comparison(sides[0], sides[1], no_prompts)
    shown = [tables.causes_table(found)]
    if "prompts" in found.details and format_ is not Format.CSV:
        shown.append(tables.prompts_table(found, None if text is None else text.decode))
    if output_file is not None:
        write_page(output_file, tables.page(found, shown))
    if format_ in (Format.TABLE, Format.MD):
        print_sentences([tables.sentence(found), ""])
    cures = _cures(found, text)
    told = [each.text for each in cures]
    print_tables(shown, format_, facts={**tables.facts(found), "cures": cures}, story=told)
    return EXIT_BAD_ROWS if any(side.workload.num_bad for side in sides) else 0


def _cures(found: "Comparison", tokenizer: "Tokenizer | None") -> "list[Cure]":
    """What to change about the later prompts, if they lost hits and their tokens are known."""
    if "prompts" not in found.parts or found.parts["prompts"]["hit_rate"] >= 0:
        return []
    side = found.sides[1]
    prompts = PromptSample.of((each.token_ids, each.cache_salt) for each in side.workload.requests if each.token_ids)
    return find_cures(None, prompts=prompts, tokenizer=tokenizer, block_size=side.limits.block_size)


def _is_trace(path: Path) -> bool:
    """Whether it is a recorded run; else it is a prompt file. Raises: UsageError for a recording of KV events."""
    if path.is_dir():
        return False
    if next(iter(LineReader(path, "trace")), b"").startswith(TRACE.beginning):
        return True
    if is_capture(path):
        raise UsageError(f"{path}: diff of recordings of KV events: removed", hint="use explain on each of them")
    return False


def _prompt_sides(loaded: LoadedConfig, *paths: Path) -> "tuple[list[Side], Tokenizer]":
    """Two prompt files, as this machine would run them, and their tokenizer."""
    from pagedcli.batch.prompts import limits_without_pool, open_prompts
    from pagedcli.planning.decide import decide
    from pagedcli.planning.machine import this_machine
    from pagedcli.simulation.difference import Side
    from pagedcli.simulation.sources import read_prompts

    folder, spec = prompt_model(loaded, None)
    if spec is None:
        raise UsageError(f"{folder} has no config.json, which says how large a block is", hint="name a model with -m")
    decision = decide(loaded.config.engine, spec, this_machine(free_memory=True))
    plan, limits = decision.expected_plan, limits_without_pool(loaded.config.engine, spec)
    sides = []
    for path in paths:
        prompts = open_prompts(loaded, str(path), folder, limits)
        sides.append(Side(path.name, read_prompts(str(path), prompts), plan))
    return sides, prompts.tokenizer
