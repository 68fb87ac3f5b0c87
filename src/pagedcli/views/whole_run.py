"""A whole run: what each sequence did when, what it waited for, and what the run says about its KV cache in words: what
was found and what was lost where.

Used by the summaries of `generate` and `trace`, by the report and Perfetto.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Annotated, ClassVar

import pagedcli.events as ev
from pagedcli.core.facts import RunFacts
from pagedcli.events import Event
from pagedcli.printable import percent_text, plural, seconds_text
from pagedcli.records import Seconds, Share, computed
from pagedcli.trace.dispatch import Handler, View
from pagedcli.trace.seq_state import SeqState, Stage
from pagedcli.trace.state import PoolState
from pagedcli.views.explain import LOSS_WORDS, Explainer, Totals, longest_shared_prefix, totals_of
from pagedcli.views.rows import Label, SeqId, ShownRow
from pagedcli.views.stats import WAITING_REASONS, RunStats, StepSeries
from pagedcli.views.words import accepted_words, again_words

PHASES = ("waiting", "prefill", "decode", "preempted")


@dataclass(slots=True)
class Phase:
    """Steps first_step ... last_step, both included."""

    status: Stage
    first_step: int
    last_step: int | None = None  # None while it lasts


class Timelines(View):
    """The phases of each sequence, without gaps. Call `finish` after the last event."""

    def __init__(self) -> None:
        self.phases: dict[int, list[Phase]] = {}
        self.num_computed: Counter[int] = (
            Counter()
        )  # seq_id -> tokens computed, those again after a preemption included
        self._in_prefill: set[int] = set()

    def on_engine_started(self, event: ev.EngineStarted, state: PoolState) -> None:
        """Another part: close what the earlier run left unfinished."""
        for seq_id, seq in state.finished.items():
            if seq.finish_reason is None:
                self._cut(seq_id, state)

    def on_request_added(self, event: ev.RequestAdded, state: PoolState) -> None:
        self._enter(event.seq_id, "waiting", _now(state))

    def on_prefix_looked_up(self, event: ev.PrefixLookedUp, state: PoolState) -> None:
        if event.reason != "continued":
            self._enter(event.seq_id, "prefill", _now(state))

    def on_sequence_forked(self, event: ev.SequenceForked, state: PoolState) -> None:
        self._enter(event.seq_id, "decode", _now(state) + 1)

    def on_step_scheduled(self, event: ev.StepScheduled, state: PoolState) -> None:
        self.num_computed.update(dict(zip(event.seq_ids, event.num_new_tokens, strict=True)))

    def on_tokens_sampled(self, event: ev.TokensSampled, state: PoolState) -> None:
        for seq_id in self._in_prefill.intersection(event.seq_ids):
            self._enter(seq_id, "decode", _now(state) + 1)

    def on_request_preempted(self, event: ev.RequestPreempted, state: PoolState) -> None:
        self._enter(event.seq_id, "preempted", _now(state))

    def on_step_failed(self, event: ev.StepFailed, state: PoolState) -> None:
        for seq_id in event.seq_ids:
            self._enter(seq_id, "preempted", state.step_number or 0)

    def on_request_finished(self, event: ev.RequestFinished, state: PoolState) -> None:
        self._end(event.seq_id, _now(state))
        self._in_prefill.discard(event.seq_id)

    def finish(self, state: PoolState) -> None:
        """Close the phases of sequences that the trace leaves unfinished."""
        for seq_id in state.seqs:
            self._cut(seq_id, state)

    def _cut(self, seq_id: int, state: PoolState) -> None:
        phases = self.phases.get(seq_id)
        if phases and phases[-1].last_step is None:
            self._end(seq_id, state.step_number or 0)

    def _enter(self, seq_id: int, status: Stage, step: int) -> None:
        phases = self.phases.setdefault(seq_id, [])
        if phases:
            self._end(seq_id, step - 1)
        phases.append(Phase(status, step))
        if status == "prefill":
            self._in_prefill.add(seq_id)
        else:
            self._in_prefill.discard(seq_id)

    def _end(self, seq_id: int, last_step: int) -> None:
        """End the phase that lasts; one of less than a step never was."""
        phase = self.phases[seq_id][-1]
        phase.last_step = last_step
        if last_step < phase.first_step:
            self.phases[seq_id].pop()


def _now(state: PoolState) -> int:
    """The current step; between steps the next one, to which events there belong."""
    step = state.step
    return 0 if step is None else step.step + (step.end_ns is not None)


@dataclass(frozen=True, slots=True)
class Findings:
    """A run's facts, and what only its events show: the outcomes of its first prefix lookups."""

    facts: RunFacts
    losses: Totals | None = None  # None: the engine's own counts, without events

    def lost(self) -> list[tuple[int, str]]:
        """Shared tokens that were computed again, and why, largest first."""
        losses, facts, in_flight = self.losses, self.facts, LOSS_WORDS["in_flight"]
        known = [(facts.num_partial_tokens, "shared in partial blocks")]
        if losses is not None:
            known += [(losses.evicted, LOSS_WORDS["evicted"]), (losses.in_flight, in_flight)]
        else:
            either = f"{LOSS_WORDS['evicted']}, or {in_flight}" if facts.num_evictions else in_flight
            known.append((max(0, facts.num_ideal_tokens - facts.num_cached_tokens), either))
        return sorted(((count, words) for count, words in known if count), reverse=True)

    @property
    def waiting_s(self) -> float:
        """Seconds, of all sequences and for all reasons."""
        return sum(self.facts.waiting_s.values())


def guess_words(facts: RunFacts) -> str:
    """How many draft tokens were accepted, by where they came from."""
    words = accepted_words(facts.num_accepted_tokens, facts.num_drafted_tokens)
    parts = [
        f"{facts.accepted[source]:,} of {num_drafted:,} from {ev.DRAFT_WORDS[source]}"
        for source, num_drafted in facts.drafted.most_common()
    ]
    words = f"{words}: {', '.join(parts)}" if parts else words
    return words + again_words(facts.num_again_tokens)


def finding_lines(findings: Findings) -> list[tuple[str, str]]:
    """Label and text of each line of a summary."""
    facts = findings.facts
    lines = []
    if facts.prefix_caching and facts.num_prompt_tokens:
        lines.append(("prefixes", _prefix_text(findings)))
        if findings.lost():
            lines.append(("lost", ", ".join(f"{plural(count, 'token')} {words}" for count, words in findings.lost())))
    if facts.mean_waste is not None and facts.peak_waste is not None:
        mean, peak = percent_text(facts.mean_waste), percent_text(facts.peak_waste)
        had_room = facts.peak_used_blocks < facts.num_blocks
        cost = "the pool had room for it" if had_room else "smaller blocks waste less, but are read more slowly"
        lines.append(("waste", f"{mean} of the slots in use held no token (mean of the steps; peak {peak}): {cost}"))
    if facts.num_drafted_tokens or facts.num_undrafted:
        without = f"; none for {plural(facts.num_undrafted, 'sequence')} with beam search"
        lines.append(("speculation", guess_words(facts) + (without if facts.num_undrafted else "")))
    if findings.waiting_s:
        lines.append(("waiting", _waiting_text(findings)))
    return lines


def story(findings: Findings, elapsed_s: float) -> str:
    """What ran, in a sentence."""
    facts = findings.facts
    return (
        f"{plural(facts.num_sequences, 'sequence')} generated {plural(facts.num_generated_tokens, 'token')} in "
        f"{plural(facts.num_steps, 'step')} and {seconds_text(elapsed_s)}, with at most "
        f"{percent_text(facts.peak_used_blocks / facts.num_blocks)} of the pool in use."
    )


def _prefix_text(findings: Findings) -> str:
    facts = findings.facts
    blocks = plural(facts.longest_shared // facts.block_size, "full block")
    cache = "unlimited cache" if facts.ideal_of is None else f"cache of the newest {plural(facts.ideal_of, 'token')}"
    store = " and the prefix store" if facts.num_disk_tokens else ""
    return (
        f"longest shared {plural(facts.longest_shared, 'token')}, {blocks} of {facts.block_size}; "
        f"ceiling {percent_text(facts.num_ideal_tokens / facts.num_prompt_tokens)} of the prompt tokens "
        f"({cache}{store})"
    )


def _waiting_text(findings: Findings) -> str:
    facts = findings.facts
    total = findings.waiting_s
    reasons = _largest_first(facts.waiting_s)
    why = ", ".join(f"{percent_text(part / total)} {ev.WAITING_WORDS[reason]}" for reason, part in reasons)
    if len(reasons) == 1:
        why = ev.WAITING_WORDS[reasons[0][0]]
    mean = seconds_text(total / max(1, facts.num_sequences))
    return f"mean {mean} a sequence, {seconds_text(total)} in all: {why}"


class RequestRow(ShownRow):
    """A sequence of a whole run: where its time went, and what it reused. Counts are tokens."""

    USES: ClassVar = {
        "page": "seq_id label first_step last_step num_prompt num_cached num_output num_preemptions num_recomputed"
        " num_computed total_s waiting_s prefill_s decode_s preempted_s ttft_s tpot_s end phases",
        "table": "label seq_id num_prompt num_cached num_output total_s waiting_s prefill_s decode_s preempted_s"
        " num_preemptions num_recomputed num_computed ttft_s tpot_s end",
    }

    seq_id: SeqId
    label: Label
    first_step: int
    last_step: int
    num_prompt: Annotated[int, "prompt tokens"] = computed(lambda row: row.num_prompt_tokens)
    num_cached: Annotated[int, "cached tokens"]
    num_output: Annotated[int, "generated tokens"] = computed(lambda row: row.num_output_tokens)
    num_preemptions: Annotated[int, "times preempted"]
    num_recomputed: Annotated[int, "tokens recomputed"] = computed(lambda row: row.num_recomputed_tokens)
    num_computed: Annotated[int, "tokens computed"]
    total_s: Annotated[Seconds, "total"] = computed(lambda row: sum(row.seconds.values()))
    waiting_s: Annotated[Seconds, "waiting"] = computed(lambda row: row.seconds["waiting"])
    prefill_s: Annotated[Seconds, "prefill"] = computed(lambda row: row.seconds["prefill"])
    decode_s: Annotated[Seconds, "decode"] = computed(lambda row: row.seconds["decode"])
    preempted_s: Annotated[Seconds, "preempted"] = computed(lambda row: row.seconds["preempted"])
    ttft_s: Annotated[Seconds | None, "TTFT"]
    tpot_s: Annotated[Seconds | None, "TPOT"]
    end: str = computed(lambda row: row.finish_reason or "unfinished")
    phases: list[list[int]] = computed(
        lambda row: [[PHASES.index(each.status), each.first_step, each.last_step] for each in row.history]
    )

    def __init__(self, seq: SeqState, history: Sequence[Phase], num_cached: int, num_computed: int) -> None:
        super().__init__(seq)
        self.history, self.num_computed = history, num_computed
        self.num_cached = num_cached  # prompt tokens found at its first lookup or while it was prefilled
        self.first_step = history[0].first_step if history else seq.added_step or 0
        self.last_step = max([phase.last_step or 0 for phase in history], default=self.first_step)
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.waited_for: dict[str, float] = {}  # seconds, by reason
        self.ttft_s: float | None = None  # time since its arrival
        self.tpot_s: float | None = None  # mean of the later tokens

    def why(self) -> str:
        """Where the time went, largest part first."""
        words = {
            "waiting": "waiting",
            "prefill": f"computing {plural(self.num_prompt, 'prompt token')} ({self.num_cached:,} cached)",
            "decode": f"generating {plural(self.num_output, 'token')}",
            "preempted": f"preempted {plural(self.num_preemptions, 'time')}, "
            f"{plural(self.num_recomputed, 'token')} recomputed",
        }
        shown = [f"{seconds_text(part)} {words[status]}" for status, part in _largest_first(self.seconds)]
        reasons = [f"{ev.WAITING_WORDS[why]} {seconds_text(part)}" for why, part in _largest_first(self.waited_for)]
        waited = f"; it waited for: {', '.join(reasons)}" if reasons else ""
        return f"{seconds_text(self.total_s)}: {'; '.join(shown)}{waited}" if shown else "no step took part in it"


@dataclass(slots=True)
class CostRow:
    """The tokens of a request, all its samples together."""

    request_id: Annotated[str, "row"]
    row_id: Annotated[str | None, "id"]
    num_computed: Annotated[int, "computed"] = 0
    share: Annotated[Share, "of all"] = 0.0
    num_prompt: Annotated[int, "prompt"] = 0
    num_cached: Annotated[int, "found"] = 0
    num_output: Annotated[int, "generated"] = 0
    num_recomputed: Annotated[int, "again"] = 0


def costs(rows: Sequence[RequestRow]) -> list[CostRow]:
    """What each request took, the costliest first. `rows`: all sequences of a run."""
    found: dict[str, CostRow] = {}
    num_computed = sum(row.num_computed for row in rows)
    for row in rows:
        cost = found.setdefault(row.request_id, CostRow(row.request_id, row.row_id))
        cost.num_prompt += 0 if row.sample_index else row.num_prompt
        for name in ("num_computed", "num_cached", "num_output", "num_recomputed"):
            setattr(cost, name, getattr(cost, name) + getattr(row, name))
        cost.share = cost.num_computed / max(1, num_computed)
    return sorted(found.values(), key=lambda cost: -cost.num_computed)


def _largest_first(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    """The parts that are not 0."""
    return sorted(((name, part) for name, part in parts.items() if part), key=lambda item: -item[1])


class WholeRun(View):
    """Takes in all events of a run. `finish` closes what the run left unfinished; then the rest is valid."""

    def __init__(self) -> None:
        self.stats = RunStats()
        self.series = StepSeries()
        self.timelines = Timelines()
        self.explainer = Explainer()
        self.requests: list[RequestRow] = []  # sorted by arrival

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
        # reason -> per step the seconds before it in which this reason kept the queue from moving
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
        self.requests = [self._request(seq, cached[seq.seq_id]) for seq in state.all_seqs()]

    def time_at(self, step: int) -> float:
        """Seconds from the first step to the start of a step; after the last step, to its end."""
        return self._starts_s[self._place(step)] if self._starts_s else 0.0

    def _place(self, step: int) -> int:
        return min(max(0, step - self.series.first_step), len(self._starts_s) - 1)

    @property
    def elapsed_s(self) -> float:
        """Seconds from the first step to the end of the last."""
        return self._starts_s[-1] if self._starts_s else 0.0

    def findings(self, state: PoolState) -> Findings:
        first, facts = totals_of(self.explainer.lookups, own=False), self.stats.facts
        if not self.stats.num_compared and state.started.enable_prefix_caching:  # an older trace: what its blocks show
            facts = replace(
                facts,
                num_ideal=first.ideal,
                num_partial_tokens=first.first_seen_shared + first.last_block_shared,
                longest_shared=longest_shared_prefix(self.explainer.lookups),
            )
        return Findings(facts, first)

    def _request(self, seq: SeqState, num_cached: int) -> RequestRow:
        row = RequestRow(seq, self.timelines.phases[seq.seq_id], num_cached, self.timelines.num_computed[seq.seq_id])
        for phase in row.history:
            self._add_phase(row, phase)
        if seq.first_token_step is not None:
            first_token_s = self.time_at(seq.first_token_step + 1)
            row.ttft_s = first_token_s - self.time_at(row.first_step)
            if seq.num_output_tokens > 1:
                row.tpot_s = (self.time_at(row.last_step + 1) - first_token_s) / (seq.num_output_tokens - 1)
        return row

    def _add_phase(self, row: RequestRow, phase: Phase) -> None:
        assert phase.last_step is not None, "a finished timeline has no open phase"
        row.seconds[phase.status] += self.time_at(phase.last_step + 1) - self.time_at(phase.first_step)
        if phase.status in ("waiting", "preempted") and self._starts_s:
            begin, end = self._place(phase.first_step), self._place(phase.last_step + 1)
            for reason, before in self._blocked_s.items():
                if before[end] > before[begin]:
                    row.waited_for[reason] = row.waited_for.get(reason, 0.0) + before[end] - before[begin]
