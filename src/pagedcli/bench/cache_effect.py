"""Generation with and without a KV cache: the same tokens at several lengths of text, timed in turns."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import floor, inf, log10
from typing import Annotated

from pagedcli import runner
from pagedcli.bench.throughput import measure
from pagedcli.planning.cards import Roofline
from pagedcli.planning.floors import StepFloor

MOST_PASSES, MOST_S = 10, 30.0  # by default as many passes as fit into these seconds


@dataclass(frozen=True, slots=True)
class CacheRow:
    """Generating the last tokens of a text: the mean of the passes and their standard deviation, None of one pass."""

    length: Annotated[int, "tokens"]  # length of the text, the generated tokens included
    kv_cache: Annotated[str, "KV cache"]
    ttft_ms: Annotated[float, "TTFT ms"]
    ttft_deviation_ms: Annotated[float | None, "+-"]
    tpot_ms: Annotated[float, "TPOT ms"]
    tpot_deviation_ms: Annotated[float | None, "+-"]
    total_s: Annotated[float, "total s"]
    total_deviation_s: Annotated[float | None, "+-"]
    formula_s: Annotated[float | None, "formula s"]  # time of what is computed, at the rate of the prompt
    tokens_computed: Annotated[int, "computed"]


_Times = tuple[float, float, float]  # seconds: of the first token, a later one in the mean, and all


def compare_cache(
    engine: "runner.LLMEngine",
    prompts: Sequence[list[int]],
    num_tokens: int,
    *,
    repeat: int | None,
    on_progress: Callable[[float], None],
) -> tuple[list[CacheRow], bool]:
    """Two rows for each prompt, with and without the cache, and whether both gave the same tokens. Prefix caching must
    be off. `num_tokens` to generate, at least 2. `repeat`: passes; None: see MOST_PASSES."""
    assert not engine.config.enable_prefix_caching, "prefix caching would defeat the comparison"
    work = sum(map(len, prompts)) * num_tokens  # tokens of a pass, nearly
    passes: list[list[tuple[_Times, _Times]]] = []  # with and without, by pass and prompt
    num_passes, num_done, started_s, same = repeat or MOST_PASSES, 0, time.perf_counter(), True
    while len(passes) < num_passes:
        passes.append([])
        for prompt in prompts:
            whole = measure(engine, [prompt], [num_tokens])
            text, times = list(prompt), list[float]()
            for _ in range(num_tokens):
                run = measure(engine, [text], [1])
                times.append(run.wall_s)
                text += run.token_ids[0]
                num_done += len(prompt)
                on_progress(num_done / (work * num_passes))
            same = same and text[len(prompt) :] == whole.token_ids[0]
            cached = whole.ttft_s, whole.tpot_s or 0.0, whole.wall_s
            passes[-1].append((cached, (times[0], statistics.mean(times[1:]), sum(times))))
        if repeat is None:
            pass_s = (time.perf_counter() - started_s) / len(passes)
            num_passes = max(len(passes), min(MOST_PASSES, int(MOST_S / pass_s)))
    each = zip(prompts, zip(*passes, strict=True), strict=True)
    return list(chain(*(_rows(engine, len(prompt), num_tokens, found) for prompt, found in each))), same


def _rows(
    engine: "runner.LLMEngine", num_prompt: int, num_tokens: int, found: Sequence[tuple[_Times, _Times]]
) -> list[CacheRow]:
    """The rows of a prompt. Without a cache each token is the first one after a longer prompt."""
    decision, one_per_s = engine.decision, Roofline(inf, 1.0)  # a rate of 1: seconds are FLOPs
    floor = StepFloor.of(decision.own, decision.footprint, one_per_s, kv_dtype=decision.plan.kv_dtype)
    ends = range(num_prompt, num_prompt + num_tokens)
    prompts = [floor.seconds([(0, end)], 1) for end in ends]
    formula_s = statistics.mean(cached[0] for cached, _ in found) * sum(prompts) / prompts[0]
    rows = []
    for way, formula, num_computed, times in zip(
        ("with", "without"), (None, formula_s), (ends[-1], sum(ends)), zip(*found, strict=True), strict=True
    ):
        ttft, tpot, total = zip(*times, strict=True)
        means = (*_mean(ttft, 1e3), *_mean(tpot, 1e3), *_mean(total, 1.0))
        rows.append(CacheRow(ends[-1] + 1, way, *means, formula, num_computed))
    return rows


def _mean(values: Sequence[float], unit: float) -> tuple[float, float | None]:
    """The mean of these seconds and their standard deviation."""
    return unit * statistics.mean(values), unit * statistics.stdev(values) if len(values) > 1 else None


def said_of(rows: Sequence[CacheRow], num_tokens: int) -> str:
    """What the cache saves, in a sentence."""
    (cached, without), *shorter = list(zip(rows[::2], rows[1::2], strict=True))[::-1]
    others = "".join(f", {slow.total_s / fast.total_s:.1f} up to {fast.length:,}" for fast, slow in shorter)
    instead, long = map(_total_text, (cached, without))
    return (
        f"Without a KV cache the last {num_tokens} of {cached.length:,} tokens take"
        f" {without.total_s / cached.total_s:.1f} times as long ({long} instead of {instead}){others}."
    )


def _total_text(row: CacheRow) -> str:
    decimals = max(0, 2 - floor(log10(row.total_s)))  # three digits
    deviation = "" if row.total_deviation_s is None else f" +- {row.total_deviation_s:.{decimals}f}"
    return f"{row.total_s:.{decimals}f}{deviation} s"
