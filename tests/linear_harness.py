"""What every linear layer of the native library promises."""

import ctypes

import torch

from pagedcli.native import load_library
from pagedcli.native.structs import LinearStruct, bind


def assert_rows_are_independent(linear, in_features, threads):
    """A row's bits depend neither on the other rows nor on the number of threads."""
    x = torch.randn(90, in_features)
    whole = linear(x)
    torch.set_num_threads(threads)
    try:
        for tokens in (1, 5, 6, 40):
            assert torch.equal(linear(x[-tokens:].contiguous()), whole[-tokens:])
    finally:
        torch.set_num_threads(1)


def panel_width():
    """Output features that the native library packs together on this processor."""
    functions = bind(load_library().functions)
    return functions.linear_padded_rows(ctypes.byref(LinearStruct(kind=1, rows=1, columns=2)))
