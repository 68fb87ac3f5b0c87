"""Launches Triton kernels in less time of the host than triton takes. Used by triton_paged; constants are a kernel's
last arguments. Imported only where triton is installed.
"""

from collections.abc import Mapping
from typing import Any

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
    ) -> None:
        """Launch a kernel. `constants`: its compile-time values, the same object in every launch that has them.

        Types of tensors must not change from launch to launch.
        """
        key = kernel, id(constants), *self._specialization(kernel, arguments)
        known = self._known.get(key)
        if known is not None:
            compiled, last, _ = known
            compiled[grid](*arguments, *last)
            return
        compiled = kernel[grid](*arguments, **constants, **options)
        if compiled is not None:  # None where triton interprets
            last = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
            self._known[key] = compiled, last, constants  # keeps the id

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
