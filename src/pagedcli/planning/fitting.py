"""What of a model fits into a machine, by weight format and KV cache dtype: from config.json alone.

Used by the engine before it loads weights, by `pagedcli plan` and by `pagedcli profile-memory`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pagedcli.config import EngineConfig
from pagedcli.core.budget import MemoryTerms
from pagedcli.core.limits import Limits
from pagedcli.core.plan import Plan
from pagedcli.errors import ConfigError, PagedcliError
from pagedcli.models.formats import FORMATS
from pagedcli.models.spec import ModelSpec
from pagedcli.planning.decide import decide
from pagedcli.planning.forecast import Forecast, forecast_pool, predict_terms
from pagedcli.planning.machine import Machine

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One way to keep a model, and what it leaves for the KV cache. All in bytes unless named otherwise."""

    flags: str  # that choose it; empty: as configured
    weight_format: str
    kv_dtype: str
    weights: int
    room: int  # left for the KV cache; negative: that much is missing
    block_bytes: int  # of the KV cache
    limits: Limits

    @property
    def token_bytes(self) -> int:
        """Of the KV cache, over all layers, as long as no window has passed the token."""
        return self.block_bytes * self.limits.tables.num_groups // self.limits.block_size

    @property
    def num_tokens(self) -> int:
        """Tokens that the room holds."""
        return max(0, self.room) // self.token_bytes

    @property
    def longest_request(self) -> int:
        """Tokens of the longest request that fits."""
        limits = self.limits
        if not limits.tables.has_windows:
            return min(self.num_tokens, limits.max_model_len)
        return limits.tables.longest(max(0, self.room) // self.block_bytes, limits.chunk_size, limits.max_model_len)

    @property
    def num_sequences(self) -> float:
        """Requests of max_model_len tokens that fit at once."""
        tables = self.limits.tables
        if not tables.has_windows:
            return self.num_tokens / self.limits.max_model_len
        return tables.concurrency(max(0, self.room) // self.block_bytes, self.limits.max_model_len)


def fits(config: EngineConfig, spec: ModelSpec, machine: Machine) -> list[Fit]:
    """Every weight format and KV cache dtype that runs on the machine; those of `config` first, others by size."""
    kinds = dict.fromkeys([config.quantization, *FORMATS])
    caches = dict.fromkeys([config.kv_cache_dtype, "auto", "fp8", "int8"])
    found: dict[tuple[str, str], Fit] = {}
    for quantization in kinds:
        for cache in caches:
            changed = msgspec.structs.replace(config, quantization=quantization, kv_cache_dtype=cache)
            try:
                plan = decide(changed, spec, machine)
            except PagedcliError:  # not there: decide says why if it is asked for it
                continue
            fit = _fit(config, changed, spec, plan, machine)
            found.setdefault((fit.weight_format, fit.kv_dtype), fit)
    own, *others = found.values()
    return [own, *sorted(others, key=lambda fit: (-fit.weights, -fit.token_bytes))]


def _fit(config: EngineConfig, changed: EngineConfig, spec: ModelSpec, plan: Plan, machine: Machine) -> Fit:
    flags = []
    if changed.quantization != config.quantization:
        flags.append(f"--quantization {changed.quantization}" if changed.quantization else "no --quantization")
    if changed.kv_cache_dtype != config.kv_cache_dtype:
        flags.append(f"--kv-cache-dtype {changed.kv_cache_dtype}")
    terms = predict_terms(changed, spec, plan, machine)
    return Fit(
        flags=" ".join(flags),
        weight_format=plan.weights or plan.dtype,
        kv_dtype=plan.kv_dtype,
        weights=terms.weights,
        room=terms.kv_cache,
        block_bytes=plan.block_bytes,
        limits=plan.limits,
    )


def forecast(config: EngineConfig, spec: ModelSpec, plan: Plan, machine: Machine) -> Forecast | None:
    """What the model would get on the machine; None for a model that runs through transformers."""
    if spec.is_fallback:
        return None
    terms = predict_terms(config, spec, plan, machine)
    refusal = weights_refusal(config, spec, terms, machine)
    if refusal is not None:
        return Forecast(terms, 0, refusal.message, refusal.hint)
    return forecast_pool(config, plan, terms)


def weights_refusal(config: EngineConfig, spec: ModelSpec, terms: MemoryTerms, machine: Machine) -> ConfigError | None:
    """The error for weights that alone exceed the free memory; None if they fit."""
    left = terms.total - terms.reserve - terms.others  # terms.runtime may be part of the others by now
    if terms.weights <= left:
        return None
    return ConfigError(
        f"the weights of {config.model} take {terms.weights / _GIB:,.2f} GiB, but only {max(0, left) / _GIB:,.2f} GiB"
        " of memory are free",
        hint=fitting_hint(fits(config, spec, machine)),
    )


def fitting_hint(found: Sequence[Fit]) -> str:
    """What to change so that the model fits, the least first."""
    for fit in found:
        if fit.flags and fit.room >= fit.token_bytes:
            return (
                f"{fit.flags} fits: {fit.weights / _GIB:,.2f} GiB of weights leave room for {fit.num_tokens:,} tokens; "
                "pagedcli profile-memory shows more"
            )
    smallest = min(found, key=lambda fit: fit.weights)
    return f"nothing fits: even {smallest.weight_format} weights take {smallest.weights / _GIB:,.2f} GiB"
