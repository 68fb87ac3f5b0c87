"""The same requests through the same engine in four KV caches: contiguous pieces reserved for the model's length or for
each request's own limit, pages without sharing, and pages."""

import io
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, cast

from pagedcli import runner
from pagedcli.batch.lines import Line
from pagedcli.batch.prompts import BatchOptions, open_tokenizer
from pagedcli.batch.rows import RowWriter
from pagedcli.batch.run import BatchRun
from pagedcli.batch.sinks import StreamSink
from pagedcli.batch.stats import BatchStats
from pagedcli.core.cache import Cache, make_cache
from pagedcli.core.engine_core import EngineCore
from pagedcli.core.limits import Limits
from pagedcli.core.reservation import reserving_cache, unshared_cache
from pagedcli.core.sequence import Sequence
from pagedcli.core.steps import ScheduledStep
from pagedcli.errors import RequestError, UsageError
from pagedcli.events import Emit
from pagedcli.records import Share, count
from pagedcli.sampling_params import SamplingParams

PUBLISHED = {"reserved": [0.204, 0.382], "paged": 0.963}  # shares of the cache that hold tokens
SOURCE = (
    "Published (Kwon et al. 2023, figure 2): 20.4 to 38.2 % of the KV cache held tokens where systems reserved the"
    " longest text, 96.3 % in vLLM."
)
_CACHES: dict[str, Callable[[int, Limits, Emit | None], Cache]] = {
    "reserved: model's length": partial(reserving_cache, of_model=True),
    "reserved: own limit": partial(reserving_cache, of_model=False),
    "paged, nothing shared": unshared_cache,
    "paged": make_cache,
}
_FOR_BLOCKS = ("free_blocks", "preemption")  # reasons for which the first in the queue waits


@dataclass(frozen=True, slots=True)
class ReservationRow:
    """What one kind of cache did. Means over the steps in which requests waited for blocks; if none did, the most that
    ran at once, and the shares of all steps."""

    kv_cache: Annotated[str, "KV cache"]
    at_once: Annotated[float, "sequences", "{:,.1f}".format]  # running at the same time
    most: Annotated[int, "most sequences"]
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


class _Core(EngineCore):
    """An engine over the executor of another, with a cache of its own."""

    def __init__(self, engine: "runner.LLMEngine", num_blocks: int, kv_cache: str) -> None:
        plan = replace(engine.plan, limits=replace(engine.limits, num_blocks=num_blocks), speculation="off")
        super().__init__(plan, engine.executor, make_cache=_CACHES[kv_cache])
        self.spec = engine.spec

    def _admitted(
        self, request_id: str, prompt: Items[int], params: SamplingParams, continuations: Items[Items[int]] | None
    ) -> int:
        if params.beam_width is not None or continuations is not None:
            raise RequestError("unsupported_parameter", "beams and continuations always share blocks: not compared")
        return super()._admitted(request_id, prompt, params, continuations)


def compare_caches(
    engine: "runner.LLMEngine",
    num_blocks: int,
    lines: Items[Line],
    options: BatchOptions,
    *,
    on_progress: Callable[[float], None],
) -> tuple[list[ReservationRow], BatchStats]:
    """Serve the lines of a file with each kind of cache. Returns a row for each, and the counts of the last run."""
    tokenizer, rows = open_tokenizer(options.config, engine.model_path), list[ReservationRow]()
    writer = RowWriter(tokenizer, engine.config.model, "bench", 0)
    for kv_cache in _CACHES:
        core = _Core(engine, num_blocks, kv_cache)
        watch, sink = _Watch(core), StreamSink(io.BytesIO(), order="completion")

        def observe(stats: BatchStats) -> None:
            on_progress((len(rows) + stats.num_done / len(lines)) / len(_CACHES))

        run = BatchRun(cast("runner.LLMEngine", core), tokenizer, lines, sink, writer, options, observe=observe)
        stats = run.run().stats
        if stats.num_failed == stats.num_done:
            why = next((f"line {line:,}: {reason}" for line, reason in stats.first_failed), "the input is empty")
            raise UsageError(f"there is no prompt to serve: {why}")
        slots = watch.num_steps * num_blocks * engine.limits.block_size
        held = watch.num_held - watch.num_unfilled, watch.num_unfilled - watch.num_never, watch.num_never
        tokens, reserved, internal, external = (each / slots for each in (*held, watch.num_free))
        at_once = watch.num_running / watch.num_steps if watch.waits else watch.most
        speed = stats.facts.num_generated_tokens / stats.elapsed_s, stats.facts.num_preemptions, stats.elapsed_s
        rows.append(ReservationRow(kv_cache, at_once, watch.most, tokens, reserved, internal, external, *speed))
    return rows, stats


def said_of(rows: Items[ReservationRow]) -> str:
    """How many more requests pages hold, and what of that is due to sharing, in a sentence."""
    paged = rows[-1].at_once
    model, own, unshared = (f"{paged / row.at_once:.1f} times as many" for row in rows[:-1])
    sharing = f" Sharing alone makes it {unshared}." if paged > 1.05 * rows[2].at_once else ""
    return (
        f"Paged holds {own} sequences at once as reserving each request's own limit ({paged:,.1f} to"
        f" {rows[1].at_once:,.1f}), {model} as reserving the model's length ({rows[0].at_once:,.1f}).{sharing}"
    )
