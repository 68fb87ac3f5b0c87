"""`pagedcli bench`: the engine's speed, compared with the limits of the machine."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer

from pagedcli import runner
from pagedcli.batch.columns import Columns
from pagedcli.batch.prompts import batch_options, open_source
from pagedcli.bench.cache_effect import MOST_PASSES, MOST_S, CacheRow, compare_cache, said_of
from pagedcli.bench.reservation import PUBLISHED, SOURCE, ReservationRow, compare_caches
from pagedcli.bench.reservation import said_of as said_of_caches
from pagedcli.bench.spread import FigureChange, compared_rows, read_earlier
from pagedcli.bench.throughput import (
    Run,
    Throughput,
    WorkloadRow,
    bench_notes,
    generate,
    headline,
    run_workload,
    throughput_row,
    workload_config,
)
from pagedcli.bench.workloads import PRESETS, BenchWorkload, preset_workload, random_draw
from pagedcli.cli.options import MEASURED_KEYS, PROMPT_KEYS, ConfigFile, Flags, FormatOption, config_flags, option
from pagedcli.config import LoadedConfig, load_config
from pagedcli.core.budget import blocks_for
from pagedcli.errors import EXIT_BAD_ROWS, UsageError
from pagedcli.printable import duration_text, plural
from pagedcli.show.curve import curve_lines
from pagedcli.show.tables import Format, print_tables, table
from pagedcli.show.terminal import ProgressLine, say


class BenchProgress(ProgressLine):
    """The share done and the remaining time at the present rate. `before` and `part`: the shares of the whole command
    that were done before this part of it, and that it is."""

    def __init__(self, what: str, *, before: float = 0.0, part: float = 1.0) -> None:
        super().__init__(line_every_s=10.0)
        self._what, self._before, self._part = what, before, part
        self._first: tuple[float, float] | None = None  # (seconds, share) at the first call, when all is loaded

    def __call__(self, share: float) -> None:
        """Show that this share of the part's work is done."""
        done = self._before + share * self._part
        if self._first is None:
            self._first = time.monotonic() - self._start_s, done
        load_s, first = self._first
        if done > first:
            self.show(
                lambda seconds: (
                    f"{self._what}: {done:.0%}, {duration_text((seconds - load_s) * (1 - done) / (done - first))} left"
                )
            )


bench = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_workload = partial(option, panel="Workload", metavar="N", show_default=True)
InputLen = Annotated[int, _workload(help="Maximum prompt tokens, not counting the shared prefix.", min=1)]
OutputLen = Annotated[int, _workload(help="Maximum tokens to generate.", min=1)]
_MOST_PASSES, _MINUTE_S = 3, 60.0
_REPEAT_HELP = f"Number of timed passes; medians are reported. Default: up to {_MOST_PASSES}, within a minute."
_PASSES_HELP = f"Number of passes over all lengths. Default: up to {MOST_PASSES}, within {MOST_S:.0f} s."
_MODEL_LENGTHS = 4  # room of the pool of `bench reservation`, by default
_NOT_COMPARED = {"engine.speculation", "engine.enable_prefix_caching", "engine.eviction", "engine.checkpoints"}
_NOT_COMPARED |= {"engine.num_state_slots", "engine.preemption_policy"}
_COMPARE_HELP = "Compare with an earlier measurement, saved with --format json."


@bench.callback()
@config_flags(*MEASURED_KEYS)
def throughput(
    context: typer.Context,
    *,
    preset: Annotated[
        list[str] | None,
        _workload(help="Predefined workload (repeatable): " + ", ".join(PRESETS) + ".", metavar="NAME"),
    ] = None,
    num_prompts: Annotated[int, _workload(help="Number of concurrent requests; 1 measures latency.", min=1)] = 32,
    input_len: InputLen = 128,
    output_len: OutputLen = 128,
    range_ratio: Annotated[float, _workload(help="Draw lengths from [X * length, length].", metavar="X")] = 1.0,
    prefix_len: Annotated[int, _workload(help="Length of a prefix shared by all prompts, in tokens.", min=0)] = 0,
    repeat: Annotated[int | None, option(help=_REPEAT_HELP, min=1, metavar="N")] = None,
    compare: Annotated[Path | None, option(metavar="FILE.json", help=_COMPARE_HELP)] = None,
    config: ConfigFile = None,
    format_: FormatOption = Format.TABLE,
    flags: Flags,
) -> None:
    """Measure throughput on random prompts and compare the time with the machine's floor.

    The floor is the shortest time that this machine's memory bandwidth and arithmetic allow; both are measured before
    and after each pass, and the better value is used. Every figure is the median of the passes, and a note warns if
    other processes were busy. Without -m, the model has the preset's shape and random weights;
    nothing is downloaded. Sampling is greedy and ignores end-of-sequence tokens. Loading and warm-up are not timed.

    \b
    Examples:
      pagedcli bench --preset W1 --preset W5 --format json > before.json
      pagedcli bench --preset W1 --preset W5 --compare before.json
      pagedcli bench --num-prompts 64 --input-len 512 --output-len 64 --range-ratio 0.2
      pagedcli bench -m ./Qwen3-0.6B --load-format dummy --prefix-len 512
      pagedcli bench cache                         (one request with and without a KV cache)
      pagedcli bench reservation prompts.jsonl     (a cache that reserves, and one with pages)

    Exit codes: 0 measured, 2 wrong usage.
    """  # fmt: skip
    if context.invoked_subcommand is not None:
        return

    loaded = load_config(config, flags)
    seed = loaded.config.engine.seed
    draw = random_draw(num_prompts, input_len, output_len, range_ratio=range_ratio, prefix_len=prefix_len, seed=seed)
    kinds = [partial(preset_workload, name) for name in preset or ()] or [partial(draw.workload, "random")]
    earlier = None if compare is None else read_earlier(compare)
    rows: list[WorkloadRow] = []
    for first, result in _run_all(loaded, kinds, range(repeat or _MOST_PASSES), within_minute=repeat is None):
        rows.append(throughput_row(result, first))
        plan = result.engine.plan
    columns = "workload wall_s total_tokens_per_s floor_s ttft_ms tpot_ms steps"
    title = "Throughput: medians of the passes"
    notes = bench_notes(plan, rows)
    tables = [table(WorkloadRow, "throughput", title, rows, f"{columns} overhead_ms load_s", notes=notes)]
    if earlier is not None:
        changes, each = compared_rows(earlier, rows), "workload figure before now change verdict"
        note = "within the spread: the ranges of the passes overlap, so the change may be chance"
        notes = [note if changes else "the two measurements have no workload in common"]
        title = "Compared with the earlier measurement"
        tables.append(table(FigureChange, "compared", title, changes, each, notes=notes))
    print_tables(tables, format_, story=list(map(headline, rows)))


@bench.command()
@config_flags(*MEASURED_KEYS)
def cache(
    *,
    lengths: Annotated[
        str, _workload(help="Lengths of the text with the generated tokens, in tokens.", metavar="N,N")
    ] = "128,512,2048",
    output_len: Annotated[int, _workload(help="Tokens to generate at the end of each text.", min=2)] = 32,
    repeat: Annotated[int | None, option(help=_PASSES_HELP, min=1, metavar="N")] = None,
    config: ConfigFile = None,
    format_: FormatOption = Format.TABLE,
    flags: Flags,
) -> None:
    """Time one request with and without a KV cache.

    Without a cache every token is computed from the whole text before it, in a real run; next to its time stands what
    the formula says: the operations of that, at the rate at which the prompt was computed. +- is the standard deviation
    of the passes.

    \b
    Examples:
      pagedcli bench cache
      pagedcli bench cache -m ./Qwen3-0.6B --lengths 128,512 --repeat 2

    Exit codes: 0 success, 1 the tokens differ (possible through rounding below float32), 2 wrong usage.
    """
    try:
        each = sorted({int(length) for length in lengths.split(",")})
    except ValueError:
        raise UsageError(f"--lengths is {lengths!r}", hint="numbers of tokens, for example 128,512,2048") from None
    if each[0] <= output_len:
        raise UsageError(f"--lengths: {each[0]} tokens are no more than the {output_len} of --output-len")
    loaded = load_config(config, flags)
    engine_config = loaded.config.engine
    [longest] = random_draw(1, each[-1] - output_len, output_len, seed=engine_config.seed).workload("cache").prompts
    length = engine_config.max_model_len or each[-1]
    changed = msgspec.structs.replace(engine_config, enable_prefix_caching=False, max_num_seqs=1, max_model_len=length)
    progress = BenchProgress("with and without a KV cache")
    with runner.LLMEngine(changed) as engine:
        prompts = [longest[: length - output_len] for length in each]
        generate(engine, prompts[:1], [2])  # warm-up
        rows, same = compare_cache(engine, prompts, output_len, repeat=repeat, on_progress=progress)
    progress.close()
    tables = [table(CacheRow, "cache", "With and without a KV cache", rows)]
    if len(each) > 1 and format_ is Format.TABLE:
        title = "Time per token by length of the text: # with, at least one line high, and : without a KV cache"
        tables.append(table(CacheRow, "curve", title, [], notes=_curve(rows)))
    print_tables(tables, format_, facts={"same_tokens": same}, story=[said_of(rows, output_len)])
    if not same:
        say("the tokens differ with and without the cache")
        raise typer.Exit(1)


def _curve(rows: Sequence[CacheRow]) -> list[str]:
    """The time per token in characters, with straight lines between the measured lengths."""
    lengths, least = [row.length for row in rows[::2]], 0.1 * max(row.tpot_ms for row in rows)
    shown = [max(least, row.tpot_ms) for row in rows]
    curves = {mark: partial(np.interp, xp=lengths, fp=shown[place::2]) for mark, place in ((":", 1), ("#", 0))}
    return curve_lines(curves, lengths[0], lengths[-1], unit="ms", label=lambda length: f"{length:,.0f} tokens")


@bench.command()
@config_flags(*(key for key in MEASURED_KEYS if key not in _NOT_COMPARED), *PROMPT_KEYS)
def reservation(
    prompts: Annotated[str, typer.Argument(metavar="PROMPTS.jsonl", help="Input file (also .gz); - reads stdin.")],
    *,
    config: ConfigFile = None,
    format_: FormatOption = Format.TABLE,
    flags: Flags,
) -> None:
    """Compare a KV cache that reserves with a paged one on a file of prompts.

    Reserving gives each request its maximum length in advance, as one contiguous piece of the same pool: the model's
    length, or its prompt and max_tokens. Waste is reserved (for tokens that come later), internal (for tokens that
    never come) and external (free, but in no piece that is large enough), on average over the steps in which requests
    wait for blocks. The pool has room for four requests of the model's length, unless its size is given.

    \b
    Examples:
      pagedcli bench reservation prompts.jsonl
      pagedcli bench reservation prompts.jsonl --num-kvcache-blocks 200 --max-model-len 1024 --limit 100

    Exit codes: 0 success, 2 wrong usage or configuration, 3 some lines are bad.
    """
    loaded = load_config(config, flags)
    progress = BenchProgress("reserved and paged")
    with runner.LLMEngine(loaded.config.engine) as engine:
        limits, num_blocks = engine.limits, engine.plan.num_blocks
        if limits.has_states or limits.tables.num_groups > 1:
            raise UsageError("a piece of the cache holds all layers alike, and those of this model differ")
        if not {"engine.num_kvcache_blocks", "engine.kv_cache_memory"} & set(loaded.sources):
            num_blocks = min(num_blocks, _MODEL_LENGTHS * blocks_for(limits.max_model_len, limits.block_size))
        options = batch_options(loaded, Columns.of(loaded.config.run))
        generate(engine, [[0]], [2])  # warm-up
        lines = list(islice(open_source(prompts, options.columns), loaded.config.run.limit))
        rows, stats = compare_caches(engine, num_blocks, lines, options, on_progress=progress)
    progress.close()
    pool = f"{plural(num_blocks, 'block')} of {plural(limits.block_size, 'token')}"
    failed = [f"{plural(stats.num_failed, 'row')} failed; line {at}: {why}" for at, why in stats.first_failed[:1]]
    title = f"{plural(stats.num_done - stats.num_failed, 'row')} in {pool}"
    columns = "kv_cache at_once tokens reserved internal external tokens_per_s preemptions wall_s"
    shown = table(ReservationRow, "caches", title, rows, columns, notes=[*failed, SOURCE])
    facts = {"num_blocks": num_blocks, "published_tokens": PUBLISHED, "num_failed": stats.num_failed}
    print_tables([shown], format_, facts=facts, story=[said_of_caches(rows)])
    if stats.num_failed:
        raise typer.Exit(EXIT_BAD_ROWS)


_PROMPT_TOKENS_PER_STEP = 8  # computed in the time of one generated token, roughly


def _run_all(
    loaded: LoadedConfig, kinds: Sequence[Callable[[int], BenchWorkload]], salts: Sequence[int], *, within_minute: bool
) -> Iterator[tuple[BenchWorkload, Throughput]]:
    """Run workloads, each with its passes, one after the other. On stderr: the share that is done, the time left, and a
    line for each pass as it ends."""
    start_s = time.monotonic()
    each = [[kind(salt) for salt in salts] for kind in kinds]
    weights = [first.num_output_tokens + first.num_prompt_tokens / _PROMPT_TOKENS_PER_STEP for first, *_ in each]
    for place, passes in enumerate(each):
        first = passes[0]
        say(f"{first.name}: {first.about}")
        before, part = sum(weights[:place]) / sum(weights), weights[place] / sum(weights)
        progress = BenchProgress(first.name, before=before, part=part)
        left_s = _MINUTE_S - (time.monotonic() - start_s)

        def on_pass(run: Run, first: BenchWorkload = first, progress: BenchProgress = progress) -> None:
            progress.close()
            tpot = "-" if run.tpot_s is None else f"{1000 * run.tpot_s:,.1f} ms"
            rate = first.num_output_tokens / run.wall_s
            say(f"  {duration_text(run.wall_s)}, {rate:,.0f} out tok/s, TTFT {1000 * run.ttft_s:,.0f} ms, TPOT {tpot}")

        try:
            result = run_workload(
                workload_config(loaded, first),
                passes,
                on_progress=progress,
                on_pass=on_pass,
                most_s=left_s * part / (1 - before) if within_minute else None,
            )
        finally:
            progress.close()
        yield first, result
        del result
        gc.collect()
