"""Linear layers on a CPU by the project's own C++ kernels: weights packed once, the unpacked copy not kept.

Near the arithmetic peak from 16 tokens on and near memory bandwidth below; see native/linear.h. A token's result does
not depend, in any bit, on the other tokens of the batch.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import astuple

import torch
from torch import Tensor

from pagedcli.errors import BackendError
from pagedcli.layers.quantized import E2M1, BlockCodes, CodedWeight, Weight, chunk_columns
from pagedcli.native import NativeLibrary, structs
from pagedcli.native.system import empty_in_huge_pages


class NativeLinear:
    """y = x W^T + b; with `gated`, silu(y of the first half of W's rows) * (y of the second half)."""

    __slots__ = ("_functions", "_parts", "dtype", "out_features", "struct", "tensors")

    def __init__(
        self,
        library: NativeLibrary,
        weight: Weight,
        bias: Tensor | None = None,
        *,
        gated: bool = False,
        quantization: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Pack `weight` [out, in]. `quantization`: a name of structs.PACKINGS, how floating-point weights are rounded.
        Weights that are quantized already keep their numbers; `dtype` is that of the activations. Neither tensor is
        kept.

        Raises: BackendError for a dtype or shape that the kernels do not support.
        """
        rows, columns = weight.shape
        dtype = weight.dtype if isinstance(weight, Tensor) else dtype or weight.codes.dtype
        if dtype not in structs.DTYPE_CODES or columns % 2 or (gated and rows % 2):
            raise BackendError(f"no native kernel for a {dtype} weight of shape {rows} x {columns}")
        self._functions = structs.bind(library.functions)
        self.dtype = dtype
        self.out_features = rows // 2 if gated else rows
        self.struct = structs.LinearStruct(rows=rows, columns=columns, gated=gated)
        self._parts: list[NativeLinear] = []  # see side_by_side
        if isinstance(weight, CodedWeight):
            packed = self._pack_codes(weight)
        else:
            packed = self._pack(weight.contiguous(), quantization)
        if bias is not None:
            packed["bias"] = bias.float().contiguous()
        self._point_to(packed)
        num_panels = self._functions.linear_num_panels(ctypes.byref(self.struct))
        self.struct.panel_bytes = packed["weight"].nbytes // num_panels

    def __call__(self, x: Tensor, *, in_float32: bool = False) -> Tensor:
        """Shapes: x [T, in] -> [T, out], or [T, out / 2] when gated; `in_float32`: the sums as they are, not rounded to
        the dtype of x."""
        x = x.contiguous()
        if x.dtype != self.dtype or x.shape[1] != self.struct.columns:
            raise BackendError(f"x is {x.dtype} {tuple(x.shape)}, not {self.dtype} [T, {self.struct.columns}]")
        out = torch.empty((x.shape[0], self.out_features), dtype=torch.float32 if in_float32 else self.dtype)
        store = structs.STORE_FLOAT if in_float32 else structs.STORE
        self._functions.linear_run(
            ctypes.byref(self.struct),
            structs.DTYPE_CODES[self.dtype],
            x.data_ptr(),
            x.shape[0],
            out.data_ptr(),
            structs.GATE_SILU if self.struct.gated else store,
            torch.get_num_threads(),
        )
        return out

    @classmethod
    def side_by_side(cls, parts: "list[NativeLinear]") -> "NativeLinear":
        """One layer with the output features of all, in their order. Changes: parts, which become its parts."""
        whole, out_features = parts[0], sum(part.out_features for part in parts)
        for part, following in zip(parts, [*parts[1:], None], strict=True):
            part.struct.out_stride = out_features
            part.struct.next = None if following is None else ctypes.addressof(following.struct)
        whole.out_features, whole._parts = out_features, parts[1:]
        return whole

    @property
    def parts(self) -> "list[NativeLinear]":
        """The layers that side_by_side has made this one of; only itself otherwise."""
        return [self, *self._parts]

    @property
    def gated(self) -> bool:
        return bool(self.struct.gated)

    @property
    def nbytes(self) -> int:
        """Size of the packed form, without the bias."""
        return sum(tensor.nbytes for part in self.parts for name, tensor in part.tensors.items() if name != "bias")

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weight alone."""
        return self.tensors["weight"].nbytes

    def move_weight(self, room: Tensor) -> None:
        """Keep the packed weight in `room` [packed_bytes] uint8 from now on."""
        self._point_to({**self.tensors, "weight": room.copy_(self.tensors["weight"].view(torch.uint8))})

    @classmethod
    def of_packed(
        cls, library: NativeLibrary, numbers: Mapping[str, int], tensors: dict[str, Tensor], dtype: torch.dtype
    ) -> "NativeLinear":
        """A layer that was packed before, from its `numbers` and tensors."""
        linear = object.__new__(cls)
        linear._functions, linear.dtype, linear._parts = structs.bind(library.functions), dtype, []
        linear.struct = structs.LinearStruct(**numbers)
        linear.out_features = linear.struct.rows // 2 if linear.struct.gated else linear.struct.rows
        linear._point_to(tensors)
        return linear

    @property
    def numbers(self) -> dict[str, int]:
        """What of_packed needs besides the tensors."""
        return {name: getattr(self.struct, name) for name in structs.LINEAR_NUMBERS}

    def _point_to(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors  # names of the struct's pointers -> tensors
        for name, tensor in tensors.items():
            setattr(self.struct, name, tensor.data_ptr())

    def weight_rows(self, rows: Tensor) -> Tensor:
        """Rows of the weight as they were before packing, codes as numbers. Shapes: rows [R] int64 -> [R, in]. Not when
        rounded here."""
        assert self.struct.kind not in structs.PACKINGS.values(), "a rounded weight has no rows as they were"
        out = torch.empty((rows.shape[0], self.struct.columns), dtype=self.dtype)
        rows, struct, threads = rows.contiguous(), ctypes.byref(self.struct), torch.get_num_threads()
        arguments = rows.data_ptr(), rows.shape[0], out.data_ptr(), threads
        if self.struct.kind < structs.INT8:
            failed = self._functions.linear_unpack_rows(struct, *arguments)
        else:
            failed = self._functions.linear_widen_rows(struct, structs.DTYPE_CODES[self.dtype], *arguments)
        if failed:
            raise IndexError(f"a row is not one of the {self.struct.rows} of this weight")
        return out

    def _pack(self, weight: Tensor, quantization: str | None) -> dict[str, Tensor]:
        """The packed weight, and what the struct needs with it."""
        if quantization is not None:
            tensors = self._empty_with_scales(structs.PACKINGS[quantization])
            self._call(f"linear_pack_{quantization}", structs.DTYPE_CODES[weight.dtype], weight, *tensors.values())
            return tensors
        self.struct.kind = structs.DTYPE_CODES[weight.dtype]
        packed = empty_in_huge_pages(self._padded_rows() * weight.shape[1], weight.dtype)
        self._call("linear_pack", weight, packed)
        return {"weight": packed}

    def _pack_codes(self, weight: CodedWeight) -> dict[str, Tensor]:
        """A weight of codes: 8 bits symmetric per output feature as int8, everything else in chunks of its groups.

        With groups of 64 inputs a chunk is 64 inputs, and a panel of P output features, for example P = 32, is

            [P scales][P zeros][P x 32 codes][P x 32 codes]  [P scales][P zeros][P x 32 codes][P x 32 codes]  ...
            |-------------- inputs 0 ... 63 --------------|  |------------- inputs 64 ... 127 -------------|

        A group that is larger than a chunk repeats its scales and zeros in each of its chunks. With act-order, inputs
        are sorted by group first, and `order` [in] says which activation belongs to which input.
        """
        columns, num_groups = weight.shape[1], weight.scales.shape[1]
        zeros = weight.zeros if isinstance(weight.zeros, Tensor) else None
        if weight.bits == 8 and num_groups == 1 and zeros is not None and bool((zeros == 128).all()):
            tensors = self._empty_with_scales(structs.INT8)
            codes = weight.codes.contiguous()
            self._call("linear_pack_int8_codes", codes, weight.scales.float().contiguous(), *tensors.values())
            return tensors
        weight, order = weight.in_order
        source, struct = _codes(weight.source), self.struct
        struct.kind = {4: structs.CODES4, 5: structs.CODES5, 6: structs.CODES6, 8: structs.CODES8}[weight.bits]
        if weight.levels:
            struct.kind = structs.LEVELS4 if weight.levels == E2M1 else structs.IQ4
        struct.zero = weight.zeros if isinstance(weight.zeros, int) and weight.minima is None else -1
        if weight.steps is not None or weight.minima is not None:
            return {"weight": self._pack_grouped(source, weight)}
        kept_dtype = weight.scales.dtype
        if kept_dtype not in structs.DTYPE_CODES or (weight.bits == 8 and zeros is not None):
            kept_dtype = torch.float32
        struct.scale_type = structs.DTYPE_CODES[kept_dtype]
        if num_groups > 1 and weight.group_size % 32:
            raise BackendError(f"no native kernel for groups of {weight.group_size}")
        struct.chunk = chunk_columns(columns, None if num_groups == 1 else weight.group_size)
        packed, scales = self._empty(), weight.scales.to(kept_dtype).contiguous()
        self._call(
            "linear_pack_codes", source, scales, 0 if zeros is None else zeros.contiguous(), weight.group_size, packed
        )
        return {"weight": packed} if order is None else {"weight": packed, "order": order.to(torch.int32)}

    def _pack_grouped(self, codes: structs.CodesStruct, weight: CodedWeight) -> Tensor:
        """Scales that are products of steps and bytes as those, otherwise a scale and a minimum in float32 for each
        group."""
        self.struct.chunk = weight.group_size
        self.struct.scale_type = structs.MINIMA if weight.steps is None else structs.STEPS
        packed = self._empty()
        scales = (weight.scales, weight.minima) if weight.steps is None else (None, None)
        own, steps = weight.factors, weight.steps
        if own is not None and steps is not None and own.dtype == torch.float8_e4m3fn:  # see E4m3Header
            own, steps = own.view(torch.int8), steps * 2.0**120
        factors = own, steps, weight.minimum_factors, weight.minimum_steps
        tensors = [0 if each is None else each.contiguous() for each in (*scales, *factors)]
        self._call("linear_pack_grouped", codes, *tensors, packed)
        return packed

    def _empty_with_scales(self, kind: int) -> dict[str, Tensor]:
        """Room for a kind that is rounded here."""
        self.struct.kind, self.struct.chunk = kind, 32
        self.struct.zero = 128 if kind == structs.INT8 else -1
        return {"weight": self._empty(), "scales": torch.empty(self._padded_rows(), dtype=torch.float32)}

    def _empty(self) -> Tensor:
        return empty_in_huge_pages(self._functions.linear_packed_bytes(ctypes.byref(self.struct)), torch.uint8)

    def _padded_rows(self) -> int:
        padded_rows: int = self._functions.linear_padded_rows(ctypes.byref(self.struct))
        return padded_rows

    def _call(self, name: str, *arguments: Tensor | structs.CodesStruct | int) -> None:
        """A packing function, with the addresses of tensors and structs."""
        values = map(_address, arguments)
        getattr(self._functions, name)(ctypes.byref(self.struct), *values, torch.get_num_threads())


def _codes(source: Tensor | BlockCodes) -> structs.CodesStruct:
    """The codes of a weight, as the packing functions take them."""
    kept = (source if isinstance(source, Tensor) else source.raw).contiguous()
    found = structs.CodesStruct(bytes=kept.data_ptr())
    found.kept = kept  # as long as the struct points there
    if isinstance(source, BlockCodes):
        planes = [structs.PlaneStruct(*astuple(plane)) for plane in source.planes]
        found.num_planes, found.planes, found.flipped = len(planes), tuple(planes), source.flipped
        found.block_bytes, found.block_columns = kept.shape[2], source.shape[1] // kept.shape[1]
    return found


def _address(argument: Tensor | structs.CodesStruct | int) -> int:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return argument if isinstance(argument, int) else ctypes.addressof(argument)
