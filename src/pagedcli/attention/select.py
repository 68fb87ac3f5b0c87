"""Selects the attention backend and explains why faster ones are unavailable. The only place that names backends.

Used by the engine and by `pagedcli doctor`. A new backend is one file with `check(spec)` and `load(spec)`, and one line
in REGISTRY.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from pagedcli.attention.base import (
    AttentionBackend,
    AttentionSpec,
    Capabilities,
    LayerKV,
    PagedBatch,
    Sinks,
    dtype_name,
)
from pagedcli.attention.layer import AttentionLayer, Heads, KvHeads
from pagedcli.errors import BackendError


@dataclass(frozen=True, slots=True)
class Entry:
    """One backend of the registry, imported lazily."""

    name: str
    module: str  # a module with check(spec) and load(spec), see AttentionSpec
    auto_devices: tuple[str, ...]  # device types on which "auto" tries it; any device by name


# In order of preference.
REGISTRY = (
    Entry("cpu", "pagedcli.attention.cpu", ("cpu",)),
    Entry("triton", "pagedcli.attention.triton_paged", ("cuda",)),
    Entry("flash", "pagedcli.attention.flash", ("cuda",)),
    Entry("sdpa", "pagedcli.attention.sdpa", ("cpu", "cuda")),
    Entry("reference", "pagedcli.attention.reference", ("cpu", "cuda")),
)


def backend_names() -> tuple[str, ...]:
    """What --attention-backend takes."""
    return ("auto", *(entry.name for entry in REGISTRY))


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend for a spec, not loaded yet, and one line for each preferred one that cannot run it."""

    name: str
    kind: type[AttentionBackend]
    refused: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Selection:
    """The backend that will run and one line for each preferred one that cannot, e.g. "cpu: no C++ compiler found"."""

    backend: AttentionBackend
    refused: tuple[str, ...]


def select_backend(name: str, *, layers: Iterable[AttentionLayer] = (), **fields: Any) -> Selection:
    """The named backend, or with "auto" the most preferred one that can run here. `fields`: the others of
    AttentionSpec.

    Raises:  BackendError with reason and hint if the name is unknown or the backend cannot run here.
    """
    spec = AttentionSpec(layers=frozenset(layers), **fields)
    choice = choose_backend(name, spec)
    return Selection(load_backend(choice.name, spec), choice.refused)


def choose_backend(
    name: str, spec: AttentionSpec, *, is_here: bool = True, missing: Mapping[str, str] | None = None
) -> Choice:
    """What select_backend would choose.

    `is_here` False: for a described machine instead of this one; its software is assumed complete except for `missing`
    (backend name -> reason).
    Raises:  BackendError with reason and hint if the name is unknown or the backend cannot run there.
    """
    for part in spec.parts:
        if part.num_heads % part.num_kv_heads:
            raise BackendError(f"num_heads is {part.num_heads}, not a multiple of num_kv_heads {part.num_kv_heads}")
    by_name = tuple(entry for entry in REGISTRY if entry.name == name)
    if not by_name and name != "auto":
        raise BackendError(f"unknown attention backend '{name}'", hint=f"choose one of {', '.join(backend_names())}")
    refused: list[str] = []
    for entry in by_name or (entry for entry in REGISTRY if spec.device.type in entry.auto_devices):
        try:
            return Choice(entry.name, _probe(entry, spec, is_here, missing or {}), tuple(refused))
        except BackendError as error:
            if by_name:
                raise BackendError(
                    f"attention backend '{name}' cannot run here: {error.message}",
                    hint=error.hint or "use attention_backend: auto",
                ) from error
            refused.append(f"{entry.name}: {error.message}")
    own_kv_dtype = spec.kv_dtype not in (None, spec.dtype)
    raise BackendError(
        f"no attention backend runs on {spec.device}: {'; '.join(refused)}",
        hint="use --kv-cache-dtype auto" if own_kv_dtype else "use device: cpu",
    )


def load_backend(name: str, spec: AttentionSpec) -> AttentionBackend:
    """The backend of a choice. Raises: BackendError."""
    entry = next(entry for entry in REGISTRY if entry.name == name)
    if spec.parts == (spec,):
        return _load(entry, spec)
    backends = {part.heads: _load(entry, part) for part in spec.parts}
    return BackendsByHeads(backends, spec.block_size)


def available_backends(spec: AttentionSpec, missing: Mapping[str, str] | None = None) -> list[tuple[str, str | None]]:
    """Every backend in order of preference, with None if it can run here, else the reason."""
    return [(entry.name, _why_not(entry, spec, missing or {})) for entry in REGISTRY]


def _why_not(entry: Entry, spec: AttentionSpec, missing: Mapping[str, str]) -> str | None:
    try:
        _probe(entry, spec, is_here=True, missing=missing)
    except BackendError as error:
        return error.message
    return None


def _probe(entry: Entry, spec: AttentionSpec, is_here: bool, missing: Mapping[str, str]) -> type[AttentionBackend]:
    if entry.name in missing:
        raise BackendError(missing[entry.name])
    parts = spec.parts
    for part in parts:
        kind = type(_load(entry, part)) if is_here else _check(entry, part)
    if parts != (spec,) and not kind.capabilities.strided_blocks:
        heads = ", ".join("{} over {} of {}".format(*part.heads) for part in parts)
        raise BackendError(f"does not support layers that differ in their heads ({heads})")
    return kind


def _check(entry: Entry, spec: AttentionSpec) -> type[AttentionBackend]:
    kind: type[AttentionBackend] = import_module(entry.module).check(spec)
    check_spec(kind.capabilities, spec)
    return kind


def _load(entry: Entry, spec: AttentionSpec) -> AttentionBackend:
    if spec.device.type == "cuda" and spec.capability is None:
        spec = replace(spec, capability=torch.cuda.get_device_capability(spec.device))
    backend: AttentionBackend = import_module(entry.module).load(spec)
    check_spec(backend.capabilities, spec)
    return backend


def check_spec(able: Capabilities, spec: AttentionSpec) -> None:
    """Raises BackendError with the first requirement of the spec that these capabilities do not meet."""
    if spec.dtype not in able.dtypes:
        known = ", ".join(sorted(map(dtype_name, able.dtypes)))
        raise BackendError(f"dtype {dtype_name(spec.dtype)} is not one of {known}")
    if spec.kv_dtype not in (None, spec.dtype, *able.kv_dtypes):
        kv_dtype = dtype_name(spec.kv_dtype or spec.dtype)
        raise BackendError(
            f"does not support a KV cache of {kv_dtype}", hint="use --kv-cache-dtype auto, or --attention-backend auto"
        )
    if spec.block_size % able.block_size_multiple:
        multiple = able.block_size_multiple
        raise BackendError(
            f"block_size is {spec.block_size}, not a multiple of {multiple}",
            hint=f"use block_size: {-(-spec.block_size // multiple) * multiple}, or attention_backend: auto",
        )
    if spec.head_dim % able.head_dim_multiple:
        raise BackendError(f"head_dim is {spec.head_dim}, not a multiple of {able.head_dim_multiple}")
    if able.max_head_dim is not None and (spec.value_dim or spec.head_dim) > able.max_head_dim:
        raise BackendError(f"head_dim is {spec.head_dim}, more than {able.max_head_dim}")
    group = spec.num_heads // spec.num_kv_heads
    if able.max_group is not None and group > able.max_group:
        raise BackendError(f"{group} query heads per key/value head are more than {able.max_group}")
    for layer in spec.layers:
        if reason := layer_refusal(able, layer):
            raise BackendError(reason)


def layer_refusal(able: Capabilities, layer: AttentionLayer) -> str | None:
    """Why a backend of these capabilities cannot run a layer; None if it can."""
    if layer.window is not None and not able.windows:
        return f"does not support sliding windows, and a layer has a window of {layer.window} tokens"
    if layer.soft_cap is not None and not able.soft_cap:
        return f"does not support soft caps, and a layer caps attention scores at {layer.soft_cap:g}"
    if layer.sinks and not able.sinks:
        return "does not support attention sinks, which this model has"
    if layer.value_dim is not None and not able.latents:
        return "does not support latent attention"
    if layer.scale <= 0 and not able.negative_scale:
        return f"supports only positive scales, and a layer has {layer.scale:g}"
    return None


class BackendsByHeads(AttentionBackend):
    """Runs one backend for each kind of layer, in models whose layers differ in their heads.

    The cache is [2, 1, N, U]: a block has U elements of K and as many of V, in which the layers of its group lie one
    after another. To a layer's backend it looks like a cache of its own whose blocks lie apart.
    """

    def __init__(self, backends: Mapping[Heads, AttentionBackend], block_size: int) -> None:
        first = next(iter(backends.values()))
        self.name, self.capabilities, self.kernels = first.name, first.capabilities, first.kernels
        self._backends, self._block_size = dict(backends), block_size
        self._by_cache = {heads.kept: backend for heads, backend in backends.items()}

    def of(self, layer: AttentionLayer) -> AttentionBackend:
        assert layer.heads is not None, "every layer says which heads it has"
        return self._backends[layer.heads]

    def kv_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        heads = num_kv_heads, head_dim
        return self._by_cache[heads].kv_shape(num_blocks, block_size, *heads)

    def cache_shape(self, groups: Sequence[tuple[int, KvHeads]], num_blocks: int, block_size: int) -> tuple[int, ...]:
        return (2, 1, num_blocks, max(count * math.prod(self._layer_shape(heads)) for count, heads in groups))

    def layer_caches(self, kv_cache: Tensor, num_layers: int, heads: KvHeads | None) -> list[LayerKV]:
        assert heads is not None, "every group says which heads it has"
        shape = self._layer_shape(heads)
        layers = kv_cache[:, 0, :, : num_layers * math.prod(shape)].view(2, -1, num_layers, *shape)
        return [(keys, values) for keys, values in layers.unbind(2)]

    def reserve(self, num_seqs: int, max_total: int) -> None:
        for backend in self._backends.values():
            backend.reserve(num_seqs, max_total)

    def write(self, k: Tensor, v: Tensor, kv: LayerKV, slots: Tensor, layer: AttentionLayer) -> None:
        self.of(layer).write(k, v, kv, slots, layer)

    def attend(self, q: Tensor, kv: LayerKV, batch: PagedBatch, layer: AttentionLayer, sinks: Sinks = None) -> Tensor:
        return self.of(layer).attend(q, kv, batch, layer, sinks)

    def _layer_shape(self, heads: KvHeads) -> tuple[int, ...]:
        """What a block holds of a layer's K."""
        return self.kv_shape(1, self._block_size, *heads)[1:]
