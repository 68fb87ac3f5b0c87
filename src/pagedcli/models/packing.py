"""What config.json says of how the numbers of a quantized checkpoint are packed."""

from dataclasses import dataclass
from typing import Literal

Layout = Literal["gptq", "awq", "pack-quantized", "int-quantized", "float8", "mxfp4", "mxfp8", "nvfp4"]


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Numbers of 4 or 8 bits with scales, as a checkpoint stores them."""

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
