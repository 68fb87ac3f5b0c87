"""The linear layers of a GGUF file: numbers kept as the file has them where a kernel computes with them, otherwise
widened to the model's dtype."""

from dataclasses import replace

import torch

from pagedcli.attention.base import dtype_name
from pagedcli.core.plan import Kernels
from pagedcli.errors import ModelError
from pagedcli.layers.quantized import CodedWeight, Weight, stacked
from pagedcli.models.formats import AS_STORED, LayerFormat, Modules, StoredTensor, WeightFormat, padded_rows
from pagedcli.models.gguf.blocks import coded, numbers
from pagedcli.models.gguf.quantization import GgufQuantization
from pagedcli.models.gguf.types import GgmlType
from pagedcli.models.packed_formats import CodedLayer
from pagedcli.native.system import one_thread


class GgufFormat(WeightFormat):
    """The formats of the layers of a file."""

    mixes = True

    def __init__(self, quantization: GgufQuantization) -> None:
        self.quantization, self.name = quantization, quantization.description
        self._layers: dict[tuple[str, bool], GgufLayer] = {}

    @property
    def lm_head(self) -> LayerFormat:
        return self.of(self.quantization.output)

    def of(self, module: str) -> LayerFormat:
        kind, scaled = self.quantization.type_of(module), self.quantization.scales(module)
        if kind.is_float:
            return AS_STORED
        return self._layers.setdefault((kind.name, scaled), GgufLayer(kind, scaled=scaled))

    def rounds_activations(self, kernels: Kernels, itemsize: int) -> bool:
        return kernels == "cpu"

    def note(self, dtype: torch.dtype, kernels: Kernels) -> str | None:
        if kernels == "cpu":
            widened = self.quantization.widened
            apart = f" apart from {widened}, widened to {dtype_name(dtype)}" if widened else ""
            if spread := self.quantization.codebooks:
                apart += f" ({spread} as 8-bit numbers)"
            unused = "; the scales of activations are not used" if self.quantization.has_input_scales else ""
            return f"weights are {self.name}, kept so{apart}; activations are rounded to 8 bits in groups of 32{unused}"
        if kernels == "torch":
            return (
                f"weights are {self.name}, widened to {dtype_name(dtype)} while loading: torch has no kernel for them"
            )
        return (
            f"weights are {self.name}, kept so apart from {self.quantization.widened_in_triton}, widened to"
            f" {dtype_name(dtype)}; activations are not rounded"
        )


SCALE = StoredTensor("scale", "float32", out_per=None, in_per=None, converts=False, init=1.0)
_LARGEST_SCALE = 256.0  # steps of half of it are stored times 2^120


def _scaled(weight: CodedWeight, scale: torch.Tensor) -> CodedWeight:
    """The weight times a number. Raises: ModelError for one that kernels cannot hold."""
    if not bool((scale.abs() < _LARGEST_SCALE).all()):
        raise ModelError("a scale of NVFP4 weights is too large or not a number", hint="download the file again")
    assert weight.steps is not None, "only NVFP4 has such a number"
    return replace(weight, scales=weight.scales * scale, steps=weight.steps * scale)


class GgufLayer(CodedLayer):
    """Linear layers of one type. `scaled`: a number of the module multiplies all of its weight."""

    def __init__(self, kind: GgmlType, *, scaled: bool = False) -> None:
        self.kind, self.name, self._scaled = kind, kind.name, scaled
        # an element is a block, whose bytes are one more dimension
        self.stored: tuple[StoredTensor, ...] = (StoredTensor("weight", "uint8", in_per=kind.block, converts=False),)
        if scaled:
            self.stored += (SCALE,)

    def kept_bytes(self, shape: tuple[int, ...], itemsize: int, kernels: Kernels, *, gated: bool = False) -> int:
        num_rows, num_columns = shape
        if kernels == "triton" and self.kind.in_triton:
            return num_rows * num_columns * self.kind.in_triton // 256
        if kernels != "cpu":
            return AS_STORED.kept_bytes(shape, itemsize, kernels, gated=gated)
        row_bytes = num_columns * self.kind.packed // 256
        if self.kind.name == "NVFP4":  # a step of 4 bytes is that of up to 256 columns
            row_bytes = num_columns * 9 // 16 + -(-num_columns // 256) * 4
        return padded_rows(num_rows, kernels, gated=gated) * row_bytes

    def weight(self, modules: Modules, dtype: torch.dtype, kernels: Kernels) -> Weight:
        if self._scaled:
            whole = stacked([_scaled(coded(module["weight"], self.kind), module["scale"]) for module in modules])
            return whole.dequantized(dtype) if kernels == "torch" else whole
        if kernels == "cpu" or (kernels == "triton" and self.kind.in_triton):
            first, *others = (module["weight"] for module in modules)
            with one_thread():
                return coded(torch.cat([first, *others]) if others else first, self.kind)
        return torch.cat([numbers(module["weight"], self.kind, dtype) for module in modules])
