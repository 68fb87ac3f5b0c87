"""`pagedcli diff`: what differs between two runs, and what each difference changes."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from pagedcli import planning
from pagedcli.answers.survey import prompt_model
from pagedcli.batch.lines import copied
from pagedcli.batch.prompts import limits_without_pool, open_prompts
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.cli.cures import find_cures, print_answer
from pagedcli.cli.decoder import TokenizerOption, recorded_tokenizer
from pagedcli.cli.options import PLAN_KEYS, PROMPT_KEYS, ConfigFile, Flags, FormatOption, config_flags, option
from pagedcli.config import LoadedConfig, load_config
from pagedcli.config_keys import flag_name
from pagedcli.errors import EXIT_BAD_ROWS, UsageError
from pagedcli.files import TRACE
from pagedcli.line_files import LineReader
from pagedcli.planning.prompt_sample import PromptSample
from pagedcli.show import difference_tables as tables
from pagedcli.show.tables import Format
from pagedcli.show.terminal import say, working
from pagedcli.simulation.difference import Comparison, Side, recorded_sides
from pagedcli.simulation.sources import read_prompts

_side = partial(typer.Argument, show_default=False)


@config_flags(*PLAN_KEYS, *PROMPT_KEYS)
def diff(
    before: Annotated[Path, _side(metavar="BEFORE", help="Trace or prompt file to compare from.")],
    after: Annotated[Path, _side(metavar="AFTER", help="Trace or prompt file to compare with it.")],
    *,
    tokenizer: TokenizerOption = None,
    config: ConfigFile = None,
    all_: Annotated[bool, option("--all", help="Also list the prompts that differ.")] = False,
    format_: FormatOption = Format.TABLE,
    flags: Flags,
) -> None:
    """Show how time and hits changed between two runs, and what each difference changes by itself.

    Compares prompts, order, block size, pool, policy and limits: the earlier run is simulated with one difference at a
    time, and the line "together" has what they change only in combination. Two prompt files are compared as this
    machine would run them, with the configuration given here. See docs/look-inside.md.

    \b
    Examples:
      pagedcli diff monday.jsonl.zst friday.jsonl.zst
      pagedcli diff before.jsonl after.jsonl --format json | jq .causes
      pagedcli diff prompts-v1.jsonl prompts-v2.jsonl -m ./Qwen3-8B --num-kvcache-blocks 4000

    Exit codes: 0 success, 1 a trace is damaged, 2 wrong usage, 3 some lines of a prompt file are bad.
    """  # fmt: skip

    if before == after == Path("-"):
        raise UsageError("standard input can be read only once", hint="pass one of the two as a file")
    before, after = copied(before), copied(after)
    is_trace, is_other = (not path.is_dir() and _is_trace(path) for path in (before, after))
    if is_trace != is_other:
        raise UsageError(
            "one is a recorded run, the other a prompt file", hint="compare two traces or two prompt files"
        )
    if flags and is_trace:
        names = ", ".join(map(flag_name, flags))
        raise UsageError(f"{names}: only for prompt files; a recorded run has its own configuration")
    no_prompts = None
    if is_trace:
        *sides, no_prompts = recorded_sides(before, after)
        text = recorded_tokenizer(after, tokenizer)
    else:
        sides, text = _prompt_sides(load_config(config, flags), before, after)
    for side in sides:
        for note in side.workload.notes:
            say(f"note: {side.name}: {note}")
    with working("simulating"):
        found = Comparison(sides[0], sides[1], no_prompts)
    shown = [tables.causes_table(found)] if found.parts or no_prompts or format_ is not Format.TABLE else []
    if "prompts" in found.details and (all_ or format_ is Format.JSON):
        shown.append(tables.prompts_table(found))
    cures, later = [], found.sides[1]
    if "prompts" in found.parts and found.parts["prompts"]["hit_rate"] < 0:
        prompts = PromptSample.of(later.workload.prompts())
        cures = find_cures(None, prompts=prompts, tokenizer=text, block_size=later.limits.block_size)
    print_answer([tables.sentence(found)], cures, shown, format_, tables.facts(found))
    raise typer.Exit(EXIT_BAD_ROWS if any(side.workload.num_bad for side in sides) else 0)


def _is_trace(path: Path) -> bool:
    """Whether it is a recorded run; else it is a prompt file."""
    return next(iter(LineReader(path, "trace")), b"").startswith(TRACE.beginning)


def _prompt_sides(loaded: LoadedConfig, *paths: Path) -> tuple[list[Side], Tokenizer]:
    """Two prompt files, as this machine would run them, and their tokenizer."""
    folder, spec = prompt_model(loaded, None)
    if spec is None:
        raise UsageError(
            f"{folder} has no config.json, which is needed for the size of a block", hint="name a model with -m"
        )
    decision = planning.decide.decide(loaded.config.engine, spec, planning.machine.this_machine(free_memory=True))
    plan, limits = decision.expected_plan, limits_without_pool(loaded.config.engine, spec)
    sides = []
    for path in paths:
        prompts = open_prompts(loaded, str(path), folder, limits)
        sides.append(Side(path.name, read_prompts(str(path), prompts), plan))
    return sides, prompts.tokenizer
