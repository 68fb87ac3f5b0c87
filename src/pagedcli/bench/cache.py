"""The benefit of a KV cache: the same request with it, and with the whole text recomputed for every token."""

import time
from dataclasses import dataclass

from pagedcli.bench.throughput import generate
from pagedcli.runner.llm_engine import LLMEngine


@dataclass(frozen=True, slots=True)
class CacheRow:
    """Generation of one request, with or without the cache. Seconds."""

    way: str
    ttft_s: float
    tpot_s: float  # mean of the later tokens
    last_tpot_s: float  # of the last token alone
    total_s: float
    tokens_computed: int  # that went through the model


def compare_cache(engine: LLMEngine, prompt: list[int], num_tokens: int) -> tuple[list[CacheRow], bool]:
    """Two rows, with and without the cache, and whether both gave the same tokens. Prefix caching must be off.

    Units: num_tokens to generate, at least 2.
    """
    assert not engine.config.enable_prefix_caching, "prefix caching would defeat the comparison"
    first_s = _seconds(engine, prompt, 1)[1]
    tokens, with_s = _seconds(engine, prompt, num_tokens)
    times = []
    text = list(prompt)
    for _ in range(num_tokens):
        [token], seconds = _seconds(engine, text, 1)
        times.append(seconds)
        text.append(token)
    later = num_tokens - 1
    rows = [
        CacheRow("with", first_s, (with_s - first_s) / later, (with_s - first_s) / later, with_s, len(prompt) + later),
        CacheRow(
            "without", times[0], sum(times[1:]) / later, times[-1], sum(times), _sum_of_lengths(prompt, num_tokens)
        ),
    ]
    return rows, text[len(prompt) :] == tokens


def _seconds(engine: LLMEngine, prompt: list[int], num_tokens: int) -> tuple[list[int], float]:
    started = time.perf_counter()
    [output] = generate(engine, [prompt], [num_tokens])
    return output.samples[0].token_ids, time.perf_counter() - started


def _sum_of_lengths(prompt: list[int], num_tokens: int) -> int:
    return sum(len(prompt) + i for i in range(num_tokens))
