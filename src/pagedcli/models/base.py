"""The contract between the engine and a model: CausalLM; and between models.loading and a decoder: DecoderNeeds,
DecoderRequest.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from pagedcli.attention.base import AttentionBackend, PagedBatch
from pagedcli.attention.layer import AttentionLayer
from pagedcli.config import LoadFormat
from pagedcli.core.plan import Kernels
from pagedcli.layers.packed_layers import PackedLayers
from pagedcli.layers.parallel import ParallelContext
from pagedcli.models.formats import WeightFormat
from pagedcli.models.spec import ModelSpec, layer_groups


class CausalLM(Protocol):
    """A language model that reads and writes the paged cache through an attention backend."""

    spec: ModelSpec
    # What each layer requires of the attention backend. The scales of an fp8 cache are set after loading.
    attention_layers: tuple[AttentionLayer, ...]
    notes: tuple[str, ...]  # notes for the user on how the model runs, one line each
    weight_bytes: int  # bytes of all weights, shared ones counted once

    def forward(self, input_ids: Tensor, positions: Tensor, batch: PagedBatch, kv_cache: Tensor) -> Tensor:
        """One step: hidden states of the new tokens, after the final norm.

        Shapes:  input_ids, positions [T] int64; kv_cache of the backend's cache_shape; returns [T, E] in the model's
                 dtype, or [R, E] of the tokens that batch.late names as wanted.
        Changes: kv_cache at batch.slots, batch.work.
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits over the vocabulary.

        Shapes:  hidden [R, E], any rows of forward's result; returns float32 [R, V].
        """
        ...


def cache_shape(model: CausalLM, backend: AttentionBackend, num_blocks: int, block_size: int) -> tuple[int, ...]:
    """Shape of the model's cache for a backend."""
    own = model.spec.num_kv_heads, model.spec.head_dim
    groups = [(len(group.layers), group.heads or own) for group in layer_groups(model.attention_layers)]
    shape = backend.cache_shape(groups, num_blocks, block_size)
    return shape if model.attention_layers[0].value_dim is None else (1, *shape[1:])


@dataclass(frozen=True, slots=True)
class DecoderNeeds:
    """What the choice of a decoder depends on. Each decoder module has `refusal(needs) -> str | None`: why it
    cannot run the model, before anything is loaded."""

    spec: ModelSpec  # the whole model
    backend: AttentionBackend | type[AttentionBackend]
    weight_format: WeightFormat
    num_ranks: int = 1

    @property
    def kernels(self) -> Kernels:
        """Whose linear layers run with the backend."""
        return linear_kernels(self.spec, self.backend)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderRequest:
    """A model to load. Each decoder module has `load(request) -> CausalLM`."""

    path: Path
    spec: ModelSpec  # the whole model
    backend: AttentionBackend
    weight_format: WeightFormat
    dtype: torch.dtype
    device: torch.device
    load_format: LoadFormat
    seed: int  # seed of dummy weights
    adapter: Path | None = None  # folder of a LoRA adapter, to merge into the weights
    trust_remote_code: bool
    max_model_len: int  # tokens
    parallel: ParallelContext
    packed: PackedLayers = field(default_factory=PackedLayers)  # layers packed before; the native decoder changes it


def linear_kernels(spec: ModelSpec, backend: AttentionBackend | type[AttentionBackend]) -> Kernels:
    """Whose linear layers run with a backend: those of the native library where it serves attention and can pack every
    weight of the model."""
    sizes = [mixer.inner for layer in spec.layers for mixer in layer.mixers]
    sizes += [spec.hidden_size, spec.intermediate_size, spec.layer_inputs.size if spec.layer_inputs is not None else 0]
    if (experts := spec.experts) is not None:
        sizes += [experts.each.width, experts.shared.width if experts.shared is not None else 0]
    if backend.capabilities.native_step and not any(size % 2 for size in sizes):
        return "cpu"
    return "triton" if backend.capabilities.fused_store else "torch"
