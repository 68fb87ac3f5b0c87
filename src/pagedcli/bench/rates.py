"""Peak rates of this machine: read bandwidth, multiply-adds in registers, and a large matrix product.

Every figure is the best of many short measurements: other load on the machine only lowers them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from pagedcli import layers, native
from pagedcli.errors import BackendError
from pagedcli.later import torch
from pagedcli.native import paths
from pagedcli.native.system import empty_in_huge_pages
from pagedcli.planning.cards import Roofline

READ_BYTES = 1 << 28  # far larger than a CPU cache
GEMM_TOKENS, GEMM_OUT, GEMM_IN = 1024, 4096, 1024


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Rates on `threads` threads; bytes and operations per second, two operations per multiply-add."""

    threads: int
    read_bytes_per_s: float
    flop_per_s: float  # rate of `instructions` in registers; without the native library that of a large matrix product
    gemm_flop_per_s: float  # rate of a product of 1024 tokens with a 4096 x 1024 weight
    instructions: str  # the fastest that the processor has for the type, whichever the kernels use

    def best(self, other: "MachineRates") -> "MachineRates":
        """The higher of both rates: other load on the machine only lowers them."""
        rates = ("read_bytes_per_s", "flop_per_s", "gemm_flop_per_s")
        return replace(self, **{name: max(getattr(self, name), getattr(other, name)) for name in rates})

    @property
    def limits(self) -> Roofline:
        """The roofline, with the higher arithmetic rate: either measurement may have been disturbed."""
        return Roofline(self.read_bytes_per_s, max(self.flop_per_s, self.gemm_flop_per_s))


def measure_rates(dtype: "torch.dtype", *, int8: bool = False) -> MachineRates:
    """Measure for the compute dtype, or for int8 multiply-adds. Takes about a second."""
    threads = torch.get_num_threads()
    data = empty_in_huge_pages(READ_BYTES // 4, torch.float32).fill_(1)
    x, weight = (torch.randn(n, GEMM_IN).to(dtype) for n in (GEMM_TOKENS, GEMM_OUT))
    gemm_flops = 2 * GEMM_TOKENS * GEMM_OUT * GEMM_IN
    try:
        library = native.load_library()
    except BackendError:
        gemm = gemm_flops / best_seconds(lambda: torch.nn.functional.linear(x, weight))
        return MachineRates(threads, READ_BYTES / best_seconds(data.sum), gemm, gemm, "torch")
    read = library.functions.native_read_all
    linear = layers.native_linear.NativeLinear(library, weight, quantization="int8" if int8 else None)
    candidates = paths.INT8_PATHS if int8 else paths.BF16_PATHS if dtype == torch.bfloat16 else (paths.Path.FMA,)
    fastest = paths.measure_peaks(library.functions, candidates, threads)[0]
    return MachineRates(
        threads,
        READ_BYTES / best_seconds(lambda: read(data.data_ptr(), data.numel(), threads)),
        fastest.flop_per_s,
        gemm_flops / best_seconds(lambda: linear(x)),
        paths.NAMES[fastest.path],
    )


def best_seconds(call: Callable[[], object]) -> float:
    """The shortest of ten timed calls, or of those of 0.3 seconds, after an untimed one."""
    call()
    seconds: list[float] = []
    started = time.perf_counter()
    while len(seconds) < 10 or time.perf_counter() - started < 0.3:
        before = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - before)
    return min(seconds)
