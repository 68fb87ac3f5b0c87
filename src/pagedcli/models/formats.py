"""How the weights of linear layers are stored in a checkpoint and kept in memory: WeightFormat. A format is one class;
those of checkpoints that others quantized are in models.packed_formats.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from pagedcli.core.plan import Kernels
from pagedcli.errors import ModelError
from pagedcli.layers.linear import Linear, LinearLayer
from pagedcli.layers.native_linear import NativeLinear
from pagedcli.layers.quantized import Weight
from pagedcli.native import load_library

# The stored tensors of a linear layer by suffix: of each of its modules, or of all as one (WeightFormat.stacks).
Modules = Sequence[Mapping[str, Tensor]]
Init = Literal["normal", "bits"] | float  # noise, random bits, or a constant
DEVIATION = 0.02  # standard deviation of dummy weights
FLOAT8_DEVIATION = 64.0  # of those stored as FP8, before their scales


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor that a format stores for a module of `out` x `in` features, and where those features lie in it.

    GPTQ's qweight, int32 [in / 8, out], is StoredTensor("qweight", torch.int32, out_dim=1, in_dim=0, in_per=8), the
    scales of groups of 128 are StoredTensor("scales", out_dim=1, in_dim=0, in_per=128).
    """

    suffix: str  # after the module's name and a dot
    dtype: torch.dtype | None = None  # as stored; None: any floating-point type
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
        if self.dtype == torch.int32 and any(per in (4, 8) and size % per for size, per in pairs):
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
    """Names what is stored for a linear layer and makes the layer from it."""

    stored: tuple[StoredTensor, ...]
    stacks: bool  # whether the modules of a fused layer (q, k, v) are read as one tensor
    keeps_rows: bool  # whether the rows of the output layer can be read again, as a tied embedding needs them

    def weight(self, modules: Modules, dtype: torch.dtype, kernels: Kernels) -> Weight:
        """The weight [out, in] that `kernels` multiply by: as stored, or widened to `dtype` where they cannot."""
        ...

    def torch_linear(
        self, modules: Modules, bias: Tensor | None, dtype: torch.dtype, *, kernels: Kernels = "torch"
    ) -> LinearLayer:
        """The layer for activations of `dtype`, on the device of the tensors, by `kernels` if they have the format."""
        ...

    def native_linear(
        self, modules: Modules, bias: Tensor | None, dtype: torch.dtype, *, gated: bool = False
    ) -> NativeLinear:
        """The layer by the project's CPU kernels. Raises: BackendError for a shape or dtype that they cannot pack."""
        ...


class WeightFormat(Protocol):
    """The formats of a model's linear layers."""

    name: str

    @property
    def lm_head(self) -> LayerFormat:
        """The format of the output layer, which is stored as a plain weight."""
        ...

    def of(self, module: str) -> LayerFormat:
        """The format of a module, by its name in the checkpoint."""
        ...

    def torch_refusal(self) -> str | None:
        """Why there are no torch layers; None if there are."""
        ...

    def note(self, dtype: torch.dtype, kernels: Kernels) -> str | None:
        """What a user should know of how the layers compute."""
        ...


class AsStored:
    """Floating-point weights, computed with in the model's dtype."""

    name = "as stored"
    stored: tuple[StoredTensor, ...] = (WEIGHT,)
    stacks = True
    keeps_rows = True

    @property
    def lm_head(self) -> LayerFormat:
        return self

    def of(self, module: str) -> LayerFormat:
        return self

    def torch_refusal(self) -> str | None:
        return None

    def note(self, dtype: torch.dtype, kernels: Kernels) -> str | None:
        return None

    def weight(self, modules: Modules, dtype: torch.dtype, kernels: Kernels) -> Tensor:
        return modules[0]["weight"]

    def kept_bytes(self, shape: tuple[int, ...], itemsize: int, kernels: Kernels) -> int:
        """Bytes in memory of a weight [out, in]; itemsize is that of the model's dtype."""
        return math.prod(shape) * itemsize

    def torch_linear(
        self, modules: Modules, bias: Tensor | None, dtype: torch.dtype, *, kernels: Kernels = "torch"
    ) -> LinearLayer:
        return Linear(modules[0]["weight"], bias)

    def native_linear(
        self, modules: Modules, bias: Tensor | None, dtype: torch.dtype, *, gated: bool = False
    ) -> NativeLinear:
        return NativeLinear(load_library(), modules[0]["weight"], bias, gated=gated)


AS_STORED = AsStored()


class Rounded:
    """Floating-point weights, rounded while they are packed: to int8 with a scale per output feature, or to 4 bits with
    a step and a zero point per 32 inputs, with an int8 output layer."""

    stored: tuple[StoredTensor, ...] = (WEIGHT,)
    stacks = True
    keeps_rows = False  # too coarse to start a sequence from

    def __init__(self, name: Literal["int8", "int4"]) -> None:
        self.name: str = name
        self._quantization = name

    @property
    def lm_head(self) -> LayerFormat:
        return Rounded("int8")

    def of(self, module: str) -> LayerFormat:
        return self

    def torch_refusal(self) -> str | None:
        return f"{self.name} weights need the native CPU kernels"

    def note(self, dtype: torch.dtype, kernels: Kernels) -> str | None:
        return None

    def weight(self, modules: Modules, dtype: torch.dtype, kernels: Kernels) -> Weight:
        raise AssertionError("rounded while it is packed, and a format with a torch_refusal has no torch layer")

    def torch_linear(
        self, modules: Modules, bias: Tensor | None, dtype: torch.dtype, *, kernels: Kernels = "torch"
    ) -> LinearLayer:
        raise AssertionError("a format with a torch_refusal is not asked for a torch layer")

    def native_linear(
        self, modules: Modules, bias: Tensor | None, dtype: torch.dtype, *, gated: bool = False
    ) -> NativeLinear:
        return NativeLinear(load_library(), modules[0]["weight"], bias, gated=gated, quantization=self._quantization)


# by EngineConfig.quantization
FORMATS: Mapping[str | None, WeightFormat] = {None: AS_STORED, "int8": Rounded("int8"), "int4": Rounded("int4")}
