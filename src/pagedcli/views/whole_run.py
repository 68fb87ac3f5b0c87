"""A whole run in numbers: its facts (findings.py) and a row for each request, with what it waited for.

Used by `trace` at its end, and by the report.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from pagedcli.core.budget import blocks_for
from pagedcli.core.prefixes import BLOCK_SIZES, SMALLEST_RECOMMENDED
from pagedcli.events import Event
from pagedcli.printable import plural, seconds_text
from pagedcli.trace.dispatch import Handler, View
from pagedcli.trace.records import SeqState
from pagedcli.trace.state import PoolState
from pagedcli.views.explain import Explainer
from pagedcli.views.findings import WAITING_WORDS, Findings, Losses
from pagedcli.views.lookups import Lookup
from pagedcli.views.stats import WAITING_REASONS, RunStats, StepSeries
from pagedcli.views.timeline import Phase, Timelines


@dataclass(slots=True)
class RequestRow:
    """One sequence: where its time went, in seconds, and what it reused. Counts are tokens."""

    seq_id: int
    label: str
    num_prompt: int
    num_output: int
    finish_reason: str | None  # None: unfinished
    first_step: int
    last_step: int
    num_cached: int  # of the prompt, found at its first lookup or while it was prefilled
    num_preemptions: int
    num_recomputed: int
    seconds: dict[str, float] = field(default_factory=dict)  # waiting, prefill, decode, preempted
    waited_for: dict[str, float] = field(default_factory=dict)  # seconds, by reason
    ttft_s: float | None = None  # from its arrival
    tpot_s: float | None = None  # mean of the later tokens

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def why(self) -> str:
        """Where the time went, largest part first."""
        words = {
            "waiting": "waiting",
            "prefill": f"computing {plural(self.num_prompt, 'prompt token')} ({self.num_cached:,} cached)",
            "decode": f"generating {plural(self.num_output, 'token')}",
            "preempted": f"preempted {plural(self.num_preemptions, 'time')}, "
            f"{plural(self.num_recomputed, 'token')} computed again",
        }
        parts = sorted(self.seconds.items(), key=lambda item: -item[1])
        shown = "; ".join(f"{seconds_text(part)} {words[status]}" for status, part in parts if part)
        return f"{seconds_text(self.total_s)}: {shown}{self._waited_for()}" if shown else "no step took part in it"

    def _waited_for(self) -> str:
        reasons = sorted(self.waited_for.items(), key=lambda item: -item[1])
        known = [f"{WAITING_WORDS[reason]} {seconds_text(part)}" for reason, part in reasons if part]
        return f"; it waited for: {', '.join(known)}" if known else ""


class WholeRun(View[PoolState]):
    """Takes in all events of a run. `finish` closes what the run left unfinished; then the rest is valid."""

    def __init__(self) -> None:
        self.stats = RunStats()
        self.series = StepSeries()
        self.timelines = Timelines()
        self.explainer = Explainer()
        self.requests: list[RequestRow] = []  # in order of arrival

    def handlers(self, event_type: type[Event]) -> list[Handler]:
        parts = (self.stats, self.series, self.timelines, self.explainer)
        return [handler for part in parts for handler in part.handlers(event_type)]

    def finish(self, state: PoolState) -> None:
        """Call once, after the last event."""
        self.explainer.finish()
        self.timelines.finish(state)
        starts = self.series.columns["start_ns"]
        self._starts_s = [(start - starts[0]) * 1e-9 for start in starts]
        if starts:
            self._starts_s.append(self._starts_s[-1] + self.series.columns["busy_ns"][-1] * 1e-9)
        lengths = [end - start for start, end in pairwise(self._starts_s)]
        blocked = [WAITING_REASONS[code] for code in self.series.blocked]
        # by reason: seconds of the steps before each step in which it kept the queue from moving
        self._blocked_s = {
            reason: [
                0.0,
                *accumulate(part if why == reason else 0.0 for part, why in zip(lengths, blocked, strict=True)),
            ]
            for reason in WAITING_REASONS
            if reason is not None
        }
        cached: Counter[int] = Counter()
        for lookup in self.explainer.lookups:
            if lookup.event.reason == "new":
                cached[lookup.seq_id] += lookup.tokens_hit
        self.requests = [self._request(seq, cached) for seq in _by_arrival(state)]

    def time_at(self, step: int) -> float:
        """Seconds from the first step to the start of a step; after the last step, to its end."""
        return self._starts_s[self._place(step)] if self._starts_s else 0.0

    def _place(self, step: int) -> int:
        return min(max(0, step - self.series.first_step), len(self._starts_s) - 1)

    # ------------------------------------------------------------------ facts

    @property
    def elapsed_s(self) -> float:
        """Seconds from the first step to the end of the last."""
        return self._starts_s[-1] if self._starts_s else 0.0

    def findings(self, state: PoolState) -> Findings:
        """What the run says about its cache."""
        engine, first, size = state.started, self.explainer.totals(own=False), state.block_size
        evicted = [lookup.num_more_blocks for lookup in self.explainer.lookups if lookup.num_more_blocks is not None]
        losses = Losses(
            num_evicted=first.evicted,
            num_in_flight=first.in_flight,
            num_more_blocks=max(evicted, default=None),
            num_enough_blocks=_enough_blocks(self.requests, engine.max_num_seqs, size),
        )
        facts = self.stats.facts
        if not self.stats.num_compared and engine.enable_prefix_caching:  # an older trace: what its blocks show
            facts = replace(
                facts,
                num_ideal={size: first.ideal} | _ideal_of_smaller(self.explainer.lookups, size, first.ideal),
                num_partial_tokens=first.first_seen_shared + first.last_block_shared,
                longest_shared=self.explainer.longest_shared_prefix(),
            )
        return Findings(facts, losses, _is_reordered(state))

    # ------------------------------------------------------------------ requests

    def _request(self, seq: SeqState, cached: Counter[int]) -> RequestRow:
        phases = self.timelines.seqs[seq.seq_id].phases
        first_step = phases[0].first_step if phases else seq.added_step or 0
        last_step = max([phase.last_step or 0 for phase in phases], default=first_step)
        row = RequestRow(
            seq_id=seq.seq_id,
            label=seq.label,
            num_prompt=seq.num_prompt_tokens,
            num_output=seq.num_output_tokens,
            finish_reason=seq.finish_reason,
            first_step=first_step,
            last_step=last_step,
            num_cached=cached[seq.seq_id],
            num_preemptions=seq.num_preemptions,
            num_recomputed=seq.num_recomputed_tokens,
            seconds=dict.fromkeys(("waiting", "prefill", "decode", "preempted"), 0.0),
        )
        for phase in phases:
            self._add_phase(row, phase)
        if seq.first_token_step is not None:
            first_token_s = self.time_at(seq.first_token_step + 1)
            row.ttft_s = first_token_s - self.time_at(first_step)
            if seq.num_output_tokens > 1:
                row.tpot_s = (self.time_at(last_step + 1) - first_token_s) / (seq.num_output_tokens - 1)
        return row

    def _add_phase(self, row: RequestRow, phase: Phase) -> None:
        assert phase.last_step is not None, "a finished timeline has no open phase"
        row.seconds[phase.status] += self.time_at(phase.last_step + 1) - self.time_at(phase.first_step)
        if phase.status in ("waiting", "preempted") and self._starts_s:
            begin, end = self._place(phase.first_step), self._place(phase.last_step + 1)
            for reason, before in self._blocked_s.items():
                if before[end] > before[begin]:
                    row.waited_for[reason] = row.waited_for.get(reason, 0.0) + before[end] - before[begin]


def _by_arrival(state: PoolState) -> list[SeqState]:
    return sorted([*state.finished.values(), *state.seqs.values()], key=lambda seq: seq.seq_id)


def _is_reordered(state: PoolState) -> bool:
    """Whether rows were started in another order than that of their numbers (--reorder)."""
    firsts = (seq.request_id for seq in _by_arrival(state) if not seq.sample_index)
    numbers = [int(request_id) for request_id in firsts if request_id.isdecimal()]
    return any(before > after for before, after in pairwise(numbers))


def _ideal_of_smaller(lookups: list[Lookup], block_size: int, ideal: int) -> dict[int, int]:
    """By smaller block size: what the first lookups would have hit in an unlimited cache."""
    first = [lookup for lookup in lookups if not lookup.own and lookup.reason != "caching_off"]
    found = {}
    for size in (size for size in BLOCK_SIZES if SMALLEST_RECOMMENDED <= size < block_size):
        found[size] = ideal
        for lookup in first:
            shared = lookup.num_shared_blocks * block_size + lookup.num_further_tokens
            found[size] += min(shared // size * size, lookup.event.num_tokens - 1) - lookup.ideal_tokens_hit
    return found


def _enough_blocks(rows: list[RequestRow], max_num_seqs: int, block_size: int) -> int:
    """The blocks of as many of the longest sequences as may run at once, without sharing."""
    blocks = sorted((blocks_for(row.num_prompt + row.num_output, block_size) for row in rows), reverse=True)
    return sum(blocks[:max_num_seqs])
