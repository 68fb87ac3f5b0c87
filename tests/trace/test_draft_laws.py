"""The events of guessed tokens: a changed field, a missing event and one too many are found."""

import msgspec
import pytest
from harness.core import Oracle, Simulation, check_events
from test_check_fields import unnoticed

from pagedcli.errors import TraceError
from pagedcli.events import AnyEvent, DraftChecked, EngineStarted, StateSlotsReleased, StepScheduled, TokensDrafted


def drafted(block_size=2, **limits):
    """A run in which about two of three guesses are right."""
    answers = None
    for _ in range(2):
        events: list = []
        drafter = None if answers is None else Oracle(answers, wrong=0.3, ragged=True)
        sim = Simulation(
            200, block_size, emit=events.append, trace_tokens=True, drafter=drafter, max_num_batched_tokens=60,
            max_num_seqs=20, **limits,
        )  # fmt: skip
        for number in range(8):
            sim.add([number % 3, 1, number % 2], 6 + number, n=1 + (number == 3), request_id=str(number))
        sim.run()
        answers = {(seq.request_id, seq.sample_index): seq.output_token_ids for seq in sim.seqs}
    return events


EVENTS = drafted()
FIELDS = [
    (kind.__name__, name)
    for kind in (TokensDrafted, DraftChecked)
    for name in kind.__struct_fields__
    if name != "token_ids"
]


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=lambda value: value)
def test_a_changed_field_is_found(kind, name):
    num_made, silent = unnoticed(EVENTS, kind, name, most=12)
    assert num_made > 5
    assert silent == []


@pytest.mark.parametrize("num_state_slots", [30, 9])  # with 9 of them, many states see no guess
def test_what_a_state_has_not_seen_is_found_if_it_is_changed(num_state_slots):
    events = drafted(num_state_slots=num_state_slots)
    assert {event.num_again for event in events if isinstance(event, DraftChecked)} >= {0, 1, 2}
    num_made, silent = unnoticed(events, "DraftChecked", "num_again", most=30)
    assert num_made > 10
    assert silent == []
    places = [place for place, event in enumerate(events) if isinstance(event, DraftChecked)]
    released = [place for place in places if isinstance(events[place - 1], StateSlotsReleased)]
    assert released
    for place in released[::5]:  # a slot with a wrong state is kept
        with pytest.raises(TraceError):
            check_events([*events[: place - 1], *events[place:]])


def test_a_changed_token_is_found_where_it_is_in_a_full_block():
    num_made, silent = unnoticed(drafted(block_size=1), "DraftChecked", "token_ids", most=40)
    assert num_made > 10
    assert silent == []


@pytest.mark.parametrize("kind", [TokensDrafted, DraftChecked])
@pytest.mark.parametrize("times", [0, 2])
def test_an_event_that_is_missing_or_comes_twice_is_found(kind, times):
    for place in [i for i, event in enumerate(EVENTS) if isinstance(event, kind)][::4]:
        with pytest.raises(TraceError):
            check_events([*EVENTS[:place], *[EVENTS[place]] * times, *EVENTS[place + 1 :]])


def replaced(place, **changes):
    return [*EVENTS[:place], msgspec.structs.replace(EVENTS[place], **changes), *EVENTS[place + 1 :]]


@pytest.mark.parametrize("speculation", ["mtp", "auto"])
def test_a_trace_of_guesses_that_are_no_longer_made_is_read(speculation):
    before = [
        msgspec.structs.replace(event, speculation=speculation)
        if isinstance(event, EngineStarted)
        else msgspec.structs.replace(event, sources=("mtp",) * len(event.sources))
        if isinstance(event, TokensDrafted)
        else event
        for event in EVENTS
    ]
    check_events([msgspec.json.decode(msgspec.json.encode(event), type=AnyEvent) for event in before])


def test_what_no_engine_guesses_is_refused():
    started = next(i for i, event in enumerate(EVENTS) if isinstance(event, EngineStarted))
    with pytest.raises(TraceError, match="no guess is due"):
        check_events(replaced(started, speculation="off"))
    place = next(i for i, event in enumerate(EVENTS) if isinstance(event, TokensDrafted))
    event = EVENTS[place]
    with pytest.raises(TraceError, match="guesses after 1 of"):
        check_events(replaced(place, num_drafted=(9, *event.num_drafted[1:])))
    after = next(i for i, event in enumerate(EVENTS) if i > place and isinstance(event, StepScheduled))
    with pytest.raises(TraceError, match="no guess is due"):
        check_events([*EVENTS[: after + 1], event, *EVENTS[after + 1 :]])
    ended = max(i for i, event in enumerate(EVENTS) if isinstance(event, DraftChecked))
    with pytest.raises(TraceError, match="have not been checked"):
        check_events([*EVENTS[:ended], *EVENTS[ended + 1 :]])


def test_a_block_that_is_evicted_for_a_guess_is_found():
    events: list = []
    sim = Simulation(
        14, emit=events.append, trace_tokens=True, max_num_batched_tokens=60, drafter=Oracle({("1", 0): [7] * 20})
    )
    pool = sim.block_manager.pool
    pool.num_empty = lambda most: min(most, len(pool.free_block_ids))
    sim.add(list(range(20)), 2, request_id="0")
    sim.run()
    sim.add([50, 51], 20, request_id="1")
    sim.run()
    with pytest.raises(TraceError, match="were evicted for guesses"):
        check_events(events)
