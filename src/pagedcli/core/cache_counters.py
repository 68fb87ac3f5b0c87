"""Cheap counts of how a run uses the KV cache: what a larger cache would have found, waste, and what was waited for.

Kept by EngineCore whether or not anybody observes the run: about 20 us per 512-token prompt and 1 us per step.
"""

from collections import Counter
from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING

import xxhash

from pagedcli.core.prefixes import TOKEN_BYTES, token_bytes
from pagedcli.core.sequence import Sequence

if TYPE_CHECKING:
    from pagedcli.core.scheduler import Scheduler

BLOCK_SIZES = (16, 32, 64, 128, 256)  # compared with that of the run, if smaller
MOST_KNOWN = 2**18  # prefixes remembered, the newest ones
_SAMPLE_EVERY = 8  # steps


class CacheCounters:
    """Tokens, unless another unit is named.

    `num_ideal`: by block size, the prompt tokens that a cache of the last MOST_KNOWN units of tokens finds if each
    block is computed once. A unit is 16 tokens, or a smaller block.
    """

    def __init__(self, block_size: int = 16) -> None:
        self.block_size = block_size
        self.unit = 16 if block_size % 16 == 0 else block_size
        self.num_looked_up = 0
        self.longest_shared = 0  # in whole units
        smaller = (size for size in BLOCK_SIZES if size < block_size and size % self.unit == 0)
        self.num_ideal: dict[int, int] = dict.fromkeys((*smaller, block_size), 0)
        self.waiting_ns: Counter[str] = Counter()  # by reason, summed over sequences
        self.running_ns = 0  # summed over sequences
        self.mean_waste: float | None = None  # share of the slots in use without a token; of every 8th step
        self.peak_waste: float | None = None
        self._num_slots = self._num_unfilled = self._num_steps = 0
        self._known: dict[int, None] = {}  # digests of prefixes of whole units, oldest first
        self.has_forgotten = False  # whether there were more than MOST_KNOWN

    @property
    def most_known_tokens(self) -> int | None:
        """Tokens of the newest prefixes that num_ideal covers; None: of all."""
        return MOST_KNOWN * self.unit if self.has_forgotten else None

    def admit(self, seq: Sequence) -> None:
        """Count a sequence when it is first started. Other samples of a request are not counted: they find its own
        blocks."""
        if seq.sample_index:
            return
        prompt = seq.token_ids[: seq.num_prompt_tokens]
        digests = self._digests(prompt, seq.cache_salt)
        num_known = next((n for n, digest in enumerate(digests) if digest not in self._known), len(digests))
        self._remember(digests[num_known:])
        self.num_looked_up += len(prompt)
        self.longest_shared = max(self.longest_shared, num_known * self.unit)
        for size in self.num_ideal:
            self.num_ideal[size] += min(num_known * self.unit // size * size, len(prompt) - 1)

    def finish(self, seq: Sequence) -> None:
        """Remember the prefixes that a finished sequence leaves in the cache; the last token was never written."""
        self._remember(self._digests(seq.token_ids[:-1], seq.cache_salt)[seq.num_prompt_tokens // self.unit :])

    def count_step(self, blocked: str | None, scheduler: "Scheduler", *, step_ns: int) -> None:
        """Count a step. `blocked`: why the first in the queue was not started."""
        self.running_ns += len(scheduler.running) * step_ns
        if blocked is not None:
            self.waiting_ns[blocked] += len(scheduler.waiting) * step_ns
        self._num_steps += 1
        if self._num_steps % _SAMPLE_EVERY == 1:
            self._sample_waste(scheduler)

    def _sample_waste(self, scheduler: "Scheduler") -> None:
        manager, size = scheduler.block_manager, self.block_size
        slots = (manager.num_blocks - manager.num_free_blocks) * size
        if slots:
            # of their last blocks, one in each group; several sequences may share one
            last = {seq.block_table[-1]: seq.num_computed_tokens for seq in scheduler.running if seq.block_table}
            unfilled = manager.num_groups * sum(-num_tokens % size for num_tokens in last.values())
            self._num_slots += slots
            self._num_unfilled += unfilled
            self.mean_waste = self._num_unfilled / self._num_slots
            self.peak_waste = max(self.peak_waste or 0.0, unfilled / slots)

    def _digests(self, token_ids: Ids[int], salt: str | None) -> list[int]:
        """Of every prefix of whole units, shortest first."""
        data, length = memoryview(token_bytes(token_ids)), self.unit * TOKEN_BYTES
        digest = xxhash.xxh64() if salt is None else xxhash.xxh64(b"salt" + salt.encode())
        digests = []
        for start in range(0, len(token_ids) // self.unit * length, length):
            digest.update(data[start : start + length])
            digests.append(digest.intdigest())
        return digests

    def _remember(self, digests: list[int]) -> None:
        known = self._known
        known.update(dict.fromkeys(digests))
        while len(known) > MOST_KNOWN:
            self.has_forgotten = True
            del known[next(iter(known))]
