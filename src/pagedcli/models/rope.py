"""Rotary position parameters: `rope_parameters` (new) or `rope_theta` + `rope_scaling` (old) -> RopeSpec.

Free of torch. blocks.py turns a RopeSpec into cosines and sines.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from pagedcli.errors import ModelError

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]
_TYPES: tuple[RopeType, ...] = ("default", "linear", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """How positions rotate q and k. Unused fields keep their default, so that equal ropes compare equal."""

    type: RopeType = "default"
    theta: float = 10000.0  # base of the geometric series of wavelengths
    factor: float = 1.0  # linear, llama3, yarn, proportional: factor of the context extension
    original_max_position_embeddings: int | None = None  # llama3, yarn: context length in tokens before the extension
    low_freq_factor: float | None = None  # llama3: wavelengths over original / low_freq_factor are divided by factor
    high_freq_factor: float | None = None  # llama3: wavelengths under original / high_freq_factor are unchanged
    beta_fast: float = 32.0  # yarn: dimensions with more rotations over the original context are unchanged
    beta_slow: float = 1.0  # yarn: dimensions with fewer rotations are divided by factor
    truncate: bool = True  # yarn: round both limits to whole dimensions
    partial: float = 1.0  # fraction of each head that is rotated: its first elements, of proportional its first pairs
    short_factor: tuple[float, ...] = ()  # longrope: factor of each wavelength up to the original length
    long_factor: tuple[float, ...] = ()  # longrope: beyond it
    attention_factor: float = 1.0  # yarn, longrope: multiplies cos and sin (from other fields if not given)
    long_attention_factor: float | None = None  # longrope: beyond the original length; None: the same
    alpha: float = 1.0  # stretches theta by alpha^(R / (R - 2)), R elements of a head that are rotated
    divisors: tuple[float, ...] = ()  # divisor per frequency, as GGUF files have them in place of llama3's parameters
    interleaved: bool = False  # pairs are the elements (2i, 2i + 1) instead of (i, i + half)
    query_growth: float = 0.0  # queries are multiplied by 1 + this * ln(1 + position // original length)

    def rotated(self, head_dim: int) -> int:
        """Elements of a head whose pairs are rotated, some of proportional by no angle."""
        return head_dim if self.type == "proportional" else int(head_dim * self.partial)

    @property
    def exact_length(self) -> int | None:
        """longrope: tokens up to which a model computes as it was trained without extension; None: no such limit."""
        return self.original_max_position_embeddings if self.type == "longrope" else None

    def extends(self, num_positions: int) -> bool:
        """Whether this number of positions is more than that."""
        return self.exact_length is not None and num_positions > self.exact_length

    @property
    def stretched_length(self) -> int:
        """The length that yarn extends to: users enable it without raising max_position_embeddings, as Qwen advises."""
        return int((self.original_max_position_embeddings or 0) * self.factor) if self.type == "yarn" else 0


def rope_notes(rope: RopeSpec | None, max_model_len: int) -> tuple[str, ...]:
    """Notes for the user on a model that serves requests of up to max_model_len tokens."""
    if rope is None or not rope.extends(max_model_len):
        return ()
    exact = rope.exact_length
    return (
        f"longrope: as max_model_len is over {exact}, all requests use the factors for long texts, as in vLLM;"
        f" transformers uses them only for sequences over {exact} tokens",
    )


class _RopeJson(msgspec.Struct):
    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_rotary_factor: float | None = None
    llama_4_scaling_beta: float | None = None
    alpha: float | None = None
    short_factor: list[float] | None = None
    long_factor: list[float] | None = None
    short_mscale: float | None = None
    long_mscale: float | None = None


class _ConfigJson(msgspec.Struct):
    rope_parameters: _RopeJson | None = None
    rope_scaling: _RopeJson | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: int | None = None


def read_rope_spec(
    config: dict[str, Any], max_position_embeddings: int, *, may_be_partial: bool = False, may_have_alpha: bool = False
) -> RopeSpec:
    """The RopeSpec of a config.json, whichever of the two forms it uses.

    Raises: ModelError for an unknown type, a missing parameter or an unexpected partial rotary embedding.
    """
    try:
        fields = msgspec.convert(config, _ConfigJson)
    except msgspec.ValidationError as error:
        raise ModelError(str(error), hint="compare the file with the original on the Hub") from error
    _check_positive(fields)
    for form in ("rope_parameters", "rope_scaling"):
        if any(isinstance(value, dict) for value in (config.get(form) or {}).values()):
            raise ModelError(f"{form} differs between layers, which is not supported for this family")
    rope = fields.rope_scaling or fields.rope_parameters or _RopeJson()  # transformers prefers rope_scaling, too
    rope_type, alpha = _type_and_alpha(rope, may_have_alpha)
    if rope_type not in _TYPES:
        raise ModelError(f"rope type {rope_type!r} is not supported (supported: {', '.join(_TYPES)})")
    partial = rope.partial_rotary_factor or fields.partial_rotary_factor or 1.0
    if partial > 1 or (partial < 1 and not may_be_partial and rope_type != "proportional"):
        raise ModelError(f"partial_rotary_factor {partial} is not supported for this family (only 1.0)")
    theta = rope.rope_theta or fields.rope_theta or 10000.0
    original = fields.original_max_position_embeddings or rope.original_max_position_embeddings
    original = original or max_position_embeddings
    plain = RopeSpec(type=rope_type, theta=theta, partial=partial, alpha=alpha)
    if rope_type == "linear":
        return replace(plain, factor=_required(rope.factor, "factor", rope_type))
    if rope_type == "proportional":
        return replace(plain, factor=rope.factor or 1.0)
    if rope_type == "llama3":
        return replace(
            plain,
            factor=_required(rope.factor, "factor", rope_type),
            original_max_position_embeddings=original,
            low_freq_factor=_required(rope.low_freq_factor, "low_freq_factor", rope_type),
            high_freq_factor=_required(rope.high_freq_factor, "high_freq_factor", rope_type),
        )
    factor = rope.factor or max_position_embeddings / original
    if rope_type == "yarn":
        return replace(
            plain,
            factor=factor,
            original_max_position_embeddings=original,
            beta_fast=rope.beta_fast or 32.0,
            beta_slow=rope.beta_slow or 1.0,
            truncate=rope.truncate,
            query_growth=rope.llama_4_scaling_beta or 0.0,
            attention_factor=_attention_factor(rope, factor),
        )
    if rope_type == "longrope":
        return _longrope(plain, rope, original, factor)
    return plain


def _longrope(plain: RopeSpec, rope: _RopeJson, original: int, factor: float) -> RopeSpec:
    if not rope.short_factor:
        raise ModelError("rope type 'longrope' needs 'short_factor'")
    by_length = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return replace(
        plain,
        original_max_position_embeddings=original,
        short_factor=tuple(rope.short_factor),
        long_factor=tuple(rope.long_factor or ()),
        attention_factor=rope.short_mscale or rope.attention_factor or by_length,
        long_attention_factor=rope.long_mscale,
    )


def _type_and_alpha(rope: _RopeJson, may_have_alpha: bool) -> tuple[str, float]:
    """A dynamic rotary embedding with alpha is a plain one of another theta. Of text, the three positions of
    `mrope` are equal."""
    rope_type = rope.rope_type or rope.type or "default"
    if rope_type == "mrope":
        return "default", 1.0
    if may_have_alpha and rope_type == "dynamic" and rope.alpha is not None:
        return "default", rope.alpha
    return rope_type, 1.0


def _check_positive(fields: _ConfigJson) -> None:
    for part in (fields, fields.rope_parameters, fields.rope_scaling):
        for name, value in msgspec.structs.asdict(part).items() if part is not None else ():
            if (
                isinstance(value, float | int)
                and name not in ("truncate", "mscale", "mscale_all_dim")
                and not 0 < value < math.inf
                and not (name == "llama_4_scaling_beta" and value == 0)  # queries then do not grow
            ):
                raise ModelError(f"{name} is {value}, but must be positive and finite")


def _attention_factor(rope: _RopeJson, factor: float) -> float:
    """Source: Peng et al., YaRN, ICLR 2024, and DeepSeek's mscale fields, as transformers combines them."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _required(value: float | None, name: str, rope_type: str) -> float:
    if value is None:
        raise ModelError(f"rope type {rope_type!r} needs {name!r}")
    return value
