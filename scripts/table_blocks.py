"""Tables inside a document: found by the line `<!-- table: name -->` before them, and renewed."""

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

# a table is fenced, or ends with a line `<!-- end -->`
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n(?:```text\n)?)(.*?)(\n(?:```|<!-- end -->))", re.DOTALL)


def tables_in(document: str) -> dict[str, str]:
    """Name and text of each table in the document."""
    return {match[2]: match[3] for match in _BLOCK.finditer(document)}


def renew(path: Path, tables: Mapping[str, Callable[[], str]]) -> None:
    """Say whether the tables of a document are those of the functions; with --write, write them into it."""
    document = path.read_text(encoding="utf-8")
    renewed = _BLOCK.sub(lambda match: match[1] + tables[match[2]]() + match[4], document)
    if "--write" in sys.argv:
        path.write_text(renewed, encoding="utf-8")
    print(
        "up to date" if renewed == document else "renewed" if "--write" in sys.argv else "out of date: run with --write"
    )
