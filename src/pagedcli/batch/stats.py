"""Counters of a batch run, in constant memory."""

import math
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

import xxhash

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

    def percentile(self, percent: float) -> float | None:
        wanted = percent / 100 * self.num_values
        num_seen = 0
        for bucket in sorted(self._counts):
            num_seen += self._counts[bucket]
            if num_seen >= wanted:
                return float(_GROWTH**bucket)
        return None


@dataclass(slots=True)
class BatchStats:
    """The progress of a run. Tokens, unless another unit is named; rows of a resumed journal are counted separately."""

    num_rows: int | None = None  # that the run will write, if known
    num_done: int = 0  # rows of this run, failed ones included
    num_failed: int = 0  # rows
    error_codes: Counter[str] = field(default_factory=Counter)  # rows by error code
    num_resumed: int = 0  # rows that were in the journal
    num_resumed_failed: int = 0  # rows
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_steps: int = 0
    num_used_blocks: int = 0  # blocks, right now
    peak_used_blocks: int = 0  # blocks
    num_blocks: int = 0  # blocks in the pool
    elapsed_s: float = 0.0
    ttft: LogHistogram = field(default_factory=LogHistogram)  # seconds, from when the engine took the row
    queued: LogHistogram = field(default_factory=LogHistogram)  # seconds, the part of it before the first step
    tpot: LogHistogram = field(default_factory=LogHistogram)  # seconds

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found in the prefix cache, over the run so far."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def num_finished(self) -> int:
        """Finished rows of the output, including those of a resumed journal."""
        return self.num_done + self.num_resumed


def total(all_stats: Iterable[BatchStats]) -> BatchStats:
    """The sum of several engines' counters; the time is the longest."""
    result = BatchStats()
    for stats in all_stats:
        result.elapsed_s = max(result.elapsed_s, stats.elapsed_s)
        for each in fields(BatchStats):
            value = getattr(stats, each.name)
            if isinstance(value, int):
                setattr(result, each.name, (getattr(result, each.name) or 0) + value)
        result.error_codes.update(stats.error_codes)
        result.ttft.add_all(stats.ttft)
        result.tpot.add_all(stats.tpot)
    return result


class SeenIds:
    """The set of row ids seen so far: a hash table of 64-bit digests, about 16 bytes per id."""

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 * 1024))
        self._num_ids = 0

    def add(self, row_id: str | int) -> bool:
        """Add an id. Returns whether it is new."""
        digest = xxhash.xxh64_intdigest(f"{type(row_id).__name__}:{row_id}".encode()) or 1  # 0 marks an empty slot
        if not self._insert(digest):
            return False
        self._num_ids += 1
        if 2 * self._num_ids > len(self._slots):
            self._grow()
        return True

    def _insert(self, digest: int) -> bool:
        slots, mask = self._slots, len(self._slots) - 1
        place = digest & mask
        while slots[place]:
            if slots[place] == digest:
                return False
            place = (place + 1) & mask
        slots[place] = digest
        return True

    def _grow(self) -> None:
        old = self._slots
        self._slots = type(old)("Q", bytes(8 * 2 * len(old)))
        for digest in old:
            if digest:
                self._insert(digest)
