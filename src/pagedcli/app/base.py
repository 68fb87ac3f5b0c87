"""What the applications of trace and attach have in common: keys, dialogs, redrawing, Ctrl-C, and
the thread that does the work under the screen.

The only module that starts Textual.
"""

import sys
import threading
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from rich.text import Text
from textual.app import App
from textual.binding import Binding, BindingType
from textual.events import Print

from pagedcli.app.colours import ANSI
from pagedcli.app.commands import Command, completed, help_lines, hint, number, run_command
from pagedcli.app.pages import HelpPage, LinePrompt
from pagedcli.app.player import Player, RunningPlayer
from pagedcli.app.rows import Lines, Painted
from pagedcli.printable import byte_text, one_line, plural
from pagedcli.process import on_signals

T = TypeVar("T")
_KEY_TICK_S = 0.025  # pause after a key, which a running engine obeys when its step has ended
_AT_ONCE_S = 0.05  # what takes longer is shown later
_MOST_CLIPBOARD_BYTES = 70_000  # terminals ignore longer sequences; xterm from 75 kB on in base64

LIST_BINDINGS: tuple[BindingType, ...] = (
    Binding("slash", "search", "search"),
    Binding("n", "next_hit(1)", show=False),
    Binding("N", "next_hit(-1)", show=False),
    Binding("f", "filter", "filter"),
    Binding("s", "sort", "sort", show=False),
    Binding("e", "jump('eviction', False)", show=False),
    Binding("E", "jump('eviction', True)", show=False),
    Binding("m", "jump('miss', False)", show=False),
    Binding("M", "jump('miss', True)", show=False),
)
KEYS = """\
 q  Ctrl-C     quit; a run stops after its step, the second time at once
 ?             this page
 Space         pause, play
 .  ,          one {unit} forward, back (in a list also right, left)
 >  <          ten {unit}s forward, back
 [  ]          to the first, the last {unit}
 0-9  g        go to a {unit} by its number
 :             jump by name, Tab completes:
{commands}
 +  -          faster, slower
{more}
 y  Y          copy the panel's table: to the terminal's clipboard
               (OSC 52), to a file
 Tab           the next panel (or click it)
 up  down      move in a list; also Page, Home, End, mouse wheel
 Enter         details of what the cursor is on (or double click)
 Esc           close a page
"""


class PlayerApp(App[None]):
    """An application that shows a player. Subclasses compose the panels and fill them in `show_moment`.

    The panels are attributes: a query would search the topmost page, and find nothing while the screen closes.
    """

    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (140, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (30, "-tall")]  # noqa: RUF012
    CSS = """
    #head { height: 1; background: $primary-background; }
    #body { height: 1fr; }
    #left { height: 1fr; }
    #right { height: auto; }
    .panel { border-top: solid $primary; border-title-color: $text-accent; }
    .panel:focus { border-top: heavy $accent; }
    Screen.-wide #body { layout: horizontal; }
    Screen.-wide #left { width: 3fr; height: 100%; }
    Screen.-wide #right { width: 2fr; height: 100%; margin-left: 1; }
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
        Binding("g", "ask_step('')", show=False),
        Binding("colon", "command", "jump", key_display=":"),
        Binding("y", "copy_table", "copy"),
        Binding("Y", "save_table", show=False),
        *(Binding(digit, f"ask_step('{digit}')", show=False) for digit in "0123456789"),
    ]
    MORE_KEYS = ""
    main_panel: Painted  # the panel with the focus at first

    def __init__(self, player: Player[Any], title: str) -> None:
        super().__init__()
        self.ansi_theme_dark = ANSI
        self.player = player
        self.head_line = Lines(id="head")
        self.shown_title = one_line(title)
        self.was_interrupted = False
        self.printed: list[str] = []  # lines that others printed while the screen was open
        self._num_signals = 0
        self._said = ""
        self._shown_notices: tuple[str, ...] = ()
        self._is_leaving = False
        self._is_live = isinstance(player, RunningPlayer)  # a finished run may get another player
        self._tick_is_due = False

    def on_mount(self) -> None:
        self.begin_capture_print(self)
        self._keep_ticking()
        if isinstance(self.player, RunningPlayer):
            self.call_after_refresh(self.player.screen_is_open.set)  # the first screen takes no time from the run

    def _keep_ticking(self) -> None:
        self.tick()
        self.set_timer(self.player.wait_s, self._keep_ticking)

    def on_print(self, event: Print) -> None:
        self.printed.append(event.text)

    def on_resize(self) -> None:
        self.call_after_refresh(self.refresh_all)

    def tick(self) -> None:
        """Show the player's moment if it is another one, take note of signals, and close the screen if it is time."""
        if self._num_signals:
            self._num_signals -= 1
            self.action_interrupt()
        if self.has_ended and (self._is_leaving or self.player.closes_at_end):
            self.exit()
        if self.player.poll():
            self.refresh_all()
        elif self._notices() != self._shown_notices:
            self._show_head()

    def refresh_all(self) -> None:
        self._show_head()
        if self.player.moment is not None:
            self.show_moment()

    # ------------------------------------------------------------------ for subclasses

    @abstractmethod
    def show_moment(self) -> None:
        """Fill the panels."""

    @abstractmethod
    def head(self) -> Text:
        """The figures of the head line."""

    @abstractmethod
    def legend(self) -> str:
        """The part of the help page about letters and columns."""

    def commands(self) -> list[Command]:
        """What one can type after `:`. The first one takes a bare number."""
        unit = self.player.unit
        return [
            Command(unit, "N", f"go to a {unit} by its number; also :N", self._jump_to_number),
            Command("start", "", f"to the first {unit}", lambda _: self.player.go_to_end(last=False)),
            Command("end", "", f"to the last {unit}", lambda _: self.player.go_to_end(last=True)),
        ]

    def landmark_command(self, name: str, landmark: str, meaning: str) -> Command:
        """A jump to the next place of a kind, or with `back` to the one before."""

        def run(argument: str) -> str:
            if argument not in ("", "back"):
                return f"{name} takes no {argument!r}: back, or nothing"
            return self.player.jump(landmark, backward=argument == "back")

        return Command(name, "[back]", f"to the next {meaning}, or back", run, lambda: ("back",))

    def _jump_to_number(self, argument: str) -> str:
        place = number(argument)
        return f"{argument!r} is no {self.player.unit}" if place is None else self.player.go_to(place)

    @property
    def table_name(self) -> str:
        """The name of a file with the panel's table."""
        return f"{self.panel.id or 'panel'}.tsv"

    # ------------------------------------------------------------------ the head line

    def _notices(self) -> tuple[str, ...]:
        player = self.player
        speed = "" if player.speed is None else f"{player.speed:g} {player.unit}s/s"
        has_run = self._is_live and player.is_at_end  # what is shown is the end of a run that was watched
        return "PAUSED" if player.paused and not has_run else speed, player.place, self._said

    def _show_head(self) -> None:
        player, self._shown_notices = self.player, self._notices()
        parts = [(f" {part} ", "bold yellow") for part in self._shown_notices if part]
        figures = Text("waiting for the first one ...", "italic") if player.moment is None else self.head()
        text = Text.assemble(*parts, " ", figures, "  ", (self.shown_title, "white"), no_wrap=True, overflow="crop")
        self.head_line.show(text)

    def say(self, text: str) -> None:
        """Show a message in the head line until the next key."""
        self._said = text
        self._show_head()

    # ------------------------------------------------------------------ keys

    @property
    def has_ended(self) -> bool:
        """Whether nothing runs any more."""
        return isinstance(self.player, RunningPlayer) and self.player.has_ended

    def action_leave(self) -> None:
        if isinstance(self.player, RunningPlayer) and not self.player.has_ended:
            self._is_leaving = True
            self.player.request_stop()
        else:
            self.exit()

    async def action_quit(self) -> None:
        """Ctrl-Q, which Textual binds."""
        self.action_leave()

    def action_interrupt(self) -> None:
        self.was_interrupted = not self._is_live  # else its work tells
        self.action_leave()

    def action_help(self) -> None:
        keys = KEYS.format(unit=self.player.unit, more=self.MORE_KEYS, commands=help_lines(self.commands()))
        self.push_screen(HelpPage(keys + "\n" + self.legend()))

    def after(self, refusal: str) -> None:
        """Show the effect of a key, or why it had none."""
        self.say(refusal)
        self.tick()
        self.set_timer(_KEY_TICK_S, self.tick)

    def action_pause(self) -> None:
        self.after(self.player.toggle_pause())

    def action_step(self, count: int) -> None:
        self.after(self.player.step(count))

    def action_go_to_end(self, last: bool) -> None:
        self.after(self.player.go_to_end(last=last))

    def action_faster(self, by: int) -> None:
        self.player.faster(by)
        speed = self.player.speed
        self.say("full speed" if speed is None else f"{speed:g} {self.player.unit}s/s")

    def action_jump(self, name: str, backward: bool) -> None:
        self.after(self.player.jump(name, backward=backward))

    def action_ask_step(self, digits: str) -> None:
        def go(typed: str | None) -> None:
            self.after(self.player.go_to(int(typed)) if typed else "")

        self.push_screen(LinePrompt(f"go to {self.player.unit}", digits, only_digits=True), go)

    def action_command(self) -> None:
        commands = self.commands()
        self.push_screen(
            LinePrompt(
                "jump to",
                "",
                accept=lambda typed: run_command(commands, typed),
                complete=lambda typed: completed(commands, typed),
                hint=lambda typed: hint(commands, typed),
            ),
            lambda typed: None if typed is None else self.after(self._said),
        )

    def scrub(self, step: int) -> None:
        """Go to a step under a mouse that moves: the screen follows as fast as it can draw."""
        self._said = self.player.go_to(step)
        if not self._tick_is_due:
            self._tick_is_due = True
            self.set_timer(_KEY_TICK_S, self._scrub_tick)

    def _scrub_tick(self) -> None:
        self._tick_is_due = False
        self.tick()

    # ------------------------------------------------------------------ what takes time, and copies

    def in_background(self, work: Callable[[], T], show: Callable[[T], None]) -> None:
        """Do some work in a thread, then show its result: at once, if it takes no time."""
        outcome: Future[T] = Future()

        def look() -> None:
            if outcome.done():
                show(outcome.result())
            else:
                self.set_timer(_KEY_TICK_S, look)

        threading.Thread(target=_settle, args=(outcome, work), name="look-up", daemon=True).start()
        wait([outcome], _AT_ONCE_S)
        look()

    @property
    def panel(self) -> Painted:
        """The panel with the focus, else the main one."""
        return self.focused if isinstance(self.focused, Painted) else self.main_panel

    def action_copy_table(self) -> None:
        text = self.panel.as_text()
        num_bytes = len(text.encode())
        if num_bytes > _MOST_CLIPBOARD_BYTES:
            self.say(f"{byte_text(num_bytes)} are too much for a terminal's clipboard: Y writes a file")
            return
        self.copy_to_clipboard(text)
        self.say(f"copied {plural(text.count(chr(10)), 'line')} to the clipboard (OSC 52); Y writes a file")

    def action_save_table(self) -> None:
        text = self.panel.as_text()

        def write(name: str) -> str:
            path = Path(name.strip()).expanduser()
            try:
                with path.open("x", encoding="utf-8") as file:
                    file.write(text)
            except OSError as error:
                return f"cannot write {path}: {error.strerror}"
            return ""

        def said(name: str | None) -> None:
            if name is not None:
                self.say(f"wrote {one_line(name)}")

        self.push_screen(LinePrompt("write the table to", self.table_name, accept=write), said)

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


def _settle(outcome: "Future[T]", work: Callable[[], T]) -> None:
    try:
        outcome.set_result(work())
    except BaseException as error:
        outcome.set_exception(error)


_WAIT_S = 0.1
# a thread that waits for the interpreter gets it within this: the screen's must not hold up the work
_SWITCH_S = 0.0005


def watch(app: PlayerApp, player: RunningPlayer[Any], work: Callable[[], T]) -> T:
    """Do `work`, which the player shows, and return its result. The screen opens when it has started, and stays after
    its end until the user closes it, or closes by itself if the player says so.

    Raises: what `work` raises.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        _settle(outcome, work)
        player.closes_at_end |= outcome.exception() is not None  # an open screen would hide the message
        player.finish()

    thread = threading.Thread(target=run, name="work", daemon=True)
    thread.start()
    while not player.has_started.wait(_WAIT_S):
        pass
    if not player.has_ended:
        switch_s = sys.getswitchinterval()
        with on_signals(player.request_stop):
            try:
                sys.setswitchinterval(_SWITCH_S)
                app.show()
            finally:  # the screen may have failed: the run does not
                sys.setswitchinterval(switch_s)
                player.release()
            while thread.is_alive():
                thread.join(_WAIT_S)
    return outcome.result()
