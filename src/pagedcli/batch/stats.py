"""Counters of a batch run, in constant memory."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

import xxhash

from pagedcli.core.facts import RunFacts
from pagedcli.core.requests import FinishedRequest
from pagedcli.errors import RequestError

_MOST_NAMED = 3  # failed rows
_GROWTH = 1.02  # a percentile is exact to about 1 %


class LogHistogram:
    """Percentiles of positive values without storing them."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.num_values = 0

    def add(self, value: float) -> None:
        self._counts[round(math.log(max(value, 1e-9), _GROWTH))] += 1
        self.num_values += 1

    def add_all(self, other: "LogHistogram") -> None:
        self._counts.update(other._counts)
        self.num_values += other.num_values

    def num_up_to(self, bound: float) -> int:
        """How many values are at most this."""
        last = math.floor(math.log(bound, _GROWTH) + 0.5)
        return sum(count for bucket, count in self._counts.items() if bucket <= last)

    @property
    def total(self) -> float:
        """The sum of all values."""
        return sum(count * _GROWTH**bucket for bucket, count in self._counts.items())

    def percentile(self, percent: float) -> float | None:
        wanted = percent / 100 * self.num_values
        num_seen = 0
        for bucket in sorted(self._counts):
            num_seen += self._counts[bucket]
            if num_seen >= wanted:
                return float(_GROWTH**bucket)
        return None


@dataclass(slots=True)
class Endings:
    """How the answers in the rows ended."""

    reasons: Counter[str] = field(default_factory=Counter)  # answers by finish reason, those of a journal included
    # of those that were cut off and could have stopped by themselves, by max_tokens; None: not known, or max_model_len
    cut_at: Counter[int | None] = field(default_factory=Counter)
    tool_rows: Counter[bool] = field(default_factory=Counter)  # rows with tools, by whether they have a call

    def add(self, other: "Endings") -> None:
        for each in fields(self):
            getattr(self, each.name).update(getattr(other, each.name))


@dataclass(slots=True)
class BatchStats:
    """The progress of a run: rows, and what its engine counts. Rows of a resumed journal are counted separately."""

    num_rows: int | None = None  # rows to write in all; None: unknown
    num_done: int = 0  # rows of this run, failed ones included
    num_failed: int = 0  # rows
    error_codes: Counter[str] = field(default_factory=Counter)  # rows by error code
    first_failed: list[tuple[int, str]] = field(default_factory=list)  # line and reason of the first failed rows
    num_resumed: int = 0  # rows that were in the journal
    num_resumed_failed: int = 0  # rows
    num_stopped: int = 0  # sequences of this run's rows that ended by themselves, before their limit
    num_row_tokens: int = 0  # generated tokens in the rows of this run; dropped beams and failed rows have others
    num_deduplicated: int = 0  # rows of this run with the answers of an equal one (--deduplicate)
    num_reused: int = 0  # rows of this run that an earlier output had (--reuse)
    num_double_bos: int = 0  # prompts made of text here that begin with two BOS tokens
    num_deduplicated_tokens: int = 0  # generated tokens in these, which num_row_tokens leaves out
    elapsed_s: float = 0.0
    ttft: LogHistogram = field(default_factory=LogHistogram)  # seconds, from when the engine took the row
    queued: LogHistogram = field(default_factory=LogHistogram)  # seconds, the part of it before the first step
    tpot: LogHistogram = field(default_factory=LogHistogram)  # seconds
    duration: LogHistogram = field(default_factory=LogHistogram)  # seconds, until its last token
    facts: RunFacts = field(default_factory=RunFacts)  # the engine's counters
    ended: Endings = field(default_factory=Endings)

    def fail(self, line_number: int, error: RequestError) -> None:
        """Count a failed row."""
        self.num_done += 1
        self.num_failed += 1
        self.error_codes[error.code] += 1
        self.name_failed([(line_number, error.message)])

    def add_times(self, output: FinishedRequest) -> None:
        """Count how a request of a good row has ended, and when."""
        self.num_stopped += sum(sample.finish_reason == "stop" for sample in output.samples)
        self.ttft.add(output.metrics.ttft_s)
        self.queued.add(output.metrics.queued_s)
        self.duration.add(output.metrics.total_s)
        if output.metrics.tpot_s is not None:
            self.tpot.add(output.metrics.tpot_s)

    def name_failed(self, failed: Iterable[tuple[int, str]]) -> None:
        """Keep the first of these rows, by line."""
        self.first_failed = sorted([*self.first_failed, *failed])[:_MOST_NAMED]

    @property
    def num_finished(self) -> int:
        """Finished rows of the output, including those of a resumed journal."""
        return self.num_done + self.num_resumed

    @property
    def num_finished_failed(self) -> int:
        """Error rows of the output, including those of a resumed journal."""
        return self.num_failed + self.num_resumed_failed


def total(all_stats: Iterable[BatchStats]) -> BatchStats:
    """The sum of several engines' counters; the time is the longest."""
    result = BatchStats(facts=RunFacts())
    for stats in all_stats:
        result.elapsed_s = max(result.elapsed_s, stats.elapsed_s)
        for each in fields(BatchStats):
            value = getattr(stats, each.name)
            if isinstance(value, int):
                setattr(result, each.name, (getattr(result, each.name) or 0) + value)
        result.error_codes.update(stats.error_codes)
        result.name_failed(stats.first_failed)
        for name in ("ttft", "queued", "tpot", "duration"):
            getattr(result, name).add_all(getattr(stats, name))
        result.facts.add(stats.facts, same_pool=False)
        result.ended.add(stats.ended)
    return result


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a run, as every machine-readable output names it."""

    key: str  # its name in the summary as JSON
    label: str
    unit: str  # `tokens`, `steps`, `seconds` ...
    value: float | None
    metric: str | None = None  # its name for Prometheus, without `pagedcli_`; None: it follows from others

    @property
    def is_counter(self) -> bool:
        """Whether it only grows while the run lasts."""
        return self.metric is not None and self.metric.endswith("_total")


def figures(stats: BatchStats) -> list[Figure]:
    """The figures of a run so far. Rates are shares of 1."""
    facts, seconds = stats.facts, max(stats.elapsed_s, 1e-9)
    prompt, generated = facts.num_prompt_tokens, facts.num_generated_tokens
    return [
        Figure("elapsed_s", "Time since the run started.", "seconds", stats.elapsed_s, "elapsed_seconds"),
        Figure("steps", "Engine steps.", "steps", facts.num_steps, "steps_total"),
        Figure("prompt_tokens", "Prompt tokens of started requests.", "tokens", prompt, "prompt_tokens_total"),
        Figure(
            "cached_tokens", "Of these, found in the prefix cache.", "tokens", facts.num_cached_tokens,
            "prompt_tokens_cached_total",
        ),
        Figure("disk_cached_tokens", "Of these, read from the prefix store.", "tokens", facts.num_disk_tokens,
               "prompt_tokens_disk_cached_total"),
        Figure("hit_rate", "Share of prompt tokens found in the prefix cache.", "share", facts.hit_rate),
        Figure("computed_tokens", "Tokens computed by the model.", "tokens", facts.num_computed_tokens,
               "computed_tokens_total"),
        Figure("generated_tokens", "Tokens generated, those of dropped beams included.", "tokens", generated,
               "generated_tokens_total"),
        Figure("row_tokens", "Generated tokens in the rows.", "tokens", stats.num_row_tokens, "row_tokens_total"),
        Figure("generated_tokens_per_s", "Tokens generated per second.", "tokens/s", generated / seconds),
        Figure("total_tokens_per_s", "Prompt and generated tokens per second.", "tokens/s",
               (prompt + generated) / seconds),
        Figure("preemptions", "Preempted sequences.", "sequences", facts.num_preemptions, "preemptions_total"),
        Figure("recomputed_tokens", "Tokens recomputed after preemption.", "tokens", facts.num_recomputed_tokens,
               "recomputed_tokens_total"),
        Figure("kv_blocks", "Blocks in the pool.", "blocks", facts.num_blocks, "kv_blocks"),
        Figure("kv_blocks_used", "Blocks in use.", "blocks", facts.num_used_blocks, "kv_blocks_used"),
        Figure("kv_blocks_peak", "Most blocks in use in a step.", "blocks", facts.peak_used_blocks, "kv_blocks_peak"),
        *(_slot_figures(facts) if facts.num_state_slots else ()),
        *(_draft_figures(facts) if facts.num_drafted_tokens else ()),
    ]  # fmt: skip


def _draft_figures(facts: RunFacts) -> tuple[Figure, ...]:
    """The figures of a run with --speculation."""
    return (
        Figure("drafted_tokens", "Draft tokens verified.", "tokens", facts.num_drafted_tokens),
        Figure("accepted_tokens", "Of these, accepted ones.", "tokens", facts.num_accepted_tokens),
        Figure("again_tokens", "Tokens computed once more for the recurrent state, after drafts.", "tokens",
               facts.num_again_tokens),
    )  # fmt: skip


def _slot_figures(facts: RunFacts) -> tuple[Figure, ...]:
    """The figures of a model with recurrent state."""
    return (
        Figure("state_slots", "Slots of recurrent state.", "slots", facts.num_state_slots, "state_slots"),
        Figure("state_slots_peak", "Most slots in use in a step.", "slots", facts.peak_used_state_slots,
               "state_slots_peak"),
        Figure("snapshots", "Snapshots made.", "snapshots", facts.num_snapshots, "snapshots_total"),
        Figure("snapshots_dropped", "Snapshots dropped for want of an empty slot.", "snapshots",
               facts.num_dropped_snapshots, "snapshots_dropped_total"),
        Figure("snapshot_hits", "Sequences that continued from a snapshot.", "sequences",
               facts.num_snapshot_hits, "snapshot_hits_total"),
    )  # fmt: skip


class SeenIds:
    """The set of row ids seen so far."""

    def __init__(self) -> None:
        self._digests: set[int] = set()

    def add(self, row_id: str | int) -> bool:
        """Add an id. Returns whether it is new."""
        num_known = len(self._digests)
        self._digests.add(xxhash.xxh64_intdigest(f"{type(row_id).__name__}:{row_id}".encode()))
        return len(self._digests) > num_known
