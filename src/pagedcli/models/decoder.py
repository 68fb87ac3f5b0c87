"""The native decoder in torch: the ModelSpec holds the differences between families. Any device, any rank.

One of the decoders of models.loading. If attention runs on the project's CPU kernels, the linear layers do, too.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from pagedcli import layers
from pagedcli.attention.base import AttentionBackend, PagedBatch, dtype_name
from pagedcli.core.plan import Kernels
from pagedcli.errors import ConfigError, ModelError
from pagedcli.layers.basic import ACTIVATIONS, ExpertLoop, fused_layers, rms_norm, xielu
from pagedcli.layers.linear import unpacked_note
from pagedcli.layers.parallel import VocabularyEmbedding
from pagedcli.layers.quantized import Weight
from pagedcli.layers.recurrent import StateStep
from pagedcli.models import blocks
from pagedcli.models.base import DecoderNeeds, DecoderRequest, linear_kernels
from pagedcli.models.formats import VECTOR
from pagedcli.models.mixers.attention import Attention, LatentAttention
from pagedcli.models.mlps import Experts, Mlp
from pagedcli.models.parameters import decoder_parameters, unread_tensors
from pagedcli.models.parts import TorchParts
from pagedcli.models.recurrent_blocks import BODIES
from pagedcli.models.rope import rope_notes
from pagedcli.models.sharding import shard_parameters, shard_spec
from pagedcli.models.spec import Mixer, ModelSpec
from pagedcli.models.stacking import UnreadTensors, kept_dtype
from pagedcli.models.stream import Stream, stream_of
from pagedcli.models.tensors import Parameter, linear_formats
from pagedcli.models.weights import open_weights


class Decoder:
    """A native CausalLM (see models.base)."""

    def __init__(
        self, request: DecoderRequest, spec: ModelSpec, tensors: UnreadTensors, parameters: Mapping[str, Parameter]
    ) -> None:
        """`spec`, `tensors` and `parameters` are those of this rank; `tensors` is emptied."""
        build = LayerBuilder(request, spec, tensors, linear_formats(parameters))
        self.spec = spec
        self.notes = format_notes(request, build.kernels)
        self.attention_layers = spec.attention_layers
        self._backend: AttentionBackend = request.backend
        self._embedding, self._lm_head, table_bytes = build.tables()
        self._layer_inputs = build.layer_inputs()
        branches, self._last = build.branches()
        num_early = build.num_early_branches
        self._branches, self._late_branches = branches[:num_early], branches[num_early:]
        self._stream: Stream | None = None
        if request.backend.kernels == "invariant" and (spec.experts or spec.states or request.parallel.size > 1):
            raise ConfigError(
                "gpu_kernels invariant is for one GPU, and models without experts and recurrent state",
                hint="leave out gpu_kernels",
            )
        if request.backend.kernels == "fused":
            self._stream, why = stream_of(branches, self._last, spec, request)
            self.notes += (f"no fused kernels for {spec.architecture}: {why}",) if why else ()
        self._first_late = sum(layer.mixer.attends for layer in spec.layers[: spec.last_keeper])
        self.weight_bytes = vector_bytes(parameters, request.dtype) + table_bytes + build.linear_bytes
        assert not tensors, f"{', '.join(tensors)} are not used by the decoder"

    def forward(self, input_ids: Tensor, positions: Tensor, batch: PagedBatch, kv_cache: Tensor) -> Tensor:
        """See CausalLM.forward."""
        state_step = StateStep.of(batch)
        layers = blocks.layer_steps(batch, kv_cache, self._backend, self.attention_layers, self._first_late)
        step = blocks.ForwardStep(positions, layers, state_step, batch.states)
        residual = scaled_embedding(self._embedding(input_ids), self.spec)
        if self._layer_inputs is not None:
            step.layer_inputs = self._layer_inputs(input_ids, residual)
        if self._stream is not None and self._stream.serves(batch):
            self._stream(residual, step)
            return self._last(None, residual)
        hidden: Tensor | None = None  # the previous branch's addition to the residual
        for branch in self._branches:
            hidden = branch(hidden, residual, step)
        if (late := batch.late) is not None:
            if not late.tokens.shape[0]:
                return residual[:0]
            if hidden is not None and hidden.shape[0] == residual.shape[0]:  # The layer has a state.
                hidden = hidden.index_select(0, late.tokens)
            residual, step = residual.index_select(0, late.tokens), step.of_late(late)
        for branch in self._late_branches:
            hidden = branch(hidden, residual, step)
        out = self._last(hidden, residual)
        return out if late is None else out.index_select(0, late.wanted)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See CausalLM.compute_logits."""
        return scaled_logits(self._lm_head(hidden), self.spec)


def format_notes(request: DecoderRequest, kernels: Kernels) -> tuple[str, ...]:
    """What a user should know of how a decoder computes, as its weights and lengths have it."""
    notes = unpacked_note(request.device, request.dtype, kernels)
    note = request.weight_format.note(dtype_name(request.dtype), kernels)
    return notes + (() if note is None else (note,)) + rope_notes(request.spec.rope, request.max_model_len)


def vector_bytes(parameters: Mapping[str, Parameter], dtype: torch.dtype) -> int:
    """Bytes of norms and biases in a model of `dtype`."""
    vectors = (each for each in parameters.values() if each.stored is VECTOR)
    return sum(math.prod(each.shape) * (kept_dtype(each, dtype) or dtype).itemsize for each in vectors)


def scaled_embedding(rows: Tensor, spec: ModelSpec) -> Tensor:
    """The start of the residual stream. Changes: rows."""
    if spec.scales.norms_embedding:
        return rms_norm(rows, torch.ones(rows.shape[1], device=rows.device), spec.norm.eps)
    if spec.scales.embedding == 1:
        return rows
    # rounded to the model's dtype first, as in transformers
    return rows.mul_(torch.tensor(spec.scales.embedding, dtype=rows.dtype))


def scaled_logits(logits: Tensor, spec: ModelSpec) -> Tensor:
    """The output layer's results as logits."""
    if spec.scales.logits_divisor != 1:
        logits = logits / spec.scales.logits_divisor
    cap = spec.scales.logits_soft_cap
    return logits if cap is None else (logits / cap).tanh_().mul_(cap)


class LayerBuilder(TorchParts):
    """Builds the layers in torch."""

    num_early_branches = 0  # branches that every token runs through: up to the mixer of the last keeper

    def tables(self) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], int]:
        """The embedding, the output layer, which has the whole vocabulary on every rank, and their bytes. A tied
        embedding is read from a packed output layer, where its format allows it, so that there is no second copy."""
        tied, vocab_size, parallel = self._spec.tie_word_embeddings, self._spec.vocab_size, self._request.parallel
        table = self._tensors.pop("embedding")
        modules, bias = self.output(table)
        layer_format, dtype = self._request.weight_format.lm_head, self._request.dtype
        if tied and layer_format.stored[0].dtype is not None:  # packed in the checkpoint
            table = layer_format.widened(modules, dtype)
        made = layer_format.output_layer(modules, bias, dtype, self.kernels, table if tied else None)
        linear, num_bytes, rows = made
        linear = self.by_chosen_kernels(linear, torch.float32)

        def head(x: Tensor) -> Tensor:
            return parallel.gather_columns(linear(x), vocab_size)

        if tied and rows is not None and parallel.size == 1:
            return rows, head, num_bytes
        return VocabularyEmbedding(table, vocab_size, parallel), head, table.nbytes + num_bytes

    def layer_inputs(self) -> blocks.LayerEmbeddings | None:
        """Models in which each layer has an input of its own."""
        table, norm = self._tensors.pop("layer_table", None), self.norm("layer_projection_norm")
        inputs = self._spec.layer_inputs
        if table is None or norm is None or inputs is None:
            return None
        self.linear_bytes += table.nbytes
        rows = VocabularyEmbedding(table, inputs.vocab_size, self._request.parallel)
        return blocks.LayerEmbeddings(rows, self.plain_linear("layer_projection"), norm, self._spec.norm.eps)

    def branches(self) -> tuple[list[blocks.ResidualBranch], blocks.Join]:
        """Attention and MLP of all layers, what else a layer has, and what is after the last."""
        spec, norm_after, factor = self._spec, None, 1.0
        branches: list[blocks.ResidualBranch] = []
        for index in range(spec.num_layers):
            key = f"layers.{index}"
            for name, body in self._bodies(index).items():
                norm = f"{key}.{name}"
                branches.append(blocks.ResidualBranch(self._join(norm_after, factor, norm), body))
                if index == spec.last_keeper and name == "input_norm":
                    self.num_early_branches = len(branches)
                norm_after, factor = self.norm(f"{norm}_after"), 1.0
            if (scalar := self._tensors.pop(f"{key}.scalar", None)) is not None:  # a factor of the layer's result
                factor = scalar.item()
        return branches, self._join(norm_after, factor, "final_norm")

    def _bodies(self, index: int) -> dict[str, blocks.Body]:
        """What each branch of a layer computes, by the norm before it."""
        spec, layer, key = self._spec, self._spec.layers[index], f"layers.{index}"
        mixer = self._mixer(layer.mixer, self._place(index), key)
        if layer.beside is not None:
            place = sum(each.recurrent is not None for each in spec.layers[:index])
            mixer = blocks.BesideState(self._place(index), mixer, self._mixer(layer.beside, place, f"{key}.beside"))
        bodies: dict[str, blocks.Body] = {"input_norm": mixer}
        if layer.mlp is not None:
            bodies["mlp_norm"] = self._mlp(layer.mlp, key)
        if layer.norms == "shared":
            bodies = {"input_norm": blocks.BesideMlp(self._place(index), *bodies.values())}
        if spec.layer_inputs is not None:
            gate, out = self.plain_linear(f"{key}.input_gate"), self.plain_linear(f"{key}.input_out")
            bodies["layer_input"] = blocks.LayerInput(index, gate, ACTIVATIONS[spec.layer_inputs.activation], out)
        return bodies

    def _place(self, index: int) -> int:
        """The number of a layer among those that attend, or among those that keep a state, as it does."""
        attends = [layer.mixer.attends for layer in self._spec.layers[: index + 1]]
        return attends.count(attends[-1]) - 1

    def _join(self, norm_after: Tensor | None, factor: float, norm: str) -> blocks.Join:
        style, residual = self._spec.norm, self._spec.scales.residual
        return blocks.Join(
            norm_after, self.norm(norm), residual, factor, style.eps, style.added_eps, style.centred != "no"
        )

    def _mixer(self, mixer: Mixer, place: int, key: str) -> blocks.Body:
        bodies: dict[type, Callable[..., blocks.Body]]
        bodies = {Attention: blocks.AttentionBody, LatentAttention: blocks.LatentAttentionBody, **BODIES}
        return bodies[type(mixer)](self, mixer, place, key)

    def _mlp(self, spec: Mlp | Experts, key: str) -> blocks.MlpBody | blocks.ExpertsBody | blocks.ExpertsBesideMlp:
        experts = spec if isinstance(spec, Experts) else None
        dense = spec.beside if isinstance(spec, Experts) else spec
        if dense is None:
            assert experts is not None, "a layer has an MLP or experts"
            return self._experts(experts, key)
        first = self.linear(f"{key}.{dense.input_name}")
        activation = ACTIVATIONS.get(dense.activation) or partial(xielu, numbers=self.xielu(key))
        mlp = blocks.MlpBody(first, activation, self.summed_linear(f"{key}.down"))
        if experts is None:
            return mlp
        names = ("mlp_norm", "dense_norm_after", "experts_norm", "experts_norm_after")
        before, after, experts_before, experts_after = (self._tensors.pop(f"{key}.{name}") for name in names)
        return blocks.ExpertsBesideMlp(
            mlp=mlp,
            mlp_norms=(before, after),
            experts=self._experts(experts, key),
            experts_norms=(experts_before, experts_after),
            router_norm=self.router_norm(key),
            eps=self._spec.norm.eps,
        )

    def _experts(self, experts: Experts, key: str) -> blocks.ExpertsBody:
        shared = experts.shared
        return blocks.ExpertsBody(
            router=self.plain_linear(f"{key}.router"),
            mixture=self._mixture(key, experts),
            shared=None if shared is None else self._expert(f"{key}.shared_expert", shared),
            shared_gate=self.plain_linear(f"{key}.shared_gate") if shared and experts.gates_shared else None,
            parallel=self._request.parallel,
        )

    def _mixture(self, key: str, spec: Experts) -> "ExpertLoop | layers.triton_experts.GroupedExperts":
        """All experts of a layer, and their routing."""
        router_bias, expert_scales = self.small(f"{key}.router_bias"), self.small(f"{key}.expert_scales")
        keys = [f"{key}.experts.{i}" for i in range(spec.num_experts)]
        if not groups_experts(self._spec, self._request.backend):
            experts = [self._expert(each, spec.each) for each in keys]
            return ExpertLoop(experts, spec, router_bias, expert_scales)
        (gate_up, gate_up_bias), (down, down_bias) = (self._expert_weights(keys, name) for name in ("gate_up", "down"))
        biases = gate_up_bias, down_bias if self._request.parallel.rank == 0 else None
        grouped = layers.triton_experts.GroupedExperts(
            gate_up,
            down,
            spec,
            activation=spec.each.activation,
            biases=biases,
            router_bias=router_bias,
            expert_scales=expert_scales,
        )
        self.linear_bytes += grouped.nbytes
        return grouped

    def _expert_weights(self, keys: list[str], name: str) -> tuple[list[Weight], Tensor | None]:
        """One linear layer of all experts: their weights, and their biases as rows."""
        weights, biases = [], []
        for key in keys:
            layer_format, modules, bias = self.stored(f"{key}.{name}")
            if any("bias" in module and bool(module["bias"].any()) for module in modules):
                raise ModelError(f"{key}.{name} has a bias, which no kernel adds", hint="use --device cpu")
            weights.append(layer_format.weight(modules, self._request.dtype, self.kernels))
            biases += [] if bias is None else [bias]
        return weights, torch.stack(biases) if biases else None

    def _expert(self, key: str, mlp: Mlp) -> blocks.MlpBody:
        """An expert without the sum over the ranks, which is taken once for all experts."""
        gate_up = self.linear(f"{key}.{mlp.input_name}", gated=mlp.activation in ("silu", "swish"))
        down = self.linear(f"{key}.down", with_bias=self._request.parallel.rank == 0)
        return blocks.MlpBody(gate_up, None if gate_up.gated else ACTIVATIONS[mlp.activation], down)


def groups_experts(spec: ModelSpec, backend: AttentionBackend | type[AttentionBackend]) -> bool:
    """Whether the Triton kernel computes all experts of a layer together."""
    is_gated = spec.experts is None or spec.experts.each.gated
    return is_gated and linear_kernels(spec, backend) == "triton" and fused_layers() is not None


def refusal(needs: DecoderNeeds) -> str | None:
    """Why this decoder cannot run a model; None if it can."""
    if needs.spec.is_fallback:
        return f"has no {needs.spec.architecture}"
    if (reason := needs.weight_format.refusal(needs.kernels)) is not None:
        return f"{reason}, but attention is '{needs.backend.name}'"
    return None


def load(request: DecoderRequest) -> Decoder:
    """The decoder, or one rank's part of it.

    Raises: ModelError, see weights; ConfigError if the model cannot be split over the ranks.
    """
    parameters, tensors, notes = read_tensors(request)
    decoder = Decoder(request, shard_spec(request.spec, request.parallel), tensors, parameters)
    decoder.notes += notes
    return decoder


def read_tensors(request: DecoderRequest) -> tuple[dict[str, Parameter], UnreadTensors, tuple[str, ...]]:
    """This rank's parameters, their tensors, and what a user should know of these. Raises: see load."""
    spec, weight_format = request.spec, request.weight_format
    parameters = shard_parameters(decoder_parameters(spec, weight_format), spec, request.parallel)
    source = open_weights(request.path, request.load_format, request.seed, spec, request.adapter)
    ignored = unread_tensors(spec, weight_format)
    tensors = source.load(parameters, ignored=ignored, dtype=request.dtype, device=request.device)
    return parameters, tensors, source.notes
