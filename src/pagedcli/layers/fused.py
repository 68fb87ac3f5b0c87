"""Detects once whether the fused Triton layers can run. Otherwise the plain torch ones do."""

import functools
from typing import Any

from pagedcli.attention.base import AttentionBackend
from pagedcli.errors import BackendError


@functools.cache
def fused_layers() -> Any:
    """The module triton_layers, or None if triton cannot run (which backend selection reports)."""
    try:
        from pagedcli.attention.triton_paged import missing_compiler
        from pagedcli.layers import triton_layers
    except (BackendError, ImportError):  # not installed
        return None
    return None if missing_compiler() else triton_layers


def stores_in_one_pass(backend: AttentionBackend) -> bool:
    """Whether triton_layers.rotate_and_store can write the backend's cache: a CUDA backend with its layout."""
    return backend.capabilities.fused_store and fused_layers() is not None
