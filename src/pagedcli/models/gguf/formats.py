"""The linear layers of a GGUF file: numbers kept as the file has them where a kernel computes with them, otherwise
widened to the model's dtype."""

import torch

from pagedcli.attention.base import dtype_name
from pagedcli.core.plan import Kernels
from pagedcli.layers.quantized import Weight
from pagedcli.models.formats import AS_STORED, LayerFormat, Modules, StoredTensor, padded_rows
from pagedcli.models.gguf.blocks import coded, numbers
from pagedcli.models.gguf.quantization import GgufQuantization
from pagedcli.models.gguf.types import GgmlType
from pagedcli.models.packed_formats import CodedLayer
from pagedcli.native.system import one_thread


class GgufFormat:
    """The formats of the layers of a file: a WeightFormat."""

    mixes = True

    def __init__(self, quantization: GgufQuantization) -> None:
        self.quantization, self.name = quantization, quantization.description
        self._layers: dict[str, GgufLayer] = {}

    @property
    def lm_head(self) -> LayerFormat:
        return self.of(self.quantization.output)

    def of(self, module: str) -> LayerFormat:
        kind = self.quantization.type_of(module)
        if kind.is_float:
            return AS_STORED
        return self._layers.setdefault(kind.name, GgufLayer(kind))

    def rounds_activations(self, kernels: Kernels, itemsize: int) -> bool:
        return kernels == "cpu"

    def torch_refusal(self) -> str | None:
        return None

    def note(self, dtype: torch.dtype, kernels: Kernels) -> str | None:
        if kernels == "cpu":
            widened = self.quantization.widened
            apart = f" apart from {widened}, widened to {dtype_name(dtype)}" if widened else ""
            return f"weights are {self.name}, kept so{apart}; activations are rounded to 8 bits per token"
        if kernels == "torch":
            return (
                f"weights are {self.name}, widened to {dtype_name(dtype)} while loading: torch has no kernel for them"
            )
        return (
            f"weights are {self.name}, kept so apart from {self.quantization.widened_in_triton}, widened to"
            f" {dtype_name(dtype)}; activations are not rounded"
        )


class GgufLayer(CodedLayer):
    """Linear layers of one type: a LayerFormat."""

    def __init__(self, kind: GgmlType) -> None:
        self.kind, self.name = kind, kind.name
        # an element is a block, whose bytes are one more dimension
        self.stored: tuple[StoredTensor, ...] = (StoredTensor("weight", "uint8", in_per=kind.block, converts=False),)

    def kept_bytes(self, shape: tuple[int, ...], itemsize: int, kernels: Kernels, *, gated: bool = False) -> int:
        """See LayerFormat.kept_bytes."""
        num_rows, num_columns = shape
        if kernels == "triton" and self.kind.in_triton:
            return num_rows * num_columns * self.kind.in_triton // 256
        if kernels != "cpu":
            return AS_STORED.kept_bytes(shape, itemsize, kernels, gated=gated)
        return padded_rows(num_rows, kernels, gated=gated) * num_columns * self.kind.packed // 256

    def weight(self, modules: Modules, dtype: torch.dtype, kernels: Kernels) -> Weight:
        if kernels == "cpu" or (kernels == "triton" and self.kind.in_triton):
            first, *others = (module["weight"] for module in modules)
            with one_thread():
                return coded(torch.cat([first, *others]) if others else first, self.kind)
        return torch.cat([numbers(module["weight"], self.kind, dtype) for module in modules])
