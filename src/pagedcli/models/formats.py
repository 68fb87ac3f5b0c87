"""How the weights of linear layers are stored in a checkpoint and kept in memory: WeightFormat. A format of
--quantization is an entry of FORMATS and its kernels; those of quantized checkpoints are in models.packed_formats.

Free of torch until a layer is made, so that help texts, plans and simulations may read it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from pagedcli.core.plan import Kernels
from pagedcli.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pagedcli.layers.linear import LinearLayer
    from pagedcli.layers.native_linear import NativeLinear
    from pagedcli.layers.quantized import Weight

# The stored tensors of a linear layer by suffix: of each of its modules, or of all as one (WeightFormat.stacks).
Modules: TypeAlias = "Sequence[Mapping[str, Tensor]]"
Init = Literal["normal", "bits"] | float  # noise, random bits, or a constant
DEVIATION = 0.02  # standard deviation of dummy weights
FLOAT8_DEVIATION = 64.0  # standard deviation of dummy weights stored as FP8, before their scales
PANEL = 32  # output features that the C++ kernels pack together; half without AVX-512, so a little less is kept there


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor that a format stores for a module of `out` x `in` features, and where those features lie in it.

    GPTQ's qweight, int32 [in / 8, out], is StoredTensor("qweight", "int32", out_dim=1, in_dim=0, in_per=8), the
    scales of groups of 128 are StoredTensor("scales", out_dim=1, in_dim=0, in_per=128).
    """

    suffix: str  # end of its name, after the module's name and a dot
    dtype: str | None = None  # dtype in the file; None: any floating-point type
    out_dim: int | None = 0  # dimension of the output features, along which modules are stacked; None: it has none
    in_dim: int | None = 1  # dimension of the input features; None: it has none
    out_per: int | None = 1  # output features per element; None: one element for all
    in_per: int | None = 1  # input features per element: 8 four-bit numbers in an int32, a group that shares a scale
    converts: bool = True  # a floating-point tensor becomes one of the model's dtype
    optional: bool = False  # not every checkpoint has it
    init: Init = "normal"  # what `--load-format dummy` fills it with

    def shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        """Its shape in the checkpoint. Raises: ModelError if its words would not be full."""
        pairs = (out_features, self.out_per), (in_features, self.in_per)
        if self.dtype == "int32" and any(per in (4, 8) and size % per for size, per in pairs):
            raise ModelError(
                f"{in_features} x {out_features} quantized weights do not fill the words of {self.suffix!r}",
                hint="use the unquantized version of the model",
            )
        sizes = {
            self.out_dim: 1 if self.out_per is None else -(-out_features // self.out_per),
            self.in_dim: 1 if self.in_per is None else -(-in_features // self.in_per),
        }
        return tuple(sizes[dim] for dim in (0, 1) if dim in sizes)


WEIGHT = StoredTensor("weight")
VECTOR = StoredTensor("bias", in_dim=None)  # a bias, or the weight of a norm


class LayerFormat(Protocol):
    """Names what is stored for a linear layer, makes the layer from it, and says what it takes in memory."""

    name: str
    stored: tuple[StoredTensor, ...]
    stacks: bool = False  # whether the modules of a fused layer (q, k, v) are read as one tensor
    keeps_rows: bool = True  # whether the rows of the output layer can be read again, as a tied embedding needs them

    def kept_bytes(self, shape: tuple[int, ...], itemsize: int, kernels: Kernels, *, gated: bool = False) -> int:
        """Bytes in memory of a weight [out, in]; itemsize is that of the model's dtype. `gated`: gate and up of an MLP,
        whose rows the C++ kernels pack in pairs."""
        ...

    def weight(self, modules: Modules, dtype: "torch.dtype", kernels: Kernels) -> "Weight":
        """The weight [out, in] that `kernels` multiply by: as stored, or widened to `dtype` where they cannot."""
        ...

    def torch_linear(
        self, modules: Modules, bias: "Tensor | None", dtype: "torch.dtype", *, kernels: Kernels = "torch"
    ) -> "LinearLayer":
        """The layer for activations of `dtype`, on the device of the tensors, by `kernels` if they have the format."""
        ...

    def native_linear(
        self, modules: Modules, bias: "Tensor | None", dtype: "torch.dtype", *, gated: bool = False
    ) -> "NativeLinear":
        """The layer by the project's CPU kernels. Raises: BackendError for a shape or dtype that they cannot pack."""
        ...


class WeightFormat(Protocol):
    """The formats of a model's linear layers."""

    name: str
    mixes: bool = False  # whether modules of different formats may be one layer (q, k, v)

    @property
    def lm_head(self) -> LayerFormat:
        """The format of the output layer, which is stored as a plain weight."""
        ...

    def of(self, module: str) -> LayerFormat:
        """The format of a module, by its name in the checkpoint."""
        ...

    def rounds_activations(self, kernels: Kernels, itemsize: int) -> bool:
        """Whether some layer rounds its activations, of `itemsize` bytes, to 8 bits."""
        return False

    def torch_refusal(self) -> str | None:
        """Why there are no torch layers; None if there are."""
        return None

    def note(self, dtype: "torch.dtype", kernels: Kernels) -> str | None:
        """What a user should know of how the layers compute."""
        return None


def padded_rows(num_rows: int, kernels: Kernels, *, gated: bool = False) -> int:
    """Output features with those that fill the last panel of the C++ kernels."""
    if kernels != "cpu":
        return num_rows
    unit = PANEL // 2 if gated else PANEL
    return -(-(num_rows // 2 if gated else num_rows) // unit) * PANEL


class AsStored(LayerFormat, WeightFormat):
    """Floating-point weights, computed with in the model's dtype."""

    name = "as stored"
    stored: tuple[StoredTensor, ...] = (WEIGHT,)
    stacks = True

    @property
    def lm_head(self) -> LayerFormat:
        return self

    def of(self, module: str) -> LayerFormat:
        return self

    def kept_bytes(self, shape: tuple[int, ...], itemsize: int, kernels: Kernels, *, gated: bool = False) -> int:
        num_rows, num_columns = shape
        return padded_rows(num_rows, kernels, gated=gated) * num_columns * itemsize

    def weight(self, modules: Modules, dtype: "torch.dtype", kernels: Kernels) -> "Tensor":
        return modules[0]["weight"]

    def torch_linear(
        self, modules: Modules, bias: "Tensor | None", dtype: "torch.dtype", *, kernels: Kernels = "torch"
    ) -> "LinearLayer":
        from pagedcli.layers.linear import Linear

        return Linear(self.weight(modules, dtype, kernels), bias)

    def native_linear(
        self, modules: Modules, bias: "Tensor | None", dtype: "torch.dtype", *, gated: bool = False
    ) -> "NativeLinear":
        return _native(modules[0]["weight"], bias, gated=gated)


AS_STORED = AsStored()


class MixedLayer(LayerFormat):
    """Modules of different formats as one layer."""

    def __init__(self, formats: Sequence[LayerFormat], rows: Sequence[int]) -> None:
        """`rows`: output features of each module."""
        self._formats, self._rows = tuple(formats), tuple(rows)
        self.name = ", ".join(dict.fromkeys(each.name for each in formats))
        self.stored = tuple({each.suffix: each for one in formats for each in one.stored}.values())

    def kept_bytes(self, shape: tuple[int, ...], itemsize: int, kernels: Kernels, *, gated: bool = False) -> int:
        if kernels != "cpu" or gated:
            return AS_STORED.kept_bytes(shape, itemsize, kernels, gated=gated)
        return sum(
            layer_format.kept_bytes((sum(self._rows[part]), shape[1]), itemsize, kernels)
            for layer_format, part in self._parts()
        )

    def weight(self, modules: Modules, dtype: "torch.dtype", kernels: Kernels) -> "Weight":
        return self._widened(modules, dtype)[0]["weight"]

    def torch_linear(
        self, modules: Modules, bias: "Tensor | None", dtype: "torch.dtype", *, kernels: Kernels = "torch"
    ) -> "LinearLayer":
        return AS_STORED.torch_linear(self._widened(modules, dtype), bias, dtype)

    def native_linear(
        self, modules: Modules, bias: "Tensor | None", dtype: "torch.dtype", *, gated: bool = False
    ) -> "NativeLinear":
        """Gate and up are multiplied in pairs, so those of different formats are widened."""
        if gated:
            return AS_STORED.native_linear(self._widened(modules, dtype), bias, dtype, gated=True)
        from pagedcli.layers.native_linear import NativeLinear

        linears, start = [], 0
        for layer_format, part in self._parts():
            end = start + sum(len(module["weight"]) for module in modules[part])
            own = self._stacked(modules[part], dtype) if layer_format.stacks else modules[part]
            linears.append(layer_format.native_linear(own, None if bias is None else bias[start:end], dtype))
            start = end
        return NativeLinear.side_by_side(linears)

    def _parts(self) -> "list[tuple[LayerFormat, slice]]":
        """Neighbours of the same format."""
        parts: list[tuple[LayerFormat, slice]] = []
        for i, layer_format in enumerate(self._formats):
            if parts and parts[-1][0] == layer_format:
                parts[-1] = (layer_format, slice(parts[-1][1].start, i + 1))
            else:
                parts.append((layer_format, slice(i, i + 1)))
        return parts

    def _widened(self, modules: Modules, dtype: "torch.dtype") -> Modules:
        weights = (each.weight([module], dtype, "torch") for each, module in zip(self._formats, modules, strict=True))
        return self._stacked([{"weight": weight} for weight in weights], dtype)  # type: ignore[dict-item]  # tensors

    @staticmethod
    def _stacked(modules: Modules, dtype: "torch.dtype") -> Modules:
        import torch

        return [{"weight": torch.cat([module["weight"].to(dtype) for module in modules])}]


class Rounded(AsStored):
    """Floating-point weights that are rounded while they are packed, for kernels that round the activations, too."""

    keeps_rows = False  # too coarse to start a sequence from

    def __init__(self, name: str, *, packing: str, block: tuple[int, int], lm_head: "Rounded | None" = None) -> None:
        """`packing`: a name of native.structs.PACKINGS; `block`: inputs that it packs together, and their bytes;
        `lm_head`: the format of the output layer; None: this one."""
        self.name = name
        self._packing, self._block, self._lm_head = packing, block, lm_head

    @property
    def lm_head(self) -> LayerFormat:
        return self._lm_head or self

    def rounds_activations(self, kernels: Kernels, itemsize: int) -> bool:
        return True

    def torch_refusal(self) -> str | None:
        return f"{self.name} weights need the native CPU kernels"

    def kept_bytes(self, shape: tuple[int, ...], itemsize: int, kernels: Kernels, *, gated: bool = False) -> int:
        (num_rows, num_columns), (inputs, num_bytes) = shape, self._block
        return padded_rows(num_rows, "cpu", gated=gated) * (-(-num_columns // inputs) * num_bytes + _SCALE_BYTES)

    def weight(self, modules: Modules, dtype: "torch.dtype", kernels: Kernels) -> "Tensor":
        raise AssertionError("rounded while it is packed, and a format with a torch_refusal has no torch layer")

    def native_linear(
        self, modules: Modules, bias: "Tensor | None", dtype: "torch.dtype", *, gated: bool = False
    ) -> "NativeLinear":
        return _native(modules[0]["weight"], bias, gated=gated, packing=self._packing)


_SCALE_BYTES = 4  # per output feature that every packing of Rounded keeps

# by EngineConfig.quantization: help, choices and tables come from here
_INT8 = Rounded("int8", packing="int8", block=(32, 33))  # a factor of a byte per block
_INT4 = Rounded("int4", packing="int4", block=(32, 18), lm_head=_INT8)  # a step and a zero point of a byte per block
FORMATS: dict[str | None, WeightFormat] = {None: AS_STORED} | {each.name: each for each in (_INT8, _INT4)}


def _native(weight: "Tensor", bias: "Tensor | None", *, gated: bool, packing: str | None = None) -> "NativeLinear":
    from pagedcli.layers.native_linear import NativeLinear
    from pagedcli.native import load_library

    return NativeLinear(load_library(), weight, bias, gated=gated, quantization=packing)
