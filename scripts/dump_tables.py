"""The columns of --dump-kv FILE in docs/reading-the-tables.md: python scripts/dump_tables.py [--write]

A table follows `<!-- table: name -->` and ends with `<!-- end -->`. tests/test_docs.py compares them, --write renews
them.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from table_blocks import renew

from pagedcli.views.step_rows import TABLES as RECORDS
from pagedcli.views.step_rows import file_columns

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "reading-the-tables.md"
_TYPES = {"ints": "list of int", "texts": "list of text"}


def columns_of(table: str) -> str:
    """The columns of a table, in Markdown."""
    rows = [f"| `{each.key}` | {_TYPES.get(each.kind, each.kind)} | {each.meaning} |" for each in file_columns(table)]
    return "\n".join(["| column | type | meaning |", "|---|---|---|", *rows])


TABLES: dict[str, Callable[[], str]] = {name: partial(columns_of, name) for name in RECORDS}

if __name__ == "__main__":
    renew(DOCUMENT, TABLES)
