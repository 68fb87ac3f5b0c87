"""Runs an engine in a thread under the application of `pagedcli trace`."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from pagedcli.app.base import on_signals
from pagedcli.app.pool_app import PoolApp
from pagedcli.app.pool_decks import LiveDeck

T = TypeVar("T")
_WAIT_S = 0.1


def watch(app: PoolApp, deck: LiveDeck, work: Callable[[], T]) -> T:
    """Do `work`, whose engine emits to the deck of the application, and return its result. The screen opens when the
    engine has started, and stays after the end of the work until the user closes it.

    Raises: what `work` raises.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)
        deck.finish()

    thread = threading.Thread(target=run, name="engine", daemon=True)
    thread.start()
    while not deck.has_started.wait(_WAIT_S):
        pass
    if not deck.has_ended:
        with on_signals(deck.request_stop):
            try:
                app.show()
            finally:  # the screen may have failed: the run does not
                deck.release()
            while thread.is_alive():
                thread.join(_WAIT_S)
    return outcome.result()
