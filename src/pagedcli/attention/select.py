"""Which attention backend runs, and why the faster ones do not. The only place that knows backends by name.

Used by the engine and by `pagedcli doctor`. A new backend is one file with `load(spec)` and one line in REGISTRY.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module

import torch

from pagedcli.attention.base import AttentionBackend, AttentionSpec, Capabilities, dtype_name
from pagedcli.attention.layer import AttentionLayer
from pagedcli.errors import BackendError


@dataclass(frozen=True, slots=True)
class Entry:
    """One backend of the registry. Nothing is imported before it is asked for."""

    name: str
    module: str  # has load(spec) -> AttentionBackend
    auto_devices: tuple[str, ...]  # device types on which "auto" tries it; by name it can be asked for anywhere


# In order of preference.
REGISTRY = (
    Entry("cpu", "pagedcli.attention.cpu", ("cpu",)),
    Entry("triton", "pagedcli.attention.triton_paged", ("cuda",)),
    Entry("varlen", "pagedcli.attention.varlen", ("cuda",)),
    Entry("flash", "pagedcli.attention.flash", ("cuda",)),
    Entry("sdpa", "pagedcli.attention.sdpa", ("cpu", "cuda", "mps", "xpu")),
    Entry("reference", "pagedcli.attention.reference", ("cpu", "cuda", "mps", "xpu")),
)
BACKEND_NAMES = ("auto", *(entry.name for entry in REGISTRY))


@dataclass(frozen=True, slots=True)
class Selection:
    """The backend that will run and one line for each preferred one that cannot: "cpu: no C++ compiler found"."""

    backend: AttentionBackend
    refused: tuple[str, ...]


def select_backend(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    kv_dtype: torch.dtype | None = None,
    layers: Iterable[AttentionLayer] = (),
) -> Selection:
    """The named backend, or with "auto" the first in order of preference that can run here.

    Units:   block_size in tokens, head_dim in elements.
    Raises:  BackendError if the name is unknown or that backend cannot run here, with the reason and a way out.
    """
    if num_heads % num_kv_heads:
        raise BackendError(f"num_heads is {num_heads}, which is not a multiple of num_kv_heads {num_kv_heads}")
    spec = AttentionSpec(device, dtype, block_size, num_heads, num_kv_heads, head_dim, kv_dtype, frozenset(layers))
    if name == "auto":
        return _first_that_runs(spec)
    for entry in REGISTRY:
        if entry.name == name:
            try:
                return Selection(_load(entry, spec), ())
            except BackendError as error:
                raise BackendError(
                    f"attention backend '{name}' cannot run here: {error.message}",
                    hint=error.hint or "use attention_backend: auto",
                ) from error
    raise BackendError(f"unknown attention backend '{name}'", hint=f"choose one of {', '.join(BACKEND_NAMES)}")


def available_backends(
    *,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> list[tuple[str, str | None]]:
    """Every backend in order of preference, each with None if it can run here or the reason why not."""
    spec = AttentionSpec(device, dtype, block_size, num_heads, num_kv_heads, head_dim)
    return [(entry.name, reason) for entry, _, reason in _try_all(REGISTRY, spec)]


def _first_that_runs(spec: AttentionSpec) -> Selection:
    refused: list[str] = []
    candidates = tuple(entry for entry in REGISTRY if spec.device.type in entry.auto_devices)
    for entry, backend, reason in _try_all(candidates, spec):
        if backend is not None:
            return Selection(backend, tuple(refused))
        refused.append(f"{entry.name}: {reason}")
    own_kv_dtype = spec.kv_dtype not in (None, spec.dtype)
    raise BackendError(
        f"no attention backend runs on {spec.device}: {'; '.join(refused)}",
        hint="use --kv-cache-dtype auto" if own_kv_dtype else "use device: cpu",
    )


def _try_all(
    entries: tuple[Entry, ...], spec: AttentionSpec
) -> Iterator[tuple[Entry, AttentionBackend | None, str | None]]:
    for entry in entries:
        try:
            yield entry, _load(entry, spec), None
        except BackendError as error:
            yield entry, None, error.message


def _load(entry: Entry, spec: AttentionSpec) -> AttentionBackend:
    backend: AttentionBackend = import_module(entry.module).load(spec)
    check_spec(backend.capabilities, spec)
    return backend


def check_spec(able: Capabilities, spec: AttentionSpec) -> None:
    """Raises BackendError with the first thing that the spec asks for and a backend of these capabilities lacks."""
    if spec.dtype not in able.dtypes:
        known = ", ".join(sorted(map(dtype_name, able.dtypes)))
        raise BackendError(f"dtype {dtype_name(spec.dtype)} is not one of {known}")
    if spec.kv_dtype not in (None, spec.dtype, *able.kv_dtypes):
        kv_dtype = dtype_name(spec.kv_dtype or spec.dtype)
        raise BackendError(
            f"has no KV cache of {kv_dtype}", hint="use --kv-cache-dtype auto, or --attention-backend auto"
        )
    if spec.block_size % able.block_size_multiple:
        multiple = able.block_size_multiple
        raise BackendError(
            f"block_size is {spec.block_size}, not a multiple of {multiple}",
            hint=f"use block_size: {-(-spec.block_size // multiple) * multiple}, or attention_backend: auto",
        )
    if spec.head_dim % able.head_dim_multiple:
        raise BackendError(f"head_dim is {spec.head_dim}, not a multiple of {able.head_dim_multiple}")
    if able.max_head_dim is not None and spec.head_dim > able.max_head_dim:
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
        return f"has no sliding window, and a layer sees only {layer.window} tokens"
    if layer.soft_cap is not None and not able.soft_cap:
        return f"does not cap attention scores, and a layer caps them at {layer.soft_cap:g}"
    if layer.scale <= 0 and not able.negative_scale:
        return f"takes positive scales only, and a layer has {layer.scale:g}"
    return None
