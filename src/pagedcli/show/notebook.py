"""A recorded run in a notebook: steps as table and picture, data frames, a film without a server, lookups explained.

from pagedcli import open_trace
t = open_trace("run.jsonl")
t.step(75)
"""

import base64
import json
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from pagedcli.errors import UsageError
from pagedcli.records import Column
from pagedcli.show.drawing import Picture, Theme
from pagedcli.show.pages import as_html
from pagedcli.show.pool_picture import PrefixLetters, pool_picture, pool_text
from pagedcli.show.raster import check_ending, write_picture
from pagedcli.show.run_pictures import life_picture, tree_picture, waste_picture
from pagedcli.show.step_tables import step_tables
from pagedcli.show.tables import Table, as_text
from pagedcli.show.why_tables import lookups_table
from pagedcli.trace.files import TraceReader
from pagedcli.trace.fold import EventSource, fold
from pagedcli.trace.tokens import Decode
from pagedcli.views.explain import explain_trace
from pagedcli.views.moment import Moment, Replay
from pagedcli.views.names import find_request
from pagedcli.views.prefix_tree import PrefixTree
from pagedcli.views.request_life import RequestLife
from pagedcli.views.step_choice import StepChoice
from pagedcli.views.step_rows import TABLES, FileRow, StepRows, file_columns

_MOST_STEPS = 2000  # longest film


def open_trace(path: str | Path) -> "Trace":
    """A run recorded by --record. Raises: UsageError if it cannot be read; TraceError if it is damaged or no trace."""
    file = Path(path)
    return Trace(lambda: TraceReader(file), file.name)


class Trace:
    """A recorded run. Nothing is read before it is asked for; what was asked for once is kept."""

    def __init__(self, open_source: Callable[[], EventSource], name: str, *, decode: Decode | None = None) -> None:
        """`open_source` gives the events from the first on; `decode` turns recorded token ids into text."""
        self._open_source, self._name, self._decode = open_source, name, decode

    def __repr__(self) -> str:
        damage = "" if self._replay.damage is None else f", damaged after them: {self._replay.damage}"
        return f"Trace({self._name!r}, {self._steps_in_words()}{damage})"

    def _steps_in_words(self) -> str:
        numbers = self.step_numbers
        return "no steps" if numbers is None else f"steps {numbers[0]} to {numbers[1]}"

    # ------------------------------------------------------------------ one step

    @cached_property
    def _replay(self) -> Replay:
        return Replay(self._open_source())

    @property
    def step_numbers(self) -> tuple[int, int] | None:
        """The first and the last step; None: nothing has run."""
        steps = [step for step in self._replay.steps if step is not None]
        return (steps[0], steps[-1]) if steps else None

    def _moment(self, step: int) -> Moment:
        stop = self._replay.stop_of_step(step)
        if stop is None:
            raise UsageError(f"{self._name} has no step {step}", hint=f"it has {self._steps_in_words()}")
        return self._replay.go(stop)

    def _seq_ids(self, request: str | None) -> set[int] | None:
        return None if request is None else find_request(self._open_source(), request, self._name).seq_ids

    def step(self, step: int, *, follow: str | None = None) -> "Step":
        """A step, as its forward pass sees the cache; `follow`: with the block table of this request alone."""
        return Step(self._moment(step).copy(), self._seq_ids(follow))

    def play(self, first: int = 0, last: int | None = None, *, follow: str | None = None) -> "Film":
        """The steps from `first` to `last` as a film with a slider, which needs no server."""
        last = (self.step_numbers or (0, 0))[1] if last is None else last
        if not 0 <= last - first < _MOST_STEPS:
            raise UsageError(f"steps {first} to {last} make no film", hint=f"choose up to {_MOST_STEPS:,} steps")
        seq_ids, letters = self._seq_ids(follow), PrefixLetters()
        steps = range(first, last + 1)
        return Film([pool_picture(self._moment(step).state, follow=seq_ids, letters=letters) for step in steps])

    def waste(self, step: int) -> Picture:
        """How many of the reserved slots hold a token, contiguous and paged."""
        return waste_picture(self._moment(step).state)

    # ------------------------------------------------------------------ the whole run

    def life(self, request: str) -> Picture:
        """When a request waited and ran, and the blocks that it held."""
        view = RequestLife(find_request(self._open_source(), request, self._name))
        state = fold(self._open_source(), view)
        return life_picture(request, view.finish(state))

    def tree(self) -> Picture:
        """The prefixes that lookups found, and how often."""
        tree = PrefixTree()
        state = fold(self._open_source(), tree)
        return tree_picture(tree, state.block_size)

    def explain(self, request: str | None = None) -> "Tables":
        """Why each prefix lookup, or each of a request, hit or missed."""
        explainer, _ = explain_trace(self._open_source())
        seq_ids = self._seq_ids(request)
        lookups = [each for each in explainer.lookups if seq_ids is None or each.seq_id in seq_ids]
        title = "Lookups" if request is None else f"Lookups of {request}"
        return Tables([lookups_table(lookups, title, self._decode)])

    # ------------------------------------------------------------------ data frames

    @cached_property
    def steps(self) -> Any:
        """A data frame with a row per step; `columns` says what each column means."""
        return self.frame("steps")

    @cached_property
    def sequences(self) -> Any:
        """A data frame with a row per step and unfinished sequence."""
        return self.frame("sequences")

    @cached_property
    def blocks(self) -> Any:
        """A data frame with a row per step and block with content, or in use."""
        return self.frame("blocks")

    @cached_property
    def lookups(self) -> Any:
        """A data frame with a row per prefix lookup."""
        return self.frame("lookups")

    def frame(self, table: str, first: int = 0, last: int | None = None, every: int = 1) -> Any:
        """The table of these steps as a data frame of pandas, or of polars where pandas is not installed."""
        if table not in TABLES:
            raise UsageError(f"there is no table {table!r}", hint=f"the tables are {', '.join(TABLES)}")
        rows: list[FileRow] = []

        def write(name: str, more: Iterable[FileRow]) -> None:
            if name == table:
                rows.extend(more)

        fold(self._open_source(), StepRows(write, StepChoice(first, last, every)))
        return data_frame(file_columns(table), rows)

    def columns(self, table: str) -> "Tables":
        """Name, type and meaning, with the unit, of each column of a data frame."""
        rows = [{"name": each.key, "kind": each.kind, "meaning": each.meaning} for each in file_columns(table)]
        headers = [Column("name", "column"), Column("kind", "type"), Column("meaning", "meaning")]
        return Tables([Table(table, f"Columns of {table}", headers, rows)])


class Tables:
    """Tables that show themselves, in a notebook as HTML."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = tables

    def __repr__(self) -> str:
        return "\n".join(as_text(each) for each in self.tables).rstrip("\n")

    def _repr_html_(self) -> str:
        return "".join(as_html(each) for each in self.tables)


class Step(Tables):
    """A step: its tables, and the picture of its pool."""

    def __init__(self, moment: Moment, follow: Collection[int] | None) -> None:
        super().__init__(step_tables(moment))
        self.state = moment.state
        self.picture = pool_picture(moment.state, follow=follow)
        self._follow = follow

    def __repr__(self) -> str:
        return f"{self.picture.title}\n\n{pool_text(self.state, follow=self._follow)}"

    def _repr_html_(self) -> str:
        return self._repr_svg_() + super()._repr_html_()

    def _repr_svg_(self) -> str:
        return self.picture.svg()


class Film:
    """Pictures of steps, played in the page itself."""

    def __init__(self, frames: Sequence[Picture]) -> None:
        self.frames = frames

    def __repr__(self) -> str:
        return f"Film({len(self.frames)} steps: save('pool.gif') keeps it)"

    def page(self) -> str:
        """A page of its own; the frames are inside, compressed."""
        packed = zlib.compress(json.dumps([each.svg() for each in self.frames]).encode())
        template = files("pagedcli.show").joinpath("report_page", "film.html").read_text(encoding="utf-8")
        return template.replace("{{frames}}", base64.b64encode(packed).decode())

    def _repr_html_(self) -> str:
        ratio = self.frames[0].width / (self.frames[0].height + 60)  # 60 for the controls
        style = f"width: 100%; max-width: 1000px; aspect-ratio: {ratio:.3f}; border: 0"
        return f'<iframe style="{style}" srcdoc="{escape(self.page())}"></iframe>'

    def save(self, path: str | Path, theme: str = "auto") -> None:
        """Write it as .gif. Raises: UsageError for another ending, or without the extra `pictures`."""
        if check_ending(Path(path)) != ".gif":
            raise UsageError(f"a film cannot be written to {path}", hint="its name must end in .gif")
        with Path(path).open("wb") as file:
            write_picture(file, ".gif", self.frames, Theme(theme))


_PANDAS = {"int": "Int64", "float": "float64", "bool": "boolean", "text": "string"}


def data_frame(columns: Sequence[Column], rows: Sequence[FileRow]) -> Any:
    """Rows as a data frame, with typed columns, also where all values are absent. Raises: UsageError."""
    values = zip(*rows, strict=True) if rows else [() for _ in columns]
    named = {column.key: list(each) for column, each in zip(columns, values, strict=True)}
    try:
        import pandas
    except ImportError:
        return _polars_frame(columns, named)
    types = {column.key: _PANDAS.get(column.kind, "object") for column in columns}
    frame = pandas.DataFrame({name: pandas.Series(each, dtype=types[name]) for name, each in named.items()})
    frame.attrs["meaning"] = {column.key: column.meaning for column in columns}
    return frame


def _polars_frame(columns: Sequence[Column], named: dict[str, list[Any]]) -> Any:
    try:
        import polars
    except ImportError as error:
        hint = "pip install pandas, or polars"
        raise UsageError("data frames need pandas or polars, neither of which is installed", hint=hint) from error
    types: dict[str, Any] = {
        "int": polars.Int64, "float": polars.Float64, "bool": polars.Boolean, "text": polars.String,
        "ints": polars.List(polars.Int64), "texts": polars.List(polars.String),
    }  # fmt: skip
    return polars.DataFrame(named, schema={column.key: types[column.kind] for column in columns}, strict=False)
