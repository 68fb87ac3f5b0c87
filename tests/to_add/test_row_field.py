"""To add a field of a row that is shown, touch its record: files, JSON, tables, list, filter and docs have it."""

import csv
import json
import sys
from pathlib import Path
from typing import Annotated

import pytest
from cli_harness import pagedcli

from pagedcli import records
from pagedcli.app.sequences import SequenceList, SequenceRows
from pagedcli.records import Means, computed
from pagedcli.trace.files import TraceReader
from pagedcli.views import rows
from pagedcli.views.moment import Replay
from pagedcli.views.whole_run import RequestRow

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "tests" / "data" / "kept" / "f9dd1c3" / "preemption.jsonl.zst"


@pytest.fixture(autouse=True)
def added(monkeypatch):
    """Each record with a field more."""

    def forget():
        records._columns_of.cache_clear()
        rows._chosen.cache_clear()

    for record in (rows.SequenceRow, rows.LookupRow, RequestRow):
        monkeypatch.setitem(record.__annotations__, "luck", Annotated[int, Means("how lucky it is")])
        monkeypatch.setattr(record, "luck", computed(lambda row: 700 + row.seq_id), raising=False)
    forget()
    yield
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("table", ["sequences", "lookups"])
def test_files_have_it(tmp_path, table):
    pagedcli("trace", TRACE, "--dump-kv", tmp_path / "kv.csv")
    with (tmp_path / f"kv.{table}.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert found
    assert all(int(row["luck"]) == 700 + int(row["seq_id"]) for row in found)


@pytest.mark.parametrize("table", ["sequences", "lookups"])
def test_json_and_tables_of_a_step_have_it(table):
    found = json.loads(pagedcli("trace", TRACE, "--step", 0, "--format", "json").stdout)[table]
    assert found
    assert all(row["luck"] == 700 + row["seq_id"] for row in found)
    text = pagedcli("trace", TRACE, "--step", 0, "--format", "md").stdout
    heading = "### Sequences" if table == "sequences" else "### Prefix lookups"
    header, _, first = text.partition(heading)[2].splitlines()[2:5]
    place = [cell.strip() for cell in header.split("|")].index("luck")
    assert first.split("|")[place].strip() == "700"


def test_the_list_shows_it_and_its_filter_asks_for_it():
    moment, shown = Replay(TraceReader(TRACE)).go(0), SequenceList()
    shown.set_filter("luck>=702 luck<704")
    assert [seq.seq_id for seq in shown.seqs(moment)] == [2, 3]
    cells = SequenceRows(moment, shown)
    assert "luck" in cells.heading(200).plain
    assert "702" in cells.row(2, 200).plain


def test_explain_and_the_page_have_it(tmp_path):
    found = json.loads(pagedcli("explain", TRACE, "--lookups", "--format", "json").stdout)["lookups"]
    assert all(row["luck"] == 700 + row["seq_id"] for row in found)
    assert "| luck |" in pagedcli("explain", TRACE, "--lookups", "--format", "md").stdout
    pagedcli("explain", TRACE, "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    data = json.loads(page.partition('id="trace-data"')[2].partition(">")[2].partition("</script>")[0])
    assert ["luck", "luck", "int"] in data["requestTable"]
    assert [row[data["requestColumns"].index("luck")] for row in data["requests"]] == [
        700 + row[0] for row in data["requests"]
    ]
    assert data["explain"]["lookupColumns"][-1] == ["luck", "luck", "int"]
    assert all(lookup[-1] == 700 + lookup[1] for lookup in data["explain"]["lookups"])


def test_docs_have_it(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    sys.modules.pop("renew", None)
    import renew

    for table in ("sequences", "lookups"):
        assert "| `luck` | int | how lucky it is |" in renew.columns_of(table)
