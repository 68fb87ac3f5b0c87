"""The same requests through the same engine in four KV caches: contiguous pieces reserved for the model's length or for
each request's own limit, pages without sharing, and pages."""

import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import msgspec

from pagedcli import runner
from pagedcli.batch.grammar import Grammars
from pagedcli.batch.prompts import Prompts
from pagedcli.batch.requests import RowPrompt
from pagedcli.batch.tokenizer import StopCheckers, Tokenizer
from pagedcli.core.cache import Cache, make_cache
from pagedcli.core.engine_core import EngineCore
from pagedcli.core.limits import Limits
from pagedcli.core.reservation import reserving_cache
from pagedcli.core.sequence import Sequence
from pagedcli.core.steps import ScheduledStep
from pagedcli.errors import RequestError, UsageError
from pagedcli.events import Emit
from pagedcli.records import Share, count

PUBLISHED = {"reserved": [0.204, 0.382], "paged": 0.963}  # shares of the cache that hold tokens
SOURCE = (
    "Published (Kwon et al. 2023, figure 2): 20.4 to 38.2 % of the KV cache held tokens where systems reserved the"
    " longest text, 96.3 % in vLLM."
)
_PAGED = "paged"
_CACHES: dict[str, Callable[[int, Limits, Emit | None], Cache]] = {
    "reserved: model's length": partial(reserving_cache, of_model=True),
    "reserved: own limit": partial(reserving_cache, of_model=False),
    "paged, nothing shared": make_cache,
    _PAGED: make_cache,
}
_FOR_BLOCKS = ("free_blocks", "preemption")  # what the first in the queue waits for
_SHARES = 1.05  # times: less is not said to be due to sharing


@dataclass(frozen=True, slots=True)
class ReservationRow:
    """What one kind of cache did. Means over the steps in which requests waited for blocks; if none did, the most that
    ran at once, and the shares of all steps."""

    kv_cache: Annotated[str, "KV cache"]
    at_once: Annotated[float, "at once", "{:,.1f}".format]  # sequences that run
    most: int  # of these
    tokens: Annotated[Share, "holds tokens"]  # shares of the pool from here on
    reserved: Annotated[Share, "reserved"]  # for tokens that come later
    internal: Annotated[Share, "internal"]  # reserved for tokens that never come
    external: Annotated[Share, "external"]  # free, but in no piece that is large enough
    tokens_per_s: Annotated[float, "out tok/s", count]
    preemptions: int
    wall_s: float


class _Watch:
    """Sums what the slots of the pool hold over the steps in which requests wait for blocks."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.waits = False  # whether a request has waited
        self.most = 0
        self._clear()
        core.observe_work = self

    def _clear(self) -> None:
        self.num_steps = self.num_running = self.num_held = self.num_unfilled = self.num_free = 0
        self._slots: dict[Sequence, Counter[int]] = {}  # slots that a sequence has -> in how many steps

    def __call__(self, work: ScheduledStep) -> None:
        scheduler, manager, waits = self._core.scheduler, self._core.block_manager, work.blocked in _FOR_BLOCKS
        self.most = max(self.most, len(scheduler.running))
        if waits and not self.waits:
            self._clear()
        elif self.waits and not waits:
            return
        self.waits = waits
        coming = dict(zip(work.seqs, work.num_new_tokens, strict=True))
        last = {seq.block_table[-1]: seq for seq in scheduler.running if seq.block_table}  # samples may share theirs
        for seq in last.values():
            num_slots = len(seq.block_table) * manager.block_size
            self.num_unfilled += num_slots - seq.num_computed_tokens - coming.get(seq, 0)
            self._slots.setdefault(seq, Counter())[num_slots] += 1
        self.num_steps += 1
        self.num_running += len(scheduler.running)
        self.num_held += (manager.num_blocks - manager.num_free_blocks) * manager.block_size
        self.num_free += waits * manager.num_free_blocks * manager.block_size

    @property
    def num_never(self) -> int:
        """Slots that sequences never filled, known once they have ended: their last token was never computed."""
        each = ((len(seq.token_ids) - 1, slots) for seq, slots in self._slots.items())
        return sum(max(0, num_slots - end) * steps for end, slots in each for num_slots, steps in slots.items())


def comparable(prompts: Prompts) -> tuple[list[tuple[RowPrompt, str | None]], list[str]]:
    """The prompts of a file, each with its cache_salt, and why others are left out. Raises: UsageError if all are."""
    found, left_out = list[tuple[RowPrompt, str | None]](), list[str]()
    for row, refused in prompts.admitted():
        if isinstance(refused, RequestError):
            left_out.append(f"line {row.line.number}: {refused.message}")
        elif any(prompt.scored is not None or prompt.params.beam_width for prompt in row.prompts):
            left_out.append(f"line {row.line.number}: scores and beam search are not compared")
        else:
            found += [(prompt, row.cache_salt) for prompt in row.prompts]
    if not found:
        raise UsageError(f"there is no prompt to serve; {left_out[0] if left_out else 'the input is empty'}")
    return found, left_out


def compare_caches(
    engine: "runner.LLMEngine",
    prompts: Items[tuple[RowPrompt, str | None]],
    tokenizer: Tokenizer,
    *,
    on_progress: Callable[[float], None] = lambda share: None,
) -> list[ReservationRow]:
    """Serve the prompts, each with its cache_salt, with each kind of cache. Where nothing is shared samples of a prompt
    are requests of their own."""
    rows = []
    for place, kv_cache in enumerate(_CACHES):
        limits = replace(engine.limits, enable_prefix_caching=kv_cache == _PAGED)
        core = EngineCore(replace(engine.plan, limits=limits), engine.executor, make_cache=_CACHES[kv_cache])
        watch, num_samples = _Watch(core), _add(core, engine, prompts, tokenizer, forks=kv_cache == _PAGED)
        started_s, num_done = time.perf_counter(), 0
        while core.has_unfinished_requests():
            num_done += sum(len(output.samples) for output in core.step())
            on_progress((place + num_done / num_samples) / len(_CACHES))
        wall_s, slots = time.perf_counter() - started_s, watch.num_steps * core.plan.num_blocks * limits.block_size
        rows.append(
            ReservationRow(
                kv_cache=kv_cache,
                at_once=watch.num_running / watch.num_steps if watch.waits else watch.most,
                most=watch.most,
                tokens=(watch.num_held - watch.num_unfilled) / slots,
                reserved=(watch.num_unfilled - watch.num_never) / slots,
                internal=watch.num_never / slots,
                external=watch.num_free / slots,
                tokens_per_s=core.stats.num_generated_tokens / wall_s,
                preemptions=core.stats.num_preemptions,
                wall_s=wall_s,
            )
        )
    return rows


def _add(
    core: EngineCore,
    engine: "runner.LLMEngine",
    prompts: Items[tuple[RowPrompt, str | None]],
    tokenizer: Tokenizer,
    *,
    forks: bool,
) -> int:
    """Queue the prompts. Returns how many samples will be generated."""
    spec = engine.spec
    grammars = Grammars(tokenizer, end_token_ids=spec.eos_token_ids, vocab_size=spec.vocab_size)
    for number, (prompt, salt) in enumerate(prompts):
        params, ids = prompt.params, prompt.token_ids
        num_requests = 1 if forks else params.n
        params = params if forks or params.n == 1 else msgspec.structs.replace(params, n=1, seed=None)
        for place in range(num_requests):
            core.add_request(
                f"{number}/{place}",
                ids,
                params,
                cache_salt=salt,
                make_stop_checker=StopCheckers(tokenizer, ids, params) if params.stop_strings else None,
                make_guide=grammars.guides(params),
            )
    return sum(prompt.params.n for prompt, _ in prompts)


def said_of(rows: Items[ReservationRow]) -> str:
    """How many more requests pages hold, and what of that is due to sharing, in a sentence."""
    model, own, unshared, paged = rows
    sharing = paged.at_once / unshared.at_once
    return (
        f"Paged holds {paged.at_once / own.at_once:.1f} times as many sequences at once as reserving each request's own"
        f" limit ({paged.at_once:,.1f} to {own.at_once:,.1f}), {paged.at_once / model.at_once:.1f} times as many as"
        f" reserving the model's length ({model.at_once:,.1f})."
        + (f" Sharing alone makes it {sharing:.1f} times as many." if sharing >= _SHARES else "")
    )
