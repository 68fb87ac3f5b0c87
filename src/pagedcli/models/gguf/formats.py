"""The linear layers of a GGUF file: numbers kept as the file has them where a kernel computes with them, otherwise
widened to the model's dtype."""

import torch
from torch import Tensor

from pagedcli.attention.base import dtype_name
from pagedcli.core.plan import Kernels
from pagedcli.layers.linear import Linear, LinearLayer
from pagedcli.layers.native_linear import NativeLinear
from pagedcli.layers.quantized import Weight
from pagedcli.models.formats import AS_STORED, LayerFormat, Modules, StoredTensor
from pagedcli.models.gguf.blocks import numbers
from pagedcli.models.gguf.quantization import GgufQuantization
from pagedcli.models.gguf.types import GgmlType


class GgufFormat:
    """The formats of the layers of a file: a WeightFormat."""

    mixes = True

    def __init__(self, quantization: GgufQuantization) -> None:
        self.quantization, self.name = quantization, quantization.description
        self._layers: dict[str, GgufLayer] = {}

    @property
    def lm_head(self) -> LayerFormat:
        return AS_STORED

    def of(self, module: str) -> LayerFormat:
        kind = self.quantization.type_of(module)
        if kind.is_float:
            return AS_STORED
        return self._layers.setdefault(kind.name, GgufLayer(kind))

    def rounds_activations(self, kernels: Kernels) -> bool:
        return False

    def torch_refusal(self) -> str | None:
        return None

    def note(self, dtype: torch.dtype, kernels: Kernels) -> str | None:
        return f"weights are {self.name}, widened to {dtype_name(dtype)} while loading"


class GgufLayer:
    """Linear layers of one type: a LayerFormat."""

    stacks = False
    keeps_rows = True

    def __init__(self, kind: GgmlType) -> None:
        self.kind, self.name = kind, kind.name
        # an element is a block, whose bytes are one more dimension
        self.stored: tuple[StoredTensor, ...] = (StoredTensor("weight", "uint8", in_per=kind.block, converts=False),)

    def kept_bytes(self, shape: tuple[int, ...], itemsize: int, kernels: Kernels, *, gated: bool = False) -> int:
        """See LayerFormat.kept_bytes."""
        return AS_STORED.kept_bytes(shape, itemsize, kernels, gated=gated)

    def weight(self, modules: Modules, dtype: torch.dtype, kernels: Kernels) -> Weight:
        return torch.cat([numbers(module["weight"], self.kind, dtype) for module in modules])

    def torch_linear(
        self, modules: Modules, bias: Tensor | None, dtype: torch.dtype, *, kernels: Kernels = "torch"
    ) -> LinearLayer:
        weight = self.weight(modules, dtype, kernels)
        assert isinstance(weight, Tensor), "widened"
        return Linear(weight, bias)

    def native_linear(
        self, modules: Modules, bias: Tensor | None, dtype: torch.dtype, *, gated: bool = False
    ) -> NativeLinear:
        weight = self.weight(modules, dtype, "cpu")
        assert isinstance(weight, Tensor), "widened"
        return AS_STORED.native_linear([{"weight": weight}], bias, dtype, gated=gated)
