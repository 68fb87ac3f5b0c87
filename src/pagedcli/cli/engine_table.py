"""How an engine runs on this machine, as a table: backend, KV cache, CUDA graphs, and why nothing faster is used.

Used by `doctor`, which runs one, and by `plan`, which does not.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagedcli.show.tables import Column, Table

if TYPE_CHECKING:
    from pagedcli.core.plan import Plan
    from pagedcli.planning.decide import Decisions


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The choices that determine speed."""

    backend: str
    refused: tuple[str, ...]  # why faster backends are not used
    dtype: str
    kv_dtype: str
    kv_scales: tuple[float, float] | None  # of an fp8 cache; None: no such cache, or not measured yet
    graph_sizes: tuple[int, ...]  # batch sizes with a CUDA graph
    no_graphs: str | None  # why there are no CUDA graphs
    notes: tuple[str, ...]  # further notes on how the model runs

    @classmethod
    def of_plan(cls, plan: "Plan", notes: tuple[str, ...]) -> "EngineFacts":
        """From a running engine."""
        shared = {name: getattr(plan, name) for name in cls.__dataclass_fields__ if name != "notes"}
        return cls(**shared, notes=notes)

    @classmethod
    def of_decisions(cls, decided: "Decisions") -> "EngineFacts":
        """From a prediction."""
        from pagedcli.attention.base import dtype_name

        kv_dtype = dtype_name(decided.kv_dtype)
        measured_later = ("the scales of the fp8 cache are measured at startup",) if "float8" in kv_dtype else ()
        return cls(
            backend=decided.backend,
            refused=decided.refused,
            dtype=dtype_name(decided.dtype),
            kv_dtype=kv_dtype,
            kv_scales=None,
            graph_sizes=decided.graph_sizes,
            no_graphs=decided.no_graphs,
            notes=decided.notes + measured_later,
        )


def engine_table(title: str, found: EngineFacts | str) -> Table:
    """One fact per row, or why the engine cannot start."""
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
