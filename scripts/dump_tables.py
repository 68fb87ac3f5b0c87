"""The columns of --dump-kv FILE in docs/reading-the-tables.md: python scripts/dump_tables.py [--write]

A table follows `<!-- table: name -->` and ends with `<!-- end -->`. tests/test_docs.py compares them, --write renews
them.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from table_blocks import renew

from pagedcli.views.step_rows import TABLES as COLUMNS

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "reading-the-tables.md"
_TYPES = {"ints": "list of int", "texts": "list of text"}


def columns_of(table: str) -> str:
    """The columns of a table, in Markdown."""
    rows = [f"| `{each.name}` | {_TYPES.get(each.type, each.type)} | {each.meaning} |" for each in COLUMNS[table]]
    return "\n".join(["| column | type | meaning |", "|---|---|---|", *rows])


TABLES: dict[str, Callable[[], str]] = {name: partial(columns_of, name) for name in COLUMNS}

if __name__ == "__main__":
    renew(DOCUMENT, TABLES)
