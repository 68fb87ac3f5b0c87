"""Every field of every event is checked: changed, it is found, or it stands here with the reason why none can know."""

import msgspec
import pytest
from harness.core import Simulation, check_events, simulated

from pagedcli.errors import TraceError
from pagedcli.events import (
    BlocksReleased,
    CacheGroup,
    PrefixLookedUp,
    RequestFinished,
    RequestRefused,
    RequestWaiting,
    StepFinished,
    StepStarted,
)
from pagedcli.sampling_params import SamplingParams

EVENTS = simulated(num_requests=20, num_blocks=12)
NOT_CHECKABLE = {
    "EngineStarted": {
        **dict.fromkeys(("pagedcli_version", "model", "device", "dtype", "backend", "refused"), "said nowhere else"),
        **dict.fromkeys(("time_ns", "max_model_len"), "said nowhere else"),
        "schema_version": "checked by the reader of the file",
        "max_num_seqs": "a higher limit explains the same steps unless a sequence waits for it",
        "max_num_batched_tokens": "a higher budget explains the same steps unless a sequence waits for it",
        "chunked_prefill_size": "a higher limit explains the same steps",
        "min_prefill_tokens": "a higher number explains the same steps",
        "num_blocks": "a larger pool explains the same steps until its last block is taken",
        "eviction": "any other policy than lru may evict in any order",
        "preemption_policy": "no law says yet which running sequence is preempted",
        "kinds": "what other kinds of cache veto is only bounded",
        "step_times": "a file of the machine that ran it",
    },
    "RequestAdded": {
        **dict.fromkeys(("request_id", "row_id"), "of a single sequence, said nowhere else"),
        "max_new_tokens": "only a sequence that ends by length shows it",
        "beam_width": "a search that ends with its first token is forked like a sample",
        "salted": "the salt is not recorded; the first block shows it if the tokens are",
        "salt": "the salt is not recorded: that it was another of the earlier ones shows nowhere else",
        "token_ids": "no hash covers the tokens of a last partial block, or of a salted first one",
    },
    "RequestRefused": dict.fromkeys(("request_id", "code", "message", "row_id"), "said nowhere else"),
    "PrefixLookedUp": {
        "missing_hash": "with a salt it shows only when that block is filled",
        "partial_tokens": "with a salt no one knows which cached blocks follow",
        "shared_tokens": "with a salt no one knows what has the same one",
    },
    "RequestPreempted": {"for_seq_id": "any running sequence that needed as many blocks explains it"},
    "RequestWaiting": {
        "num_blocks_needed": "with a salt no one knows how much of the prefix is in use",
        "reason": "it follows from the policy of the scheduler; the laws only judge what a reason claims",
    },
    "StepStarted": {"time_ns": "a clock: only its order and the parts of the step bound it"},
    "StepFinished": {
        **dict.fromkeys(("time_ns", "schedule_ns", "forward_ns", "sample_ns", "observer_ns"), "only bounded"),
    },
    "TokensSampled": {"token_ids": "no hash covers the tokens of a last partial block"},
    "RequestFinished": {"reason": "a stop token as the last one allowed looks like the end by length"},
}  # fmt: skip
CHANGED = {
    str: lambda text: text + "x",
    bool: lambda flag: not flag,
    tuple: lambda many: (*many[:-1], other(many[-1])),
    msgspec.UnsetType: lambda _: "state",
    CacheGroup: lambda group: msgspec.structs.replace(group, token_bytes=other(group.token_bytes)),
}
WORDS = {
    "reason": ("new", "resumed", "continued", "max_num_seqs", "token_budget", "free_blocks", "preemption", "stop",
               "length", "score", "abort"),
    "eviction": ("lru", "fifo", "lfu", "prefix-lru", "next-use"),
    "miss_reason": ("caching_off", "no_full_block", "no_match", None),
}  # fmt: skip


def other(value):
    return value + 1 if type(value) is int else 7 if value is None else CHANGED[type(value)](value)


def mutations(event, name):
    value = getattr(event, name)
    if name in WORDS:
        allowed = [word for word in WORDS[name] if word != value and word_fits(event, name, word)]
        return [msgspec.structs.replace(event, **{name: word}) for word in allowed]
    if value == ():
        return []
    changed = 1 if name in ("num_context_tokens", "disk_tokens") and value is msgspec.UNSET else other(value)
    return [msgspec.structs.replace(event, **{name: changed})]


def word_fits(event, name, word):
    """Whether the reader would accept the word in this field."""
    try:
        msgspec.convert({**msgspec.to_builtins(event), name: word}, type(event))
    except msgspec.ValidationError:
        return False
    return True


def unnoticed(events, kind, name, *, most=8):
    """How many changes of a field were made, and at which events one was not found."""
    num_made, silent = 0, []
    places = [i for i, event in enumerate(events) if type(event).__name__ == kind]
    for place in places[:: max(1, len(places) // most)]:
        for changed in mutations(events[place], name):
            num_made += 1
            try:
                check_events([*events[:place], changed, *events[place + 1 :]])
            except TraceError:
                continue
            silent.append((place, changed))
    return num_made, silent


FIELDS = sorted({(type(event).__name__, name) for event in EVENTS for name in event.__struct_fields__})


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=lambda value: value)
def test_a_changed_field_is_found_or_listed_with_the_reason(kind, name):
    num_made, silent = unnoticed(EVENTS, kind, name)
    if name in NOT_CHECKABLE.get(kind, {}):
        return
    assert num_made or (kind, name) == ("EngineStarted", "refused")
    assert silent == []


def unsalted(**limits):
    """A run whose every token is in a hashed block, or nearly so: block size 1 and no salts."""
    events = []
    sim = Simulation(14, 1, emit=events.append, trace_tokens=True, **{"max_num_seqs": 3, **limits})
    for number in range(12):
        sim.add([number % 3, 1, number % 2], 1 + number % 5)
    sim.run()
    return events


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("RequestAdded", "token_ids"), ("PrefixLookedUp", "missing_hash"), ("PrefixLookedUp", "partial_tokens"),
        ("PrefixLookedUp", "shared_tokens"),
        ("RequestWaiting", "num_blocks_needed"),
    ],
)  # fmt: skip
def test_without_a_salt_tokens_decide(kind, name):
    """In full blocks: with a block size of 1 every token of a prompt is in one."""
    num_made, silent = unnoticed(unsalted(max_num_batched_tokens=5), kind, name, most=40)
    assert num_made >= 5
    assert silent == []


def test_every_sampled_token_but_the_last_is_found():
    events = unsalted()
    _, silent = unnoticed(events, "TokensSampled", "token_ids", most=200)
    last = {event.seq_id: place for place, event in enumerate(events) if isinstance(event, RequestFinished)}
    for place, changed in silent:
        ends = last[changed.seq_ids[-1]]
        assert not any(changed.seq_ids[-1] in getattr(event, "seq_ids", ()) for event in events[place + 1 : ends])


def of_several_sequences():
    """A run of requests with three samples each, and of beam searches."""
    events = []
    sim = Simulation(60, 2, emit=events.append, max_num_seqs=6, max_model_len=64)
    for number in range(4):
        sim.add(
            [number] * 5, params=SamplingParams(beam_width=3, n=2, max_tokens=6, temperature=0), row_id=f"b{number}"
        )
        sim.add([number] * 3, 6, n=3, row_id=f"s{number}")
    sim.run()
    return events


@pytest.mark.parametrize("name", ["request_id", "row_id", "sample_index", "beam_width"])
def test_samples_and_beams_of_a_request_agree(name):
    num_made, silent = unnoticed(of_several_sequences(), "RequestAdded", name, most=40)
    assert num_made >= 20
    assert silent == []


def check_refused(place, message, events=EVENTS, **changes):
    """With these changes of one event the trace is refused in these words."""
    changed = msgspec.structs.replace(events[place], **changes)
    with pytest.raises(TraceError, match=message):
        check_events([*events[:place], changed, *events[place + 1 :]])


@pytest.mark.parametrize("salt", [0, 2, 7])
def test_salts_are_numbered_as_they_appear(salt):
    place = next(i for i, event in enumerate(EVENTS) if getattr(event, "salted", False))
    assert EVENTS[place].salt == 1
    check_refused(place, f"salt {salt} of a request, after 0 earlier ones", salt=salt)


@pytest.mark.quick("TokensSampled")
@pytest.mark.parametrize("kind", ["StepScheduled", "TokensSampled"])
def test_another_order_of_the_sequences_in_a_step_is_found(kind):
    places = [i for i, event in enumerate(EVENTS) if type(event).__name__ == kind and len(event.seq_ids) > 1]
    assert len(places) > 20
    for place in places:
        event = EVENTS[place]
        changes = {
            key: getattr(event, key)[::-1]
            for key in ("seq_ids", "num_new_tokens", "token_ids")
            if getattr(event, key, None) is not None
        }
        check_refused(place, "was started before the one that it follows", **changes)


def test_a_part_that_lasts_ten_seconds_more_than_its_step_is_found():
    for name in ("schedule_ns", "forward_ns", "sample_ns", "observer_ns"):
        place = next(i for i, event in enumerate(EVENTS) if hasattr(event, name))
        check_refused(place, "its parts last 10,000,", **{name: 10**10})


def test_a_finish_that_is_none_is_found():
    places = [i for i, event in enumerate(EVENTS) if isinstance(event, RequestFinished)]
    for place in places:
        check_refused(place, "ended by abort, but got a token in this step", reason="abort")


KINDS = sorted({type(event).__name__ for event in EVENTS} - {"EngineStarted"})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("times", [0, 2])
def test_an_event_that_is_missing_or_comes_twice_is_found(kind, times):
    """But the very last one: a killed run ends before it."""
    places = [i for i, event in enumerate(EVENTS[:-1]) if type(event).__name__ == kind]
    for place in places[:: max(1, len(places) // 12)]:
        with pytest.raises(TraceError):
            check_events([*EVENTS[:place], *[EVENTS[place]] * times, *EVENTS[place + 1 :]])


def test_an_event_of_a_step_that_comes_while_none_runs_is_found():
    """Neighbours within a step that change different things have no order that a law could know."""
    places = [i for i, event in enumerate(EVENTS[:-1]) if isinstance(event, StepStarted | StepFinished) and i]
    num_found = 0
    for place in places:
        for first in (place - 1, place):
            a, b = EVENTS[first : first + 2]
            between = {"StepStarted", "StepFinished", "RequestAdded"} & {type(a).__name__, type(b).__name__}
            if len(between) == 1 and not isinstance(a, BlocksReleased):
                with pytest.raises(TraceError):
                    check_events([*EVENTS[:first], b, a, *EVENTS[first + 2 :]])
                num_found += 1
    assert num_found > 40


@pytest.mark.parametrize("reason", ["max_num_seqs", "min_prefill_tokens", "state_slots", "checkpoint", "free_blocks"])
def test_a_reason_to_wait_that_claims_what_is_not_so_is_found(reason):
    roomy = simulated(num_blocks=200, max_num_seqs=40, max_num_batched_tokens=4)
    place = next(i for i, event in enumerate(roomy) if isinstance(event, RequestWaiting))
    check_refused(place, f"need not wait for {reason}", roomy, reason=reason)


def test_the_list_of_what_cannot_be_checked_names_real_fields():
    kinds = {type(event).__name__: event for event in EVENTS} | {"RequestRefused": RequestRefused("", "", "")}
    for kind, fields in NOT_CHECKABLE.items():
        assert set(fields) <= set(kinds[kind].__struct_fields__)
    assert any(isinstance(event, RequestWaiting) for event in EVENTS)


def test_time_that_runs_backward_is_found():
    place = [i for i, event in enumerate(EVENTS) if isinstance(event, StepFinished)][5]
    check_refused(place, "time 0 is before", time_ns=0)


def test_an_admission_tells_shared_revived_and_fresh_blocks():
    """A holds two blocks that B shares; once both have ended, C revives them. D is admitted in an older trace."""
    events = []
    sim = Simulation(8, 2, emit=events.append, max_num_seqs=2, max_num_batched_tokens=64)
    for last in (7, 8, 9):
        sim.add([1, 2, 3, 4, last], 3)
    sim.run()
    lookups = [(place, event) for place, event in enumerate(events) if isinstance(event, PrefixLookedUp)]
    kinds = ("shared", "revived", "fresh")
    assert [tuple(event.blocks_taken.values()) for _, event in lookups] == [(0, 0, 3), (2, 0, 1), (0, 2, 1)]
    assert sim.stats.admitted == dict(zip(kinds, (2, 2, 5), strict=True))
    place, third = lookups[2]
    for name, what in (("shared", "2 blocks were found, 2 of them free"), ("fresh", "1 fresh blocks of seq 2")):
        wrong = getattr(third, f"blocks_{name}") + 1
        check_refused(place, what, events, **{f"blocks_{name}": wrong})
    older = msgspec.structs.replace(third, **{f"blocks_{kind}": msgspec.UNSET for kind in kinds})
    check_events([*events[:place], older, *events[place + 1 :]])
    assert older.blocks_taken is None
