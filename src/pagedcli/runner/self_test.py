"""Checks that the engine gives right answers on this machine: look-ups through prefix hits, preemption and chunks, and
each attention backend against the reference.

Used by `pagedcli doctor`. The built-in model was trained to look codes up in its prompt, so a wrong or misplaced KV
block shows as a wrong code. Works on token ids only.
"""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import torch

from pagedcli.attention.base import AttentionBackend, AttentionSpec, PagedBatch
from pagedcli.attention.layer import AttentionLayer
from pagedcli.attention.select import load_backend
from pagedcli.config import EngineConfig
from pagedcli.core.budget import blocks_for
from pagedcli.errors import PagedcliError
from pagedcli.native.system import one_thread
from pagedcli.printable import plural
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams

CHUNK = 7  # tokens; divides no block size, so that chunks end inside blocks
_EXTRA_TOKENS = 32  # generated after an answer, to make sequences grow into new blocks
# for averages of standard normal values; the rounding error of each dtype is below a third of it
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True, slots=True)
class LookUp:
    """A question about a list that all prompts share, and its right answer."""

    prompt_token_ids: list[int]
    answer_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of the self-test."""

    check: str
    passed: Annotated[bool, "result", lambda passed: "pass" if passed else "FAIL"]
    detail: Annotated[str, "details"]  # observation, in words
    seconds: Annotated[float, "time (s)"]


class _Failure(Exception):
    """A check failed."""


def look_up_texts(*, seed: int = 0) -> list[tuple[str, str]]:
    """Prompts over one list of twelve made-up names with four-digit codes, and the answers, as text."""
    rng = random.Random(seed)
    names: dict[str, str] = {}
    while len(names) < 12:
        syllables = [rng.choice("bdfgklmnprst") + rng.choice("aeiou") for _ in range(3)]
        names["".join(syllables).capitalize()] = "".join(rng.choices("0123456789", k=4))
    listed = "\n".join(f"{name}: {code}" for name, code in names.items())
    return [(f"{listed}\nQ: What is the code of {name}?\nA:", f" {code}") for name, code in names.items()]


def run_self_test(lookups: list[LookUp], *, device: str, backends: list[str]) -> Iterator[CheckResult]:
    """Run the checks one by one. `backends` are those that can run on the device."""
    yield _timed("look-ups through prefix hits", lambda: _check_prefix_hits(lookups, device))
    yield _timed("look-ups through preemption", lambda: _check_preemption(lookups, device))
    yield _timed("look-ups through chunks", lambda: _check_chunks(lookups, device))
    for name in backends:
        yield _timed(f"attention {name}", lambda name=name: _check_backend(name, lookups, device))  # type: ignore[misc]


def _timed(check: str, run: Callable[[], str]) -> CheckResult:
    start = time.perf_counter()
    try:
        passed, detail = True, run()
    except (_Failure, PagedcliError) as error:
        passed, detail = False, str(error)
    except Exception as error:  # a diagnosis must continue and report what broke: drivers raise anything
        passed, detail = False, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return CheckResult(check, passed, detail, time.perf_counter() - start)


# ---------------------------------------------------------------------- look-ups


def _answer(engine: LLMEngine, lookups: list[LookUp], *, num_extra: int = 0) -> str:
    """Run all look-ups at once; says how many are right. Raises: _Failure if one is wrong."""
    with one_thread():  # with the tiny built-in model others would mostly wait; the attention checks use all
        answers = _generate(engine, lookups, num_extra)
    wrong = [
        place
        for place, lookup in enumerate(lookups)
        if answers[str(place)][: len(lookup.answer_token_ids)] != lookup.answer_token_ids
    ]
    if wrong:
        raise _Failure(f"{len(wrong)} of {len(lookups)} answers are wrong, the first is number {wrong[0] + 1}")
    return f"{len(lookups)} of {len(lookups)} right"


def _generate(engine: LLMEngine, lookups: list[LookUp], num_extra: int) -> dict[str, list[int]]:
    for place, lookup in enumerate(lookups):
        params = SamplingParams(temperature=0, max_tokens=len(lookup.answer_token_ids) + num_extra, ignore_eos=True)
        engine.add_request(str(place), lookup.prompt_token_ids, params)
    answers: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            answers[output.request_id] = output.samples[0].token_ids
    return answers


def _check_prefix_hits(lookups: list[LookUp], device: str) -> str:
    engine = LLMEngine(EngineConfig(device=device, num_kvcache_blocks=_roomy(lookups)))
    seen = _answer(engine, lookups)
    stats = engine.stats
    if not stats.num_cached_tokens:
        raise _Failure("no prompt token was found in the prefix cache")
    return f"{seen}, {stats.num_cached_tokens:,} of {stats.num_prompt_tokens:,} prompt tokens from the cache"


def _check_preemption(lookups: list[LookUp], device: str) -> str:
    longest = max(len(lookup.prompt_token_ids) for lookup in lookups)
    # room for two prompts, but not for their outputs
    num_blocks = max(2 * blocks_for(longest, 16), blocks_for(longest + 2 * _EXTRA_TOKENS, 16))
    config = EngineConfig(device=device, num_kvcache_blocks=num_blocks, enable_prefix_caching=False)
    engine = LLMEngine(config)
    seen = _answer(engine, lookups[:6], num_extra=_EXTRA_TOKENS)
    if not engine.stats.num_preemptions:
        raise _Failure(f"nothing was preempted in a pool of {plural(num_blocks, 'block')}")
    return (
        f"{seen}, {plural(engine.stats.num_preemptions, 'preemption')} in a pool of {plural(num_blocks, 'block')}, "
        f"{plural(engine.stats.num_recomputed_tokens, 'token')} recomputed"
    )


def _check_chunks(lookups: list[LookUp], device: str) -> str:
    config = EngineConfig(device=device, num_kvcache_blocks=_roomy(lookups), chunked_prefill_size=CHUNK)
    engine = LLMEngine(config)
    seen = _answer(engine, lookups)
    longest = max(len(lookup.prompt_token_ids) for lookup in lookups)
    steps = plural(engine.stats.num_steps, "step")
    if engine.stats.num_steps < longest // CHUNK:
        raise _Failure(f"{plural(longest, 'prompt token')} took {steps}: they were not cut into chunks")
    return f"{seen}, prompts in chunks of {plural(CHUNK, 'token')} over {steps}"


def _roomy(lookups: list[LookUp]) -> int:
    """Blocks for all at once."""
    return sum(blocks_for(len(lookup.prompt_token_ids) + _EXTRA_TOKENS, 16) for lookup in lookups)


# ---------------------------------------------------------------------- attention


def _check_backend(name: str, lookups: list[LookUp], device: str) -> str:
    """The backend against the reference on a ragged batch, and the look-ups through it."""
    engine = LLMEngine(EngineConfig(device=device, attention_backend=name, num_kvcache_blocks=_roomy(lookups[:4])))
    spec, dtype = engine.spec, getattr(torch, engine.plan.dtype)
    heads = spec.num_heads, spec.num_kv_heads, spec.head_dim
    of_engine = AttentionSpec(torch.device(device), dtype, 16, *heads)
    backends = [load_backend(each, of_engine) for each in (name, "reference")]
    outs = [_attend(backend, torch.device(device), dtype, heads) for backend in backends]
    difference = (outs[0].double() - outs[1].double()).abs().nan_to_num(nan=float("inf")).max().item()
    if difference > TOLERANCE[dtype]:
        raise _Failure(f"differs from the reference by {difference:.2g}, allowed {TOLERANCE[dtype]:.2g}")
    return f"{_answer(engine, lookups[:4])}, within {difference:.1g} of the reference"


def _attend(
    backend: AttentionBackend, device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int]
) -> torch.Tensor:
    """[T, H, D] of a batch with a whole prompt, a chunk and a decode, in scattered blocks of a cache full of NaN."""
    num_heads, num_kv_heads, head_dim = sizes
    lengths = [(37, 37), (50, 9), (123, 1)]  # tokens after the step, new ones
    block_size, num_blocks = 16, 20
    generator = torch.Generator().manual_seed(0)
    total = sum(tokens for tokens, _ in lengths)
    q, k, v = (
        torch.randn(total, heads, head_dim, generator=generator).to(device, dtype)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    shape = backend.kv_shape(num_blocks, block_size, num_kv_heads, head_dim)
    k_cache, v_cache = (torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(2))
    kv = k_cache, v_cache
    free = torch.randperm(num_blocks, generator=generator).tolist()
    tables, slots, is_new, cu_q = [], [], [], [0]
    for tokens, new in lengths:
        table = [free.pop() for _ in range(blocks_for(tokens, block_size))]
        slots += [table[place // block_size] * block_size + place % block_size for place in range(tokens)]
        is_new += [False] * (tokens - new) + [True] * new
        cu_q.append(cu_q[-1] + new)
        tables.append(table + [num_blocks - 1] * (8 - len(table)))

    def ints(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    new_rows = torch.tensor(is_new, device=device)
    all_slots, totals = ints(slots), [tokens for tokens, _ in lengths]
    batch = PagedBatch(
        cu_q=ints(cu_q),
        num_tokens=ints(totals),
        block_table=ints(tables),
        slots=all_slots[new_rows],
        max_new=max(new for _, new in lengths),
        max_total=max(totals),
        cu_q_host=cu_q,
        num_tokens_host=totals,
    )
    layer = AttentionLayer(scale=head_dim**-0.5)
    backend.write(k[~new_rows], v[~new_rows], kv, all_slots[~new_rows], layer)
    backend.prepare(batch)
    backend.write(k[new_rows], v[new_rows], kv, batch.slots, layer)
    return backend.attend(q[new_rows], kv, batch, layer)
