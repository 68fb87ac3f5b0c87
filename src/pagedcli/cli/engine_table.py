"""How an engine runs on this machine, as a table: backend, KV cache, CUDA graphs, and why nothing faster is used.

Used by `doctor`, which runs one, and by `plan`, which does not.
"""

from typing import TYPE_CHECKING

from pagedcli.show.tables import Fact, Table, table

if TYPE_CHECKING:
    from pagedcli.core.plan import Plan


def engine_table(title: str, found: "Plan | str") -> Table:
    """One choice that determines speed per row, or why the engine cannot start."""
    if isinstance(found, str):
        return table(Fact, "engine", title, [Fact("error", found)])
    rows = [Fact("attention", found.backend), *(Fact("not used", reason) for reason in found.refused)]
    rows += [Fact("dtype", found.dtype), Fact("KV cache", found.kv_dtype)]
    notes = found.notes
    if found.kv_scales is None and "float8" in found.kv_dtype:
        notes += ("the scales of the fp8 cache are measured at startup",)
    elif found.kv_scales is not None:
        k_scale, v_scale = found.kv_scales
        rows.append(Fact("KV scales", f"K {k_scale:.4g}, V {v_scale:.4g}"))
    sizes = ", ".join(map(str, found.graph_sizes))
    rows.append(Fact("CUDA graphs", f"batch sizes {sizes}" if sizes else f"none: {found.no_graphs}"))
    return table(Fact, "engine", title, [*rows, *(Fact("note", note) for note in notes)])
