"""Screens above the main one: help, a story, and a line to type a step or a filter. Used by the applications."""

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from pagedcli.app.rows import Rows


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
    """Facts about a sequence or a block, then what happened to it. Enter on a line gives its number to the caller."""

    def __init__(self, title: str, facts: Text, lines: list[Text], *, hint: str = "") -> None:
        super().__init__()
        self._title, self._facts, self._lines, self._hint = title, facts, lines, hint

    def compose(self) -> ComposeResult:
        with Vertical(id="page") as page:
            page.border_title, page.border_subtitle = self._title, f"{self._hint}Esc closes"
            with VerticalScroll(id="facts", can_focus=False):
                yield Static(self._facts)
            yield Rows(id="story", empty="nothing is known")

    def on_mount(self) -> None:
        rows = self.query_one(Rows)
        rows.show(None, range(len(self._lines)), lambda key, width: self._lines[key].copy())
        rows.focus()

    def on_rows_chosen(self, message: Rows.Chosen) -> None:
        message.stop()
        if self._hint:
            self.dismiss(message.key)


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
