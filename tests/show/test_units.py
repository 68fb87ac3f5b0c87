"""Every column of numbers that a table prints says what it counts: in its cells, in its header, or, where figures of
several units stand below each other, in the name of the figure."""

import ast
import importlib
import re
from pathlib import Path

import pytest

import pagedcli
from pagedcli import records
from pagedcli.batch.stats import BatchStats, figures
from pagedcli.records import columns_of
from pagedcli.show.difference_tables import points

ROOT = Path(pagedcli.__file__).parent
PLAIN = (records.count, records.decimal, records.number, records.whole, points)  # formats without a unit
NOUNS = {
    *("answers", "block", "blocks", "bytes", "character", "copies", "days", "files", "forks", "gb/s", "gflop/s"),
    *("group", "groups", "heads", "hits", "layers", "level", "lookups", "ms", "ms/step", "nats", "orphans", "pairs"),
    *("numbers", "place", "points", "probe", "preemptions", "probes", "prompts", "rank", "requests", "roots", "rows"),
    *("s", "sample", "seconds", "seq", "sequences", "slot", "slots", "step", "steps", "times", "tok/s", "token"),
    *("tokens", "tokens/s"),
}  # fmt: skip


def printed_records():
    """The records that are given to `table` or `chosen`, by name."""
    used, defined = {}, {}
    for path in sorted(ROOT.rglob("*.py")):
        module = ".".join(("pagedcli", *path.relative_to(ROOT).with_suffix("").parts))
        tree = ast.parse(path.read_text(encoding="utf-8"))
        defined |= {node.name: module for node in tree.body if isinstance(node, ast.ClassDef)}
        for node in ast.walk(tree):
            is_printed = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if is_printed and node.func.id in ("table", "chosen") and isinstance(node.args[0], ast.Name):
                used[node.args[0].id] = module
    found = {}
    for name, module in used.items():
        record = getattr(importlib.import_module(module), name, None)
        if record is None and name in defined:  # imported where it is used
            record = getattr(importlib.import_module(defined[name]), name)
        if isinstance(record, type):
            found[name] = record
    return found


RECORDS = printed_records()


def has_unit(column):
    words = set(re.split(r"[ ,:()]+", column.header.lower()))
    return column.show not in PLAIN or bool(words & NOUNS) or column.unit.startswith("that of")


IN_NAMES = {"TraceCount"}  # figures of several units below each other
IN_TITLE = {
    "CostRow",
    "SequenceRow",
    "Point",
    "_TotalsRow",
}  # many narrow columns: `Sequences (new, cached, ...: in tokens)`


@pytest.mark.parametrize("name", [name for name in RECORDS if name not in IN_TITLE | IN_NAMES])
def test_every_column_of_numbers_has_a_unit(name):
    columns = columns_of(RECORDS[name]).values()
    assert [column.key for column in columns if column.is_number and not has_unit(column)] == []


def test_every_figure_of_a_run_has_a_unit():
    assert len(RECORDS) > 50
    assert [figure.key for figure in figures(BatchStats()) if not figure.unit] == []
