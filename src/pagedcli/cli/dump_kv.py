"""--dump-kv of generate and trace: the tables of each step, printed, or as data in files."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pagedcli import show
from pagedcli.cli.options import option
from pagedcli.errors import UsageError
from pagedcli.files import check_new
from pagedcli.views.step_choice import StepChoice

_FLAG = "--dump-kv"
_ENDINGS = (".csv", ".jsonl", ".parquet")
_INPUTS = ("prompts", "trace")  # parameters that name what a command reads
_TABLES = ""  # the value of a bare --dump-kv

_DUMP_HELP = "Print each step's block tables, ref counts and prefix hits, or write FILE.csv."
_panel = "Step tables (docs/look-inside.md)"
DumpKv = Annotated[str | None, option(_FLAG, help=_DUMP_HELP, metavar="[FILE]", panel=_panel)]
Steps = Annotated[
    str | None, option("--steps", help="Show only these steps, e.g. 100-120, 100- or 100.", metavar="A-B", panel=_panel)
]
Every = Annotated[
    int,
    option(
        "--every", help="Show only every N-th of these steps, but all lookups.", metavar="N", min=1, panel=_panel,
        show_default=True,
    ),
]  # fmt: skip


def with_value(arguments: Sequence[str], parser: Any) -> list[str]:
    """The arguments with the value of --dump-kv attached, as `--dump-kv=FILE` or, of a bare one, `--dump-kv=`.

    The word after it is its file if it is named like one and the others still name an input:
    `generate in.jsonl --dump-kv kv.csv`, but `generate --dump-kv in.jsonl`.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    if _FLAG not in arguments[:end]:
        return list(arguments)
    place = arguments.index(_FLAG, 0, end)
    before, after = list(arguments[:place]), list(arguments[place + 1 :])
    if place + 1 < end and after[0].endswith(_ENDINGS):
        taken = [*before, f"{_FLAG}={after[0]}", *after[1:]]
        values, _, _ = parser.parse_args(args=list(taken))
        if any(isinstance(values.get(name), str) for name in _INPUTS):
            return taken
    return [*before, f"{_FLAG}={_TABLES}", *after]


@dataclass(frozen=True, slots=True)
class Dump:
    """What --dump-kv, --steps and --every ask for."""

    chosen: StepChoice
    as_tables: bool  # --dump-kv without a file
    file: Path | None  # --dump-kv FILE

    @classmethod
    def of(cls, dump_kv: str | None, steps: str | None, every: int, *, step: int | None = None) -> "Dump":
        """`step`: only this one. Raises: UsageError."""
        if step is not None and (steps is not None or every != 1):
            raise UsageError("--step cannot be combined with --steps or --every")
        chosen = StepChoice.parse(steps, every) if step is None else StepChoice(step, step)
        file = Path(dump_kv) if dump_kv else None
        if file is not None:
            show.data_files.data_paths(file)
        return cls(chosen, dump_kv == _TABLES, file)

    @property
    def chooses(self) -> bool:
        """Whether only some steps are wanted."""
        return self.chosen != StepChoice()

    def named_files(self, *, overwrite: bool, resume: bool = False) -> "show.data_files.DumpFiles | None":
        """The files to write; what a resumed run adds is a part of its own. Raises: UsageError if one exists."""
        if self.file is None:
            return None
        data = show.data_files
        files = data.DataFiles(data.next_part(self.file) if resume else self.file, overwrite=overwrite)
        for table, path in files.paths.items():
            check_new(_FLAG, path, kind=data.table_kind(table, path.suffix), overwrite=overwrite)
        return data.DumpFiles(files, self.chosen)


def table_width(*, stderr: bool = False) -> int | None:
    """The width of tables: the terminal's, or $COLUMNS where that is set; None in pipes and files."""
    stream = sys.stderr if stderr else sys.stdout
    is_limited = (stream is not None and stream.isatty()) or "COLUMNS" in os.environ
    if not is_limited:
        return None
    from rich.console import Console

    return Console(stderr=stderr).width
