"""How the weights of linear layers are stored in a checkpoint and kept in memory: WeightFormat. A format is one class
and one entry of FORMATS.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from pagedcli.errors import ConfigError
from pagedcli.layers.linear import Linear, LinearLayer
from pagedcli.layers.native_linear import NativeLinear
from pagedcli.native import load_library


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor that a format stores for a module of `out` x `in` features, and where those features lie in it.

    GPTQ's qweight, int32 [in / 8, out], is StoredTensor("qweight", torch.int32, out_dim=1, in_dim=0, in_per=8), the
    scales of groups of 128 are StoredTensor("scales", out_dim=1, in_dim=0, in_per=128).
    """

    suffix: str  # after the module's name and a dot
    dtype: torch.dtype | None = None  # as stored; None: any floating-point type, converted to the model's
    out_dim: int | None = 0  # dimension of the output features, along which modules are stacked; None: it has none
    in_dim: int | None = 1  # dimension of the input features; None: it has none
    out_per: int = 1  # output features per element
    in_per: int = 1  # input features per element: 8 four-bit numbers in an int32, a group that shares a scale

    def shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        """Its shape in the checkpoint."""
        sizes = {self.out_dim: -(-out_features // self.out_per), self.in_dim: -(-in_features // self.in_per)}
        return tuple(sizes[dim] for dim in (0, 1) if dim in sizes)


WEIGHT = StoredTensor("weight")
VECTOR = StoredTensor("bias", in_dim=None)  # a bias, or the weight of a norm


class WeightFormat(Protocol):
    """Names what is stored for a linear layer and makes the layer from it."""

    name: str
    stored: tuple[StoredTensor, ...]
    keeps_rows: bool  # whether the rows of a packed weight can be read again, as a tied embedding needs them

    @property
    def lm_head(self) -> "WeightFormat":
        """The format of the output layer, which is stored as a plain weight."""
        ...

    def torch_refusal(self) -> str | None:
        """Why there is no torch layer of this format; None if there is one."""
        ...

    def torch_linear(self, tensors: Mapping[str, Tensor], bias: Tensor | None) -> LinearLayer:
        """The layer by torch, on the device of `tensors`: the stored ones by suffix, modules stacked."""
        ...

    def native_linear(self, tensors: Mapping[str, Tensor], bias: Tensor | None, *, gated: bool = False) -> NativeLinear:
        """The layer by the project's CPU kernels. Raises: BackendError for a shape or dtype that they cannot pack."""
        ...


class AsStored:
    """Floating-point weights, computed with in the model's dtype."""

    name = "as stored"
    stored: tuple[StoredTensor, ...] = (WEIGHT,)
    keeps_rows = True

    @property
    def lm_head(self) -> WeightFormat:
        return self

    def torch_refusal(self) -> str | None:
        return None

    def torch_linear(self, tensors: Mapping[str, Tensor], bias: Tensor | None) -> LinearLayer:
        return Linear(tensors["weight"], bias)

    def native_linear(self, tensors: Mapping[str, Tensor], bias: Tensor | None, *, gated: bool = False) -> NativeLinear:
        return NativeLinear(load_library(), tensors["weight"], bias, gated=gated)


class Rounded:
    """Floating-point weights, rounded while they are packed: to int8 with a scale per output feature, or to 4 bits with
    a scale and a minimum per 32 inputs, with an int8 output layer."""

    stored: tuple[StoredTensor, ...] = (WEIGHT,)
    keeps_rows = False  # too coarse to start a sequence from

    def __init__(self, name: Literal["int8", "int4"]) -> None:
        self.name: str = name
        self._quantization = name

    @property
    def lm_head(self) -> WeightFormat:
        return Rounded("int8")

    def torch_refusal(self) -> str | None:
        return f"{self.name} weights need the native CPU kernels"

    def torch_linear(self, tensors: Mapping[str, Tensor], bias: Tensor | None) -> LinearLayer:
        raise AssertionError("a format with a torch_refusal is not asked for a torch layer")

    def native_linear(self, tensors: Mapping[str, Tensor], bias: Tensor | None, *, gated: bool = False) -> NativeLinear:
        return NativeLinear(load_library(), tensors["weight"], bias, gated=gated, quantization=self._quantization)


# by EngineConfig.quantization
FORMATS: Mapping[str | None, WeightFormat] = {None: AsStored(), "int8": Rounded("int8"), "int4": Rounded("int4")}


def weight_format(quantization: str | None) -> WeightFormat:
    """The format that --quantization names. Raises: ConfigError for an unknown one."""
    if quantization not in FORMATS:
        names = ", ".join(name for name in FORMATS if name is not None)
        raise ConfigError(f"quantization {quantization!r} is unknown", hint=f"choose one of {names}")
    return FORMATS[quantization]
