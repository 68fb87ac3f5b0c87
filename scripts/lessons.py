"""Renews docs/learn: python scripts/lessons.py --write. Each page is what `pagedcli learn N` prints in a pipe."""

import subprocess
import sys
from pathlib import Path

from pagedcli.cli.learn import Lesson, lessons

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "learn"


INDEX = """\
# How a paged KV cache works, in eight lessons

`pagedcli learn` teaches these lessons in a terminal: it asks for a prediction, runs the command, shows the block pool,
and the trace of the run says whether you were right. Nothing is downloaded. Here they are to be read; all commands can
be run as they stand, in a folder with the file that is shown. `pagedcli learn 3 --picture copy.svg` also
[draws the pool](../pictures.md).

"""


def page(lesson: Lesson) -> str:
    """What the command prints of a lesson."""
    command = [sys.executable, "-m", "pagedcli", "learn", str(lesson.number)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def index() -> str:
    """The page that lists them."""
    return INDEX + "".join(f"{each.number}. [{each.title}]({each.name})\n" for each in lessons())


def main() -> None:
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(__doc__)
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "README.md").write_text(index(), encoding="utf-8")
    for lesson in lessons():
        (FOLDER / lesson.name).write_text(page(lesson), encoding="utf-8")


if __name__ == "__main__":
    main()
