"""How many blocks fit: arithmetic only, the same for measured and for described machines.

Used by the engine's plan, `pagedcli profile-memory` and `pagedcli plan`.
"""

from dataclasses import dataclass, fields

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}  # bytes per element
SCALE_BYTES = {"int8": 4}  # a float32 scale per token and head, for K and V each


def head_bytes(head_dim: int, kv_dtype: str) -> int:
    """Bytes of one token's K (or V) of one head: its elements and, if the dtype has one, its scale."""
    return head_dim * ITEMSIZE[kv_dtype] + SCALE_BYTES.get(kv_dtype, 0)


def block_bytes(*, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, kv_dtype: str) -> int:
    """Bytes of one block over all layers: 2 (K and V) x layers x block x kv_heads x bytes of a token and head."""
    return 2 * num_layers * block_size * num_kv_heads * head_bytes(head_dim, kv_dtype)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks needed for num_tokens tokens."""
    return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Where the memory of a device goes, in bytes. The names are the keys of the report."""

    total: int
    reserve: int = 0  # bytes that the utilization limit leaves unused
    others: int = 0  # other processes
    runtime: int = 0  # bytes of this process without the model: CUDA context, interpreter, libraries
    weights: int
    activations: int  # bytes in the largest step
    graphs: int = 0  # CUDA graph pool
    measured: frozenset[str] = frozenset()  # terms that were measured; the others are forecast

    @property
    def used(self) -> int:
        """Used by all processes with the model loaded, while no step runs."""
        return self.others + self.runtime + self.weights

    @property
    def available(self) -> int:
        """Unused bytes while the largest step runs; negative if it does not fit."""
        return self.total - self.used - self.activations - self.graphs

    @property
    def kv_cache(self) -> int:
        """Bytes left for the KV cache; negative if the rest does not fit."""
        return self.available - self.reserve


TERMS = tuple(each.name for each in fields(Terms) if each.name != "measured")


@dataclass(frozen=True, slots=True)
class StepShape:
    """The largest step that the limits allow: it sets the activation peak."""

    num_tokens: int
    num_seqs: int

    @classmethod
    def largest(cls, num_tokens: int, num_seqs: int, max_model_len: int) -> "StepShape":
        """The maximum of tokens and of sequences: each sequence adds a row of logits."""
        num_seqs = min(num_seqs, num_tokens)
        return cls(min(num_tokens, num_seqs * max_model_len), num_seqs)

    @property
    def lengths(self) -> list[int]:
        """New tokens of each sequence, as equal as can be."""
        short, longer = divmod(self.num_tokens, self.num_seqs)
        return [short + (i < longer) for i in range(self.num_seqs)]
