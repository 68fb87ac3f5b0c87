"""Rows as text, JSON, CSV and Markdown: aligned, wrapped only on a narrow terminal, and safe to print."""

import csv
import io
import json
import re
from contextlib import redirect_stdout

import pytest
from cli_harness import Terminal

from pagedcli.records import Column, count
from pagedcli.show.tables import Format, Table, as_csv, as_markdown, as_text, print_tables

COLUMNS = [Column("name", "name"), Column("num_blocks", "blocks", count), Column("why", "why")]
ROWS = [{"name": "a", "num_blocks": 1234567, "why": "short"}, {"name": "日本", "num_blocks": None, "why": "x " * 40}]
TABLE = Table("pool", "The pool", COLUMNS, ROWS, ["a note"])


def test_columns_are_aligned_by_what_the_terminal_shows():
    assert as_text(Table("t", "T", COLUMNS[:2], ROWS)).splitlines() == [
        "T",
        "name     blocks",
        "----  ---------",
        "a     1,234,567",
        "日本          -",
    ]


def test_only_a_narrow_terminal_wraps_and_only_the_last_column():
    assert max(map(len, as_text(TABLE).splitlines())) > 90
    lines = as_text(TABLE, 50).splitlines()
    assert max(map(len, lines)) <= 50
    assert lines[5].startswith(" " * 17 + "x x")
    assert lines[-1] == "a note"


def test_columns_of_numbers_that_do_not_fit_continue_below():
    columns = [Column("name", "name"), *(Column(f"n{i}", f"number {i}", count) for i in range(6))]
    rows = [{"name": name, **{f"n{i}": 10**i for i in range(6)}} for name in ("a", "longer")]
    table = Table("t", "T", columns, rows, ["a note"])
    assert as_text(table, 40).splitlines() == [
        "T",
        "name    number 0  number 1  number 2",
        "        number 3  number 4  number 5",
        "------------------------------------",
        "a              1        10       100",
        "           1,000    10,000   100,000",
        "longer         1        10       100",
        "           1,000    10,000   100,000",
        "a note",
    ]
    wide = as_text(table)
    assert max(map(len, wide.splitlines())) == 66
    assert as_text(table, 66) == wide
    assert max(map(len, as_text(table, 65).splitlines())) <= 65


EVIL = "a\x1b[2J\x9b31m\u202eb\u2028c\x7f"


@pytest.mark.parametrize("format_", [Format.TABLE, Format.MD, Format.JSON])
def test_no_part_of_a_table_steers_the_terminal(capsys, format_):
    table = Table(EVIL, EVIL, COLUMNS, [{"name": EVIL, "num_blocks": 1, "why": EVIL}], [EVIL])
    print_tables([table], format_, facts={EVIL: EVIL})
    out = capsys.readouterr().out
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e]", out)
    if format_ is Format.JSON:
        assert json.loads(out)[EVIL] == [{"name": EVIL, "num_blocks": 1, "why": EVIL}]


def test_csv_is_raw_for_a_program_and_safe_on_a_terminal(capsys):
    table = Table("t", "T", COLUMNS, [{"name": EVIL, "num_blocks": 1, "why": ""}])
    print_tables([table], Format.CSV)
    assert EVIL in capsys.readouterr().out
    with redirect_stdout(Terminal()) as terminal:
        print_tables([table], Format.CSV)
    assert terminal.getvalue()
    assert "\x1b" not in terminal.getvalue()


def test_nothing_in_a_cell_steers_the_terminal_or_breaks_a_row():
    hostile = [{"name": "a\x1b[2Jb\nc\td", "num_blocks": 1, "why": "one | two"}]
    table = Table("t", "T", COLUMNS, hostile, ["[here](http://evil) <img src=x> `code`"])
    assert "a\\x1b[2Jb c d" in as_text(table)
    assert "one \\| two |" in as_markdown(table)
    assert r"\[here](http://evil) \<img src=x> \`code\`" in as_markdown(table)


def test_csv_and_json_carry_plain_keys_and_raw_values(capsys):
    rows = list(csv.DictReader(io.StringIO(as_csv(TABLE))))
    assert rows[0] == {"name": "a", "num_blocks": "1234567", "why": "short"}
    assert rows[1]["num_blocks"] == ""
    print_tables([TABLE], Format.JSON, facts={"passed": True})
    assert json.loads(capsys.readouterr().out) == {"passed": True, "pool": ROWS}
    print_tables([TABLE, TABLE], Format.CSV)
    assert capsys.readouterr().out.count("# The pool\nname,num_blocks,why\n") == 2
