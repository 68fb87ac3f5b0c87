"""What a configuration may not have on a model and a machine, and which features are off: a table of conditions each.

Read by planning.decide, in one pass.
"""

from collections.abc import Iterable
from typing import TypeAlias

import torch

from pagedcli.attention.base import AttentionBackend, dtype_name
from pagedcli.buckets import is_url
from pagedcli.config import EngineConfig
from pagedcli.config_keys import flag_name
from pagedcli.core.limits import Limits
from pagedcli.core.plan import Kernels
from pagedcli.core.snapshots import SnapshotPolicy
from pagedcli.errors import ConfigError
from pagedcli.layers.basic import fused_layers
from pagedcli.layers.linear import unpacked_note
from pagedcli.models.decoder import groups_experts
from pagedcli.models.formats import AS_STORED, WeightFormat
from pagedcli.models.loading import IN_ONE_CALL
from pagedcli.models.spec import ModelSpec
from pagedcli.records import size

LARGEST_BUCKET = 512  # sequences; in larger steps launch overhead is negligible
Why: TypeAlias = tuple[str, str | None]  # a reason, and what to use instead
_Rows: TypeAlias = Iterable[tuple[bool, str, str | None]]  # condition, reason, what to use instead


def _first(rows: _Rows) -> Why | None:
    return next(((reason, hint) for holds, reason, hint in rows if holds), None)


def _refuse(rows: _Rows) -> None:
    if (why := _first(rows)) is not None:
        raise ConfigError(why[0], hint=why[1])


def check_cache(config: EngineConfig, spec: ModelSpec, kv_dtype: torch.dtype) -> None:
    """Raises: ConfigError for settings of the cache that exclude each other or the model."""
    rows = [
        (
            kv_dtype == torch.int8 and spec.is_fallback,
            f"kv_cache_dtype int8 is not for {spec.architecture}, which runs through transformers",
            "use --kv-cache-dtype auto",
        ),
        (
            config.eviction != "lru" and not config.enable_prefix_caching,
            f"eviction is {config.eviction}, but without prefix caching there is nothing to evict",
            "leave out --eviction, or --no-enable-prefix-caching",
        ),
    ]
    _refuse(rows)


def check_states(config: EngineConfig, spec: ModelSpec, device: torch.device, *, is_here: bool) -> None:
    """Raises: ConfigError for settings of recurrent state that are wrong, or not for this model, or without Triton."""
    SnapshotPolicy.named(config.checkpoints)
    defaults, has_states = EngineConfig(), bool(spec.states)
    rows = [
        (
            not has_states and getattr(config, name) != getattr(defaults, name),
            f"{name} is {getattr(config, name)}, but {spec.architecture} has no layers with recurrent state",
            f"leave out {flag_name(name)}",
        )
        for name in ("checkpoints", "num_state_slots")
    ]
    no_triton = has_states and device.type == "cuda" and is_here and fused_layers() is None
    what = f"{spec.architecture} has layers with recurrent state, whose kernels on {device} need Triton"
    hint = "`pagedcli doctor` says why; or use --device cpu"
    _refuse([*rows, (no_triton, f"{what}, which cannot run here", hint)])


def check_tables(limits: Limits, spec: ModelSpec, itemsize: int, available: int) -> None:
    """Raises: ConfigError if the tables that grow with the length of a request alone need more than `available` bytes:
    the rotary embedding of every position, and a block table per sequence."""
    ropes = {(mixer.rope, mixer.rotary_dim) for mixer in spec.attentions}
    needed = limits.max_model_len * itemsize * sum(head_dim for _, head_dim in ropes)
    needed += limits.max_num_seqs * limits.tables.num_entries(limits.max_model_len) * 4
    takes = f"its tables of positions and blocks take {size(needed)}, but only {size(available)} are available"
    hint = "lower --max-model-len or --max-num-seqs"
    _refuse([(needed > available, f"max_model_len is {limits.max_model_len}: {takes}", hint)])


def why_unequal_bits(
    spec: ModelSpec, device: torch.device, backend: type[AttentionBackend], decoder: str
) -> Why | None:
    """Why the bits of a token may depend on what else is in its step (see docs/reproducibility.md); None: they do
    not."""
    none = "no equal bits are promised"
    rows = [
        (device.type != "cpu", f"{none} on {device}", "use --device cpu"),
        (
            not backend.capabilities.batch_invariant,
            f"{none} with attention backend {backend.name}",
            "use --attention-backend cpu",
        ),
        (decoder != IN_ONE_CALL, f"{none} for {spec.architecture} with decoder {decoder}", None),
    ]
    return _first(rows)


def check_store(config: EngineConfig, unequal: Why | None) -> None:
    """Raises: ConfigError for a prefix store whose blocks would not have the bits of computed ones, or that would never
    be used. `unequal`: see why_unequal_bits."""
    folder, cannot = config.prefix_store, "prefix_store cannot be used:"
    rows = [
        (
            folder is None and getattr(config, name) is not None,
            f"{name} is for a prefix store",
            "name its folder with --prefix-store",
        )
        for name in ("prefix_store_size", "prefix_store_days")
    ]
    has, (bits, hint) = folder is not None, unequal or ("", None)
    rows += [
        (folder == "", "prefix_store is empty", "name one, or leave out --prefix-store"),
        (is_url(folder), f"{cannot} its blocks are read and replaced one by one", "name a folder of this machine"),
        (
            has and not config.enable_prefix_caching,
            f"{cannot} prefix caching is off",
            "leave out --no-enable-prefix-caching",
        ),
        (
            has and config.tensor_parallel_size > 1,
            f"{cannot} it keeps the blocks of one rank",
            "use --tensor-parallel-size 1",
        ),
        (has and unequal is not None, f"{cannot} {bits}", hint or "leave out --prefix-store"),
    ]
    _refuse(rows)


def why_no_drafts(config: EngineConfig, unequal: Why | None, *, runs_ahead: bool) -> str | None:
    """Why the speculation that is configured is off; None: it is on, or not configured. Where bits depend on the rest
    of a step, a draft could change the tokens."""
    rows = [
        (unequal is not None, (unequal or ("",))[0], None),
        (runs_ahead, "async_scheduling launches a step before the tokens of the last one are known", None),
        (config.tensor_parallel_size > 1, "tensor_parallel_size is more than 1", None),
    ]
    why = None if config.speculation == "off" else _first(rows)
    return why and why[0]


def why_no_graphs(
    config: EngineConfig, spec: ModelSpec, device: torch.device, backend: type[AttentionBackend]
) -> str | None:
    """Why steps run without graphs; None if graphs are used."""
    on_host = spec.experts is not None and not groups_experts(spec, backend)
    rows = [
        (device.type != "cuda", f"{device} has none", None),
        (config.enforce_eager, "enforce_eager", None),
        (spec.is_fallback, f"{spec.architecture} runs through transformers", None),
        (on_host, "the host counts the tokens of each expert", None),
        (not backend.capabilities.graph_safe, f"backend {backend.name} needs lengths on the host", None),
    ]
    why = _first(rows)
    return why and why[0]


def bucket_sizes(num_seqs: int) -> list[int]:
    """Batch sizes to capture, ascending: 1, 2, 4, 8, 16, then steps of at most half, and always the maximum."""
    end = min(num_seqs, LARGEST_BUCKET)
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256) if size < end]
    return [*sizes, *range(320, end, 64), end]


def notes(
    spec: ModelSpec, weights: WeightFormat, kernels: Kernels, device: torch.device, dtype: torch.dtype
) -> tuple[str, ...]:
    """What the user should know of the linear layers."""
    found = () if spec.is_fallback else unpacked_note(device, dtype, kernels)
    if spec.widened is not None and weights is AS_STORED:
        found += (f"weights are {spec.widened}, widened to {dtype_name(dtype)} while loading",)
    if (note := weights.note(dtype_name(dtype), kernels)) is not None:
        found += (note,)
    return found
