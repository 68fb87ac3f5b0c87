"""Print the rows of an output file as a table: python scripts/show_rows.py OUT.jsonl"""

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text


def main() -> None:
    table = Table("id", "text or error", "prompt tokens", show_lines=True)
    for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        usage = row["usage"] or {"prompt_tokens": 0}
        text = row["text"] if row["error"] is None else f"{row['error']['code']}: {row['error']['message']}"
        # Text, not markup: what a model says is never interpreted
        table.add_row(Text(str(row["id"] or row["index"])), Text(text.strip()), str(usage["prompt_tokens"]))
    Console().print(table)


if __name__ == "__main__":
    main()
