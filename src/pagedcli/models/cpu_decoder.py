"""The decoder of models.decoder on a CPU: the same weights and results, with a whole step in one native call.

Linear layers are packed (layers.native_linear); a tied embedding is read from the packed output layer.
"""

import ctypes
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from pagedcli.attention.base import AttentionBackend, LateTokens, PagedBatch
from pagedcli.attention.layer import AttentionLayer
from pagedcli.errors import BackendError
from pagedcli.events import CacheGroup
from pagedcli.layers.native_linear import NativeLinear
from pagedcli.layers.packed_layers import PackedLayer
from pagedcli.models.base import DecoderNeeds, DecoderRequest
from pagedcli.models.blocks import NORM_EPS
from pagedcli.models.decoder import format_notes, read_tensors, scaled_embedding, scaled_logits
from pagedcli.models.formats import AS_STORED, LayerFormat
from pagedcli.models.mixers.attention import Attention, LatentAttention
from pagedcli.models.mixers.recurrent import GatedDelta, KimiDelta, Mamba2, ShortConv
from pagedcli.models.mlps import Experts, Mlp
from pagedcli.models.parts import Parts
from pagedcli.models.spec import LayerSpec, Recurrent, layer_groups
from pagedcli.models.stacking import UnreadTensors
from pagedcli.models.tensors import Parameter, linear_formats
from pagedcli.native import load_library, structs
from pagedcli.native.system import empty_in_huge_pages, release_free_memory

_GATES = {
    "silu": structs.GATE_SILU,
    "swish": structs.GATE_SILU,
    "gelu_pytorch_tanh": structs.GATE_GELU,
    "clamped_silu": structs.GATE_CLAMPED,
    "relu2": structs.RELU2,
    "ungated_gelu": structs.GELU,
    "xielu": structs.STORE,  # each layer has numbers of its own
}
_MIXERS = {Attention, LatentAttention, GatedDelta, KimiDelta, Mamba2, ShortConv}
_CENTRED = {"no": 0, "plain": 1, "biased": 2}
_NORMS = (
    *("input_norm", "input_norm_after", "mlp_norm", "mlp_norm_after", "q_norm", "k_norm"),
    *("experts_norm", "experts_norm_after", "dense_norm_after", "layer_input_after"),
)


class CpuDecoder:
    """A native CausalLM (see models.base)."""

    def __init__(self, request: DecoderRequest, tensors: UnreadTensors, parameters: Mapping[str, Parameter]) -> None:
        """Packs the weights and removes each from `tensors`."""
        spec = request.spec
        self.spec = spec
        self.notes = format_notes(request, "cpu")
        self.attention_layers = spec.attention_layers
        self._backend = request.backend
        self._works = _works(request.backend, self.attention_layers)
        self._cache: weakref.ref[Tensor] | None = None  # cache of the last step
        self._layer_bytes: list[int] = []  # distance from one layer's cache to the next one's, for each list of work
        self._addresses = (0, 0)  # addresses of the K cache and of the V cache
        self._has_states = bool(spec.states)
        self._functions = structs.bind(load_library().functions)
        build = _Builder(request, tensors, linear_formats(parameters))
        self._embedding, self._lm_head = build.tables()
        self._model = build.model()
        self._kept = build.kept
        self.weight_bytes = build.weight_bytes  # all weights as stored in memory, shared ones counted once
        assert not tensors, f"{', '.join(tensors)} are not used by the decoder"

    def forward(self, input_ids: Tensor, positions: Tensor, batch: PagedBatch, kv_cache: Tensor) -> Tensor:
        """See CausalLM.forward."""
        late = batch.late
        groups, _kept = self._group_steps(batch, late, kv_cache)
        rows = self._lm_head.weight_rows if self._embedding is None else partial(self._embedding.index_select, 0)
        residual = scaled_embedding(rows(input_ids), self.spec)
        out = residual if late is None else torch.empty((late.wanted.shape[0], residual.shape[1]), dtype=residual.dtype)
        positions = positions.contiguous()
        late_positions = positions if late is None else positions.index_select(0, late.tokens)
        states = _StateArguments(batch) if self._has_states else None
        input_ids = input_ids.contiguous()
        step = structs.StepStruct(
            num_tokens=input_ids.shape[0],
            threads=torch.get_num_threads(),
            residual=residual.data_ptr(),
            positions=positions.data_ptr(),
            ids=input_ids.data_ptr(),
            groups=ctypes.addressof(groups),
            k_cache=self._addresses[0],
            v_cache=self._addresses[1],
            late=None if late is None else late.tokens.data_ptr(),
            late_positions=late_positions.data_ptr(),
            num_late=late_positions.shape[0],
            rows=None if late is None else late.wanted.data_ptr(),
            num_rows=out.shape[0],
            out=out.data_ptr(),
            state_step=None if states is None else ctypes.addressof(states.step),
            states=None if states is None else ctypes.addressof(states.pools),
        )
        if self._functions.decoder_forward(ctypes.byref(self._model), ctypes.byref(step)):
            raise BackendError(f"a block table names a block outside the cache of {kv_cache.shape[2]} blocks")
        return out

    def _group_steps(
        self, batch: PagedBatch, late: LateTokens | None, kv_cache: Tensor
    ) -> tuple[ctypes.Array[structs.GroupStepStruct], list[object]]:
        """The step as each group of layers sees it, and what that points into. Changes: batch, which is prepared."""
        if self._cache is None or self._cache() is not kv_cache:
            self._layer_bytes = [self._bytes_in(kv_cache, group, backend) for _, group, backend in self._works]
            self._addresses = kv_cache[0].data_ptr(), kv_cache[-1].data_ptr()
            self._cache = weakref.ref(kv_cache)
        steps, kept, batches = [], [], (batch, *batch.others)
        for (number, group, backend), layer_bytes in zip(self._works, self._layer_bytes, strict=True):
            of_all = batches[number]
            slots = of_all.slots.contiguous()
            of_all.window = group.window
            of_late = of_all if late is None else replace(of_all, cu_q=late.cu_q)
            backend.prepare(of_all)
            if late is not None:
                backend.prepare(of_late)
            works = of_all.work.address, of_late.work.address
            steps.append(structs.GroupStepStruct(slots.data_ptr(), *works, backend.geometry_address, layer_bytes))
            kept += [slots, of_all.work, of_late.work]
        return (structs.GroupStepStruct * len(steps))(*steps), kept

    def _bytes_in(self, kv_cache: Tensor, group: CacheGroup, backend: AttentionBackend) -> int:
        """Bytes from one layer's cache to the next one's of its group. Raises: BackendError for another cache."""
        caches = self._backend.layer_caches(kv_cache, min(2, len(group.layers)), group.heads)
        backend.check_cache(caches[0])
        return caches[1][0].data_ptr() - caches[0][0].data_ptr() if len(caches) > 1 else 0

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See CausalLM.compute_logits."""
        return scaled_logits(self._lm_head(hidden, in_float32=True), self.spec)


class _Builder(Parts):
    """Builds the structs."""

    def __init__(self, request: DecoderRequest, tensors: UnreadTensors, formats: Mapping[str, LayerFormat]) -> None:
        super().__init__(request, request.spec, tensors, formats)
        self.kept: list[object] = []  # tensors, layers and structs that the structs point into
        self.weight_bytes = 0

    def tables(self) -> tuple[Tensor | None, NativeLinear]:
        """The embedding, None if it is read from the output layer, and the output layer."""
        tied, layer_format = self._spec.tie_word_embeddings, self._request.weight_format.lm_head
        packed, reads_rows = self._request.packed, tied and layer_format.keeps_rows
        if reads_rows and (kept := packed.kept.get("lm_head")) is not None:
            self._tensors.discard("embedding")
            return None, self._keep(kept.linear)
        embedding = self._tensors.pop("embedding")

        def make() -> PackedLayer:
            modules, bias = self.output(embedding)
            linear = layer_format.native_linear(modules, bias, self._request.dtype)
            return PackedLayer(linear, bias.nbytes if bias is not None else 0)

        def discard() -> None:
            if "lm_head" in self._formats:
                self.discard("lm_head")
            for name in ("lm_head", "lm_head.bias"):
                self._tensors.discard(name)

        layer = packed.get("lm_head", make, discard)
        self.weight_bytes += layer.bias_bytes
        lm_head = self._keep(layer.linear)
        if reads_rows:
            return None, lm_head
        self.weight_bytes += embedding.nbytes
        return embedding, lm_head

    def model(self) -> structs.ModelStruct:
        spec, attention = self._spec, self._spec.attentions[0]
        made = [self._layer(layer, f"layers.{i}") for i, layer in enumerate(spec.layers)]
        layers = (structs.LayerStruct * spec.num_layers)(*made)
        attending = [i for i, layer in enumerate(spec.layers) if layer.mixer.attends]
        for work, (_, group, backend) in enumerate(_works(self._request.backend, spec.attention_layers)):
            for place, index in enumerate(group.layers):
                if self._request.backend.of(spec.attention_layers[index]) is backend:
                    layers[attending[index]].group, layers[attending[index]].place = work, place
        for index, mixer in zip(attending, spec.attentions, strict=True):
            if mixer.source is not None:
                source = layers[attending[mixer.source]]
                layers[index].group, layers[index].place = source.group, source.place
        for place, index in enumerate(i for i, layer in enumerate(spec.layers) if layer.recurrent is not None):
            layers[index].state_place = place
        self.kept.append(layers)
        experts, mixers = spec.experts, [mixer for layer in spec.layers for mixer in layer.mixers]
        shared = experts.shared.width if experts is not None and experts.shared is not None else 0
        return structs.ModelStruct(
            dtype=structs.DTYPE_CODES[self._request.dtype],
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
            last_keeper=spec.last_keeper,
            qkv_size=spec.widest_attention.qkv_size,
            head_size=max(mixer.num_heads * mixer.head_dim for mixer in spec.attentions),
            inner_size=max(spec.widest_mlp, shared, *(mixer.inner for mixer in mixers)),
            output_gate=attention.output_gate is not None and attention.output_gate.module is None,
            norms_heads=attention.qk_norm == "all",
            norms_last=attention.norms_last,
            value_norm=attention.value_norm,
            float_norms=spec.norm.in_float32,
            gate=_GATES[(spec.activations or ["silu"])[0]],
            layer_norm=_CENTRED[spec.norm.centred],
            side_by_side=spec.layers[0].norms == "shared",
            eps=spec.norm.eps,
            added_eps=spec.norm.eps if spec.norm.added_eps is None else spec.norm.added_eps,
            attention_scale=spec.attention_layers[0].scale,
            soft_cap=attention.soft_cap or 0.0,
            residual_multiplier=spec.scales.residual,
            layers=ctypes.addressof(layers),
            final_norm=self._address(self.norm("final_norm")),
            **self._inputs(),
        )

    def _inputs(self) -> dict[str, object]:
        """What gives each layer its inputs, if they have any."""
        if self._spec.layer_inputs is None:
            return {}
        return {
            "input_size": self._spec.layer_inputs.size,
            "input_table": self._address(self.small("layer_table")),
            "input_projection": self._unquantized("layer_projection"),
            "input_norm": self._address(self.norm("layer_projection_norm")),
        }

    def _layer(self, spec: LayerSpec, key: str) -> structs.LayerStruct:
        layer = structs.LayerStruct(scalar=1.0)
        for name in _NORMS:
            setattr(layer, name, self._address(self.norm(f"{key}.{name}")))
        match spec.mixer:
            case LatentAttention() as mixer:
                layer.num_heads, layer.num_kv_heads, layer.head_dim = mixer.heads
                self._rotary(layer, mixer)
                layer.rotated = mixer.rope_dim
                layer.qkv = self._linear(f"{key}.latents").struct
                layer.attention_out = self._linear(f"{key}.out").struct
                layer.latent = self._latent(mixer, key)
            case Attention() as mixer:
                self._attention(layer, mixer, key)
            case recurrent:
                layer.recurrent = self._recurrent(recurrent, key)
        if spec.beside is not None:
            layer.recurrent = self._recurrent(spec.beside, f"{key}.beside")
        if self._spec.layer_inputs is not None:
            layer.input_gate = self._unquantized(f"{key}.input_gate")
            layer.input_out = self._unquantized(f"{key}.input_out")
        if (scalar := self._tensors.pop(f"{key}.scalar", None)) is not None:
            layer.scalar = scalar.item()
        for mlp in spec.mlps:
            layer.gate_up, layer.down = self._mlp(mlp, key)
            if mlp.activation == "xielu":
                layer.xielu = self._address(self.xielu(key))
        if isinstance(spec.mlp, Experts):
            if spec.mlp.beside is not None:
                layer.router_norm = self._address(self.router_norm(key))
            layer.experts = ctypes.addressof(self._experts(spec.mlp, key))
        return layer

    def _attention(self, layer: structs.LayerStruct, mixer: Attention, key: str) -> None:
        """Changes: layer."""
        layer.reads, layer.keys_as_values = not mixer.keeps, mixer.keys_as_values
        layer.num_heads, layer.num_kv_heads, layer.head_dim = mixer.heads
        layer.qkv, layer.attention_out = self._linear(f"{key}.qkv").struct, self._linear(f"{key}.out").struct
        layer.sinks = self._address(self.small(f"{key}.sinks"))
        if mixer.output_gate is not None and mixer.output_gate.module is not None:
            layer.gates_per_head = mixer.num_gates // mixer.num_heads
            layer.softplus_gates = mixer.output_gate.softplus
        if (both := self.head_norms(mixer, key)) is not None:
            self.weight_bytes -= both.nbytes if mixer.qk_norm == "unweighted" else 0
            layer.q_norm, *of_keys = (self._address(weight) for weight in both.unbind(0))
            layer.k_norm = of_keys[0] if of_keys else None
        self._rotary(layer, mixer)

    def _rotary(self, layer: structs.LayerStruct, mixer: Attention) -> None:
        """Changes: layer."""
        if (rope := mixer.rope) is not None:
            table = self.table(rope, mixer.rotary_dim)
            self.kept.append(table)
            layer.rope_table, layer.rotated, layer.interleaved = table.data_ptr(), table.shape[1], rope.interleaved
            if (scales := self.query_scales(rope)) is not None:
                self.kept.append(scales)
                layer.query_scales = scales.data_ptr()

    def _latent(self, mixer: LatentAttention, key: str) -> int:
        """The address of what a layer with latents has besides."""
        ups = [self._by_heads(weights) for weights in self.latents_up(mixer, key)]
        struct = structs.LatentStruct(
            query_rank=mixer.query_rank or 0,
            rank=mixer.rank,
            nope_dim=mixer.nope_dim,
            value_dim=mixer.value_dim,
            query_norm=self._address(self.norm(f"{key}.query_norm")),
            latent_norm=self._address(self.norm(f"{key}.latent_norm")),
            eps=NORM_EPS,
            key_up=ctypes.addressof(ups[0]),
            value_up=ctypes.addressof(ups[1]),
        )
        if mixer.query_rank is not None:
            struct.queries = self._linear(f"{key}.queries").struct
        self.kept += [*ups, struct]
        return ctypes.addressof(struct)

    def _by_heads(self, weights: Tensor) -> ctypes.Array[structs.LinearStruct]:
        """A linear layer for each head."""
        dtype = self._request.dtype
        linears = (self._keep(AS_STORED.native_linear([{"weight": each}], None, dtype)) for each in weights.unbind(0))
        return (structs.LinearStruct * len(weights))(*_moved_together(linears, len(weights)))

    def _experts(self, experts: Experts, key: str) -> structs.ExpertsStruct:
        numbers, count = range(experts.num_experts), experts.num_experts
        gate_up, down = (
            (structs.LinearStruct * count)(
                *self._side_by_side((self._linear(f"{key}.experts.{i}.{name}", gated=gated) for i in numbers), count)
            )
            for name, gated in ((experts.each.input_name, experts.each.gated), ("down", False))
        )
        struct = structs.ExpertsStruct(
            num_experts=experts.num_experts,
            num_per_token=experts.num_per_token,
            renormalize=experts.renormalize,
            sigmoid=experts.sigmoid,
            scale=experts.scale,
            least_sum=experts.least_sum,
            nearness=experts.nearness,
            **dict(zip(("num_groups", "num_kept_groups", "num_best"), experts.groups or (), strict=False)),
            router_bias=self._address(self.small(f"{key}.router_bias")),
            expert_scales=self._address(self.small(f"{key}.expert_scales")),
            router=self._unquantized(f"{key}.router"),
            gate_up=ctypes.addressof(gate_up),
            down=ctypes.addressof(down),
        )
        if experts.shared is not None:
            linears = list(self._mlp(experts.shared, f"{key}.shared_expert"))
            struct.shared_gate_up, struct.shared_down = map(ctypes.addressof, linears)
            if experts.gates_shared:
                linears.append(self._unquantized(f"{key}.shared_gate"))
                struct.shared_gate = ctypes.addressof(linears[-1])
            self.kept += linears
        self.kept += [gate_up, down, struct]
        return struct

    def _side_by_side(self, linears: Iterator[NativeLinear], count: int) -> list[structs.LinearStruct]:
        """The structs of a layer's experts."""
        if self._request.packed.kept:  # written side by side
            return [linear.struct for linear in linears]
        return _moved_together(linears, count)

    def _recurrent(self, shape: Recurrent, key: str) -> int:
        """The address of a layer with a state."""
        struct = structs.RecurrentStruct(
            kernel=shape.kernel,
            channels=shape.channels,
            eps=self._spec.norm.eps,
            conv=self._address(self.conv(key)),
            conv_bias=self._address(self.small(f"{key}.conv_bias")),
            skip=self._address(self.small(f"{key}.skip")),
            inner=self._linear(f"{key}.inner").struct,
            out=self._linear(f"{key}.out").struct,
        )
        if isinstance(shape, ShortConv):
            struct.kind = structs.SHORT_CONV
        else:
            struct.decay = self._address(self.decay(key))
            struct.step_bias = self._address(self.small(f"{key}.step_bias"))
            struct.norm = self._address(self.small(f"{key}.gated_norm"))
            struct.num_key_heads, struct.num_heads = shape.num_key_heads, shape.num_heads
            struct.key_dim, struct.value_dim = shape.key_dim, shape.value_dim
            struct.interleaved, struct.tiled, struct.correction = shape.interleaved, shape.tiled, shape.correction
            struct.least_step, struct.most_step = shape.limits
        if isinstance(shape, GatedDelta):
            struct.kind, struct.gates = structs.GATED_DELTA, self._unquantized(f"{key}.gates")
            struct.eps = struct.eps if shape.eps is None else shape.eps
        if isinstance(shape, KimiDelta):
            struct.kind, struct.gates = structs.KIMI_DELTA, self._unquantized(f"{key}.gates")
            struct.decay_down = self._unquantized(f"{key}.decay_down")
            struct.decay_up = self._unquantized(f"{key}.decay_up")
            struct.shares_down = self._linear(f"{key}.shares_down").struct
            struct.shares_up = self._linear(f"{key}.shares_up").struct
        if isinstance(shape, Mamba2):
            struct.kind, struct.norm_group = structs.MAMBA2, shape.gate_group
        self.kept.append(struct)
        return ctypes.addressof(struct)

    def _mlp(self, mlp: Mlp, key: str) -> tuple[structs.LinearStruct, structs.LinearStruct]:
        first = self._linear(f"{key}.{mlp.input_name}", gated=mlp.gated)
        return first.struct, self._linear(f"{key}.down").struct

    def _linear(self, key: str, *, gated: bool = False) -> NativeLinear:
        def make() -> PackedLayer:
            layer_format, modules, bias = self.stored(key)
            linear = layer_format.native_linear(modules, bias, self._request.dtype, gated=gated)
            return PackedLayer(linear, bias.nbytes if bias is not None else 0)

        layer = self._request.packed.get(key, make, lambda: self.discard(key))
        self.weight_bytes += layer.bias_bytes
        return self._keep(layer.linear)

    def _unquantized(self, key: str) -> structs.LinearStruct:
        modules, bias = self.unquantized(key)
        self.weight_bytes += bias.nbytes if bias is not None else 0
        return self._keep(AS_STORED.native_linear(modules, bias, self._request.dtype)).struct

    def _keep(self, linear: NativeLinear) -> NativeLinear:
        self.kept.append(linear)
        self.weight_bytes += linear.nbytes
        return linear

    def _address(self, weight: Tensor | None) -> int | None:
        """The address of a small tensor or of a norm's weight; None if the model does not have it."""
        if weight is None:
            return None
        weight = weight.contiguous()
        self.kept.append(weight)
        self.weight_bytes += weight.nbytes
        return weight.data_ptr()


def _works(
    backend: AttentionBackend, layers: Sequence[AttentionLayer]
) -> list[tuple[int, CacheGroup, AttentionBackend]]:
    """The lists of work of a step: one for those layers of a group that have equal heads, with their own backend."""
    return [
        (number, group, own)
        for number, group in enumerate(layer_groups(layers))
        for own in dict.fromkeys(backend.of(layers[index]) for index in group.layers)
    ]


class _StateArguments:
    """A step's slots and pools of states, as the library takes them."""

    def __init__(self, batch: PagedBatch) -> None:
        reads, writes = batch.state_reads, batch.state_writes
        assert reads is not None, "the batch says which slots its sequences read"
        assert writes is not None, "the batch says which slots its sequences write"
        num_slots = batch.states[0][0].shape[0]
        if int(reads.max()) >= num_slots or not 0 <= int(writes.min()) <= int(writes.max()) < num_slots:
            raise BackendError(f"a step names a slot outside the pool of {num_slots} states")
        ends = batch.cu_q[1:] if batch.state_ends is None else batch.state_ends
        self._tensors = (reads.contiguous(), writes.contiguous(), batch.cu_q.contiguous(), ends.contiguous())
        self.step = structs.StateStepStruct(reads.shape[0], *(tensor.data_ptr() for tensor in self._tensors))
        self.pools = (structs.StatePoolsStruct * len(batch.states))(
            *(structs.StatePoolsStruct(*(pool.data_ptr() for pool in pools)) for pools in batch.states)
        )


def _moved_together(linears: Iterator[NativeLinear], count: int) -> list[structs.LinearStruct]:
    """The structs of `count` layers. Their packed weights, if of the size of the first one's, are moved side by side as
    soon as they are made: each alone may be too small for huge pages."""
    first = next(linears)
    rooms = empty_in_huge_pages(count * first.packed_bytes, torch.uint8).view(count, -1)
    moved = []
    for linear, room in zip(chain((first,), linears), rooms, strict=True):
        if linear.packed_bytes == len(room):
            linear.move_weight(room)
        moved.append(linear.struct)
        release_free_memory()  # thousands of tensors of one expert each: freed, they would still fill the memory
    return moved


def refusal(needs: DecoderNeeds) -> str | None:
    """Why the native library cannot run a whole step of the model in one call; None if it can."""
    spec, backend = needs.spec, needs.backend
    if needs.num_ranks > 1:
        return "runs on one rank only"
    if spec.is_fallback:
        return f"has no {spec.architecture}"
    if not backend.capabilities.native_step:
        return f"needs the native attention kernels, and attention is '{backend.name}'"
    if unknown := [activation for activation in spec.activations if activation not in _GATES]:
        return f"has no activation {unknown[0]}"
    mixers = [mixer for layer in spec.layers for mixer in layer.mixers]
    if unknown_mixers := [mixer.name for mixer in mixers if type(mixer) not in _MIXERS]:
        return f"has no kernel for {unknown_mixers[0]}"
    if needs.kernels != "cpu":
        return "packs no odd sizes of layers"
    return None


def load(request: DecoderRequest) -> CpuDecoder:
    """Raises: ModelError, see weights."""
    parameters, tensors, notes = read_tensors(request)
    decoder = CpuDecoder(request, tensors, parameters)
    decoder.notes += notes
    return decoder
