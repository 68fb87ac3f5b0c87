"""A workload as one long list of block accesses: what every analysis without a scheduler works on."""

from array import array
from dataclasses import dataclass

import numpy as np

from pagedcli.simulation.requests import Workload, block_keys

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Bools = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class Accesses:
    """The blocks that the prompts look up, request after request, the first block of each prompt first.

    R requests, A accesses. A block that hits saves its tokens; the last token of a prompt is always computed.
    """

    blocks: Ints  # [A] numbers from 0, equal where content and everything before it are equal
    starts: Ints  # [R+1] the accesses of request r are starts[r] ... starts[r+1] - 1
    tokens: Ints  # [A] that a hit saves
    prompt_tokens: Ints  # [R]
    full_tokens: Ints  # [R] that a hit of all blocks would save
    block_size: int

    @property
    def num_requests(self) -> int:
        return len(self.starts) - 1

    @property
    def num_unique(self) -> int:
        """Distinct blocks."""
        return int(self.blocks.max()) + 1 if len(self.blocks) else 0

    @property
    def requests(self) -> Ints:
        """[A] the request of each access."""
        return np.repeat(np.arange(self.num_requests), np.diff(self.starts))

    def first_access(self, warmup: float) -> int:
        """The first access after the warm-up requests."""
        return int(self.starts[num_warmup(self.num_requests, warmup)])


def num_warmup(num_requests: int, warmup: float) -> int:
    """Requests that fill the cache without being counted."""
    return min(num_requests, int(num_requests * warmup))


def accesses_of(workload: Workload, block_size: int, *, partial_blocks: bool = False) -> Accesses:
    """The accesses of a workload. With `partial_blocks` the last, partial block of a prompt can hit, too, where the
    trace has its hash, and so can the last token: the definition of kvcache-simulator and llmtrafficlens."""
    numbers: dict[tuple[int, int], int] = {}
    blocks, tokens, starts = array("q"), array("q"), array("q", [0])
    for request in workload.requests:
        num_prompt = request.num_prompt_tokens
        for key in block_keys(request, workload.hash_size, block_size):
            blocks.append(numbers.setdefault(key, len(numbers)))
            tokens.append(block_size)
        num_full = len(blocks) - starts[-1]
        rest = num_prompt - num_full * block_size
        if partial_blocks:
            if rest and workload.hash_size is not None and num_prompt > (len(request.hashes) - 1) * workload.hash_size:
                end = num_prompt - (len(request.hashes) - 1) * workload.hash_size
                if end <= workload.hash_size:
                    blocks.append(numbers.setdefault((request.hashes[-1], end), len(numbers)))
                    tokens.append(rest)
        elif not rest and num_full:
            tokens[-1] -= 1
        starts.append(len(blocks))
    weights, ends = _as_ints(tokens), _as_ints(starts)
    total = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(weights)])
    prompt_tokens = np.array([request.num_prompt_tokens for request in workload.requests], dtype=np.int64)
    return Accesses(_as_ints(blocks), ends, weights, prompt_tokens, total[ends[1:]] - total[ends[:-1]], block_size)


def _as_ints(values: "array[int]") -> Ints:
    return np.frombuffer(values, dtype=np.int64) if values else np.zeros(0, dtype=np.int64)
