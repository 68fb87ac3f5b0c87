"""`pagedcli plan`: predict how a prompt file uses this machine's KV cache, without generating anything."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedcli.cli.engine_table import engine_table
from pagedcli.cli.options import PLAN_KEYS, ConfigFile, Flags, FormatOption, config_flags, option
from pagedcli.cli.prompt_scan import MAX_LISTED, PROMPT_KEYS, PromptScan, prompt_model, scan_prompts
from pagedcli.cli.share_table import share_table
from pagedcli.config import Config, EngineConfig, LoadedConfig, load_config
from pagedcli.core.groups import TableShape
from pagedcli.core.prefixes import BLOCK_SIZES, SMALLEST_RECOMMENDED
from pagedcli.distributed.partition import SharePlan
from pagedcli.errors import BackendError
from pagedcli.planning.prompt_survey import MORE_SLOTS, UNIT, PromptSurvey
from pagedcli.printable import plural
from pagedcli.show.tables import Column, Format, Table, count, decimal, percent, print_tables, size
from pagedcli.show.terminal import say

if TYPE_CHECKING:
    from pagedcli.core.limits import Limits
    from pagedcli.core.plan import Plan
    from pagedcli.models.spec import ModelSpec

_MAX_SHOWN = 10
EXIT_BAD_ROWS = 3


@config_flags(*PLAN_KEYS, *PROMPT_KEYS, "run.output_field", "run.keep")
def plan(
    prompts: Annotated[str, typer.Argument(metavar="PROMPTS.jsonl", help="Input file (also .gz); - reads stdin.")],
    *,
    tokenizer: Annotated[
        Path | None, option(metavar="DIR", help="Tokenizer folder, instead of the model's own.")
    ] = None,
    workers: Annotated[
        int | None, option(metavar="N", min=2, help="Also predict the distribution over N workers (generate --ray).")
    ] = None,
    config: ConfigFile = None,
    format_: FormatOption = Format.TABLE,
    flags: Flags,
) -> None:
    """Predict how a prompt file uses the KV cache, without generating anything or loading weights.

    Shows invalid rows, prompt lengths, shared prefixes, the ideal hit rate and the waste at block sizes from 8 to 256,
    the recommended block and pool size, how much this machine can hold, and which kernels it would use.

    \b
    Examples:
      pagedcli plan prompts.jsonl
      pagedcli plan prompts.jsonl -m Qwen/Qwen3-0.6B --max-tokens 64
      pagedcli plan mt_bench_question.jsonl --field turns --tokenizer ./qwen2
      pagedcli plan prompts.jsonl --workers 8                     (before generate --ray --workers 8)
      pagedcli plan prompts.jsonl --format json | jq .recommended_block_size

    Exit codes: 0 all rows are good, 2 wrong usage or configuration, 3 some rows are bad.
    """  # fmt: skip
    loaded = load_config(config, flags)
    raise typer.Exit(run_plan(loaded, prompts, tokenizer=tokenizer, num_workers=workers, format_=format_))


def run_plan(
    loaded: LoadedConfig,
    input_name: str,
    *,
    tokenizer: Path | None = None,
    num_workers: int | None = None,
    format_: Format = Format.TABLE,
) -> int:
    """Print the plan of a prompt file; also `generate --dry-run`. Returns the exit code."""
    config = loaded.config
    shares = None if num_workers is None else SharePlan(config.engine.block_size)
    folder, spec = prompt_model(loaded, tokenizer)
    pool, expected = _expect(config.engine, spec)
    scan = scan_prompts(loaded, input_name, folder, spec, shares=shares, limits=None if pool is None else pool.limits)
    if scan.plan.num_prompts == 0:
        say("this file has no valid row, so there is nothing to plan (see --field if prompts have another name)")
    tables = _tables(scan, config, pool)
    if shares is not None and num_workers is not None and scan.plan.num_prompts:
        tables.append(share_table(shares, num_workers))
    if expected is not None:
        tables.append(engine_table("Engine settings on this machine", expected))
    print_tables(tables, format_, facts=_facts(scan, config.engine, pool))
    return EXIT_BAD_ROWS if scan.num_bad else 0


@dataclass(frozen=True, slots=True)
class _Pool:
    """The KV-cache pool on this machine."""

    device: str
    block_bytes: int
    num_blocks: int
    reason: str
    limits: "Limits"  # num_blocks None if none fits: rows are judged by the rest

    @property
    def tables(self) -> TableShape:
        return self.limits.tables


def _expect(engine: EngineConfig, spec: "ModelSpec | None") -> "tuple[_Pool | None, Plan | str | None]":
    """The pool and engine on this machine, as far as they can be predicted. If the engine would refuse to start, its
    reason takes their place: the rest of the plan is still useful."""
    if spec is None:
        return None, None
    from pagedcli.planning.decide import decide
    from pagedcli.planning.machine import this_machine
    from pagedcli.planning.memory import expected_pool

    machine = this_machine(free_memory=True)
    try:
        plan = decide(engine, spec, machine)
    except BackendError as error:
        return None, error.message
    found = expected_pool(engine, spec, plan, machine)
    pool = None
    if found is not None:
        limits = replace(plan.limits, num_blocks=found.num_blocks or None)
        pool = _Pool(plan.device, plan.block_bytes, found.num_blocks, found.reason, limits)
    return pool, plan


def _facts(scan: PromptScan, engine: EngineConfig, pool: _Pool | None) -> dict[str, Any]:
    plan = scan.plan
    block_size = plan.recommended_block_size() if plan.num_prompts else None
    facts: dict[str, Any] = {
        "num_rows": scan.num_rows,
        "num_valid_rows": scan.num_valid,
        "num_bad_rows": scan.num_bad,
        "bad_row_codes": dict(scan.bad_codes),
        "ignored_fields": scan.ignored,
        "num_repeated_prompts": plan.num_repeated,
        "num_prompt_tokens": plan.prompt_tokens,
        "num_output_tokens": plan.output_tokens,
        "longest_shared_prefix_tokens": plan.longest_shared_tokens(),
        "recommended_block_size": block_size,
        "recommended_num_blocks": block_size and plan.recommended_num_blocks(block_size, engine.max_num_seqs),
    }
    if pool is not None:
        facts |= {
            "device": pool.device,
            "block_size": engine.block_size,
            "block_bytes": pool.block_bytes,
            "num_kvcache_blocks": pool.num_blocks,
            "num_kvcache_tokens": pool.num_blocks // pool.tables.num_groups * engine.block_size,
            "num_kvcache_blocks_reason": pool.reason,
        }
    return facts


def _tables(scan: PromptScan, config: Config, pool: _Pool | None) -> list[Table]:
    plan = scan.plan
    tables = [_rows_table(scan)]
    if scan.num_bad:
        tables.append(_bad_table(scan))
    if plan.num_prompts:
        tables += [_length_table(plan), _histogram_table(plan), _shared_table(plan)]
        tables += [_block_size_table(plan, config.engine), _pool_table(plan, config.engine, pool)]
    return tables


def _rows_table(scan: PromptScan) -> Table:
    plan = scan.plan
    rows = [{"what": "rows", "rows": scan.num_rows}, {"what": "valid", "rows": scan.num_valid}]
    rows += [{"what": f"bad: {code}", "rows": n} for code, n in scan.bad_codes.most_common()]
    rows.append({"what": "prompt equal to an earlier one", "rows": plan.num_repeated})
    notes = [
        f"ignored field {name!r} in {plural(lines, 'row')}" for name, lines in sorted(scan.ignored.items())[:_MAX_SHOWN]
    ]
    if scan.max_model_len is None:
        notes.append("no config.json in the tokenizer's folder: length limits and memory are not checked")
    return Table("rows", "Rows", [Column("what", "what"), Column("rows", "rows", count)], rows, notes)


def _bad_table(scan: PromptScan) -> Table:
    columns = [
        Column("line", "line", str),
        Column("id", "id"),
        Column("code", "code"),
        Column("message", "what is wrong"),
    ]
    more = scan.num_bad - min(_MAX_SHOWN, len(scan.bad_rows))
    notes = [f"and {more:,} more; --format json lists the first {MAX_LISTED:,}"] if more else []
    return Table("bad_rows", "Bad rows", columns, scan.bad_rows, notes, max_shown=_MAX_SHOWN)


def _length_table(plan: PromptSurvey) -> Table:
    names = ("mean", "min", "p50", "p95", "max", "total")
    columns = [Column("what", "tokens of"), *(Column(name, name, count) for name in names)]
    return Table("lengths", "Lengths (tokens)", columns, plan.length_rows())


def _histogram_table(plan: PromptSurvey) -> Table:
    rows = plan.histogram_rows()
    most = max(row["num_prompts"] for row in rows)
    rows = [{**row, "share_of_largest": row["num_prompts"] / most} for row in rows]
    columns = [
        Column("from_tokens", "from", count),
        Column("to_tokens", "to", count),
        Column("num_prompts", "prompts", count),
        Column(
            "share_of_largest",
            "of the largest",
            lambda share: "#" * max(1, round(32 * share)) if share else "",
            words=True,
        ),
    ]
    return Table("histogram", "Prompts by length (tokens)", columns, rows)


def _shared_table(plan: PromptSurvey) -> Table:
    rows = plan.longest_shared()
    sizes = [size for size in BLOCK_SIZES if size >= 16]
    columns = [
        Column("num_tokens", "tokens", count),
        Column("num_prompts", "prompts", count),
        Column("first_line", "first line", str),
        Column("last_line", "last line", str),
        *(Column(f"blocks_at_{size}", f"at {size}", count) for size in sizes),
    ]
    notes = [f"tokens in this table: rounded down to a multiple of {UNIT}, so 23 shows as 16"] if rows else []
    title = "Shared prefixes that save most, and their full blocks at each block size"
    return Table("shared_prefixes", title, columns, rows, [*notes, _shared_in_words(plan)])


def _shared_in_words(plan: PromptSurvey) -> str:
    tokens = plan.longest_shared_tokens()
    if tokens < UNIT:
        return f"no two prompts share their first {UNIT} tokens: prefix caching has no benefit"
    parts = ", ".join(f"{tokens // size} at block {size}" for size in (16, 64, 256))
    return f"longest shared prefix: {plural(tokens, 'token')}; in blocks: {parts}"


def _block_size_table(plan: PromptSurvey, engine: EngineConfig) -> Table:
    best = plan.recommended_block_size()
    num_blocks = plan.recommended_num_blocks(best, engine.max_num_seqs)
    columns = [
        Column("block_size", "block size", count),
        Column("hit_rate", "hit rate", percent),
        Column("hit_tokens", "cached tokens", count),
        Column("waste", "waste", percent),
        Column("num_blocks", "blocks", count),
        Column("num_slots", "slots", count),
        Column("longest_table", "longest table", count),
    ]
    notes = [
        "hit rate: cached / prompt tokens of the whole file with an unlimited cache; the last token is never cached",
        "waste: unfilled slots / slots of all rows at full length; blocks, slots: whole file, shared ones once",
        f"recommended block size: {best}, the largest of at least {SMALLEST_RECOMMENDED} that needs at most"
        f" {MORE_SLOTS:.0%} more slots than the best one",
        f"recommended pool: {num_blocks:,} of these blocks: {engine.max_num_seqs:,} sequences run without preemption",
    ]
    return Table("block_sizes", "Ideal hit rate and waste", columns, plan.block_size_rows(), notes)


def _pool_table(plan: PromptSurvey, engine: EngineConfig, pool: _Pool | None) -> Table:
    block_size = engine.block_size
    rows = plan.pool_rows(block_size, engine.max_num_seqs)
    columns = [Column("enough_for", "pool for"), Column("num_blocks", "blocks", count)]
    if pool is None:
        return Table("pools", f"Pools at block size {block_size}", columns, rows)
    for row in rows:
        row["kv_cache_bytes"] = row["num_blocks"] * pool.block_bytes
        row["fits"] = row["num_blocks"] <= pool.num_blocks
    columns += [Column("kv_cache_bytes", "KV cache", size), Column("fits", "fits here")]
    longest = plan.most_cached_tokens()
    at_once = pool.tables.concurrency(pool.num_blocks, longest)
    notes = [
        f"this machine ({pool.device}): {plural(pool.num_blocks, 'block')},"
        f" {size(pool.num_blocks * pool.block_bytes)} ({pool.reason})",
        f"that holds {decimal(at_once)} of the longest row ({longest:,} tokens) at once, without sharing",
    ]
    if pool.tables.has_windows:
        notes.append("blocks of layers with a window: at most those that a sequence holds at once")
    if rows[0]["num_blocks"] > pool.num_blocks:
        notes.append("rows that need more blocks than the pool has are invalid here, but included in these tables")
    return Table("pools", f"Pools at block size {block_size}", columns, rows, notes)
