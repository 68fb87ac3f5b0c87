"""What an engine does on this machine, as a table: backend, KV cache, CUDA graphs, and why nothing faster.

Used by `doctor`, which runs one, and by `plan`, which does not.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagedcli.cli.tables import Column, Table
from pagedcli.config import EngineConfig

if TYPE_CHECKING:
    from pagedcli.engine.engine_plan import Plan
    from pagedcli.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The choices of engine.plan.Plan that speed depends on."""

    backend: str
    refused: tuple[str, ...]  # why faster backends are not used
    dtype: str
    kv_dtype: str
    kv_scales: tuple[float, float] | None  # of an fp8 cache; None: it has none, or they are not measured yet
    graph_sizes: tuple[int, ...]  # batch sizes with a CUDA graph
    no_graphs: str | None  # why there are none
    notes: tuple[str, ...]  # what else a person should know about how the model runs

    @classmethod
    def of(cls, plan: "Plan", notes: tuple[str, ...]) -> "EngineFacts":
        """Of an engine that runs."""
        shared = {name: getattr(plan, name) for name in cls.__dataclass_fields__ if name != "notes"}
        return cls(**shared, notes=notes)


def expect_engine(engine: EngineConfig, spec: "ModelSpec") -> EngineFacts:
    """What an engine would choose here, from its configuration alone.

    Raises: ConfigError or BackendError as the engine would.
    """
    import torch

    from pagedcli.attention.base import dtype_name
    from pagedcli.engine.cuda_graphs import bucket_sizes, why_no_graphs
    from pagedcli.engine.plan import choose_backend, resolve_device, resolve_dtype, resolve_kv_dtype
    from pagedcli.layers.linear import unpacked_note
    from pagedcli.layers.parallel import ParallelContext
    from pagedcli.models.loading import runs_in_one_call
    from pagedcli.models.sharding import shard_spec

    device, dtype = resolve_device(engine.device), resolve_dtype(engine.dtype, spec)
    kv_dtype = resolve_kv_dtype(engine.kv_cache_dtype, dtype, device)
    own = shard_spec(spec, ParallelContext(0, engine.tensor_parallel_size))
    selection = choose_backend(engine, own, device=device, dtype=dtype, kv_dtype=kv_dtype)
    in_one_call = runs_in_one_call(selection.backend, spec) and engine.tensor_parallel_size == 1
    no_graphs = why_no_graphs(engine, spec, device, selection.backend)
    scaled = kv_dtype == torch.float8_e4m3fn
    return EngineFacts(
        backend=selection.backend.name,
        refused=selection.refused,
        dtype=dtype_name(dtype),
        kv_dtype=dtype_name(kv_dtype),
        kv_scales=None,
        graph_sizes=tuple(bucket_sizes(engine.max_num_seqs)) if no_graphs is None else (),
        no_graphs=no_graphs,
        notes=(() if in_one_call or spec.is_fallback else unpacked_note(device, dtype))
        + (("the scales of the fp8 cache are measured at the start",) if scaled else ()),
    )


def engine_table(title: str, found: EngineFacts | str) -> Table:
    """The facts below each other; or why no engine starts."""
    columns = [Column("what", "what"), Column("value", "value")]
    if isinstance(found, str):
        return Table("engine", title, columns, [{"what": "error", "value": found}])
    rows: list[dict[str, Any]] = [{"what": "attention", "value": found.backend}]
    rows += [{"what": "not used", "value": reason} for reason in found.refused]
    rows += [{"what": "dtype", "value": found.dtype}, {"what": "KV cache", "value": found.kv_dtype}]
    if found.kv_scales is not None:
        k_scale, v_scale = found.kv_scales
        rows.append({"what": "KV scales", "value": f"K {k_scale:.4g}, V {v_scale:.4g}"})
    sizes = ", ".join(map(str, found.graph_sizes))
    graphs = f"batch sizes {sizes}" if sizes else f"none: {found.no_graphs}"
    rows.append({"what": "CUDA graphs", "value": graphs})
    rows += [{"what": "note", "value": note} for note in found.notes]
    return Table("engine", title, columns, rows)
