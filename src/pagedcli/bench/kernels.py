"""Times of the parts of a step, each compared with two limits: that of the machine, which is memory bandwidth or the
peak of its instructions, and the same product by torch, the fastest library here."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import torch

from pagedcli.attention.base import AttentionBackend, PagedBatch, dtype_name
from pagedcli.attention.layer import AttentionLayer
from pagedcli.attention.select import select_backend
from pagedcli.bench.rates import timed_seconds
from pagedcli.bench.spread import Spread
from pagedcli.core.budget import block_bytes, blocks_for
from pagedcli.errors import BackendError
from pagedcli.layers.basic import rms_norm
from pagedcli.layers.linear import Linear, LinearLayer
from pagedcli.models.formats import AS_STORED, FORMATS
from pagedcli.models.mixers.attention import Attention
from pagedcli.models.mixers.latent_attention import LatentAttention
from pagedcli.models.spec import ModelSpec
from pagedcli.native import load_library
from pagedcli.native.structs import DTYPE_CODES
from pagedcli.native.system import ask_for_huge_pages
from pagedcli.planning.cards import Roofline
from pagedcli.records import Share, count

_SLOW_S = 0.05  # a library's call beyond this is not repeated if our kernel is many times as fast
STREAM_BYTES = 1 << 27  # weights, or K and V, of several layers: more than any CPU cache


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One measurement: equal sequences of `context` tokens, the last `new` of which are new."""

    num_sequences: int
    context: int  # tokens in the cache after the step
    new: int  # tokens of the step, 1 for decode
    shared: int  # leading tokens in blocks that all sequences have in common, a multiple of block_size
    window: int | None  # tokens that a query sees; only with one new token and none shared
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype  # type of the cache
    value_dim: int | None = None  # see AttentionLayer
    block_size: int = 16

    @property
    def num_seen_tokens(self) -> int:
        """Distinct tokens in the cache that a call must read."""
        if self.window is not None:
            return self.num_sequences * min(self.window, self.context)
        return self.shared + self.num_sequences * (self.context - self.shared)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that one call must read."""
        both = block_bytes(
            num_layers=1,
            block_size=self.num_seen_tokens,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            kv_dtype=dtype_name(self.kv_dtype),
        )
        return both if self.value_dim is None else both // 2

    @property
    def flops(self) -> int:
        """Operations of both products under the causal mask; a multiply-add counts as two."""
        seen = self.new * (2 * self.context - self.new + 1) // 2
        if self.window is not None:
            seen = min(self.window, self.context)
        sizes = self.head_dim + (self.value_dim or self.head_dim)
        return 2 * self.num_sequences * seen * self.num_heads * sizes


def _attend_seconds(backend: AttentionBackend, shape: AttentionShape, layer: AttentionLayer) -> Spread:
    """Blocks are in random order, as after long use of a cache."""
    batch, num_blocks = _batch(shape)
    cache_shape = backend.kv_shape(num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
    num_layers = max(1, blocks_for(STREAM_BYTES, replace(shape, window=None).kv_bytes))
    num_kept = 2 if shape.value_dim is None else 1
    cache = torch.empty((num_layers, num_kept, *cache_shape), dtype=shape.kv_dtype)
    ask_for_huge_pages(cache)  # as the engine does
    caches = [(of_layer[0], of_layer[-1]) for of_layer in cache]
    num_slots = num_blocks * shape.block_size
    filling = torch.randn(num_slots, shape.num_kv_heads, shape.head_dim).to(shape.dtype)
    slots = torch.arange(num_slots, dtype=torch.int32)
    for kv in caches:
        backend.write(filling, filling, kv, slots, layer)
    q = torch.randn(shape.num_sequences * shape.new, shape.num_heads, shape.head_dim).to(shape.dtype)
    backend.prepare(batch)

    def step() -> None:
        for kv in caches:
            backend.attend(q, kv, batch, layer)

    return timed_seconds(step) * (1 / num_layers)


def _batch(shape: AttentionShape) -> tuple[PagedBatch, int]:
    width = blocks_for(shape.context, shape.block_size)
    common = shape.shared // shape.block_size
    num_blocks = common + shape.num_sequences * (width - common)
    order = torch.randperm(num_blocks).to(torch.int32)
    own = order[common:].view(shape.num_sequences, width - common)
    table = torch.cat([order[:common].expand(shape.num_sequences, -1), own], dim=1)
    starts = [b * shape.new for b in range(shape.num_sequences + 1)]
    totals = [shape.context] * shape.num_sequences
    batch = PagedBatch(
        cu_q=torch.tensor(starts, dtype=torch.int32),
        num_tokens=torch.tensor(totals, dtype=torch.int32),
        block_table=table,
        slots=torch.full((starts[-1],), -1, dtype=torch.int32),
        max_new=shape.new,
        max_total=shape.context,
        cu_q_host=starts,
        num_tokens_host=totals,
        window=shape.window,
    )
    return batch, num_blocks


# sequences, tokens of each, new ones, those that all share
_ATTENTION_SIZES = (
    (1, 2048, 1, 0),
    (32, 128, 1, 0),
    (32, 512, 1, 0),
    (8, 2200, 1, 0),
    (32, 576, 1, 512),
    (1, 512, 512, 0),
    (1, 2048, 2048, 0),
)
_WINDOW_SIZE = (8, 16_384, 1, 0)  # decoding with and without a window


def _thousandths(value: float) -> str:
    return f"{value:,.3f}"


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One kernel at one size. Rates are those of the fastest call: other load on the machine only adds time."""

    kernel: str
    size: str
    implementation: str
    ms: Annotated[float, _thousandths]
    gb_per_s: Annotated[float, "GB/s"]
    gflop_per_s: Annotated[float, "GFLOP/s", count]
    # shortest possible time over the time; None above 1
    share: Annotated[Share | None, "of the limit"]
    # the same product by torch; None if it has none, or one many times as slow
    library_ms: Annotated[float | None, "torch ms", _thousandths]
    nearer: Annotated[str, "nearer limit"]  # "memory", "instructions" or "library": the one nearer to the time
    spread_ms: Spread


@dataclass(frozen=True, slots=True)
class CallSpread:
    """The calls of a kernel."""

    kernel: str
    size: str
    implementation: str
    min: Annotated[float, "min ms", _thousandths]
    median: Annotated[float, "median ms", _thousandths]
    max: Annotated[float, "max ms", _thousandths]

    @classmethod
    def of(cls, row: KernelRow) -> "CallSpread":
        spread = row.spread_ms
        return cls(row.kernel, row.size, row.implementation, spread.min, spread.median, spread.max)


def kernel_rows(
    spec: ModelSpec,
    limits: Roofline,
    tokens: Sequence[int],
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    quantization: str | None,
    windows: Sequence[int],
    attention_limits: Roofline,
) -> Iterator[tuple[float, KernelRow]]:
    """Linear layers and norms of a model at each number of tokens, and attention at a few lengths. On the CPU. Each
    with the share of the measurements that is done.

    `kv_dtype`: of the KV cache; if it differs from `dtype`, attention is measured with both. `windows`: in tokens;
    decoding of long sequences is measured with each, and without one. `attention_limits`: of the dtype that attention
    computes in, if `limits` are those of quantized linear layers.
    """
    width, inner, head_dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    value_dim = spec.attention_layers[0].value_dim
    sizes = _attention_sizes(spec.attentions[0], width) | {"gate_up": (2 * inner, width)}
    sizes |= {"down": (width, inner), "lm_head": (spec.vocab_size, width)}
    whole: list[tuple[int, int, int, int, int | None]] = [(*size, None) for size in _ATTENTION_SIZES]
    decoding = [(*_WINDOW_SIZE, window) for window in (None, *windows)] if windows else []
    calls: list[Callable[[], KernelRow]] = [
        partial(_linear_row, name, *size, count, limits, dtype, quantization)
        for count in tokens
        for name, size in sizes.items()
        if name != "lm_head" or count <= 64  # only sampled tokens need it
    ]
    calls += [partial(_norm_row, width, count, limits, dtype) for count in tokens]
    calls += [
        partial(
            _attention_row,
            AttentionShape(*length, spec.num_heads, spec.num_kv_heads, head_dim, dtype, cache_dtype, value_dim),
            attention_limits,
        )
        for length in [*whole, *decoding]
        for cache_dtype in dict.fromkeys((dtype, kv_dtype))
    ]
    for place, call in enumerate(calls, 1):
        yield place / len(calls), call()


def _attention_sizes(mixer: Attention, width: int) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the linear layers around attention."""
    match mixer:
        case LatentAttention(query_rank=rank):
            latents = {"latents": ((rank or mixer.query_size) + mixer.head_dim, width)}
            queries = {} if rank is None else {"queries": (mixer.query_size, rank)}
            return latents | queries | {"out": (width, mixer.num_heads * mixer.value_dim)}
    qkv = (mixer.num_heads + 2 * mixer.num_kv_heads) * mixer.head_dim
    return {"qkv": (qkv, width), "out": (width, mixer.num_heads * mixer.head_dim)}


def _attention_row(shape: AttentionShape, limits: Roofline) -> KernelRow:
    layer = AttentionLayer(scale=shape.head_dim**-0.5, window=shape.window, value_dim=shape.value_dim)
    backend = select_backend(
        "auto",
        device=torch.device("cpu"),
        dtype=shape.dtype,
        block_size=shape.block_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        kv_dtype=shape.kv_dtype,
        layers=(layer,),
    ).backend
    seconds = _attend_seconds(backend, shape, layer)
    size = f"{shape.num_sequences} x {shape.new} after {shape.context - shape.new}"
    size += f", {shape.shared} of them shared" if shape.shared else ""
    size += f", window {shape.window}" if shape.window else ""
    kernel = "attention" if shape.value_dim is None else f"attention, latents of {shape.head_dim}"
    name = backend.name + ("" if shape.kv_dtype == shape.dtype else f", {dtype_name(shape.kv_dtype)} KV")
    library_s = _library_attention_seconds(shape, seconds.min)
    return _row(kernel, size, name, seconds, shape.kv_bytes, shape.flops, limits, library_s)


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
    weights = [weight.clone() for _ in range(max(1, STREAM_BYTES // weight.nbytes))]
    library_s = _library_seconds(torch.nn.functional.linear, [(x, each) for each in weights], seconds.min)
    return _row(f"linear {name}", size, implementation, seconds, num_bytes, flops, limits, library_s)


def _norm_row(width: int, tokens: int, limits: Roofline, dtype: torch.dtype) -> KernelRow:
    x, weight = torch.randn(tokens, width).to(dtype), torch.ones(width, dtype=dtype)
    out = torch.empty_like(x)
    try:
        functions = load_library().functions
    except BackendError:
        seconds, name = timed_seconds(lambda: rms_norm(x, weight, 1e-6)), "torch"
    else:
        code, threads = DTYPE_CODES[dtype], torch.get_num_threads()
        arguments = (code, x.data_ptr(), weight.data_ptr(), tokens, width, 1e-6, out.data_ptr(), threads)
        seconds, name = timed_seconds(lambda: functions.decoder_norm_rows(*arguments)), "native"
    return _row("rms_norm", f"{tokens} x {width}", name, seconds, 2 * x.nbytes, 4 * x.numel(), limits)


def _library_attention_seconds(shape: AttentionShape, own_seconds: float) -> float | None:
    """None for latents, and other steps than those of whole prompts, for which torch has a causal kernel."""
    if shape.new < shape.context or shape.shared or shape.value_dim is not None or shape.kv_dtype != shape.dtype:
        return None
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    q, k, v = (torch.randn(shape.num_sequences, h, shape.new, shape.head_dim).to(shape.dtype) for h in heads)
    attention = torch.nn.functional.scaled_dot_product_attention
    return _library_seconds(lambda: attention(q, k, v, is_causal=True, enable_gqa=True), [()], own_seconds)


def _library_seconds(
    call: Callable[..., object], inputs: Sequence[tuple[object, ...]], own_seconds: float
) -> float | None:
    """The shortest of some calls, which take the inputs in turn; None if one takes 20 times as long as our kernel."""
    call(*inputs[0])  # the first call prepares
    started = time.perf_counter()
    call(*inputs[0])
    if time.perf_counter() - started > max(20 * own_seconds, _SLOW_S):
        return None
    turns = itertools.cycle(inputs)
    return timed_seconds(lambda: call(*next(turns))).min


def nearer_limit(seconds: float, limits: Roofline, num_bytes: int, flops: int, library_s: float | None) -> str:
    """Which limit's time has the smaller ratio to `seconds`, either way."""
    reads = num_bytes / limits.read_bytes_per_s > flops / limits.flop_per_s
    times = {"memory" if reads else "instructions": limits.seconds(num_bytes, flops)}
    if library_s is not None:
        times["library"] = library_s
    return min(times, key=lambda name: abs(math.log(times[name] / seconds)))


def _row(
    kernel: str,
    size: str,
    implementation: str,
    spread: Spread,
    num_bytes: int,
    flops: int,
    limits: Roofline,
    library_s: float | None = None,
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
        None if library_s is None else library_s * 1e3,
        nearer_limit(seconds, limits, num_bytes, flops, library_s),
        spread * 1e3,
    )
