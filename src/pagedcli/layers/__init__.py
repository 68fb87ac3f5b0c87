"""The steps of a decoder layer between its attention calls: one function each, one implementation per device. Modules
that need torch or Triton are imported at their first use.
"""

from typing import TYPE_CHECKING

from pagedcli.later import modules_of

if TYPE_CHECKING:
    from pagedcli.layers import (
        linear,
        native_linear,
        quantized,
        triton_experts,
        triton_products,
        triton_recurrent,
        triton_sampling,
        triton_stream,
    )
else:
    __getattr__ = modules_of(__name__)

__all__ = [
    "linear",
    "native_linear",
    "quantized",
    "triton_experts",
    "triton_products",
    "triton_recurrent",
    "triton_sampling",
    "triton_stream",
]
