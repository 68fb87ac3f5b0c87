"""The one native decoder: pre-norm, rotary, grouped heads, gated MLP. Runs Llama, Mistral, Qwen2(.5) and Qwen3.

Plain tensors in slotted classes: a decode step of a small model is 28 layers of a few microseconds each, and module
machinery would cost as much again.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pagedcli.attention.base import AttentionBackend, PagedBatch
from pagedcli.attention.layer import AttentionLayer
from pagedcli.layers.fused import fused_layers, stores_in_one_pass
from pagedcli.layers.linear import Linear, unpacked_note
from pagedcli.layers.mlp import silu_and_mul
from pagedcli.layers.norm import add_rms_norm, rms_norm
from pagedcli.layers.parallel import SINGLE, ParallelContext, SummedLinear, VocabularyEmbedding, VocabularyHead
from pagedcli.layers.rotary import rotary_rows, split_heads
from pagedcli.models.rope_table import rope_table
from pagedcli.models.sharding import shard_parameters, shard_spec
from pagedcli.models.spec import ModelSpec
from pagedcli.models.weights import Parameter, WeightSource


@dataclass(slots=True)
class DecoderLayer:
    """The weights of one layer."""

    input_norm: Tensor  # [E]
    qkv: Linear  # E -> (H + 2G) * D
    qk_norm: tuple[Tensor, float] | None  # weight [H + G, D] and eps
    attention_out: Linear  # H * D -> E
    mlp_norm: Tensor  # [E]
    gate_up: Linear  # E -> 2I
    down: Linear  # I -> E


class Decoder:
    """A native CausalLM (see models.base)."""

    __slots__ = (
        "_backend",
        "_embedding",
        "_final_norm",
        "_layers",
        "_lm_head",
        "_rope_table",
        "_stores_in_one_pass",
        "_weight_bytes",
        "attention_layers",
        "notes",
        "spec",
    )

    def __init__(
        self,
        spec: ModelSpec,
        tensors: dict[str, Tensor],
        *,
        backend: AttentionBackend,
        rope_table: Tensor,
        parallel: ParallelContext = SINGLE,
    ) -> None:
        self.spec = spec  # of this rank
        self.attention_layers = spec.attention_layers
        self.notes = unpacked_note(rope_table.device, rope_table.dtype)
        self._weight_bytes = sum(tensor.nbytes for tensor in tensors.values())  # a tied lm_head is not in there
        self._backend = backend
        self._stores_in_one_pass = stores_in_one_pass(backend)
        self._rope_table = rope_table  # [P, D]
        self._embedding = VocabularyEmbedding(tensors["embedding"], spec.vocab_size, parallel)  # [V, E]
        self._layers = [_layer(spec, tensors, f"layers.{i}", parallel) for i in range(spec.num_layers)]
        self._final_norm = tensors["final_norm"]
        lm_head = tensors["embedding" if spec.tie_word_embeddings else "lm_head"]
        self._lm_head = VocabularyHead(lm_head, spec.vocab_size, parallel)

    @classmethod
    def load(
        cls,
        spec: ModelSpec,
        source: WeightSource,
        *,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        parallel: ParallelContext = SINGLE,
    ) -> "Decoder":
        """Fill a decoder from `source`, or one rank's part of it. Units: max_model_len in tokens. Raises: ModelError,
        see weights; ConfigError if the model cannot be split over the ranks."""
        assert spec.rope is not None, "a native spec has rope parameters"
        ignored = frozenset({"lm_head.weight"} if spec.tie_word_embeddings else ())
        own_spec = shard_spec(spec, parallel)
        parameters = shard_parameters(decoder_parameters(spec), spec, parallel)
        tensors = source.load(parameters, ignored=ignored, dtype=dtype, device=device)
        table = rope_table(spec.rope, spec.head_dim, max_model_len, dtype=dtype).to(device)
        return cls(own_spec, tensors, backend=backend, rope_table=table, parallel=parallel)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, shared ones counted once."""
        return self._weight_bytes

    def forward(self, input_ids: Tensor, positions: Tensor, batch: PagedBatch, kv_cache: Tensor) -> Tensor:
        """See CausalLM.forward."""
        spec, backend, eps = self.spec, self._backend, self.spec.rms_norm_eps
        backend.prepare(batch)
        # None: the backend's cache is filled in one pass with the rotation
        angles = None if self._stores_in_one_pass else rotary_rows(self._rope_table, positions)
        residual = self._embedding(input_ids)
        k_caches, v_caches = kv_cache.unbind(0)
        hidden: Tensor | None = None  # what the previous layer adds to the residual
        caches = k_caches.unbind(0), v_caches.unbind(0)
        for layer, ask, k_cache, v_cache in zip(self._layers, self.attention_layers, *caches, strict=True):
            x = _norm(hidden, residual, layer.input_norm, eps)
            if angles is None:
                q = self._rotate_and_store(layer, layer.qkv(x), positions, batch.slots, k_cache, v_cache, ask)
            else:
                heads = layer.qkv(x), spec.num_heads, spec.num_kv_heads
                q, k, v = split_heads(*heads, norm=layer.qk_norm, cos=angles[0], sin=angles[1])
                backend.write(k, v, k_cache, v_cache, batch.slots, ask)
            x = layer.attention_out(backend.attend(q, k_cache, v_cache, batch, ask).flatten(1))
            x = add_rms_norm(x, residual, layer.mlp_norm, eps)
            hidden = layer.down(silu_and_mul(layer.gate_up(x)))
        return _norm(hidden, residual, self._final_norm, eps)

    def _rotate_and_store(
        self,
        layer: DecoderLayer,
        qkv: Tensor,
        positions: Tensor,
        slots: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        ask: AttentionLayer,
    ) -> Tensor:
        q: Tensor = fused_layers().rotate_and_store(
            qkv,
            self.spec.num_heads,
            self.spec.num_kv_heads,
            norm=layer.qk_norm,
            table=self._rope_table,
            positions=positions,
            slots=slots,
            k_cache=k_cache,
            v_cache=v_cache,
            kv_scales=(ask.k_scale, ask.v_scale),
        )
        return q

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See CausalLM.compute_logits."""
        return self._lm_head(hidden)


def decoder_parameters(spec: ModelSpec) -> dict[str, Parameter]:
    """Every tensor of the decoder and the checkpoint tensors that fill it, under the names transformers gives them."""
    width, q_rows, kv_rows = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    inner = spec.intermediate_size
    parameters = {
        "embedding": Parameter({"model.embed_tokens.weight": (spec.vocab_size, width)}),
        "final_norm": Parameter({"model.norm.weight": (width,)}, init="ones"),
    }
    if not spec.tie_word_embeddings:
        parameters["lm_head"] = Parameter({"lm_head.weight": (spec.vocab_size, width)})
    for i in range(spec.num_layers):
        key, name = f"layers.{i}", f"model.layers.{i}"
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        parameters[f"{key}.input_norm"] = Parameter({f"{name}.input_layernorm.weight": (width,)}, init="ones")
        parameters[f"{key}.mlp_norm"] = Parameter({f"{name}.post_attention_layernorm.weight": (width,)}, init="ones")
        qkv = {f"{attention}.q_proj": q_rows, f"{attention}.k_proj": kv_rows, f"{attention}.v_proj": kv_rows}
        parameters |= _linear(f"{key}.qkv", qkv, width, spec.qkv_bias)
        parameters |= _linear(f"{key}.out", {f"{attention}.o_proj": width}, q_rows, spec.attention_out_bias)
        parameters |= _linear(
            f"{key}.gate_up", {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}, width, spec.mlp_bias
        )
        parameters |= _linear(f"{key}.down", {f"{mlp}.down_proj": width}, inner, spec.mlp_bias)
        if spec.qk_norm:
            norms = {f"{attention}.{part}_norm.weight": (spec.head_dim,) for part in ("q", "k")}
            parameters[f"{key}.qk_norm"] = Parameter(norms, init="ones")
    return parameters


def _linear(key: str, rows: dict[str, int], columns: int, has_bias: bool) -> dict[str, Parameter]:
    parameters = {f"{key}.weight": Parameter({f"{name}.weight": (n, columns) for name, n in rows.items()})}
    if has_bias:
        parameters[f"{key}.bias"] = Parameter({f"{name}.bias": (n,) for name, n in rows.items()})
    return parameters


def _layer(spec: ModelSpec, tensors: dict[str, Tensor], key: str, parallel: ParallelContext) -> DecoderLayer:
    def linear(name: str) -> Linear:
        return Linear(tensors[f"{key}.{name}.weight"], tensors.get(f"{key}.{name}.bias"))

    def summed_linear(name: str) -> Linear:
        return SummedLinear(tensors[f"{key}.{name}.weight"], tensors.get(f"{key}.{name}.bias"), parallel)

    qk_norm = None
    if spec.qk_norm:
        q_weight, k_weight = tensors[f"{key}.qk_norm"].chunk(2)
        rows = [q_weight.expand(spec.num_heads, -1), k_weight.expand(spec.num_kv_heads, -1)]
        qk_norm = (torch.cat(rows), spec.rms_norm_eps)
    return DecoderLayer(
        input_norm=tensors[f"{key}.input_norm"],
        qkv=linear("qkv"),
        qk_norm=qk_norm,
        attention_out=summed_linear("out"),
        mlp_norm=tensors[f"{key}.mlp_norm"],
        gate_up=linear("gate_up"),
        down=summed_linear("down"),
    )


def _norm(hidden: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The next norm; the first layer has nothing to add to the residual yet."""
    return rms_norm(residual, weight, eps) if hidden is None else add_rms_norm(hidden, residual, weight, eps)
