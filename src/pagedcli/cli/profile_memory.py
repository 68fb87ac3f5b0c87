"""`pagedcli profile-memory`: where the memory goes, how many KV blocks fit and why, and what N requests need."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from pagedcli.cli.machine import budget_of, fit_blocks, kv_dtype, largest_step, max_model_len, model_folder, model_sizes
from pagedcli.cli.options import ENGINE_KEYS, ConfigFile, Flags, config_flags
from pagedcli.cli.prompt_scan import PROMPT_KEYS, FieldOption, scan_prompts
from pagedcli.cli.tables import Column, Format, FormatOption, Table, count, decimal, percent, print_tables, size
from pagedcli.cli.terminal import say
from pagedcli.config import EngineConfig, LoadedConfig, load_config, parse_bytes
from pagedcli.errors import ConfigError, UsageError
from pagedcli.inspection.memory_report import (
    block_formula,
    concurrency_rows,
    missing_memory,
    size_rows,
    target_rows,
    waterfall_rows,
)
from pagedcli.inspection.prompt_plan import percentile
from pagedcli.kvcache.budget import ITEMSIZE, MemoryTerms, StepShape
from pagedcli.kvcache.cards import CARDS, card_memory

if TYPE_CHECKING:
    from pagedcli.engine.llm_engine import LLMEngine
    from pagedcli.models.spec import ModelSpec

_CUDA_CONTEXT = 512 * 2**20  # bytes; what an idle CUDA process takes on recent cards, good to a factor of two
_OTHER_MACHINE, _REQUESTS = "A machine described by numbers (no GPU, no weights)", "Requests"


def _described(help_: str, metavar: str = "BYTES") -> Any:
    return typer.Option(metavar=metavar, help=help_, rich_help_panel=_OTHER_MACHINE, show_default=False)


@config_flags(*ENGINE_KEYS, *PROMPT_KEYS)
def profile_memory(
    *,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Concurrency at this file's lengths, too.",
            rich_help_panel=_REQUESTS,
            show_default=False,
        ),
    ] = None,
    field: FieldOption = None,
    target_concurrency: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="What N requests at once need.", rich_help_panel=_REQUESTS, show_default=False
        ),
    ] = None,
    gpu: Annotated[str | None, _described("A card by name: " + ", ".join(CARDS) + ".", "NAME")] = None,
    gpu_memory: Annotated[str | None, _described("Total memory of the device, e.g. 24GiB.")] = None,
    used: Annotated[str | None, _described("In use on it, everybody counted, with the model loaded.")] = None,
    peak: Annotated[str | None, _described("Allocated by this process at most, in the largest step.")] = None,
    current: Annotated[str | None, _described("Allocated by this process with the model loaded.")] = None,
    config: ConfigFile = None,
    format_: FormatOption = Format.TABLE,
    flags: Flags,
) -> None:
    """Say where the memory goes, how many KV blocks that leaves and why, and how many requests they serve.

    Loads the model, runs the largest step that the limits allow, and measures. With --gpu or --gpu-memory it needs
    config.json alone and predicts, for a machine that need not exist.

    \b
    Examples:
      pagedcli profile-memory
      pagedcli profile-memory -m Qwen/Qwen3-0.6B --prompts prompts.jsonl
      pagedcli profile-memory -m ./Qwen3-0.6B --gpu h200 --target-concurrency 512
      pagedcli profile-memory -m ./Qwen3-0.6B --block-size 256 --gpu-memory 24GiB
               --used 3.69GiB --peak 1.58GiB --current 1.14GiB

    Exit codes: 0 blocks fit, 2 wrong usage, configuration or no block fits.
    """  # fmt: skip
    loaded = load_config(config, flags)
    described = _read_described(gpu, gpu_memory, used=used, peak=peak, current=current)
    profile = _profile_described(loaded.config.engine, described) if described else _profile_here(loaded.config.engine)
    lengths, shared = {"model length": profile.max_model_len}, None
    if prompts is not None:
        lengths, shared = _lengths_of(loaded, prompts, lengths, field)
    tables = [_waterfall_table(profile), _concurrency_table(profile, lengths, shared)]
    if target_concurrency is not None:
        tables.append(_target_table(profile, target_concurrency, lengths, shared or 0))
    tables.append(_size_table(profile))
    print_tables(tables, format_, facts=_facts(profile, shared))
    nothing = missing_memory(profile.terms, profile.block_bytes, profile.holders) if not profile.num_blocks else None
    if nothing is not None:
        raise ConfigError(nothing[0], hint=nothing[1])
    if not profile.num_blocks:
        raise ConfigError(profile.reason, hint="raise --kv-cache-memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A machine with a model on it, measured, predicted or both."""

    engine: EngineConfig
    spec: "ModelSpec"
    device: str
    dtype: str
    measured: MemoryTerms | None
    predicted: MemoryTerms | None  # None: a model whose code is not ours
    block_bytes: int
    num_blocks: int
    reason: str  # what set num_blocks
    step: StepShape
    max_model_len: int
    notes: Mapping[str, str]  # term -> what a person should know about it
    holders: str = ""  # other processes with most memory

    @property
    def terms(self) -> MemoryTerms:
        """The measured terms, else the predicted ones."""
        terms = self.measured or self.predicted
        assert terms is not None, "a profile is measured or predicted"
        return terms


# ---------------------------------------------------------------------- a machine described by numbers


@dataclass(frozen=True, slots=True)
class _Described:
    """Bytes as given; None where not."""

    total: int
    used: int | None
    peak: int | None
    current: int | None


def _read_described(gpu: str | None, gpu_memory: str | None, **parts: str | None) -> _Described | None:
    given = [f"--{name}" for name, value in parts.items() if value is not None]
    if gpu is not None and gpu_memory is not None:
        raise UsageError("--gpu and --gpu-memory exclude each other")
    if gpu is None and gpu_memory is None:
        if given:
            raise UsageError(f"{given[0]} describes another machine, which needs --gpu or --gpu-memory, too")
        return None
    if (parts["peak"] is None) != (parts["current"] is None):
        raise UsageError("--peak and --current belong together: the activations are their difference")
    total = card_memory(gpu) if gpu is not None else parse_bytes(gpu_memory or "")
    described = _Described(total, **{k: None if v is None else parse_bytes(v) for k, v in parts.items()})
    if described.peak is not None and described.current is not None and described.peak < described.current:
        raise UsageError("--peak is below --current")
    return described


def _profile_described(engine: EngineConfig, given: _Described) -> Profile:
    from pagedcli.models.spec import read_spec

    spec = read_spec(model_folder(engine), trust_remote_code=engine.trust_remote_code)
    length, dtype = max_model_len(engine, spec), kv_dtype(engine, spec)
    step, sizes, itemsize = largest_step(engine, length), model_sizes(engine, spec), ITEMSIZE[dtype]
    if not spec.native and given.current is None:
        raise UsageError(
            f"the memory of {spec.architecture} is not predicted", hint="give --used, --peak and --current as well"
        )
    notes = {"activations": "predicted", "weights": "predicted"}
    weights, activations = sizes.num_parameters * itemsize, sizes.activation_bytes(step, itemsize)
    if given.peak is not None and given.current is not None:
        weights, activations = given.current, given.peak - given.current
        notes = {"activations": "--peak minus --current", "weights": "--current: all that this process holds"}
    others = 0 if given.used is None else max(0, given.used - weights)
    notes["others"] = "none given (--used)" if given.used is None else "--used minus the model"
    notes["runtime"] = "CUDA context, assumed" if given.used is None else "counted in --used"
    terms = MemoryTerms(
        total=given.total,
        reserve=given.total - int(given.total * engine.gpu_memory_utilization),
        others=others,
        runtime=_CUDA_CONTEXT if given.used is None else 0,
        weights=weights,
        activations=activations,
    )
    block_bytes = sizes.block_bytes(engine.block_size, itemsize)
    num_blocks, reason = fit_blocks(engine, block_bytes, length, budget_of(terms, engine.gpu_memory_utilization))
    return Profile(
        engine=engine,
        spec=spec,
        device="described by flags",
        dtype=dtype,
        measured=None,
        predicted=terms,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        reason=reason,
        step=step,
        max_model_len=length,
        notes=notes,
    )


# ---------------------------------------------------------------------- this machine


def _profile_here(engine: EngineConfig) -> Profile:
    """Load the model, run the largest step and measure."""
    from pagedcli.engine.memory import measure_terms, other_holders
    from pagedcli.models.spec import read_spec

    length = max_model_len(engine, read_spec(model_folder(engine), trust_remote_code=engine.trust_remote_code))
    step = largest_step(engine, length)
    loaded = _load(engine, step)
    plan, spec, device = loaded.plan, loaded.spec, loaded.runner.device
    sizes, itemsize = model_sizes(engine, spec), ITEMSIZE[plan.dtype]
    expected = {
        "weights": sizes.num_parameters * itemsize,
        "activations": sizes.activation_bytes(step, itemsize),
    }
    measured = measure_terms(loaded.runner, plan, step, expected_activations=expected["activations"])
    loaded.close()
    given = {item.name: getattr(measured, item.name) for item in fields(MemoryTerms)}
    num_blocks, reason = fit_blocks(engine, plan.block_bytes, length, plan.budget)
    holders = [str(holder) for holder in other_holders(device)]
    return Profile(
        engine=engine,
        spec=spec,
        device=plan.device,
        dtype=plan.dtype,
        measured=measured,
        predicted=MemoryTerms(**given | expected) if spec.native else None,
        block_bytes=plan.block_bytes,
        num_blocks=num_blocks,
        reason=reason,
        step=step,
        max_model_len=length,
        notes=_notes_here(plan.device, holders),
        holders=", ".join(holders),
    )


def _load(engine: EngineConfig, step: StepShape) -> "LLMEngine":
    """The engine with a pool just large enough for the largest step."""
    import torch

    from pagedcli.engine.llm_engine import LLMEngine
    from pagedcli.engine.memory import step_blocks
    from pagedcli.engine.plan import resolve_device

    if engine.tensor_parallel_size > 1 and resolve_device(engine.device).type == "cpu":
        raise UsageError(
            f"memory is measured for one CPU process, not for {engine.tensor_parallel_size}",
            hint="use --tensor-parallel-size 1",
        )
    say(f"loading {engine.model} and running the largest step")
    try:
        return LLMEngine(msgspec.structs.replace(engine, num_gpu_blocks_override=step_blocks(step, engine.block_size)))
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the device has no room for the model and its largest step: {str(error).partition('. ')[0]}",
            hint="end other processes on it, or lower --max-num-batched-tokens",
        ) from error


def _notes_here(device: str, holders: list[str]) -> dict[str, str]:
    if device == "cpu":
        return {
            "others": ("largest: " if holders else "") + ", ".join(holders),
            "runtime": "Python, torch and this program",
            "activations": "growth of the process",
        }
    unnamed = "none that the driver names; they would count as runtime"
    return {"others": ", ".join(holders) or unnamed, "runtime": "CUDA context and buffers"}


# ---------------------------------------------------------------------- the screen


def _lengths_of(
    loaded: LoadedConfig, prompts: str, lengths: dict[str, int], field: str | None
) -> tuple[dict[str, int], int]:
    """Percentiles of the file's prompt and output lengths, and the prefix that half of the prompts share."""
    scan = scan_prompts(loaded, prompts, field=field)
    if scan.num_bad:
        say(f"{scan.num_bad:,} of {scan.num_rows:,} rows are bad and do not count: see pagedcli plan")
    if not scan.plan.num_prompts:
        raise UsageError(f"{prompts} has no good row", hint="see pagedcli plan")
    shares = {"file p50": 0.5, "file p95": 0.95, "file max": 1.0}
    found = {name: percentile(scan.plan.total_lengths, share) for name, share in shares.items()}
    return lengths | found, scan.plan.common_prefix_tokens()


def _labels(profile: Profile) -> dict[str, tuple[str, str]]:
    terms, notes, step = profile.terms, profile.notes, profile.step
    shape = f"largest step: {step.num_tokens:,} tokens in {step.num_seqs:,} sequences"
    labels = {
        "total": ("total", profile.device),
        "reserve": ("- kept free", f"1 - gpu_memory_utilization {profile.engine.gpu_memory_utilization}"),
        "others": ("- other processes", notes.get("others", "")),
        "runtime": ("- runtime", notes.get("runtime", "")),
        "weights": ("- weights", "; ".join(filter(None, (profile.dtype, notes.get("weights"))))),
        "activations": ("- activation peak", "; ".join(filter(None, (shape, notes.get("activations"))))),
        "graphs": ("- CUDA graphs", ""),
        "kv_cache": ("= room for KV", ""),
    }
    if not terms.reserve:
        del labels["reserve"]
    if not terms.graphs:
        del labels["graphs"]
    return labels


def _waterfall_table(profile: Profile) -> Table:
    rows = waterfall_rows(profile.measured, profile.predicted, _labels(profile))
    pool_bytes = profile.num_blocks * profile.block_bytes
    pool = {"term": "pool", "name": "KV cache", "difference": None, "note": profile.reason.partition(":")[0]}
    is_measured = profile.measured is not None
    rows.append(
        pool
        | {
            "measured_bytes": pool_bytes if is_measured else None,
            "predicted_bytes": None if is_measured else pool_bytes,
        }
    )
    columns = [Column("name", "memory")]
    if profile.measured is not None:
        columns.append(Column("measured_bytes", "measured", size))
    if profile.predicted is not None:
        columns.append(Column("predicted_bytes", "predicted" if profile.measured else "bytes", size))
    if profile.measured is not None and profile.predicted is not None:
        columns.append(Column("difference", "off by", percent))
    columns.append(Column("note", "what it is"))
    itemsize = ITEMSIZE[profile.dtype]
    num_slots = profile.num_blocks * profile.engine.block_size
    notes = [
        "bytes/block = "
        + block_formula(model_sizes(profile.engine, profile.spec), profile.engine.block_size, itemsize),
        f"{profile.num_blocks:,} blocks of {size(profile.block_bytes)} = {num_slots:,} tokens",
    ]
    num_ranks = profile.engine.tensor_parallel_size
    title = f"Memory of {profile.engine.model}" + (f", each of {num_ranks} ranks" if num_ranks > 1 else "")
    return Table("waterfall", title, columns, rows, notes)


def _concurrency_table(profile: Profile, lengths: Mapping[str, int], shared: int | None) -> Table:
    block_size = profile.engine.block_size
    rows = concurrency_rows(lengths, num_blocks=profile.num_blocks, block_size=block_size, shared_tokens=shared)
    columns = [
        Column("at", "requests of"),
        Column("num_tokens", "tokens", count),
        Column("num_blocks", "blocks", count),
        Column("max_concurrency", "at once", decimal),
    ]
    notes = [f"--max-num-seqs lets at most {profile.engine.max_num_seqs:,} run at once"]
    if shared:
        columns.append(Column("max_concurrency_shared", f"sharing {shared:,} tokens", decimal))
        notes.append(f"at least half of the rows begin with the same {shared:,} tokens; only whole blocks are shared")
    elif shared == 0:
        notes.append("no prefix is shared by half of the rows")
    return Table("concurrency", f"Requests that {profile.num_blocks:,} blocks hold", columns, rows, notes)


def _target_table(profile: Profile, num_requests: int, lengths: Mapping[str, int], shared: int) -> Table:
    rows = target_rows(
        num_requests,
        lengths,
        terms=profile.terms,
        block_size=profile.engine.block_size,
        block_bytes=profile.block_bytes,
        shared_tokens=shared,
    )
    columns = [
        Column("at", "requests of"),
        Column("num_blocks", "blocks", count),
        Column("kv_cache_bytes", "KV cache", size),
        Column("device_bytes", "whole device", size),
        Column("utilization", "utilization", decimal),
        Column("fits", "fits"),
    ]
    notes = ["utilization: of this device's total, with all else as above; above 1 it is too small"]
    return Table("target", f"What {num_requests:,} requests at once need", columns, rows, notes)


def _size_table(profile: Profile) -> Table:
    pool_bytes = profile.num_blocks * profile.block_bytes
    rows = size_rows(model_sizes(profile.engine, profile.spec), pool_bytes, profile.max_model_len)
    columns = [
        Column("kv_dtype", "KV dtype"),
        Column("block_size", "block size", count),
        Column("block_bytes", "bytes/block", size),
        Column("num_kvcache_blocks", "blocks", count),
        Column("num_kvcache_tokens", "tokens", count),
        Column("max_concurrency", "at model length", decimal),
    ]
    notes = ["float16 is as bfloat16, int8 as float8; arithmetic: the cache has the dtype of the model"]
    return Table("sizes", f"The same {size(pool_bytes)} at other block sizes and KV dtypes", columns, rows, notes)


def _facts(profile: Profile, shared: int | None) -> dict[str, Any]:
    terms, block_size = profile.terms, profile.engine.block_size
    facts: dict[str, Any] = {
        "model": profile.engine.model,
        "device": profile.device,
        "dtype": profile.dtype,
        "measured": profile.measured is not None,
        "block_size": block_size,
        "block_bytes": profile.block_bytes,
        "num_kvcache_blocks": profile.num_blocks,
        "num_kvcache_blocks_reason": profile.reason,
        "num_kvcache_tokens": profile.num_blocks * block_size,
        "kv_cache_bytes": profile.num_blocks * profile.block_bytes,
        "max_model_len": profile.max_model_len,
        "activation_peak_tokens": profile.step.num_tokens,
        "activation_peak_seqs": profile.step.num_seqs,
    }
    facts |= {f"{field.name}_bytes": getattr(terms, field.name) for field in fields(MemoryTerms)}
    return facts | {"room_bytes": terms.kv_cache, "shared_prefix_tokens": shared}
