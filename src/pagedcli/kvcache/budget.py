"""How many blocks fit: arithmetic only, the same for a measured machine and for one described by numbers.

Used by the engine's plan and by `pagedcli profile-memory`; knows no torch.
"""

from dataclasses import dataclass

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "int8": 1}  # bytes per element


def block_bytes(*, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Bytes of one block over all layers: 2 (K and V) x layers x block x kv_heads x head_dim x itemsize."""
    return 2 * num_layers * block_size * num_kv_heads * head_dim * itemsize


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold num_tokens tokens."""
    return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The terms of `total x utilization - used - peak + current`, all in bytes.

    used counts everything on the device, other processes included, and so contains `current`; peak and current are
    what this process had allocated at most during a largest step and has allocated now.
    """

    total: int
    utilization: float  # 0 ... 1
    used: int
    peak: int
    current: int
    graphs: int = 0  # CUDA graph pool

    @property
    def activations(self) -> int:
        """What the largest step needs on top of what is allocated now."""
        return self.peak - self.current

    @property
    def kv_cache(self) -> int:
        """Bytes left for the KV cache; negative if there is nothing left."""
        return int(self.total * self.utilization) - self.used - self.activations - self.graphs

    def num_blocks(self, bytes_per_block: int) -> int:
        """Whole blocks that fit, at least 0."""
        return max(0, self.kv_cache) // bytes_per_block
