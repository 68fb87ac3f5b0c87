"""How an engine runs on this machine, as a table: backend, KV cache, CUDA graphs, and why nothing faster is used.

Used by `doctor`, which runs one, and by `plan`, which does not.
"""

from typing import TYPE_CHECKING, Any

from pagedcli.show.tables import Column, Table

if TYPE_CHECKING:
    from pagedcli.core.plan import Plan


def engine_table(title: str, found: "Plan | str") -> Table:
    """One choice that determines speed per row, or why the engine cannot start."""
    columns = [Column("what", "what"), Column("value", "value")]
    if isinstance(found, str):
        return Table("engine", title, columns, [{"what": "error", "value": found}])
    rows: list[dict[str, Any]] = [{"what": "attention", "value": found.backend}]
    rows += [{"what": "not used", "value": reason} for reason in found.refused]
    rows += [{"what": "dtype", "value": found.dtype}, {"what": "KV cache", "value": found.kv_dtype}]
    notes = found.notes
    if found.kv_scales is None and "float8" in found.kv_dtype:
        notes += ("the scales of the fp8 cache are measured at startup",)
    elif found.kv_scales is not None:
        k_scale, v_scale = found.kv_scales
        rows.append({"what": "KV scales", "value": f"K {k_scale:.4g}, V {v_scale:.4g}"})
    sizes = ", ".join(map(str, found.graph_sizes))
    graphs = f"batch sizes {sizes}" if sizes else f"none: {found.no_graphs}"
    rows.append({"what": "CUDA graphs", "value": graphs})
    rows += [{"what": "note", "value": note} for note in notes]
    return Table("engine", title, columns, rows)
