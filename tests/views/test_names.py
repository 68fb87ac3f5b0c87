"""Which request a name means, and what is said of a name that means none."""

import pytest
from harness.core import EventList, simulated, write

from pagedcli.errors import TraceError, UsageError
from pagedcli.events import RequestAdded, RequestRefused, only_wanted
from pagedcli.trace.files import TraceReader
from pagedcli.views.names import find_request


def added(seq_id, request_id, row_id=None, sample_index=0):
    return RequestAdded(seq_id, request_id, sample_index, 5, 5, False, row_id=row_id)


EVENTS = [
    added(0, "0", "code-Mirano"), added(1, "1", "3"), added(2, "2"), added(3, "3", "seq:0"), added(4, "3", "seq:0", 1),
    RequestRefused("4", "prompt_too_long", "it needs 9 blocks, the pool has 4", "too-long"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "seq_ids"),
    [
        ("code-Mirano", {0}),
        ("0", {0}),  # the request's number
        ("3", {1}),  # the user's own id takes precedence over the number of another request
        ("2", {2}),
        ("seq:1", {1}),
        ("seq:0", {3, 4}),  # also over the name of a sequence; both samples of the request
    ],
)
@pytest.mark.parametrize("order", [1, -1])
def test_the_own_id_takes_precedence_whatever_comes_first(name, seq_ids, order):
    assert find_request(EventList(EVENTS[::order]), name, "run.jsonl").seq_ids == seq_ids


def test_a_refused_request_is_named_as_such():
    for name in ("too-long", "4"):
        with pytest.raises(UsageError, match="was refused: it needs 9 blocks, the pool has 4"):
            find_request(EventList(EVENTS), name, "run.jsonl")


def test_unwanted_fields_are_dropped_and_only_these():
    event = RequestAdded(0, "0", 0, 2, 5, False, (1, 2), "code-Mirano")
    kept = []
    for tokens, row_ids in ((True, True), (False, True), (True, False), (False, False)):
        only_wanted(kept.append, tokens=tokens, row_ids=row_ids)(event)
    assert [(each.token_ids, each.row_id) for each in kept] == [
        ((1, 2), "code-Mirano"), (None, "code-Mirano"), ((1, 2), None), (None, None),
    ]  # fmt: skip
    assert all(each.request_id == "0" for each in kept)


def test_what_is_no_trace_is_not_searched_and_of_a_damaged_one_the_beginning_is(tmp_path):
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    with pytest.raises(TraceError, match="not a trace, but a file of prompts"):
        find_request(TraceReader(prompts), "1", "in.jsonl")
    path = write(tmp_path / "run.jsonl", simulated())
    first, second, *_ = path.read_text().splitlines(keepends=True)
    path.write_text(first + second + "{\n" + second)
    assert find_request(TraceReader(path), "seq:0", "run.jsonl").seq_ids == {0}
