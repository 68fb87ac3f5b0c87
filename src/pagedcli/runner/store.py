"""The prefix store of an engine: its folder, what its blocks depend on, and the memory of its pool.

Used by LLMEngine; planning.decide has refused the engines whose bits are not promised.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pagedcli.config import EngineConfig
from pagedcli.content_files import ContentFolder, digest_of
from pagedcli.core.store import PrefixStore
from pagedcli.planning.decision import Decision
from pagedcli.runner.identity import weights_identity
from pagedcli.runner.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """The blocks of a KV cache on the CPU, [2, P, N, ...]."""

    kv_cache: Tensor
    block_bytes: int

    @classmethod
    def of(cls, kv_cache: Tensor) -> "CacheMemory":
        return cls(kv_cache, kv_cache[:, :, 0].numel() * kv_cache.itemsize)

    def read(self, block_id: int) -> bytes:
        """A copy of a block's K and V."""
        return _bytes_of(self.kv_cache[:, :, block_id])

    def write(self, block_id: int, content: bytes) -> None:
        """Replace a block's K and V."""
        _replace(self.kv_cache[:, :, block_id], content)


@dataclass(frozen=True, slots=True)
class StateMemory:
    """The slots of recurrent state on the CPU: pools [slots, ...] of all layers that keep one."""

    pools: tuple[Tensor, ...]
    block_bytes: int

    @classmethod
    def of(cls, states: Sequence[Sequence[Tensor]]) -> "StateMemory":
        pools = tuple(pool for of_layer in states for pool in of_layer)
        return cls(pools, sum(pool[0].numel() * pool.itemsize for pool in pools))

    def read(self, block_id: int) -> bytes:
        """A copy of a slot's state."""
        return b"".join(_bytes_of(pool[block_id]) for pool in self.pools)

    def write(self, block_id: int, content: bytes) -> None:
        """Replace a slot's state."""
        start = 0
        for pool in self.pools:
            end = start + pool[block_id].numel() * pool.itemsize
            _replace(pool[block_id], content[start:end])
            start = end


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _replace(tensor: Tensor, content: bytes) -> None:
    given = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(tensor.dtype)
    tensor.copy_(given.view(tensor.shape))


def open_store(config: EngineConfig, decision: Decision, model_path: Path, runner: ModelRunner) -> PrefixStore | None:
    """The store that a configuration names; None: it names none. Raises: UsageError."""
    if config.prefix_store is None:
        return None
    days = config.prefix_store_days
    folder = ContentFolder(
        Path(config.prefix_store).expanduser(),
        most_bytes=config.prefix_store_size,
        most_age_s=None if days is None else days * 86_400,
    )
    limits = runner.limits
    identity = store_identity(config, decision, model_path)
    return PrefixStore(
        folder,
        identity,
        CacheMemory.of(runner.kv_cache),
        limits.block_size,
        len(limits.groups),
        states=StateMemory.of(runner.state.states) if limits.has_states else None,
    )


def store_identity(config: EngineConfig, decision: Decision, model_path: Path) -> dict[str, str]:
    """Named parts: everything that the bits of a block depend on, apart from its tokens and their salt."""
    plan, spec = decision.plan, decision.spec.within(decision.plan.limits.max_model_len)
    return weights_identity(config, decision, model_path) | {
        "attention backend": plan.backend,
        "KV dtype": plan.kv_dtype,
        "block size": str(plan.limits.block_size),
        "groups of layers": digest_of(repr(plan.limits.groups).encode()),
        "rotary embedding": digest_of(repr([(mixer.rope, mixer.head_dim) for mixer in spec.attentions]).encode()),
        "recurrent state": digest_of(repr(spec.states).encode()),
    }
