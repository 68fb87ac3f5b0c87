"""Launches Triton kernels in less time of the host than triton takes. Used by triton_paged, and for its sizes by
the kernels of layers; constants are a kernel's last arguments. Imported only where triton is installed.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
from torch import Tensor

Grid = tuple[int, int, int]


class Launcher:
    """Launches kernels on one device. triton looks up the compiled kernel by all arguments in each launch, in 20 us of
    the host; here a launch that is known skips that.
    """

    __slots__ = ("_known", "_specialized")

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], Any]] = {}
        self._specialized: dict[Any, tuple[tuple[int, bool], ...]] = {}

    def __call__(
        self, kernel: Any, grid: Grid, arguments: tuple[Any, ...], constants: Mapping[str, Any], **options: int
    ) -> Any:
        """Launch a kernel. Returns it as compiled, None where triton interprets. `constants`: its compile-time values,
        the same object in every launch that has them.

        Types of tensors must not change from launch to launch.
        """
        key = kernel, id(constants), *self._specialization(kernel, arguments)
        known = self._known.get(key)
        if known is not None:
            compiled, last, _ = known
            compiled[grid](*arguments, *last)
            return compiled
        compiled = kernel[grid](*arguments, **constants, **options)
        if compiled is not None:
            last = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
            self._known[key] = compiled, last, constants  # keeps the id
        return compiled

    def _specialization(self, kernel: Any, arguments: tuple[Any, ...]) -> list[int]:
        """What triton compiles kernels apart by: which pointers and integers are multiples of 16, which integers 1."""
        places = self._specialized.get(kernel)
        if places is None:
            params = kernel.params if hasattr(kernel, "params") else ()  # an interpreted one has none
            found = [
                (place, param.do_not_specialize_on_alignment)
                for place, param in enumerate(params[: len(arguments)])
                if not param.do_not_specialize
            ]
            places = self._specialized[kernel] = tuple(found)
        key = []
        for place, any_alignment in places:
            value = arguments[place]
            if isinstance(value, Tensor):
                key.append(0 if any_alignment else value.data_ptr() % 16)
            elif isinstance(value, int):
                key.append(value if value == 1 or value >= 2**31 else -2 if any_alignment or value % 16 else -1)
        return key


_REGISTERS = 2**16  # registers of a multiprocessor, from compute capability 8.0 to 12.1
_RESERVED_SHARED = 1024  # bytes that CUDA takes for each program


def programs_per_processor(compiled: Any, properties: Any) -> int:
    """How many programs of a kernel a multiprocessor runs side by side. `properties`: torch's, of the device."""
    threads = 32 * compiled.metadata.num_warps
    by_registers = _REGISTERS // (max(1, -(-compiled.n_regs // 8)) * 8 * threads)
    by_shared = properties.shared_memory_per_multiprocessor // (compiled.metadata.shared + _RESERVED_SHARED)
    by_threads = properties.max_threads_per_multi_processor // threads
    return max(1, min(int(by_registers), int(by_shared), int(by_threads)))


def starts_early(device: torch.device) -> bool:
    """Whether a kernel may start before the one ahead of it has ended, up to its gdc_wait: programmatic dependent
    launch, from compute capability 9.0 on."""
    on_gpu = device.type == "cuda" and not triton.knobs.runtime.interpret
    return on_gpu and torch.cuda.get_device_capability(device) >= (9, 0)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
