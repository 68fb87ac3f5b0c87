"""How the weights of linear layers are stored in a checkpoint and kept in memory: LayerFormat, and WeightFormat of all
layers. A format of --quantization is an entry of FORMATS and its kernels; those of quantized checkpoints are in
models.stored_quantization, those of GGUF files in models.gguf.types.

Free of torch until a layer is made, so that help texts, plans and simulations may read it.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from pagedcli import layers, native
from pagedcli.core.plan import Kernels
from pagedcli.errors import ModelError
from pagedcli.later import torch

# The stored tensors of a linear layer by suffix: of each of its modules, or of all as one (WeightFormat.stacks).
Tensor: TypeAlias = "torch.Tensor"
Modules: TypeAlias = "Sequence[Mapping[str, Tensor]]"
Init = Literal["normal", "bits"] | float  # noise, random bits, or a constant
DEVIATION = 0.02  # standard deviation of dummy weights
FLOAT8_DEVIATION = 64.0  # standard deviation of dummy weights stored as FP8, before their scales
Layout = Literal["gptq", "awq", "pack-quantized", "int-quantized", "float8", "mxfp4", "mxfp8", "nvfp4"]
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
    init: Init = "normal"  # its content with `--load-format dummy`

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


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Numbers of 4 or 8 bits with scales, as the config.json of a quantized checkpoint says that it stores them."""

    method: str  # quant_method, with the format of compressed-tensors
    layout: Layout
    bits: int  # bits per weight
    group_size: int | None = None  # inputs that share a scale; None: all inputs of an output feature
    block: tuple[int, ...] | None = None  # float8: outputs and inputs that share a scale
    per_tensor: bool = False  # one scale for a whole module
    symmetric: bool = True
    act_order: bool = False  # the inputs of a group are not neighbours
    zero_offset: int = 0  # number added to stored zero points: 1 in checkpoints of the first GPTQ convention
    scale_name: str = "weight_scale"  # name of the scales of a float8 or int8 module


class LayerFormat:
    """What is stored for a linear layer, and the layer made from it.

    A format says its tensors, what it reads from those of a module, and what kernels keep of it; the rest is the same
    for all.
    """

    packing: str | None = None  # a name of native.structs.PACKINGS: how the CPU kernels round numbers
    stacks: bool = False  # whether the modules of a fused layer (q, k, v) are read as one tensor
    keeps_rows: bool = True  # whether the rows of the output layer can be read again, as a tied embedding needs them

    @functools.cached_property
    def stored(self) -> tuple[StoredTensor, ...]:
        """The tensors of a module."""
        raise NotImplementedError

    def read(self, module: "Mapping[str, Tensor]") -> "layers.quantized.CodedWeight":
        """A module's weight as stored, [out, in]."""
        raise NotImplementedError

    def row_bytes(self, num_columns: int, itemsize: int, kernels: Kernels) -> int:
        """Bytes in memory of an output feature that `kernels` keep as stored."""
        raise NotImplementedError

    def why_widened(self, kernels: Kernels, itemsize: int) -> str | None:
        """Why `kernels` do not multiply by the numbers as stored, which are then widened; None if they do. `itemsize`:
        bytes of an activation."""
        return None

    def kept_bytes(self, shape: tuple[int, ...], itemsize: int, kernels: Kernels, *, gated: bool = False) -> int:
        """Bytes in memory of a weight [out, in]; itemsize is that of the model's dtype. `gated`: gate and up of an MLP,
        whose rows the C++ kernels pack in pairs."""
        kept = self if self.why_widened(kernels, itemsize) is None else AS_STORED
        return padded_rows(shape[0], kernels, gated=gated) * kept.row_bytes(shape[1], itemsize, kernels)

    def weight(self, modules: Modules, dtype: "torch.dtype", kernels: Kernels) -> "layers.quantized.Weight":
        """The weight [out, in] that `kernels` multiply by: as stored, or widened to `dtype` where they cannot."""
        weight = layers.quantized.stacked([self.read(module) for module in modules])
        return weight if self.why_widened(kernels, dtype.itemsize) is None else weight.dequantized(dtype)

    def widened(self, modules: Modules, dtype: "torch.dtype") -> "Tensor":
        """The weight as numbers, which torch multiplies by."""
        return cast("Tensor", self.weight(modules, dtype, "torch"))

    def linear(
        self, modules: Modules, bias: "Tensor | None", dtype: "torch.dtype", kernels: Kernels, *, gated: bool = False
    ) -> "layers.linear.LinearLayer":
        """The layer by `kernels` for activations of `dtype`, on the device of the tensors. `gated`: with silu(gate) *
        up in the same pass, by kernels that can."""
        if kernels == "cpu":
            return self.native_linear(modules, bias, dtype, gated=gated)
        weight, bias = self.weight(modules, dtype, kernels), _with_biases(modules, bias, dtype)
        if not isinstance(weight, layers.quantized.CodedWeight):
            return layers.linear.Linear(weight, bias)
        return layers.triton_products.TritonLinear(weight, bias)

    def output_layer(
        self, modules: Modules, bias: "Tensor | None", dtype: "torch.dtype", kernels: Kernels, tied: "Tensor | None"
    ) -> "tuple[Callable[[Tensor], Tensor], int, Callable[[Tensor], Tensor] | None]":
        """The output layer, which gives float32; the bytes that it keeps; and what reads rows of its weight, if
        something does. `tied`: the embedding, as numbers, if that is its weight."""
        if kernels == "cpu":
            packed = self.native_linear(modules, bias, dtype)
            rows = packed.weight_rows if self.keeps_rows else None
            return functools.partial(packed, in_float32=True), packed.nbytes, rows
        weight = self.widened(modules, dtype) if tied is None else tied
        make = layers.linear.Linear if dtype.itemsize == 4 else layers.linear.OutputLinear
        return make(weight, _with_biases(modules, bias, dtype)), 0 if tied is not None else weight.nbytes, None

    def native_linear(
        self, modules: Modules, bias: "Tensor | None", dtype: "torch.dtype", *, gated: bool = False
    ) -> "layers.native_linear.NativeLinear":
        """The layer by the CPU kernels. Raises: BackendError for a shape or dtype that they cannot pack."""
        weight, bias = self.weight(modules, dtype, "cpu"), _with_biases(modules, bias, dtype)
        return layers.native_linear.NativeLinear(
            native.load_library(), weight, bias, gated=gated, quantization=self.packing, dtype=dtype
        )


def _with_biases(modules: Modules, bias: "Tensor | None", dtype: "torch.dtype") -> "Tensor | None":
    """The bias, or what GPTQ checkpoints store for modules that have none in their architecture."""
    stored = [tensors["bias"] for tensors in modules if "bias" in tensors]
    if bias is not None or not stored:
        return bias
    if len(stored) != len(modules):
        raise ModelError("only some modules of a linear layer have a bias", hint="download the checkpoint again")
    return torch.cat(stored).to(dtype)


class WeightFormat:
    """The formats of a model's linear layers."""

    mixes: bool = False  # whether modules of different formats may be one layer (q, k, v)

    @functools.cached_property
    def name(self) -> str:
        """What a person should know of them."""
        raise NotImplementedError

    @functools.cached_property
    def lm_head(self) -> LayerFormat:
        """The format of the output layer."""
        raise NotImplementedError

    @property
    def act_order(self) -> bool:
        """Whether some layer groups inputs that are not neighbours."""
        return False

    def of(self, module: str) -> LayerFormat:
        """The format of a module, by its name in the checkpoint."""
        raise NotImplementedError

    def rounds_activations(self, kernels: Kernels, itemsize: int) -> bool:
        """Whether some layer rounds its activations, of `itemsize` bytes, to 8 bits."""
        return False

    def refusal(self, kernels: Kernels) -> str | None:
        """Why `kernels` do not run the layers; None if they do."""
        return None

    def note(self, dtype: str, kernels: Kernels) -> str | None:
        """What a user should know of how the layers compute in a model of `dtype`."""
        return None


def kernels_note(
    name: str, dtype: str, kernels: Kernels, why_widened: str | None, *, apart: str = "", alone: bool = True
) -> str:
    """How layers of a format compute in a model of `dtype`. `why_widened`: see LayerFormat; `apart`: what is widened of
    others, in words; `alone`: the checkpoint has no other format."""
    some, whose = ("", "") if alone else ("some ", "their ")
    if why_widened is not None:
        return f"{some}weights are {name}, widened to {dtype} while loading: {why_widened}"
    rounded = "are rounded to 8 bits in groups of 32" if kernels == "cpu" else "are not rounded"
    return f"{some}weights are {name}, kept so{apart}; {whose}activations {rounded}"


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

    def __init__(self) -> None:
        self.lm_head: LayerFormat = self

    def of(self, module: str) -> LayerFormat:
        return self

    def row_bytes(self, num_columns: int, itemsize: int, kernels: Kernels) -> int:
        return num_columns * itemsize

    def weight(self, modules: Modules, dtype: "torch.dtype", kernels: Kernels) -> "Tensor":
        if len(modules) == 1:
            return modules[0]["weight"]
        return torch.cat([module["weight"] for module in modules])


AS_STORED = AsStored()


@dataclass(frozen=True, eq=False)
class MixedLayer(LayerFormat):
    """Modules of different formats as one layer. Widened but for the CPU kernels; there gate and up are, too, as they
    are multiplied in pairs."""

    formats: Sequence[LayerFormat]
    rows: Sequence[int]  # output features of each module

    @functools.cached_property
    def stored(self) -> tuple[StoredTensor, ...]:
        return tuple({each.suffix: each for one in self.formats for each in one.stored}.values())

    def kept_bytes(self, shape: tuple[int, ...], itemsize: int, kernels: Kernels, *, gated: bool = False) -> int:
        if kernels != "cpu" or gated:
            return AS_STORED.kept_bytes(shape, itemsize, kernels, gated=gated)
        return sum(
            layer_format.kept_bytes((sum(self.rows[part]), shape[1]), itemsize, kernels)
            for layer_format, part in self._parts()
        )

    def weight(self, modules: Modules, dtype: "torch.dtype", kernels: Kernels) -> "Tensor":
        pairs = zip(self.formats, modules, strict=True)
        return torch.cat([layer_format.widened([module], dtype) for layer_format, module in pairs])

    def native_linear(
        self, modules: Modules, bias: "Tensor | None", dtype: "torch.dtype", *, gated: bool = False
    ) -> "layers.native_linear.NativeLinear":
        if gated:
            return super().native_linear(modules, bias, dtype, gated=True)
        linears, start = [], 0
        for layer_format, part in self._parts():
            end = start + sum(len(module["weight"]) for module in modules[part])  # of a rank: fewer than all rows
            own_bias = None if bias is None else bias[start:end]
            linears.append(layer_format.native_linear(modules[part], own_bias, dtype))
            start = end
        return layers.native_linear.NativeLinear.side_by_side(linears)

    def _parts(self) -> list[tuple[LayerFormat, slice]]:
        """Neighbours of the same format."""
        parts, start = [], 0
        for layer_format, same in itertools.groupby(self.formats):
            end = start + len(list(same))
            parts.append((layer_format, slice(start, end)))
            start = end
        return parts


class Rounded(AsStored):
    """Floating-point weights that are rounded while they are packed, for kernels that round the activations, too."""

    keeps_rows = False  # too coarse to start a sequence from

    def __init__(self, name: str, *, packing: str, block: tuple[int, int], lm_head: "Rounded | None" = None) -> None:
        """`packing`: see LayerFormat; `block`: inputs that it packs together, and their bytes; `lm_head`: the format of
        the output layer; None: this one."""
        self.name, self.packing, self._block, self.lm_head = name, packing, block, lm_head or self

    def rounds_activations(self, kernels: Kernels, itemsize: int) -> bool:
        return True

    def refusal(self, kernels: Kernels) -> str | None:
        return None if kernels == "cpu" else f"{self.name} weights need the native CPU kernels"

    def row_bytes(self, num_columns: int, itemsize: int, kernels: Kernels) -> int:
        inputs, num_bytes = self._block
        return -(-num_columns // inputs) * num_bytes + _SCALE_BYTES


_SCALE_BYTES = 4  # per output feature that every packing of Rounded keeps

# by EngineConfig.quantization: help, choices and tables come from here
_INT8 = Rounded("int8", packing="int8", block=(32, 33))  # a factor of a byte per block
_INT4 = Rounded("int4", packing="int4", block=(32, 18), lm_head=_INT8)  # a step and a zero point of a byte per block
FORMATS: dict[str | None, WeightFormat] = {None: AS_STORED} | {each.name: each for each in (_INT8, _INT4)}
