"""What the applications of trace, replay and attach have in common: keys, dialogs, redrawing, Ctrl-C, and
the thread that does the work under the screen.

The only module that starts Textual.
"""

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from textwrap import wrap
from types import FrameType
from typing import Any, ClassVar, TypeVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.events import Print
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from pagedcli.app.deck import Deck, RunningDeck
from pagedcli.app.rows import Lines, Rows
from pagedcli.printable import one_line

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


_KEY_TICK_S = 0.025  # after a key, which a running engine obeys when its step has ended

KEYS = """\
 q  Ctrl-C     quit; a run stops after its step, the second time at once
 ?             this page
 Space         pause, play
 .  ,          one {unit} forward, back (in a list also right, left)
 >  <          ten {unit}s forward, back
 [  ]          to the first, the last {unit}
 0-9  g        go to a {unit} by its number
 +  -          faster, slower
{more}
 Tab           the next panel (or click it)
 up  down      move in a list; also Page, Home, End, mouse wheel
 Enter         details of what the cursor is on (or double click)
 Esc           close a page
"""


class DeckApp(App[None]):
    """An application that shows a deck. Subclasses compose the panels and fill them in `show_moment`.

    The panels are attributes: a query would search the topmost page, and find nothing while the screen closes.
    """

    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (140, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (30, "-tall")]  # noqa: RUF012
    CSS = """
    #head { height: 1; background: $primary-background; }
    #body { height: 1fr; }
    .panel { border-top: solid $primary; border-title-color: $text-accent; }
    .panel:focus { border-top: heavy $accent; }
    Screen.-wide #body { layout: horizontal; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark", "help", "help"),
        Binding("q", "leave", "quit"),
        Binding("ctrl+c", "interrupt", show=False, priority=True),
        Binding("space", "pause", "pause"),
        Binding("full_stop,right", "step(1)", "step", key_display="."),
        Binding("comma,left", "step(-1)", show=False),
        Binding("greater_than_sign", "step(10)", show=False),
        Binding("less_than_sign", "step(-10)", show=False),
        Binding("left_square_bracket", "go_to_end(False)", show=False),
        Binding("right_square_bracket", "go_to_end(True)", show=False),
        Binding("plus,equals_sign", "faster(1)", show=False),
        Binding("minus,underscore", "faster(-1)", show=False),
        Binding("g", "ask_step('')", "go to"),
        *(Binding(digit, f"ask_step('{digit}')", show=False) for digit in "0123456789"),
    ]
    MORE_KEYS = ""

    def __init__(self, deck: Deck[Any], title: str) -> None:
        super().__init__()
        self.deck = deck
        self.head_line = Lines(id="head")
        self.shown_title = one_line(title)
        self.was_interrupted = False
        self.printed: list[str] = []  # by others while the screen was open
        self._num_signals = 0
        self._said = ""
        self._shown_notices: tuple[str, ...] = ()
        self._is_leaving = False

    def on_mount(self) -> None:
        self.begin_capture_print(self)
        self._keep_ticking()
        if isinstance(self.deck, RunningDeck):
            self.call_after_refresh(self.deck.screen_is_open.set)  # the first screen takes no time from the run

    def _keep_ticking(self) -> None:
        self.tick()
        self.set_timer(self.deck.wait_s, self._keep_ticking)

    def on_print(self, event: Print) -> None:
        self.printed.append(event.text)

    def on_resize(self) -> None:
        self.call_after_refresh(self.refresh_all)

    def tick(self) -> None:
        """Show the deck's moment if it is another one, take note of signals, and close the screen if it is time."""
        if self._num_signals:
            self._num_signals -= 1
            self.action_interrupt()
        if self.has_ended and (self._is_leaving or self.deck.closes_at_end):
            self.exit()
        if self.deck.poll():
            self.refresh_all()
        elif self._notices() != self._shown_notices:
            self._show_head()

    def refresh_all(self) -> None:
        """Show the current moment."""
        self._show_head()
        if self.deck.moment is not None:
            self.show_moment()

    # ------------------------------------------------------------------ for subclasses (an App cannot be an ABC)

    def show_moment(self) -> None:
        """Fill the panels."""
        raise NotImplementedError

    def head(self) -> Text:
        """The figures of the head line."""
        raise NotImplementedError

    def legend(self) -> str:
        """The part of the help page about letters and columns."""
        raise NotImplementedError

    # ------------------------------------------------------------------ the head line

    def _notices(self) -> tuple[str, ...]:
        deck = self.deck
        speed = "" if deck.speed is None else f"{deck.speed:g} {deck.unit}s/s"
        return "PAUSED" if deck.paused else speed, deck.place, self._said

    def _show_head(self) -> None:
        deck, self._shown_notices = self.deck, self._notices()
        parts = [(f" {part} ", "bold yellow") for part in self._shown_notices if part]
        figures = Text("waiting for the first one ...", "italic") if deck.moment is None else self.head()
        text = Text.assemble(*parts, " ", figures, "  ", (self.shown_title, "dim"), no_wrap=True, overflow="crop")
        self.head_line.show(text)

    def say(self, text: str) -> None:
        """Show a message in the head line until the next key."""
        self._said = text
        self._show_head()

    # ------------------------------------------------------------------ keys

    @property
    def has_ended(self) -> bool:
        """Whether nothing runs any more."""
        return isinstance(self.deck, RunningDeck) and self.deck.has_ended

    def action_leave(self) -> None:
        if isinstance(self.deck, RunningDeck) and not self.deck.has_ended:
            self._is_leaving = True
            self.deck.request_stop()
        else:
            self.exit()

    async def action_quit(self) -> None:
        """Ctrl-Q, which Textual binds."""
        self.action_leave()

    def action_interrupt(self) -> None:
        self.was_interrupted = not isinstance(self.deck, RunningDeck)  # else its work tells
        self.action_leave()

    def action_help(self) -> None:
        self.push_screen(HelpPage(KEYS.format(unit=self.deck.unit, more=self.MORE_KEYS) + "\n" + self.legend()))

    def after(self, refusal: str) -> None:
        """Show the effect of a key, or why it had none."""
        self.say(refusal)
        self.tick()
        self.set_timer(_KEY_TICK_S, self.tick)

    def action_pause(self) -> None:
        self.after(self.deck.toggle_pause())

    def action_step(self, count: int) -> None:
        self.after(self.deck.step(count))

    def action_go_to_end(self, last: bool) -> None:
        self.after(self.deck.go_to_end(last=last))

    def action_faster(self, by: int) -> None:
        self.deck.faster(by)
        speed = self.deck.speed
        self.say("full speed" if speed is None else f"{speed:g} {self.deck.unit}s/s")

    def action_jump(self, name: str, backward: bool) -> None:
        self.after(self.deck.jump(name, backward=backward))

    def action_ask_step(self, digits: str) -> None:
        def go(typed: str | None) -> None:
            self.after(self.deck.go_to(int(typed)) if typed else "")

        self.push_screen(Ask(f"go to {self.deck.unit}", digits, only_digits=True), go)

    # ------------------------------------------------------------------ running

    def show(self) -> None:
        """Run until the user quits. What others printed meanwhile follows the screen.

        Raises: KeyboardInterrupt after Ctrl-C.
        """
        with on_signals(self._note_signal):
            self.run()
        sys.stderr.write("".join(self.printed))
        if self.was_interrupted:
            raise KeyboardInterrupt

    def _note_signal(self) -> None:
        self._num_signals += 1


@contextmanager
def on_signals(act: Callable[[], None]) -> Iterator[None]:
    """SIGINT and SIGTERM only call `act` within this context."""
    if threading.current_thread() is not threading.main_thread():  # Python delivers signals only there
        yield
        return

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        act()

    before = [(number, signal.signal(number, on_signal)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


T = TypeVar("T")
_WAIT_S = 0.1
_SWITCH_S = (
    0.0005  # a thread that waits for the interpreter gets it within this: the screen's must not hold up the work
)


def watch(app: DeckApp, deck: RunningDeck[Any], work: Callable[[], T]) -> T:
    """Do `work`, which the deck of the application shows, and return its result. The screen opens when it has started,
    and stays after its end until the user closes it, or closes by itself if that is what the deck says.

    Raises: what `work` raises.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            deck.closes_at_end = True  # so that its message is seen
            outcome.set_exception(error)
        deck.finish()

    thread = threading.Thread(target=run, name="work", daemon=True)
    thread.start()
    while not deck.has_started.wait(_WAIT_S):
        pass
    if not deck.has_ended:
        switch_s = sys.getswitchinterval()
        with on_signals(deck.request_stop):
            try:
                sys.setswitchinterval(_SWITCH_S)
                app.show()
            finally:  # the screen may have failed: the run does not
                sys.setswitchinterval(switch_s)
                deck.release()
            while thread.is_alive():
                thread.join(_WAIT_S)
    return outcome.result()
