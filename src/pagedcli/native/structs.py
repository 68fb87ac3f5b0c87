"""ctypes definitions of the structs of linear.h, experts.h and decoder.h, the types of their functions, and codes."""

import ctypes
import functools
from typing import Any

import torch

_int, _int64, _float, _pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p

STORE, STORE_FLOAT, ADD, RELU2, GELU, GATE_SILU, GATE_GELU, GATE_CLAMPED = range(8)  # Epilogue
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # dtypes of activations; also WeightKind
GATED_DELTA, MAMBA2, SHORT_CONV, KIMI_DELTA = range(4)  # RecurrentKind
INT8, CODES4, CODES8, LEVELS4, CODES5, CODES6, IQ4 = 3, *range(5, 11)  # WeightKind
MINIMA, STEPS = 3, 4  # Linear::scale_type, beyond DTYPE_CODES
PACKINGS = {"int8": INT8, "int4": 4}  # how weights are rounded while linear_pack_NAME packs them -> WeightKind


_SIZES, _PACKING = ("kind", "rows", "columns", "gated"), ("chunk", "scale_type", "zero", "panel_bytes")
LINEAR_NUMBERS = (*_SIZES, *_PACKING)  # the fields of a packed layer that point nowhere


class LinearStruct(ctypes.Structure):
    """struct Linear"""

    _fields_ = [
        *((name, _int64) for name in _SIZES),
        *((name, _pointer) for name in ("weight", "bias", "scales", "order")),
        *((name, _int64) for name in (*_PACKING, "out_stride")),
        ("next", _pointer),
    ]


class PlaneStruct(ctypes.Structure):
    """struct Plane"""

    _fields_ = [(name, _int64) for name in ("first", "end", "bits", "width", "shift")]


class CodesStruct(ctypes.Structure):
    """struct Codes"""

    _fields_ = [
        ("bytes", _pointer),
        *((name, _int64) for name in ("block_bytes", "block_columns", "flipped", "num_planes")),
        ("planes", PlaneStruct * 2),
    ]


class ExpertsStruct(ctypes.Structure):
    """struct Experts"""

    _fields_ = [
        *((name, _int64) for name in ("num_experts", "num_per_token", "renormalize", "sigmoid")),
        *((name, _int64) for name in ("num_groups", "num_kept_groups", "num_best")),
        *((name, ctypes.c_double) for name in ("scale", "least_sum", "nearness")),
        *((name, _pointer) for name in ("router_bias", "expert_scales")),
        ("router", LinearStruct),
        *((name, _pointer) for name in ("gate_up", "down", "shared_gate_up", "shared_down", "shared_gate")),
    ]


class LatentStruct(ctypes.Structure):
    """struct Latent"""

    _fields_ = [
        *((name, _int64) for name in ("query_rank", "rank", "nope_dim", "value_dim")),
        *((name, _pointer) for name in ("query_norm", "latent_norm")),
        ("eps", ctypes.c_double),
        ("queries", LinearStruct),
        *((name, _pointer) for name in ("key_up", "value_up")),
    ]


class LayerStruct(ctypes.Structure):
    """struct Layer"""

    _fields_ = [
        *((name, _pointer) for name in ("input_norm", "input_norm_after", "mlp_norm", "mlp_norm_after")),
        *((name, _pointer) for name in ("q_norm", "k_norm", "sinks", "rope_table", "query_scales")),
        *((name, _int64) for name in ("rotated", "interleaved", "group", "place", "state_place")),
        *((name, _int64) for name in ("num_heads", "num_kv_heads", "head_dim")),
        *((name, _int64) for name in ("reads", "keys_as_values", "gates_per_head", "softplus_gates")),
        *((name, LinearStruct) for name in ("qkv", "attention_out", "gate_up", "down")),
        ("xielu", _pointer),
        *((name, _pointer) for name in ("experts", "router_norm", "experts_norm", "experts_norm_after")),
        ("dense_norm_after", _pointer),
        *((name, LinearStruct) for name in ("input_gate", "input_out")),
        ("layer_input_after", _pointer),
        ("scalar", ctypes.c_double),
        *((name, _pointer) for name in ("recurrent", "latent")),
    ]


class RecurrentStruct(ctypes.Structure):
    """struct Recurrent"""

    _fields_ = [
        *(
            (name, _int64)
            for name in ("kind", "kernel", "channels", "num_key_heads", "num_heads", "key_dim", "value_dim")
        ),
        *((name, _int64) for name in ("interleaved", "tiled", "norm_group")),
        *((name, ctypes.c_double) for name in ("correction", "eps", "least_step", "most_step")),
        *((name, _pointer) for name in ("conv", "conv_bias", "decay", "step_bias", "skip", "norm")),
        *((name, LinearStruct) for name in ("inner", "gates", "out")),
        *((name, LinearStruct) for name in ("decay_down", "decay_up", "shares_down", "shares_up")),
    ]


class StatePoolsStruct(ctypes.Structure):
    """struct StatePools"""

    _fields_ = [("conv", _pointer), ("matrix", _pointer)]


class StateStepStruct(ctypes.Structure):
    """struct StateStep"""

    _fields_ = [("num_seqs", _int64), *((name, _pointer) for name in ("reads", "writes", "cu_q", "ends"))]


class ModelStruct(ctypes.Structure):
    """struct Model"""

    _fields_ = [
        *((name, _int64) for name in ("dtype", "num_layers", "hidden_size", "last_keeper")),
        *((name, _int64) for name in ("qkv_size", "head_size")),
        *((name, _int64) for name in ("inner_size", "output_gate", "norms_heads", "value_norm", "float_norms", "gate")),
        *((name, _int64) for name in ("layer_norm", "side_by_side", "norms_last")),
        *((name, ctypes.c_double) for name in ("eps", "added_eps", "attention_scale", "soft_cap")),
        ("residual_multiplier", ctypes.c_double),
        *((name, _pointer) for name in ("layers", "final_norm")),
        ("input_size", _int64),
        ("input_table", _pointer),
        ("input_projection", LinearStruct),
        ("input_norm", _pointer),
    ]


class GroupStepStruct(ctypes.Structure):
    """struct GroupStep"""

    _fields_ = [*((name, _pointer) for name in ("slots", "work", "late_work", "geometry")), ("layer_bytes", _int64)]


class StepStruct(ctypes.Structure):
    """struct Step"""

    _fields_ = [
        *((name, _int64) for name in ("num_tokens", "threads")),
        *((name, _pointer) for name in ("residual", "positions", "ids", "groups", "k_cache", "v_cache")),
        *((name, _pointer) for name in ("late", "late_positions")),
        ("num_late", _int64),
        ("rows", _pointer),
        ("num_rows", _int64),
        *((name, _pointer) for name in ("out", "state_step", "states")),
    ]


@functools.cache
def bind(library: ctypes.CDLL) -> Any:
    """Declare the functions that tensors are passed to. Returns the library."""
    signatures: dict[str, tuple[list[Any], Any]] = {
        "linear_padded_rows": ([_pointer], _int64),
        "linear_num_panels": ([_pointer], _int64),
        "linear_pack": ([_pointer, _pointer, _pointer, _int], None),
        "linear_pack_int8_codes": ([_pointer] * 5 + [_int], None),
        "linear_packed_bytes": ([_pointer], _int64),
        "linear_pack_grouped": ([*[_pointer] * 9, _int], None),
        "linear_widen_rows": ([_pointer, _int64, _pointer, _int64, _pointer, _int], _int),
        "linear_pack_codes": ([*[_pointer] * 4, _int64, _pointer, _int], None),
        **{f"linear_pack_{name}": ([_pointer, _int64, *[_pointer] * 3, _int], None) for name in PACKINGS},
        "linear_run": ([_pointer, _int64, _pointer, _int64, _pointer, _int, _int], None),
        "linear_unpack_rows": ([_pointer, _pointer, _int64, _pointer, _int], _int),
        "decoder_forward": ([_pointer, _pointer], _int),
        "paged_work_new": ([_pointer, _int64, *[_pointer] * 3, _int64, _int64, _int], _pointer),
        "paged_work_free": ([_pointer], None),
        "paged_attend": ([_int, *[_pointer] * 3, _int64, _int64, *[_pointer] * 3, _float, _float, _pointer], _int),
        "paged_write": ([_int, _pointer, _int64, _int, *[_pointer] * 6], None),
        "sampling_argmax": ([_int64, _pointer, _int64, _int64, _pointer, _int], None),
        "sampling_top": ([_pointer, _int64, _int64, _int64, _pointer, _pointer, _int], None),
        "sampling_floors": ([_int64, _pointer, _int64, _int64, *[_pointer] * 5, _int], None),
        "sampling_draw": ([_int64, _pointer, _int64, _int64, *[_pointer] * 4, _int], None),
    }
    for name, (arguments, result) in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library
