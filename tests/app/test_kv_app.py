"""The application on KV events: a recording forwards and backwards, and a running server."""

import threading

import pytest
from app_harness import drive, press, screen_text, shown, until
from kv_event_harness import message, removed, state_of, stored

from pagedcli.app.base import watch
from pagedcli.app.kv_app import AttachPlayer, CapturePlayer, KVApp
from pagedcli.kvevents.fold import KVState

MESSAGES = [
    message(0, stored(1, 2, 3)),
    message(1, stored(4, 5, parent=2)),
    message(2, removed(3)),
    message(3, stored(7)),
    message(4, stored(3, parent=2)),  # again
    message(5, removed(7)),
]


def recording(**options):
    return KVApp(
        CapturePlayer([(frames, float(i), 0) for i, frames in enumerate(MESSAGES)], ["server"]), "t", **options
    )


@pytest.mark.quick("size0")
@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
def test_every_panel_is_on_the_screen(size):
    text = shown(recording(), "]", size=size)
    assert len(text.split("\n")) == size[1]
    parts = (
        "prefix tree",
        "churn 1 of 7",
        "group",
        "resident 5 blocks",
        "no block ids",
        "message 6 of 6",
        "No block of a",
    )
    for part in parts:
        assert part in text
    assert "…" not in text


def test_a_recording_moves_both_ways_and_jumps():
    app = recording()

    async def script(pilot):
        seen = []
        for keys in ([".", "."], ["e"], ["m"], ["e"], ["E"], ["[", "4", "enter"], [","]):
            await press(pilot, *keys)
            seen.append(app.player.position)
            assert (
                app.player.moment.facts["num_resident_blocks"]
                == state_of(*MESSAGES[: app.player.position]).num_resident
            )
        assert "no earlier miss" in await press(pilot, "M")
        return seen

    assert drive(app, script) == [2, 3, 5, 6, 3, 4, 3]


def test_enter_shows_the_blocks_of_a_subtree():
    def decode(ids):
        return "-".join(map(str, ids))

    app = recording(decode=decode)

    async def script(pilot):
        text = await press(pilot, "2", "enter")
        assert "'1-1-2-2'" in text  # blocks 1 and 2, then a fork to 3 and to 4, 5
        text = await press(pilot, "enter")
        assert "2 blocks without a fork" in text
        assert "begins a prompt" in text
        assert "text       1-1-2-2" in text
        assert "0000000000000002" in text
        text = await press(pilot, "escape", "/", *"4-4", "enter")
        assert "1 of 1 prefix with '4-4'" in text
        text = await press(pilot, "f", *"4-4", "enter")
        assert "with '4-4'" in text
        assert len(app.query_one("#tree").as_text().splitlines()) == 2, "a heading and one prefix"

    drive(app, script)


class Driven(KVApp):
    """Its keys are pressed by a script, without a terminal; without a script the screen fails at once."""

    script = None

    def run(self):
        return None if self.script is None else drive(self, self.script)


def test_a_running_server_is_shown_until_it_ends():
    player = AttachPlayer()
    app = Driven(player, "pagedcli attach")
    state = KVState(["server"])
    next_message = threading.Event()

    def follow():
        for place, frames in enumerate(MESSAGES):
            state.take(frames, float(place))
            while not next_message.wait(0.01):
                player.offer(state, float(place))
                if player.stop_requested:
                    return "stopped"
            next_message.clear()
        return "ended"

    async def script(pilot):
        await until(pilot, lambda: "3 blocks resident" in screen_text(app))
        await press(pilot, "space")
        next_message.set()
        await pilot.pause(0.3)
        assert "3 blocks resident" in await press(pilot, "z")  # paused: the snapshot is another one
        await press(pilot, ".")
        await until(pilot, lambda: "5 blocks resident" in screen_text(app))
        assert "cannot go back" in await press(pilot, ",")
        await press(pilot, "q")
        await until(pilot, lambda: not app.is_running)

    app.script = script
    assert watch(app, player, follow) == "stopped"


def test_a_screen_that_fails_does_not_end_the_work():
    player = AttachPlayer()
    assert watch(Driven(player, "pagedcli attach"), player, lambda: player.screen_is_open.wait(5)) is True


def test_what_the_work_raises_is_raised():
    player = AttachPlayer()

    def fail():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch(Driven(player, "pagedcli attach"), player, fail)
