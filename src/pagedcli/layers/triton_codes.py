"""Linear layers of 4- and 8-bit weights on a GPU: the numbers stay packed in memory and become weights in the product.

Imported only where triton is installed. Its twin is QuantizedWeight.dequantized and a torch product.
"""

from typing import Any

import torch
from torch import Tensor

from pagedcli.layers import triton_kernels as kernels
from pagedcli.layers.quantized import QuantizedWeight


class CodesLinear:
    """y = x W^T + b of quantized weights. Keeps its own copy of them."""

    __slots__ = ("_bias", "_group_size", "_order", "_scales", "_shape", "_words", "_zeros", "nbytes")

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None) -> None:
        """Raises: ModelError if the groups of act-order weights are of different sizes."""
        weight, self._order = weight.in_order
        self._shape = (*weight.codes.shape, weight.bits)
        self._group_size, self._bias = weight.group_size, bias
        self._words = _words(weight.codes.T, weight.bits)
        self._scales, self._zeros = weight.scales.T.contiguous(), weight.zeros.T.contiguous()
        self.nbytes = self._words.nbytes + self._scales.nbytes + self._zeros.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: x [T, in] -> [T, out], in the dtype of x."""
        x = x.contiguous() if self._order is None else x[:, self._order]
        (num_out, num_in, bits), num_tokens = self._shape, x.shape[0]
        out = x.new_empty((num_tokens, num_out))
        if num_tokens:
            constants = launch_constants(num_tokens, num_out, num_in, bits, self._group_size)
            grid = (-(-num_out // constants["BLOCK_N"]), -(-num_tokens // constants["BLOCK_T"]))
            kernels.codes_linear_kernel[grid](
                x,
                self._words,
                self._scales,
                self._zeros,
                x if self._bias is None else self._bias,
                out,
                num_tokens,
                **constants,
                BIAS=self._bias is not None,
                num_warps=4,
                num_stages=3,
            )
        return out


def launch_constants(num_tokens: int, num_out: int, num_in: int, bits: int, group_size: int) -> dict[str, Any]:
    """Compile-time values of codes_linear_kernel: few tokens in narrow blocks, so that all processors have work."""
    block_t = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64
    block_k = next(size for size in (64, 32) if group_size % size == 0 or size == 32)
    blocks = {"BLOCK_T": block_t, "BLOCK_N": 32 if block_t == 16 else 64, "BLOCK_K": block_k}
    return {"N": num_out, "K": num_in, "GROUP": group_size, "BITS": bits, **blocks}


def _words(codes: Tensor, bits: int) -> Tensor:
    """int32 words of codes along the first dimension. Shapes: codes uint8 [K, N] -> [ceil(K * bits / 32), N]."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, 0, 0, -len(codes) % per_word)).view(-1, per_word, codes.shape[1])
    words = torch.zeros(padded[:, 0].shape, dtype=torch.int32, device=codes.device)
    for i in range(per_word):
        words |= padded[:, i].int() << i * bits
    return words
