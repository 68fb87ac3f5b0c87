"""`pagedcli bench`: the engine's speed, compared with the limits of the machine."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from pagedcli import runner
from pagedcli.bench.spread import FigureChange, compared_rows, read_earlier
from pagedcli.bench.throughput import (
    CacheEffectRow,
    Run,
    Throughput,
    WorkloadRow,
    bench_notes,
    compare_cache,
    generate,
    headline,
    run_workload,
    throughput_row,
    workload_config,
)
from pagedcli.bench.workloads import PRESETS, BenchWorkload, preset_workload, random_draw
from pagedcli.cli.options import MEASURED_KEYS, ConfigFile, Flags, FormatOption, config_flags, option
from pagedcli.config import LoadedConfig, load_config
from pagedcli.errors import UsageError
from pagedcli.printable import duration_text, plural
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
      pagedcli bench --preset W1
      pagedcli bench --preset W1 --preset W5 --format json > before.json
      pagedcli bench --preset W1 --preset W5 --compare before.json
      pagedcli bench --num-prompts 64 --input-len 512 --output-len 64 --range-ratio 0.2
      pagedcli bench --num-prompts 1 --output-len 64
      pagedcli bench -m ./Qwen3-0.6B --load-format dummy --prefix-len 512

    Exit codes: 0 measured, 2 wrong usage.
    """
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
    input_len: InputLen = 128,
    output_len: OutputLen = 32,
    config: ConfigFile = None,
    format_: FormatOption = Format.TABLE,
    flags: Flags,
) -> None:
    """Compare one request with and without a KV cache (recomputing the whole text for every token).

    \b
    Examples:
      pagedcli bench cache
      pagedcli bench cache --input-len 1024 --output-len 16

    Exit codes: 0 success, 1 the tokens differ (possible through rounding below float32), 2 wrong usage.
    """
    if output_len < 2:
        raise UsageError(f"--output-len is {output_len}, but TPOT needs at least 2")
    loaded = load_config(config, flags)
    workload = random_draw(1, input_len, output_len, seed=loaded.config.engine.seed).workload("random")
    changed = workload_config(loaded, workload)
    with runner.LLMEngine(msgspec.structs.replace(changed, enable_prefix_caching=False)) as engine:
        generate(engine, workload.prompts, [2])  # warm-up
        rows, same = compare_cache(engine, workload.prompts[0], output_len)
    ratio = rows[1].total_s / rows[0].total_s
    said = f"{ratio:.1f} times as fast with the cache: {plural(input_len, 'token')} in, {output_len} out."
    columns = "way ttft_ms tpot_ms last_tpot_ms total_s tokens_computed"
    shown = table(CacheEffectRow, "cache", "With and without a KV cache", rows, columns)
    print_tables([shown], format_, facts={"same_tokens": same}, story=[said])
    if not same:
        say("the tokens differ with and without the cache")
        raise typer.Exit(1)


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
