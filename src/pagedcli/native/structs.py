"""ctypes definitions of the structs of linear.h and decoder.cpp, the types of their functions, and dtype codes."""

import ctypes
from typing import Any

import torch

_int, _int64, _pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p

STORE, ADD, GATE = 0, 1, 2  # Epilogue
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # of activations; also WeightKind
INT8, INT4, CODES4, CODES8 = 3, 4, 5, 6  # WeightKind


class LinearStruct(ctypes.Structure):
    """struct Linear"""

    _fields_ = [
        *((name, _int64) for name in ("kind", "rows", "columns", "gated")),
        *((name, _pointer) for name in ("weight", "bias", "scales", "sums", "mins", "order")),
        ("chunk", _int64),
        ("scale_type", _int64),
    ]


class LayerStruct(ctypes.Structure):
    """struct Layer"""

    _fields_ = [
        *((name, _pointer) for name in ("input_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, LinearStruct) for name in ("qkv", "attention_out", "gate_up", "down")),
    ]


class ModelStruct(ctypes.Structure):
    """struct Model"""

    _fields_ = [
        *((name, _int64) for name in ("dtype", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim")),
        ("eps", ctypes.c_double),
        *((name, _pointer) for name in ("layers", "final_norm", "rope_table")),
    ]


class StepStruct(ctypes.Structure):
    """struct Step"""

    _fields_ = [
        *((name, _int64) for name in ("num_tokens", "threads")),
        *((name, _pointer) for name in ("residual", "positions", "slots", "geometry", "work", "k_cache", "v_cache")),
        ("layer_bytes", _int64),
        ("rows", _pointer),
        ("num_rows", _int64),
        ("out", _pointer),
    ]


def bind(library: ctypes.CDLL) -> Any:
    """Declare the functions of linear*.cpp and decoder.cpp. Returns the library."""
    signatures: dict[str, tuple[list[Any], Any]] = {
        "linear_padded_rows": ([_pointer], _int64),
        "linear_pack": ([_pointer, _pointer, _pointer, _int], None),
        "linear_pack_int8": ([_pointer, _int64, *[_pointer] * 4, _int], None),
        "linear_pack_int8_codes": ([_pointer] * 6 + [_int], None),
        "linear_groups_bytes": ([_pointer], _int64),
        "linear_pack_codes": ([*[_pointer] * 4, _int64, _pointer, _int], None),
        "linear_pack_int4": ([_pointer, _int64, *[_pointer] * 4, _int], None),
        "linear_run": ([_pointer, _int64, _pointer, _int64, _pointer, _int, _int], None),
        "linear_unpack_rows": ([_pointer, _pointer, _int64, _pointer, _int], _int),
        "decoder_forward": ([_pointer, _pointer], _int),
        "decoder_norm_rows": ([_int64, _pointer, _pointer, _int64, _int64, ctypes.c_float, _pointer, _int], None),
        "decoder_argmax": ([_int64, _pointer, _int64, _int64, _pointer, _int], None),
    }
    for name, (arguments, result) in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library
