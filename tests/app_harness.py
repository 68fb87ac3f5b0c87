"""Drive an application without a terminal, with Textual's pilot, and read its screen as text."""

import asyncio
import threading
import time

from harness.core import EventList, Simulation
from textual.events import Key
from textual.keys import _character_to_key
from textual.widgets import Input

from pagedcli.app.pool_app import PoolApp
from pagedcli.app.pool_players import LivePlayer, ReplayPlayer
from pagedcli.events import to_all
from pagedcli.views.moment import Replay


def app_of(events, *, judge=tuple, **options):
    """The application on a recorded run."""
    return PoolApp(ReplayPlayer(Replay(EventList(events), **options)), "pagedcli trace run.jsonl", judge=judge)


def panel(app, name):
    """A panel of the first page."""
    return app.screen_stack[0].query_one(f"#{name}")


def column_of(app, name):
    """The numbers in the first column of a panel, as a copy of it has them: sequences, or blocks."""
    return [int(line.split("\t")[0]) for line in panel(app, name).as_text().splitlines()[1:]]


def cells_of_map(app):
    """Glyph and style of each cell of the block map."""
    region = panel(app, "map").content_region
    strips = app.screen._compositor.render_strips()[region.y : region.bottom - 2]  # without figures and legend
    lines = [strip.crop(region.x, region.right) for strip in strips]
    cells = [(glyph, style) for line in lines for text, style, _ in line for glyph in text]
    return [cell for cell in cells if cell[0] != " "]


def contrast(first, second):
    """WCAG's contrast ratio of two colours, between 1 and 21. Source: WCAG 2.2, relative luminance."""
    low, high = sorted(_luminance(*colour) for colour in (first, second))
    return (high + 0.05) / (low + 0.05)


def _luminance(*channels):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (each / 255 for each in channels)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def drive(app, script, size=(80, 24)):
    """Run an application of a given size while `script(pilot)`, a coroutine, presses its keys. Returns its result."""

    async def run():
        async with app.run_test(size=size) as pilot:
            await settle(pilot)
            return await script(pilot)

    return asyncio.run(run())


async def press(pilot, *keys):
    """The text of the screen after some keys: characters, or names such as `enter`."""
    for key in keys:
        name, character = (_character_to_key(key), key) if len(key) == 1 else (key, None)
        event = Key(name, character)
        event.set_sender(pilot.app)
        pilot.app._driver.send_message(event)
        await settle(pilot)
    return screen_text(pilot.app)


async def settle(pilot):
    """Wait until what a key has begun is done. Faster than the pilot, which waits until the process idles."""
    for _ in range(5):  # from the key to the panel, to the application, to a page, and back
        await pilot.pause(0)


def screen_text(app):
    """What the screen shows, line by line."""
    return "\n".join(strip.text for strip in app.screen._compositor.render_strips())


def shown(app, *keys, size=(80, 24)):
    """The screen after some keys."""
    return drive(app, lambda pilot: press(pilot, *keys), size)


async def typed(pilot, key, text):
    """The screen after a key, a text in the line that it opens, and Enter."""
    await press(pilot, key)
    pilot.app.screen.query_one(Input).value = text
    return await press(pilot, "enter")


async def until(pilot, holds, seconds=60.0):
    """Wait until something holds, while the screen lives."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, screen_text(pilot.app)
        await pilot.pause(0.02)
    await settle(pilot)


class Run:
    """A simulated engine in a thread, under an application."""

    def __init__(self, *, num_requests=3, num_new=6, act=lambda run: None, **options):
        self.player = LivePlayer(**options)
        self.app = PoolApp(self.player, "pagedcli trace")
        self.error, self.events = None, []
        self._size = (num_requests, num_new)
        self._act = act
        self.thread = threading.Thread(target=self._work, daemon=True)

    def _work(self):
        try:
            emit = to_all(self.events.append, self.player.on_event)
            self.sim = Simulation(8, 2, emit=emit, max_num_seqs=3, max_num_batched_tokens=64)
            num_requests, num_new = self._size
            for index in range(num_requests):
                self.sim.add([10 * index + 1, 10 * index + 2, 10 * index + 3], num_new)
            self._act(self)
            while self.sim.has_unfinished_requests() and not self.player.stop_requested:
                self.sim.step()
        except BaseException as error:
            self.error = error
        self.player.finish()

    def under(self, script, size=(80, 24)):
        """Run `script(pilot)` while the engine runs, and release the engine afterwards."""
        self.thread.start()
        assert self.player.has_started.wait(10)
        try:
            return drive(self.app, script, size)
        finally:
            self.player.release()
            self.thread.join(10)
            assert not self.thread.is_alive()
