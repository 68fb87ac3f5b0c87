"""The tables of rotary embeddings, and the scales of queries by position."""

import math

import torch
from torch import Tensor

from pagedcli.errors import ModelError
from pagedcli.models.rope import RopeSpec

_ROWS = 2**14  # positions computed at a time


def rope_table(rope: RopeSpec, head_dim: int, num_positions: int, *, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of every position.

    longrope has two sets of factors. A table longer than the original length uses the long ones for all positions, as
    cached keys of one sequence must agree; transformers uses the short ones for sequences up to the original length.
    Shapes:  returns [P, R] of dtype, R the rotated part of D: R/2 cosines, then R/2 sines,
             computed in float32 and then rounded.
    Units:   num_positions P in tokens.
    """
    size = rope.rotated(head_dim)
    frequencies = inverse_frequencies(rope, size, num_positions)
    table, factor = torch.empty((num_positions, size), dtype=dtype), rope.attention_factor
    if rope.long_attention_factor is not None and rope.extends(num_positions):
        factor = rope.long_attention_factor
    for start in range(0, num_positions, _ROWS):  # in float32 a million positions would take gigabytes
        rows = table[start : start + _ROWS]
        angles = torch.arange(start, start + len(rows), dtype=torch.float32)[:, None] * frequencies
        rows.copy_(torch.cat((angles.cos(), angles.sin()), dim=-1) * factor)
    return table


def query_scales(rope: RopeSpec, num_positions: int, *, dtype: torch.dtype) -> Tensor | None:
    """What queries are multiplied by at each position, [P] of dtype; None: by 1 everywhere.

    Source:  Llama 4's temperature of attention, as Ministral 3 has it.
    """
    original = rope.original_max_position_embeddings
    if not rope.query_growth or original is None or num_positions <= original:
        return None
    positions = torch.arange(num_positions)
    return (1 + rope.query_growth * torch.log(1 + torch.floor(positions / original))).to(dtype)


def inverse_frequencies(rope: RopeSpec, head_dim: int, num_positions: int) -> Tensor:
    """Radians per token of each rotated pair, [D/2] float32.

    Source:  Su et al., RoFormer, 2021 (default); kaiokendev 2023 (linear); Llama 3.1 (llama3); Peng et al., YaRN, 2023.
             Operation order as in transformers' modeling_rope_utils, so that the values are equal to the last bit.
    """
    wavelength_steps = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    if rope.type == "yarn":
        return _yarn(rope, head_dim, rope.theta**wavelength_steps)
    theta = rope.theta if rope.alpha == 1 else rope.theta * rope.alpha ** (head_dim / (head_dim - 2))
    frequencies = 1.0 / (theta**wavelength_steps)
    if rope.type == "proportional":
        is_rotated = torch.arange(head_dim // 2) < int(rope.partial * head_dim // 2)
        return frequencies.where(is_rotated, 0.0) / rope.factor
    if rope.type == "linear":
        return frequencies / rope.factor
    if rope.type == "longrope":
        is_long = rope.extends(num_positions)
        name, factors = ("long_factor", rope.long_factor) if is_long else ("short_factor", rope.short_factor)
        if len(factors) != head_dim // 2:
            raise ModelError(f"rope's {name} has {len(factors)} entries, not {head_dim // 2}")
        return 1.0 / (torch.tensor(factors) * rope.theta**wavelength_steps)
    if rope.type == "llama3":
        return _llama3(rope, frequencies)
    if rope.divisors:
        if len(rope.divisors) != head_dim // 2:
            raise ModelError(f"rope_freqs has {len(rope.divisors)} entries, not {head_dim // 2}")
        return frequencies / torch.tensor(rope.divisors)
    return frequencies


def _llama3(rope: RopeSpec, frequencies: Tensor) -> Tensor:
    original, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    assert original, "read_rope_spec sets it for llama3"
    assert low, "read_rope_spec sets it for llama3"
    assert high, "read_rope_spec sets it for llama3"
    wavelengths = 2 * math.pi / frequencies
    stretched = torch.where(wavelengths > original / low, frequencies / rope.factor, frequencies)
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * stretched / rope.factor + smooth * stretched
    is_between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(is_between, between, stretched)


def _yarn(rope: RopeSpec, head_dim: int, wavelengths: Tensor) -> Tensor:
    original = rope.original_max_position_embeddings
    assert original, "read_rope_spec sets it for yarn"

    def dimension(num_turns: float) -> float:
        """The dimension with num_turns rotations over the original context."""
        return head_dim * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as transformers does: avoids 0 / 0
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
