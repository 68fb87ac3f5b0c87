"""Linear layers on a CPU by the project's own C++ kernels: weights packed once, the unpacked copy not kept.

Near the arithmetic peak from 16 tokens on and near memory bandwidth below; see native/linear.h. A token's result does
not depend, in any bit, on the other tokens of the batch.
"""

import ctypes
from typing import Literal

import torch
from torch import Tensor

from pagedcli.errors import BackendError
from pagedcli.native import NativeLibrary
from pagedcli.native.memory import empty_in_huge_pages
from pagedcli.native.structs import ADD, DTYPE_CODES, GATE, INT4, INT8, STORE, LinearStruct, bind


class NativeLinear:
    """y = x W^T + b; with `gated`, silu(y of the first half of W's rows) * (y of the second half)."""

    __slots__ = ("_functions", "_tensors", "dtype", "nbytes", "out_features", "struct")

    def __init__(
        self,
        library: NativeLibrary,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        gated: bool = False,
        quantization: Literal["int8", "int4"] | None = None,
    ) -> None:
        """Pack `weight` [out, in]; quantized, to int8 with a scale per output feature, or to 4 bits with a scale and a
        minimum per 32 inputs, chosen for least squared error. Neither tensor is kept.

        Raises: BackendError for a dtype or shape that the kernels do not know.
        """
        rows, columns = weight.shape
        if weight.dtype not in DTYPE_CODES or columns % 2 or (gated and rows % 2):
            raise BackendError(f"no native kernel for a {weight.dtype} weight of shape {rows} x {columns}")
        self._functions = bind(library.functions)
        self.dtype = weight.dtype
        self.out_features = rows // 2 if gated else rows
        kind = DTYPE_CODES[weight.dtype] if quantization is None else {"int8": INT8, "int4": INT4}[quantization]
        self.struct = LinearStruct(kind=kind, rows=rows, columns=columns, gated=gated)
        padded_rows = self._functions.linear_padded_rows(ctypes.byref(self.struct))
        wide_bias = bias.float().contiguous() if bias is not None else None
        pack = {INT8: self._packed_int8, INT4: self._packed_int4}.get(kind, self._packed)
        tensors = pack(weight.contiguous(), padded_rows)
        self._tensors = (*tensors, wide_bias)  # the struct points into them
        self.struct.weight = tensors[0].data_ptr()
        self.struct.bias = wide_bias.data_ptr() if wide_bias is not None else None
        self.nbytes = sum(tensor.nbytes for tensor in tensors)  # as packed

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: x [T, in] -> [T, out], or [T, out / 2] when gated."""
        out = torch.empty((x.shape[0], self.out_features), dtype=self.dtype)
        self._run(x, out, GATE if self.struct.gated else STORE)
        return out

    def add_to(self, out: Tensor, x: Tensor) -> Tensor:
        """out + y, in out. Shapes: out [T, out], x [T, in]."""
        self._run(x, out, ADD)
        return out

    def weight_rows(self, rows: Tensor) -> Tensor:
        """Rows of the weight as they were before packing. Shapes: rows [R] int64 -> [R, in]. Not when quantized."""
        assert self.struct.kind not in (INT8, INT4), "a quantized weight has no rows as they were"
        out = torch.empty((rows.shape[0], self.struct.columns), dtype=self.dtype)
        rows, threads = rows.contiguous(), torch.get_num_threads()
        if self._functions.linear_unpack_rows(
            ctypes.byref(self.struct), rows.data_ptr(), rows.shape[0], out.data_ptr(), threads
        ):
            raise IndexError(f"a row is not one of the {self.struct.rows} of this weight")
        return out

    def _run(self, x: Tensor, out: Tensor, epilogue: int) -> None:
        x = x.contiguous()
        if x.dtype != self.dtype or out.dtype != self.dtype or x.shape[1] != self.struct.columns:
            raise BackendError(f"x is {x.dtype} {tuple(x.shape)}, not {self.dtype} [T, {self.struct.columns}]")
        if out.shape != (x.shape[0], self.out_features) or not out.is_contiguous():
            raise BackendError(f"out is {tuple(out.shape)}, not [{x.shape[0]}, {self.out_features}]")
        self._functions.linear_run(
            ctypes.byref(self.struct),
            DTYPE_CODES[self.dtype],
            x.data_ptr(),
            x.shape[0],
            out.data_ptr(),
            epilogue,
            torch.get_num_threads(),
        )

    def _packed(self, weight: Tensor, padded_rows: int) -> tuple[Tensor, ...]:
        packed = empty_in_huge_pages(padded_rows * weight.shape[1], weight.dtype)
        self._functions.linear_pack(
            ctypes.byref(self.struct), weight.data_ptr(), packed.data_ptr(), torch.get_num_threads()
        )
        return (packed,)

    def _packed_int8(self, weight: Tensor, padded_rows: int) -> tuple[Tensor, ...]:
        packed = empty_in_huge_pages(padded_rows * (-(-weight.shape[1] // 4) * 4), torch.int8)
        scales = torch.empty(padded_rows, dtype=torch.float32)
        sums = torch.empty(padded_rows, dtype=torch.int32)
        addresses = (tensor.data_ptr() for tensor in (weight, packed, scales, sums))
        self._functions.linear_pack_int8(
            ctypes.byref(self.struct), DTYPE_CODES[weight.dtype], *addresses, torch.get_num_threads()
        )
        self.struct.scales, self.struct.sums = scales.data_ptr(), sums.data_ptr()
        return packed, scales, sums

    def _packed_int4(self, weight: Tensor, padded_rows: int) -> tuple[Tensor, ...]:
        packed = empty_in_huge_pages(self._functions.linear_int4_bytes(ctypes.byref(self.struct)), torch.uint8)
        scales, mins = (torch.empty(padded_rows, dtype=torch.float32) for _ in range(2))
        addresses = (tensor.data_ptr() for tensor in (weight, packed, scales, mins))
        self._functions.linear_pack_int4(
            ctypes.byref(self.struct), DTYPE_CODES[weight.dtype], *addresses, torch.get_num_threads()
        )
        self.struct.scales, self.struct.mins = scales.data_ptr(), mins.data_ptr()
        return packed, scales, mins
