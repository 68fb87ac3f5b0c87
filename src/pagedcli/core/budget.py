"""How many blocks fit: arithmetic only, the same for measured and for described machines.

Used by the engine's plan, `pagedcli profile-memory` and `pagedcli plan`; needs no torch.
"""

from dataclasses import dataclass
from typing import Protocol

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}  # bytes per element
INT4_BYTES = 18 / 32  # per 4-bit weight: a group of 32 has a scale and a minimum of a byte each
SORT_BYTES = 24  # per logit: float32 copies, sorted values with their int64 indices, and probabilities
SCALE_BYTES = {"int8": 4}  # of K and of V, per token and head: a float32 scale


def head_bytes(head_dim: int, kv_dtype: str) -> int:
    """Bytes of one token's K (or V) of one head: its elements and, if the dtype has one, its scale."""
    return head_dim * ITEMSIZE[kv_dtype] + SCALE_BYTES.get(kv_dtype, 0)


def block_bytes(*, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, kv_dtype: str) -> int:
    """Bytes of one block over all layers: 2 (K and V) x layers x block x kv_heads x bytes of a token and head."""
    return 2 * num_layers * block_size * num_kv_heads * head_bytes(head_dim, kv_dtype)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks needed for num_tokens tokens."""
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
    def available(self) -> int:
        """Unused bytes while the largest step runs."""
        return self.total - self.used - self.activations - self.graphs

    @property
    def kv_cache(self) -> int:
        """Bytes left for the KV cache; negative if there is nothing left."""
        return self.available - (self.total - int(self.total * self.utilization))

    def num_blocks(self, bytes_per_block: int) -> int:
        """Whole blocks that fit, at least 0."""
        return max(0, self.kv_cache) // bytes_per_block


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTerms:
    """Where the memory of a device goes, in bytes. The field names are the keys of the report."""

    total: int
    reserve: int = 0  # not used because of the utilization limit
    others: int  # other processes
    runtime: int = 0  # this process without the model: CUDA context, interpreter, libraries
    weights: int
    activations: int  # of the largest step
    graphs: int = 0  # CUDA graph pool

    @property
    def kv_cache(self) -> int:
        """Bytes left for the KV cache; negative if the rest does not fit."""
        spent = (self.reserve, self.others, self.runtime, self.weights, self.activations, self.graphs)
        return self.total - sum(spent)


@dataclass(frozen=True, slots=True)
class StepShape:
    """The largest step that the limits allow: it sets the activation peak."""

    num_tokens: int
    num_seqs: int

    @classmethod
    def largest(cls, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int) -> "StepShape":
        """The maximum of tokens and of sequences: each sequence adds a row of logits."""
        num_seqs = min(max_num_seqs, max_num_batched_tokens)
        return cls(min(max_num_batched_tokens, num_seqs * max_model_len), num_seqs)

    @property
    def lengths(self) -> list[int]:
        """New tokens of each sequence, as equal as can be."""
        short, longer = divmod(self.num_tokens, self.num_seqs)
        return [short + (i < longer) for i in range(self.num_seqs)]


EXPERT_TOKENS = 2048  # most tokens whose experts the native CPU decoder computes at a time (MOST_TOKENS in experts.cpp)


class ExpertSizes(Protocol):
    """The sizes of a mixture of experts, named as in models.spec.ExpertsSpec."""

    @property
    def num_experts(self) -> int: ...
    @property
    def num_per_token(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def shared_intermediate_size(self) -> int | None: ...
    @property
    def dense_layers(self) -> frozenset[int]: ...


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes that our decoder's memory depends on, named as in models.spec.ModelSpec."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tie_word_embeddings: bool
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    qk_norm_all: bool = False
    layer_norms: str = "before"
    experts: ExpertSizes | None = None

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model, a tied embedding counted once."""
        tables = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        return tables + self._layer_matrices + self._router_weights + self._vectors

    @property
    def _layer_matrices(self) -> int:
        """Elements of the linear layers of all decoder layers."""
        q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * q_rows + 2 * kv_rows)
        return self.num_layers * attention + self._mlp_matrices

    @property
    def _mlp_matrices(self) -> int:
        """Elements of the linear layers of all gated MLPs, or of experts."""
        return sum(count * 3 * self.hidden_size * inner for count, inner in self._mlps)

    @property
    def _mlps(self) -> list[tuple[int, int]]:
        """Number and inner size of the gated MLPs of all layers, experts included."""
        experts = self.experts
        if experts is None:
            return [(self.num_layers, self.intermediate_size)]
        num_dense = len(experts.dense_layers)
        num_sparse = self.num_layers - num_dense
        mlps = [(num_dense, self.intermediate_size), (num_sparse * experts.num_experts, experts.intermediate_size)]
        shared = experts.shared_intermediate_size
        return mlps if shared is None else [*mlps, (num_sparse, shared)]

    @property
    def _router_weights(self) -> int:
        """Elements of the routers and gates of experts, which are never rounded."""
        if self.experts is None:
            return 0
        num_outputs = self.experts.num_experts + (self.experts.shared_intermediate_size is not None)
        return (self.num_layers - len(self.experts.dense_layers)) * num_outputs * self.hidden_size

    @property
    def _vectors(self) -> int:
        """Elements of biases and norms."""
        width, inner = self.hidden_size, self.intermediate_size
        biases = self.qkv_bias * (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        biases += self.attention_out_bias * width + self.mlp_bias * (2 * inner + width)
        norms = (4 if self.layer_norms == "around" else 2) * width + self.qk_norm * 2 * self.head_dim
        norms += self.qk_norm_all * (self.num_heads + self.num_kv_heads) * self.head_dim
        return width + self.num_layers * (biases + norms)

    def table_bytes(self, itemsize: int) -> int:
        """The embedding table, or the output layer."""
        return self.vocab_size * self.hidden_size * itemsize

    def weight_bytes(self, itemsize: int, *, quantization: str | None = None) -> int:
        """Bytes of all weights in memory. Quantized: linear layers are int8 with two floats per row, or 4 bits with two
        bytes per 32 inputs; the output layer is int8; the embedding table is kept unquantized."""
        if quantization is None:
            return self.num_parameters * itemsize
        width = self.hidden_size
        rows = self.num_layers * ((self.num_heads + 2 * self.num_kv_heads) * self.head_dim + width)
        rows += sum(count * (2 * inner + width) for count, inner in self._mlps)
        in_layers = int(self._layer_matrices * INT4_BYTES) if quantization == "int4" else self._layer_matrices
        whole = in_layers + self.vocab_size * width
        scales = (ITEMSIZE["float32"] + ITEMSIZE["float32"]) * (rows + self.vocab_size)
        return whole + scales + self.table_bytes(itemsize) + (self._vectors + self._router_weights) * itemsize

    def block_bytes(self, block_size: int, kv_dtype: str, num_layers: int | None = None) -> int:
        """Bytes of one block over all layers, or over those of a group."""
        return block_bytes(
            num_layers=num_layers or self.num_layers,
            block_size=block_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            kv_dtype=kv_dtype,
        )

    def activation_bytes(self, step: StepShape, itemsize: int, *, native: bool = False) -> int:
        """What a step takes on top of weights and cache, predicted from the decoder's code: with torch what is alive
        at the widest of three places (fused kernels take less), with the native CPU decoder its workspace.
        """
        hidden = step.num_tokens * itemsize * self.hidden_size
        sampling = self.logits_bytes(step.num_seqs, itemsize) + self.sampler_bytes(step.num_seqs)
        if native:
            heads = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
            inner = max(self.num_heads * self.head_dim, self.intermediate_size, self.hidden_size)
            workspace = step.num_tokens * itemsize * (self.hidden_size + heads + inner)
            if self.experts is not None:
                rows = min(step.num_tokens, EXPERT_TOKENS) * self.experts.num_per_token
                workspace += rows * itemsize * (self.experts.intermediate_size + self.hidden_size)
            return workspace + max(hidden, sampling)
        return max(self.step_bytes(step.num_tokens, itemsize), hidden + sampling)

    def logits_bytes(self, num_seqs: int, itemsize: int) -> int:
        """Logits of one token per sequence."""
        return num_seqs * self.vocab_size * itemsize

    def sampler_bytes(self, num_seqs: int) -> int:
        """The peak of sampling on top of the logits: top-p sorts them all."""
        return num_seqs * self.vocab_size * SORT_BYTES

    def step_bytes(self, num_tokens: int, itemsize: int) -> int:
        """Tensors of a step alive at once in torch, at the widest point of a layer."""
        width, inner, head = self.hidden_size, self.intermediate_size, self.head_dim
        heads, kv_heads = self.num_heads, self.num_kv_heads
        wide = ITEMSIZE["float32"]  # norms are computed in float32
        # the last inputs of attention: q, k (a view into q and k together) and v (a view into all three)
        given = (heads + (heads + kv_heads) + (heads + 2 * kv_heads)) * head
        # alive in every layer: the residual, its norm, the last layer's output, cosines and sines, q, k and v
        always = itemsize * (3 * width + 2 * head + given)
        # q, k and v, and what turns q and k: three copies to rotate them, or two float32 ones and a result to norm them
        rotating = 3 * itemsize
        norming = self.qk_norm * (2 * wide + itemsize)
        attention = itemsize * (heads + 2 * kv_heads) * head + (heads + kv_heads) * head * max(rotating, norming)
        mlp = itemsize * 3 * inner  # gate, up and their product
        return num_tokens * (always + max(attention, mlp))
