"""What `bench` prints in addition to its figures: progress, spread, other load, comparison with an earlier file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pagedcli.bench.busy import Busy, worst
from pagedcli.bench.spread import compared_rows, spread_rows
from pagedcli.errors import UsageError
from pagedcli.show.tables import Column, Table, decimal
from pagedcli.show.terminal import ProgressLine

if TYPE_CHECKING:
    from pagedcli.bench.rates import MachineRates
    from pagedcli.bench.throughput import Throughput

_NAMES = {
    "wall_s": "s",
    "output_tokens_per_s": "out tok/s",
    "ttft_ms": "TTFT ms",
    "tpot_ms": "TPOT ms",
    "overhead_ms": "engine ms/step",
    "share_of_floor": "share of the floor",
}


class BenchProgress(ProgressLine):
    """The share done and the remaining time."""

    def __init__(self, what: str) -> None:
        super().__init__(line_every_s=10.0)
        self._what = what

    def __call__(self, share: float) -> None:
        """Show that this share of the work is done."""
        if share > 0:
            self.show(lambda s: f"{self._what}: {share:.0%}, about {s * (1 - share) / share:,.0f} s left")


def read_earlier(path: Path | None, name: str) -> list[dict[str, Any]] | None:
    """The rows of an earlier measurement, printed with --format json. Raises: UsageError if the file has none."""
    if path is None:
        return None
    try:
        rows = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])[name]
        if all("spread" in row for row in rows):
            return list(rows)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, KeyError, TypeError):
        pass
    raise UsageError(
        f"{path} is not a measurement to compare with", hint=f"make one with pagedcli bench {name} --format json"
    )


def result_tables(
    table: Table, rows: Sequence[Mapping[str, Any]], earlier: Sequence[Mapping[str, Any]] | None
) -> list[Table]:
    """The table of a measurement, its spread, and the comparison with an earlier one."""
    names = [column for column in table.columns if column.key in ("workload", "batch_size")]
    tables = [table]
    if len(rows[0]["all_wall_s"]) > 1:
        values = [Column(name, name, decimal) for name in ("min", "median", "max")]
        columns = [*names, Column("figure", "figure", _figure), *values]
        tables.append(Table("spread", "Spread of the passes", columns, spread_rows(rows)))
    if earlier is not None:
        columns = [
            *names,
            Column("figure", "figure", _figure),
            Column("before", "before", decimal),
            Column("now", "now", decimal),
            Column("change", "change", lambda share: f"{share:+.1%}"),
            Column("verdict", "verdict"),
        ]
        found = compared_rows(earlier, rows)
        notes = ["within the spread: the ranges of the passes overlap, so the change may be chance"]
        missing = ["no workload is in both measurements"] if not found else notes
        tables.append(Table("compared", "Compared with the earlier measurement", columns, found, missing))
    return tables


def _figure(name: str) -> str:
    return _NAMES.get(name, name)


def bench_notes(result: "Throughput", rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was measured, on what machine, and what disturbed it."""
    plan = result.engine.plan
    notes = [f"{plan.dtype} on {plan.device}, attention backend {plan.backend}."]
    machines = [row["machine"] for row in rows if "machine" in row]
    if machines:
        read, peak = (
            " to ".join(dict.fromkeys(f"{end(each[key] for each in machines) / 1e9:,.0f}" for end in (min, max)))
            for key in ("read_bytes_per_s", "flop_per_s")
        )
        notes.append(
            f"Around these passes the machine read {read} GB/s and did {peak} GFLOP/s of"
            f" {machines[0]['instructions']} on {machines[0]['threads']} threads."
        )
    return [*notes, *_warnings(rows)]


def _warnings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    warnings = _busy_warning(worst([Busy(**row["busy"]) for row in rows if row["busy"] is not None]))
    if any("machine" in row and row["share_of_floor"] is None for row in rows):
        warnings.append("'of the floor' is left out: passes were faster than the limits measured around them.")
    return warnings


def kernel_spread(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The spread of the calls of each kernel."""
    columns = [Column(name, name) for name in ("kernel", "size")]
    columns += [Column(name, f"{name} ms", lambda ms: f"{ms:,.3f}") for name in ("min", "median", "max")]
    names = ("kernel", "size", "implementation")
    values = [{**{name: row[name] for name in names}, **row["spread_ms"]} for row in rows]
    notes = ["the rates above are those of the fastest call: other load on the machine only adds time"]
    return Table("spread", "Spread of the calls", columns, values, notes)


def kernel_warnings(rows: Sequence[Mapping[str, Any]], busy: Busy | None) -> list[str]:
    """What disturbed a measurement of kernels."""
    warnings = _busy_warning(busy)
    if any(row["share"] is None for row in rows):
        warnings.append("'of the limit' is left out where a kernel was faster than the measured limit of the machine.")
    return warnings


def _busy_warning(busy: Busy | None) -> list[str]:
    if busy is None or not busy.disturbs:
        return []
    return [
        f"Warning: the machine was busy: other processes used {busy.others:.0%} of its processor time, the hypervisor"
        f" withheld {busy.steal:.0%}. Measure again on an idle machine."
    ]


def limits_note(machine: "MachineRates", attention: "MachineRates | None" = None) -> str:
    """`attention`: its own limits, if they are not the machine's because only the weights are quantized."""
    read, peak, gemm = (rate / 1e9 for rate in (machine.read_bytes_per_s, machine.flop_per_s, machine.gemm_flop_per_s))
    return (
        f"This machine on {machine.threads} threads: reads {read:.1f} GB/s, {peak:,.0f} GFLOP/s of"
        f" {machine.instructions} in registers; a large matrix product by {machine.path} reaches {gemm:,.0f}:"
        f" {gemm / peak:.0%}."
        + (f" Attention's limit: {attention.flop_per_s / 1e9:,.0f} of {attention.instructions}." if attention else "")
    )
