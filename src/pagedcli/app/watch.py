"""Runs an engine, or the fold of a server's events, in a thread under its application."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from pagedcli.app.base import DeckApp, on_signals
from pagedcli.app.deck import RunningDeck

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
