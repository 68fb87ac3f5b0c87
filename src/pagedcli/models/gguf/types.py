"""The types of numbers in GGUF files: one table, which the reader, the memory forecast and the docs use. Free of torch.

Source of the layouts: ggml's block structures, as the gguf package's dequantize computes them (tested against it).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GgmlType:
    """How a tensor's numbers are stored: a row is a sequence of blocks."""

    name: str
    block: int  # numbers of a block; a row is whole blocks
    num_bytes: int  # bytes per block
    group: int = 0  # neighbours that share a scale; 0: plain numbers
    bits: int = 0  # bits of a code as the CPU kernels keep it
    packed: int = 0  # bytes of 256 inputs there, with their scales (native/packed_groups.h)
    codes: str = ""  # what a code is
    in_triton: int = 0  # bytes of 256 inputs in the Triton kernels, with their scales; 0: widened there

    @property
    def is_float(self) -> bool:
        """Whether it is an ordinary floating-point type."""
        return self.group == 0


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
