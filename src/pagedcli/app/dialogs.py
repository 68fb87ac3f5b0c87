"""Screens above the main one: help, a story, and a line to type a step or a filter. Used by the applications."""

from collections.abc import Sequence
from textwrap import wrap
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from pagedcli.app.rows import Rows

_WORD_WIDTH = 10  # in front of each line of a story


class Page(ModalScreen[int | None]):
    """A titled page over the screen; Escape closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "close", "close")]
    DEFAULT_CSS = """
    Page { align: center middle; }
    Page > #page { width: 94%; height: 90%; background: $surface; border: round $primary; padding: 0 1; }
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
            page.border_title, page.border_subtitle = "help", "Esc closes"
            yield Static(self._text, markup=False)


class StoryPage(Page):
    """Facts about a sequence, a block or a subtree, then lines, each with a word in front of it. With a hint, Enter on
    a line closes the page and gives its number to the caller."""

    def __init__(self, title: str, facts: Text, lines: Sequence[tuple[str, str]], *, hint: str = "") -> None:
        super().__init__()
        self._title, self._facts, self._lines, self._hint = title, facts, lines, hint
        self._rows = Rows(id="story", empty="nothing is known")
        self._places: list[int] = []  # of each row its line

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

    def _show_lines(self) -> None:
        width = max(20, self._rows.text_width - _WORD_WIDTH - 2)
        rows = [
            (place, word if part == 0 else "", text)
            for place, (word, words) in enumerate(self._lines)
            for part, text in enumerate(wrap(words, width))
        ]
        self._places = [place for place, _, _ in rows]
        self._rows.show(None, range(len(rows)), lambda key, _: Text(f"{rows[key][1]:>{_WORD_WIDTH}}  {rows[key][2]}"))

    def on_rows_chosen(self, message: Rows.Chosen) -> None:
        message.stop()
        if self._hint:
            self.dismiss(self._places[message.key])


class Ask(ModalScreen[str | None]):
    """A line to type in at the bottom. Escape gives None."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "close", show=False)]
    DEFAULT_CSS = """
    Ask { align: left bottom; background: transparent; }
    Ask > Input { dock: bottom; height: 3; }
    """

    def __init__(self, title: str, value: str, *, only_digits: bool = False) -> None:
        super().__init__()
        self._title, self._value, self._only_digits = title, value, only_digits

    def compose(self) -> ComposeResult:
        line = Input(self._value, restrict=r"\d*" if self._only_digits else None, select_on_focus=False)
        line.border_title, line.border_subtitle = self._title, "Enter accepts, Esc leaves"
        yield line

    def on_input_submitted(self, message: Input.Submitted) -> None:
        self.dismiss(message.value)

    def action_close(self) -> None:
        self.dismiss(None)
