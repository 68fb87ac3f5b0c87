"""The plan of an engine: everything that was decided before its first step. Read by EngineCore and by all reports.

Needs no torch: simulations make plans without a model.
"""

import time
from dataclasses import dataclass
from typing import Literal

from pagedcli import __version__
from pagedcli.core.budget import MemoryBudget
from pagedcli.core.groups import TableShape
from pagedcli.events import SCHEMA_VERSION, EngineStarted, Eviction

PreemptionPolicy = Literal["last", "largest"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What this machine will do with an EngineConfig. Computed once, never changed."""

    model: str
    device: str
    dtype: str
    backend: str
    refused: tuple[str, ...]  # why faster backends were not chosen, one line each
    block_size: int  # tokens
    block_bytes: int  # over all layers, K and V
    num_blocks: int
    num_blocks_reason: str  # why num_blocks is what it is
    max_model_len: int  # tokens
    max_num_seqs: int
    max_num_batched_tokens: int
    weight_bytes: int
    budget: MemoryBudget | None  # the measured terms where memory was measured
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    graph_sizes: tuple[int, ...] = ()  # batch sizes with a CUDA graph
    no_graphs: str | None = None  # why there are none
    kv_dtype: str = "auto"  # of the KV cache
    kv_scales: tuple[float, float] | None = None  # scales of K and of V in an fp8 cache
    chunked_prefill_size: int | None = None  # tokens of one prompt per step; None: the whole budget
    enable_prefix_caching: bool = True
    eviction: Eviction = "lru"
    preemption_policy: PreemptionPolicy = "last"
    runs_ahead: bool = False  # each step is launched before the tokens of the last one are read
    seed: int = 0  # for requests without one
    windows: tuple[int | None, ...] = (None,)  # of each group of layers, see core.groups

    @property
    def chunk_size(self) -> int:
        """Most tokens of one sequence in a step."""
        return self.chunked_prefill_size or self.max_num_batched_tokens

    @property
    def table_shape(self) -> TableShape:
        """The block tables of a sequence."""
        return TableShape(self.block_size, self.windows)

    @property
    def num_slots(self) -> int:
        """Capacity of the pool in tokens."""
        return self.num_blocks * self.block_size


def started(plan: Plan) -> EngineStarted:
    """The first event of an engine with this plan."""
    return EngineStarted(
        schema_version=SCHEMA_VERSION,
        pagedcli_version=__version__,
        time_ns=time.time_ns(),
        model=plan.model,
        device=plan.device,
        dtype=plan.dtype,
        backend=plan.backend,
        refused=plan.refused,
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        block_bytes=plan.block_bytes,
        max_model_len=plan.max_model_len,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        chunked_prefill_size=plan.chunked_prefill_size,
        enable_prefix_caching=plan.enable_prefix_caching,
        eviction=plan.eviction,
        windows=plan.windows,
    )
