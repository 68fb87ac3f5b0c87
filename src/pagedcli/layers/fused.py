"""Whether the fused Triton layers can run, found out once. Where they cannot, the plain torch ones do."""

import functools
from typing import Any

from pagedcli.attention.base import AttentionBackend


@functools.cache
def fused_layers() -> Any:
    """The module triton_layers, or None where triton is not installed (which the choice of backends reports)."""
    try:
        from pagedcli.layers import triton_layers
    except ImportError:
        return None
    return triton_layers


def stores_in_one_pass(backend: AttentionBackend) -> bool:
    """Whether triton_layers.rotate_and_store can fill the backend's cache: a CUDA backend of that layout."""
    return getattr(backend, "fused_store", False) and fused_layers() is not None
