"""Times of the parts of a step, each compared with its limit: memory bandwidth or arithmetic."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from pagedcli.attention.base import dtype_name
from pagedcli.bench.attention import STREAM_BYTES, AttentionRow, AttentionShape, attention_rows
from pagedcli.bench.rates import timed_seconds
from pagedcli.bench.spread import Spread
from pagedcli.errors import BackendError
from pagedcli.layers.basic import rms_norm
from pagedcli.layers.linear import Linear, LinearLayer
from pagedcli.models.formats import AS_STORED, FORMATS
from pagedcli.models.spec import ModelSpec
from pagedcli.native import load_library
from pagedcli.native.structs import DTYPE_CODES
from pagedcli.planning.cards import Roofline

# sequences, tokens of each, new ones, those that all share
_ATTENTION_SIZES = (
    (1, 2048, 1, 0),
    (32, 128, 1, 0),
    (32, 512, 1, 0),
    (32, 576, 1, 512),
    (1, 512, 512, 0),
    (1, 2048, 2048, 0),
)
_WINDOW_SIZE = (8, 16_384)  # sequences and tokens of decoding with and without a window


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One kernel at one size. Rates are those of the fastest call: other load on the machine only adds time."""

    kernel: str
    size: str
    implementation: str
    ms: float
    gb_per_s: float
    gflop_per_s: float
    share: float | None  # of the kernel's limit: its shortest possible time over its time; None above 1
    spread_ms: Spread


def kernel_rows(
    spec: ModelSpec,
    limits: Roofline,
    tokens: Sequence[int],
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    quantization: str | None = None,
    windows: Sequence[int] = (),
    attention_limits: Roofline | None = None,
) -> Iterator[tuple[float, KernelRow]]:
    """Linear layers and norms of a model at each number of tokens, and attention at a few lengths. On the CPU. Each
    with the share of the measurements that is done.

    `kv_dtype`: of the KV cache; if it differs from `dtype`, attention is measured with both. `windows`: in tokens;
    decoding of long sequences is measured with each, and without one. `attention_limits`: of the dtype that attention
    computes in, if `limits` are those of quantized linear layers.
    """
    width, inner, head_dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    qkv = (spec.num_heads + 2 * spec.num_kv_heads) * head_dim
    sizes = {"qkv": (qkv, width), "out": (width, spec.num_heads * head_dim), "gate_up": (2 * inner, width)}
    sizes |= {"down": (width, inner), "lm_head": (spec.vocab_size, width)}
    # only sampled tokens need lm_head
    linears = [(name, count) for count in tokens for name in sizes if name != "lm_head" or count <= 64]
    shapes = [
        AttentionShape(
            n, context, new, spec.num_heads, spec.num_kv_heads, head_dim, 16, dtype, cache_dtype, shared, window
        )
        for n, context, new, shared, window in (
            *((*size, None) for size in _ATTENTION_SIZES),
            *((*_WINDOW_SIZE, 1, 0, window) for window in ((None, *windows) if windows else ())),
        )
        for cache_dtype in dict.fromkeys((dtype, kv_dtype or dtype))
    ]
    num_parts = len(linears) + len(tokens) + len(shapes)
    for place, (name, count) in enumerate(linears, 1):
        yield place / num_parts, _linear_row(name, *sizes[name], count, limits, dtype, quantization)
    for place, count in enumerate(tokens, 1 + len(linears)):
        yield place / num_parts, _norm_row(width, count, limits, dtype)
    for place, shape in enumerate(shapes, 1 + len(linears) + len(tokens)):
        for row in attention_rows([shape]):
            yield place / num_parts, _attention_row(row, dtype, attention_limits or limits)


def _attention_row(row: AttentionRow, dtype: torch.dtype, limits: Roofline) -> KernelRow:
    shape = row.shape
    size = f"{shape.num_sequences} x {shape.new} after {shape.context - shape.new}"
    size += f", {shape.shared} of them shared" if shape.shared else ""
    size += f", window {shape.window}" if shape.window else ""
    cache = "" if shape.kv_dtype == dtype else f", {dtype_name(shape.kv_dtype or dtype)} KV"
    return _row("attention", size, row.backend + cache, row.seconds, shape.kv_bytes, shape.flops, limits)


def _linear_row(
    name: str,
    out_features: int,
    in_features: int,
    tokens: int,
    limits: Roofline,
    dtype: torch.dtype,
    quantization: str | None,
) -> KernelRow:
    layer_format = FORMATS[quantization].lm_head if name == "lm_head" else FORMATS[quantization].of(name)
    num_bytes = layer_format.kept_bytes((out_features, in_features), dtype.itemsize, "cpu")
    copies = max(1, STREAM_BYTES // num_bytes)
    x = torch.randn(tokens, in_features).to(dtype)
    weight = torch.randn(out_features, in_features).to(dtype)
    try:
        layers: list[LinearLayer] = [
            layer_format.native_linear([{"weight": weight}], None, dtype) for _ in range(copies)
        ]
    except BackendError:
        layers = [Linear(weight.clone()) for _ in range(copies)]
    seconds = timed_seconds(lambda: [layer(x) for layer in layers]) * (1 / copies)
    flops = 2 * tokens * out_features * in_features
    size = f"{tokens} x {in_features} -> {out_features}"
    quantized = "" if layer_format is AS_STORED else f" {layer_format.name}"
    implementation = type(layers[0]).__name__ + quantized
    return _row(f"linear {name}", size, implementation, seconds, num_bytes, flops, limits)


def _norm_row(width: int, tokens: int, limits: Roofline, dtype: torch.dtype) -> KernelRow:
    x, weight = torch.randn(tokens, width).to(dtype), torch.ones(width, dtype=dtype)
    out = torch.empty_like(x)
    try:
        functions = load_library().functions
    except BackendError:
        seconds, name = timed_seconds(lambda: rms_norm(x, weight, 1e-6)), "torch"
    else:
        code, threads = DTYPE_CODES[dtype], torch.get_num_threads()
        addresses = (x.data_ptr(), weight.data_ptr())
        seconds, name = (
            timed_seconds(
                lambda: functions.decoder_norm_rows(code, *addresses, tokens, width, 1e-6, out.data_ptr(), threads)
            ),
            "native",
        )
    return _row("rms_norm", f"{tokens} x {width}", name, seconds, 2 * x.nbytes, 4 * x.numel(), limits)


def _row(
    kernel: str, size: str, implementation: str, spread: Spread, num_bytes: int, flops: int, limits: Roofline
) -> KernelRow:
    seconds = spread.min
    shortest = limits.seconds(num_bytes, flops)
    return KernelRow(
        kernel,
        size,
        implementation,
        seconds * 1e3,
        num_bytes / seconds / 1e9,
        flops / seconds / 1e9,
        shortest / seconds if shortest <= seconds else None,
        spread * 1e3,
    )
