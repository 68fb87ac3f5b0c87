"""The decoder of models.decoder on a CPU: the same weights and results, with a whole step in one native call.

Linear layers are packed (layers.native_linear); a tied embedding is read from the packed output layer.
"""

import ctypes
from dataclasses import replace

import torch
from torch import Tensor

from pagedcli.attention.base import PagedBatch
from pagedcli.errors import BackendError
from pagedcli.layers.native_linear import NativeLinear
from pagedcli.models.base import DecoderNeeds, DecoderRequest
from pagedcli.models.parameters import decoder_parameters, take_linear
from pagedcli.models.rope import rope_notes
from pagedcli.models.rope_table import rope_table
from pagedcli.models.weights import open_weights
from pagedcli.native import load_library
from pagedcli.native.structs import DTYPE_CODES, LayerStruct, ModelStruct, StepStruct, bind

# Fields of a spec that the library supports only with this value.
_PLAIN = {
    "qk_norm_all": False,
    "layer_norms": "before",
    "float_norms": False,
    "norm_offset": False,
    "soft_cap": None,
    "logits_soft_cap": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_divisor": 1.0,
    "query_scale": None,
    "layer_ropes": (),
    "experts": None,
}


class CpuDecoder:
    """A native CausalLM (see models.base)."""

    def __init__(self, request: DecoderRequest, tensors: dict[str, Tensor], rope_table: Tensor) -> None:
        """Packs the weights and removes each from `tensors`, so that memory holds only one copy."""
        spec = request.spec
        self.spec = spec
        note = request.weight_format.note(request.dtype, "cpu")
        self.notes: tuple[str, ...] = () if note is None else (note,)
        self.notes += rope_notes(spec.rope, request.max_model_len)
        self.attention_layers = spec.attention_layers
        self._backend = request.backend
        self._format, self._dtype = request.weight_format, request.dtype
        self._functions = bind(load_library().functions)
        self._kept: list[Tensor | NativeLinear] = [rope_table]  # what the structs point into
        self._weight_bytes = 0
        embedding = tensors.pop("embedding")
        tied = spec.tie_word_embeddings
        output = {"weight": embedding if tied else tensors.pop("lm_head")}
        self._lm_head = self._keep(self._format.lm_head.native_linear([output], None, request.dtype))
        self._embedding = None if tied and self._format.keeps_rows else embedding
        self._weight_bytes += self._embedding.nbytes if self._embedding is not None else 0
        self._layers = (LayerStruct * spec.num_layers)(
            *(self._layer(tensors, f"layers.{i}") for i in range(spec.num_layers))
        )
        self._model = ModelStruct(
            dtype=DTYPE_CODES[rope_table.dtype],
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            eps=spec.rms_norm_eps,
            layers=ctypes.addressof(self._layers),
            final_norm=self._vector(tensors.pop("final_norm")),
            rope_table=rope_table.data_ptr(),
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as stored in memory, shared ones counted once."""
        return self._weight_bytes

    def forward(self, input_ids: Tensor, positions: Tensor, batch: PagedBatch, kv_cache: Tensor) -> Tensor:
        """See CausalLM.forward. The last layer computes only the rows in batch.logits_rows."""
        backend, rows = self._backend, batch.logits_rows
        batch = replace(batch, window=self.attention_layers[0].window)
        backend.prepare(batch)
        k_cache, v_cache = kv_cache[0, 0], kv_cache[1, 0]
        backend.check_cache(k_cache, v_cache)
        embedding = self._embedding
        residual = self._lm_head.weight_rows(input_ids) if embedding is None else embedding.index_select(0, input_ids)
        out = residual if rows is None else torch.empty((rows.shape[0], residual.shape[1]), dtype=residual.dtype)
        positions, slots = positions.contiguous(), batch.slots.contiguous()
        step = StepStruct(
            num_tokens=input_ids.shape[0],
            threads=torch.get_num_threads(),
            residual=residual.data_ptr(),
            positions=positions.data_ptr(),
            slots=slots.data_ptr(),
            geometry=backend.geometry_address,
            work=batch.work.address,
            k_cache=k_cache.data_ptr(),
            v_cache=v_cache.data_ptr(),
            layer_bytes=kv_cache.stride(1) * kv_cache.element_size(),
            rows=None if rows is None else rows.data_ptr(),
            num_rows=out.shape[0],
            out=out.data_ptr(),
        )
        if self._functions.decoder_forward(ctypes.byref(self._model), ctypes.byref(step)):
            raise BackendError(f"a block table names a block outside the cache of {k_cache.shape[0]} blocks")
        return out

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See CausalLM.compute_logits."""
        return self._lm_head(hidden)

    def _layer(self, tensors: dict[str, Tensor], key: str) -> LayerStruct:
        def linear(name: str, *, gated: bool = False) -> object:
            weight_format, modules = take_linear(tensors, f"{key}.{name}", self._format)
            bias = tensors.pop(f"{key}.{name}.bias", None)
            self._weight_bytes += bias.nbytes if bias is not None else 0
            return self._keep(weight_format.native_linear(modules, bias, self._dtype, gated=gated)).struct

        q_norm, k_norm = None, None
        if self.spec.qk_norm:
            q_norm, k_norm = (self._vector(weight) for weight in tensors.pop(f"{key}.qk_norm").chunk(2))
        return LayerStruct(
            input_norm=self._vector(tensors.pop(f"{key}.input_norm")),
            mlp_norm=self._vector(tensors.pop(f"{key}.mlp_norm")),
            q_norm=q_norm,
            k_norm=k_norm,
            qkv=linear("qkv"),
            attention_out=linear("out"),
            gate_up=linear("gate_up", gated=True),
            down=linear("down"),
        )

    def _keep(self, linear: NativeLinear) -> NativeLinear:
        self._kept.append(linear)
        self._weight_bytes += linear.nbytes
        return linear

    def _vector(self, weight: Tensor) -> int:
        weight = weight.contiguous()
        self._kept.append(weight)
        self._weight_bytes += weight.nbytes
        return weight.data_ptr()


def refusal(needs: DecoderNeeds) -> str | None:
    """Why the native library cannot run a whole step of the model in one call; None if it can."""
    spec, backend = needs.spec, needs.backend
    if needs.num_ranks > 1:
        return "runs on one rank only"
    if spec.is_fallback:
        return f"has no {spec.architecture}"
    if others := [name for name, plain in _PLAIN.items() if getattr(spec, name) != plain]:
        return f"computes a plain decoder layer, without {', '.join(others)}"
    if len(set(spec.windows)) > 1:
        return "has one window for all layers"
    if not backend.capabilities.native_step:
        return f"needs the native attention kernels, and attention is '{backend.name}'"
    if spec.rope is not None and spec.rope.partial != 1:
        return f"does not support a partial rotary factor of {spec.rope.partial:g}"
    if spec.hidden_act not in ("silu", "swish"):
        return f"has no activation {spec.hidden_act}"
    if spec.hidden_size % 2 or spec.intermediate_size % 2:
        return f"packs no odd sizes, and the model's are {spec.hidden_size} and {spec.intermediate_size}"
    return None


def load(request: DecoderRequest) -> CpuDecoder:
    """Raises: ModelError, see weights."""
    spec = request.spec
    assert spec.rope is not None, "a native spec has rope parameters"
    ignored = frozenset({"lm_head.weight"} if spec.tie_word_embeddings else ())
    source = open_weights(request.path, request.load_format, request.seed)
    parameters = decoder_parameters(spec, request.weight_format)
    tensors = source.load(parameters, ignored=ignored, dtype=request.dtype, device=torch.device("cpu"))
    table = rope_table(spec.rope, spec.head_dim, request.max_model_len, dtype=request.dtype).contiguous()
    return CpuDecoder(request, tensors, table)
