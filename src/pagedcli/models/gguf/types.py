"""The types of numbers in GGUF files, one table, and those that a file stores its linear layers in. Free of torch until
a weight is read.

Source of the layouts: ggml's block structures, as the gguf package's dequantize computes them (tested against it).
"""

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pagedcli import layers
from pagedcli.core.plan import Kernels
from pagedcli.later import torch
from pagedcli.models.formats import AS_STORED, LayerFormat, StoredTensor, WeightFormat, kernels_note
from pagedcli.models.gguf.names import stored_tensor
from pagedcli.printable import plural


@dataclass(frozen=True)
class GgmlType(LayerFormat):
    """How a tensor's numbers are stored: a row is a sequence of blocks. The format of linear layers of this type."""

    name: str
    block: int  # numbers of a block; a row is whole blocks
    num_bytes: int  # bytes per block
    group: int = 0  # neighbours that share a scale; 0: plain numbers
    bits: int = 0  # bits of a code as the CPU kernels keep it
    packed: int = 0  # bytes of 256 inputs there, with their scales (native/packed_groups.h)
    codes: str = ""  # meaning of a code, in words
    in_triton: int = 0  # bytes of 256 inputs in the Triton kernels, with their scales; 0: widened there
    scaled: bool = False  # a number of the module multiplies all of its weight

    @property
    def is_float(self) -> bool:
        """Whether it is an ordinary floating-point type."""
        return self.group == 0

    @functools.cached_property
    def stored(self) -> tuple[StoredTensor, ...]:
        # an element is a block, whose bytes are one more dimension
        blocks = StoredTensor("weight", "uint8", in_per=self.block, converts=False)
        return (blocks, SCALE) if self.scaled else (blocks,)

    def why_widened(self, kernels: Kernels, itemsize: int) -> str | None:
        is_kept = kernels == "cpu" or (kernels == "triton" and self.in_triton)
        return None if is_kept else f"{kernels} has no kernel for them"

    def row_bytes(self, num_columns: int, itemsize: int, kernels: Kernels) -> int:
        if kernels == "cpu" and self.name == "NVFP4":  # a step of 4 bytes is that of up to 256 columns
            return num_columns * 9 // 16 + -(-num_columns // 256) * 4
        return num_columns * (self.packed if kernels == "cpu" else self.in_triton) // 256

    def read(self, module: "Mapping[str, torch.Tensor]") -> "layers.quantized.CodedWeight":
        from pagedcli.models.gguf.blocks import coded

        return coded(module["weight"], self.name, self.bits, self.group, module.get("scale"))


SCALE = StoredTensor("scale", "float32", out_per=None, in_per=None, converts=False, init=1.0)
CODEBOOK = "a vector of a codebook, as 8 bits with a scale"
# By the number in the file. What is read:
TYPES = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    30: GgmlType("BF16", 1, 2),
    8: GgmlType("Q8_0", 32, 34, 32, 8, 272, "8 bits with a scale", 280),
    2: GgmlType("Q4_0", 32, 18, 32, 4, 144, "4 bits with a scale", 152),
    3: GgmlType("Q4_1", 32, 20, 32, 4, 192, "4 bits with a scale and a minimum", 192),
    6: GgmlType("Q5_0", 32, 22, 32, 5, 176, "5 bits with a scale", 280),
    7: GgmlType("Q5_1", 32, 24, 32, 5, 224, "5 bits with a scale and a minimum", 320),
    10: GgmlType("Q2_K", 256, 84, 16, 4, 168, "2 bits with a scale and a minimum", 256),
    11: GgmlType("Q3_K", 256, 110, 16, 4, 148, "3 bits with a scale", 208),
    12: GgmlType("Q4_K", 256, 144, 32, 4, 152, "4 bits with a scale and a minimum", 192),
    13: GgmlType("Q5_K", 256, 176, 32, 5, 184, "5 bits with a scale and a minimum", 320),
    14: GgmlType("Q6_K", 256, 210, 16, 6, 212, "6 bits with a scale", 336),
    20: GgmlType("IQ4_NL", 32, 18, 32, 4, 144, "one of 16 levels, with a scale"),
    23: GgmlType("IQ4_XS", 256, 136, 32, 4, 140, "one of 16 levels, with a scale"),
    39: GgmlType("MXFP4", 32, 17, 32, 4, 144, "e2m1 with a power of two", 144),
    16: GgmlType("IQ2_XXS", 256, 66, 16, 8, 276, CODEBOOK),
    17: GgmlType("IQ2_XS", 256, 74, 16, 8, 276, CODEBOOK),
    22: GgmlType("IQ2_S", 256, 82, 16, 8, 276, CODEBOOK),
    18: GgmlType("IQ3_XXS", 256, 98, 16, 8, 276, CODEBOOK),
    21: GgmlType("IQ3_S", 256, 110, 16, 8, 276, CODEBOOK),
    19: GgmlType("IQ1_S", 256, 50, 16, 8, 276, CODEBOOK),
    29: GgmlType("IQ1_M", 256, 56, 16, 8, 276, CODEBOOK),
    34: GgmlType("TQ1_0", 256, 54, 32, 4, 144, "-1, 0 or 1 with a scale", 152),
    35: GgmlType("TQ2_0", 256, 66, 32, 4, 144, "-1, 0 or 1 with a scale", 152),
    40: GgmlType("NVFP4", 64, 36, 16, 4, 148, "e2m1 with an e4m3 scale", 192),
}
# What is known and not read: number -> name and what it is.
REFUSED = {
    9: ("Q8_1", "an intermediate result of llama.cpp"),
    15: ("Q8_K", "an intermediate result of llama.cpp"),
    24: ("I8", "whole numbers"),
    25: ("I16", "whole numbers"),
    26: ("I32", "whole numbers"),
    27: ("I64", "whole numbers"),
    28: ("F64", "64-bit floating point"),
    41: ("Q1_0", "1-bit weights"),
}
BY_NAME = {each.name: each for each in TYPES.values()}

# Tensors that are computed with as numbers, in words -> the last parts of their names
_WIDENED = {
    "routers": ("ffn_gate_inp", "ffn_gate_inp_shexp"),
    "the inputs of layers": ("per_layer_token_embd", "per_layer_model_proj", "inp_gate", "proj"),
    "K's and V's matrices of latents": ("attn_k_b", "attn_v_b", "attn_kv_b"),
    "gates of states": ("ssm_ba", "ssm_alpha", "ssm_beta", "ssm_f_a", "ssm_f_b"),
}


@dataclass(frozen=True)
class GgufQuantization(WeightFormat):
    """The types of a file's tensors, of which some linear layers are quantized."""

    types: Mapping[str, str] = field(hash=False)  # tensor -> name of its type
    sizes: Mapping[str, int] = field(hash=False)  # tensor -> numbers in it
    mixes = True

    @functools.cached_property
    def name(self) -> str:
        """The types by how much they store, e.g. "GGUF: Q4_K 71 %, Q6_K 29 %"."""
        totals: Counter[str] = Counter()
        for name, kind in self.types.items():
            if not BY_NAME[kind].is_float:
                totals[kind] += self.sizes[name]
        whole = sum(totals.values())
        return "GGUF: " + ", ".join(f"{kind} {100 * count / whole:.0f} %" for kind, count in totals.most_common())

    @functools.cached_property
    def lm_head(self) -> LayerFormat:
        return self.of("lm_head" if "output.weight" in self.types else "model.embed_tokens")

    def of(self, module: str) -> LayerFormat:
        """F32 if the file lacks the module's tensor."""
        kind = BY_NAME[self.types.get(stored_tensor(f"{module}.weight", self.types).name, "F32")]
        if kind.is_float:
            return AS_STORED
        return replace(kind, scaled=True) if kind.name == "NVFP4" and self._has_scale(module) else kind

    def _has_scale(self, module: str) -> bool:
        name = stored_tensor(f"{module}.scale", self.types).name
        # Gemma 4 calls the factors of its router's weights so
        is_of_router = name.endswith("ffn_down_exps.scale") and name.replace("down_exps", "gate_inp") in self.types
        return name in self.types and not is_of_router

    def rounds_activations(self, kernels: Kernels, itemsize: int) -> bool:
        return kernels == "cpu"

    def note(self, dtype: str, kernels: Kernels) -> str:
        if kernels == "torch":
            return kernels_note(self.name, dtype, kernels, "torch has no kernel for them")
        parts = ", ".join(self._widened if kernels == "cpu" else self._widened_in_triton)
        apart = f" apart from {parts}, widened to {dtype}" if parts else ""
        if kernels == "triton":
            return kernels_note(self.name, dtype, kernels, None, apart=apart)
        spread = ", ".join(sorted({kind for kind in self.types.values() if BY_NAME[kind].codes == CODEBOOK}))
        apart += f" ({spread} as 8-bit numbers)" if spread else ""
        note = kernels_note(self.name, dtype, kernels, None, apart=apart)
        is_scaled = any(name.endswith(".input_scale") for name in self.types)
        return f"{note}; the scales of activations are not used" if is_scaled else note

    @property
    def _widened(self) -> list[str]:
        """What CPU kernels do not keep as stored, e.g. ["the embedding", "gate and up of 2 layers"]."""
        embedding = self.types.get("token_embd.weight", "F32")
        parts = ["the embedding"] if "output.weight" in self.types and not BY_NAME[embedding].is_float else []
        coded = [name.removesuffix(".weight") for name, kind in self.types.items() if not BY_NAME[kind].is_float]
        modules = {name.rpartition(".")[2] for name in coded}
        parts += [what for what, names in _WIDENED.items() if not modules.isdisjoint(names)]
        return parts + self._differing("gate and up", "ffn_gate", "ffn_up")

    @property
    def _widened_in_triton(self) -> list[str]:
        """What Triton kernels do not keep as stored, e.g. ["the embedding and output", "q, k and v of 2 layers"]."""
        parts = ["the embedding and output", *self._differing("gate and up", "ffn_gate", "ffn_up")]
        parts += self._differing("q, k and v", "attn_q", "attn_k", "attn_v")
        unknown = {kind for kind in self.types.values() if not BY_NAME[kind].is_float and not BY_NAME[kind].in_triton}
        return [*parts, *sorted(unknown)]

    def _differing(self, what: str, own: str, *others: str) -> list[str]:
        """E.g. ["gate and up of 2 layers"]: those in which tensors that are computed as one have different types."""
        layers = {
            name.split(".")[1]
            for name, kind in self.types.items()
            if f".{own}" in name and name.endswith(".weight") and "norm" not in name
            for other in others
            if self.types.get(name.replace(own, other), kind) != kind
        }
        return [f"{what} of {plural(len(layers), 'layer')}"] if layers else []
