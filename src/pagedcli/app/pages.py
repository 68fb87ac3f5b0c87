"""Pages and lines to type in, over the screen of an application."""

from collections.abc import Callable, Sequence
from textwrap import wrap
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.suggester import Suggester
from textual.widgets import Input, Static

from pagedcli.app.rows import Rows
from pagedcli.show.step_tables import table_lines
from pagedcli.show.tables import Table, shown_cells

_WORD_WIDTH = 10  # cells before each line of a story


class Page(ModalScreen[int | None]):
    """A titled page over the screen; Escape closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "close", "close")]
    DEFAULT_CSS = """
    Page { align: center middle; }
    Page > #page {
        width: 94%; min-width: 80; max-width: 100%; height: 90%;
        background: $surface; border: round $primary; padding: 0 1;
    }
    Page #facts { height: auto; max-height: 50%; }
    """

    def action_close(self) -> None:
        self.dismiss(None)


class HelpPage(Page):
    """The keys and what the letters mean."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("question_mark", "close", show=False)]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="page") as page:
            page.border_title, page.border_subtitle = "help", "up, down scroll, Esc closes"
            yield Static(self._text, markup=False)


class StoryPage(Page):
    """Facts about a sequence, a block or a subtree, then lines, each with a word in front of it, which may come later.
    With a hint, Enter on a line closes the page and gives its number to the caller."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("y", "app.copy_table", "copy", show=False)]

    def __init__(self, title: str, facts: Text, *, hint: str = "") -> None:
        super().__init__()
        self._title, self._facts, self._hint = title, facts, hint
        self._lines: Sequence[tuple[str, str]] = ()
        self._rows = Rows(id="story", empty="reading ...")
        self._at = 0  # the line of the cursor
        self._places: list[int] = []  # the line of each row

    def compose(self) -> ComposeResult:
        with Vertical(id="page") as page:
            page.border_title, page.border_subtitle = Content(self._title), f"{self._hint}Esc closes"
            with VerticalScroll(id="facts", can_focus=False):
                yield Static(self._facts)
            yield self._rows

    def on_mount(self) -> None:
        self._rows.focus()

    def on_resize(self) -> None:
        self.call_after_refresh(self._show_lines)

    def fill(self, lines: Sequence[tuple[str, str]], *, at: int = 0, empty: str = "nothing is known") -> None:
        """Show the lines, with the cursor on one of them, or what to say if there are none."""
        self._lines, self._at, self._rows.empty = lines, at, empty
        if self.is_mounted:
            self._show_lines()

    def _show_lines(self) -> None:
        width = max(20, self._rows.text_width - _WORD_WIDTH - 2)
        rows = [
            (place, word if part == 0 else "", text)
            for place, (word, words) in enumerate(self._lines)
            for part, text in enumerate(wrap(words, width))
        ]
        self._places = [place for place, _, _ in rows]
        at = self._places.index(self._at) if self._at in self._places else None
        self._rows.show(
            None, range(len(rows)), lambda key, _: Text(f"{rows[key][1]:>{_WORD_WIDTH}}  {rows[key][2]}"), at=at
        )

    def on_rows_row_chosen(self, message: Rows.RowChosen) -> None:
        message.stop()
        if self._hint:
            self.dismiss(self._places[message.key])


class TablePage(Page):
    """A table of the moment, which follows it: the keys that step and pause work here, too."""

    DEFAULT_CSS = "TablePage > #page { padding: 0; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "app.copy_table", "copy", show=False),
        Binding("space", "app.pause", show=False),
        Binding("full_stop,right", "app.step(1)", show=False),
        Binding("comma,left", "app.step(-1)", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._rows = _TableRows(id="table")
        self._page = Vertical(id="page")
        self._page.border_subtitle = ". , step, Space plays, Esc closes"

    def compose(self) -> ComposeResult:
        with self._page:
            yield self._rows

    def on_mount(self) -> None:
        self._rows.focus()

    def on_resize(self) -> None:
        self.call_after_refresh(self._rows.lay_out)

    def show(self, title: str, table: Table) -> None:
        """Show the table of a moment, laid out for the page's width."""
        self._page.border_title, self._rows.table = Content(title), table
        if self.is_mounted:
            self._rows.lay_out()


class _TableRows(Rows):
    """The lines of a table; a copy has its cells."""

    table: Table | None = None

    def lay_out(self) -> None:
        if self.table is not None:
            lines = table_lines(self.table, self.text_width)[1:]  # the page has the title
            self.show(None, range(len(lines)), lambda key, width: lines[key])

    def as_text(self) -> str:
        if self.table is None:
            return ""
        rows = [[column.header for column in self.table.columns], *shown_cells(self.table)]
        return "".join("\t".join(row) + "\n" for row in rows)


class _Completion(Suggester):
    """Textual's contract for what follows what was typed."""

    def __init__(self, complete: Callable[[str], str | None]) -> None:
        super().__init__(use_cache=False)
        self._complete = complete

    async def get_suggestion(self, value: str) -> str | None:
        return self._complete(value)


class LinePrompt(ModalScreen[str | None]):
    """A line to type in at the bottom, under a line with a hint. Escape gives None. `accept` does what was typed and
    returns why it could not, which is shown, and the line stays; `complete` is what Tab makes of it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", show=False),
        Binding("tab", "complete", show=False, priority=True),
    ]
    DEFAULT_CSS = """
    LinePrompt { align: left bottom; background: transparent; }
    LinePrompt > Vertical { dock: bottom; height: auto; background: $surface; }
    LinePrompt #hint { height: auto; max-height: 4; padding: 0 1; }
    LinePrompt Input { height: 3; }
    """

    def __init__(
        self,
        title: str,
        value: str,
        *,
        only_digits: bool = False,
        accept: Callable[[str], str] = lambda typed: "",
        complete: Callable[[str], str | None] = lambda typed: None,
        hint: Callable[[str], str] = lambda typed: "",
    ) -> None:
        super().__init__()
        self._accept, self._complete, self._hint_of = accept, complete, hint
        self._line = Input(
            value, restrict=r"\d*" if only_digits else None, select_on_focus=False, suggester=_Completion(complete)
        )
        self._line.border_title, self._line.border_subtitle = title, "Enter accepts, Esc leaves"
        self._hint = Static(id="hint", markup=False)

    def compose(self) -> ComposeResult:
        with Vertical():
            yield self._hint
            yield self._line

    def on_mount(self) -> None:
        self._say(self._hint_of(self._line.value))

    def _say(self, text: str, style: str = "bright_black") -> None:
        self._hint.update(Text(text, style))
        self._hint.display = bool(text)

    def on_input_changed(self, message: Input.Changed) -> None:
        self._say(self._hint_of(message.value))

    def on_input_submitted(self, message: Input.Submitted) -> None:
        refusal = self._accept(message.value)
        if refusal:
            self._say(refusal, "bold red")
        else:
            self.dismiss(message.value)

    def action_complete(self) -> None:
        text = self._complete(self._line.value)
        if text is not None:
            self._line.value, self._line.cursor_position = text, len(text)

    def action_close(self) -> None:
        self.dismiss(None)
