"""The memory of a KV cache whose first blocks the system clears while weights are read, on a core that would be idle.

Linux clears a page when it is first written, and a virtual machine may have to obtain it from its host first. Used by
load_engine on a CPU; the cache itself belongs to DeviceState.
"""

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedcli.attention.base import AttentionBackend, named_dtype
from pagedcli.config import EngineConfig
from pagedcli.core.budget import blocks_for
from pagedcli.core.plan import Plan
from pagedcli.errors import ConfigError
from pagedcli.models.base import pool_shape
from pagedcli.models.spec import ModelSpec
from pagedcli.native.system import ask_for_huge_pages, populate, usable_cores
from pagedcli.planning.decide import choose_pool
from pagedcli.planning.machine import Machine
from pagedcli.planning.memory import predict_terms


@dataclass(frozen=True, slots=True)
class EarlyCache:
    """A cache of the size that the pool will most likely have, and the thread that touches its first blocks."""

    memory: Tensor  # of AttentionBackend.cache_shape: [2, P, N, ...]
    num_blocks: int  # that are touched
    stop: threading.Event
    thread: threading.Thread

    @classmethod
    def begin(cls, memory: Tensor, num_blocks: int) -> "EarlyCache":
        """Starts to touch blocks 0 to num_blocks - 1 of all layers, which the first requests get."""
        stop = threading.Event()
        thread = threading.Thread(target=_touch, args=(memory[:, :, :num_blocks], stop), daemon=True)
        thread.start()
        return cls(memory, num_blocks, stop, thread)

    @property
    def num_bytes(self) -> int:
        """Most bytes that have been touched."""
        return self.memory[:, :, : self.num_blocks].nbytes

    def end(self) -> None:
        """Waits until the thread touches nothing any more, which takes milliseconds."""
        self.stop.set()
        self.thread.join()


def _touch(blocks: Tensor, stop: threading.Event) -> None:
    for cache in blocks.flatten(0, 1):
        if stop.is_set() or not populate(cache, stop.is_set):
            return


def begin_early_cache(
    config: EngineConfig,
    spec: ModelSpec,
    plan: Plan,
    backend: AttentionBackend,
    machine: Machine,
    *,
    expected_tokens: int,
) -> EarlyCache | None:
    """The cache for requests of this many tokens in all. None where nothing would be gained (one core, no requests
    known, a GPU) or the memory may not suffice for it next to the weights.
    """
    if not plan.on_cpu or spec.is_fallback or expected_tokens < 1 or usable_cores() < 2:
        return None
    free = machine.available_bytes - predict_terms(config, spec, plan, machine).weights
    try:
        num_blocks = choose_pool(config, plan, available=free, terms=None).num_blocks
    except ConfigError:
        return None  # load_engine says so if the memory does not suffice once the weights are there, either
    own = spec.num_kv_heads, spec.head_dim
    shape = pool_shape(plan.groups, own, backend, num_blocks, plan.limits.block_size)
    memory = torch.empty(shape, dtype=named_dtype(plan.kv_dtype))
    ask_for_huge_pages(memory)
    return EarlyCache.begin(memory, min(num_blocks, blocks_for(expected_tokens, plan.limits.block_size)))
