"""A prefix store over blocks that are bytes: what it counts, and what it says of files of no use."""

import pytest
from harness.core import SIZE, make_seq
from test_store_machine import Contents, write_at_once

from pagedcli.content_files import ContentFolder
from pagedcli.core.prefixes import Prefix, token_bytes
from pagedcli.core.store import PrefixStore, StoreFacts

IDENTITY = {"model": "a"}


class States(Contents):
    block_bytes = 32


def opened(folder, *, memory=None, states=None, num_groups=1, identity=IDENTITY):
    memory = Contents() if memory is None else memory
    store = PrefixStore(ContentFolder(folder), identity, memory, SIZE, num_groups, states=states)
    write_at_once(store)
    return store


def chained(token_ids, num_groups=1, salt=None):
    """A sequence with the prefix of each entry of its table."""
    seq, parent = make_seq(token_ids, cache_salt=salt), None if salt is None else Prefix.salt(salt)
    for span in range(len(token_ids) // SIZE):
        for _ in range(num_groups):
            parent = Prefix(token_bytes(token_ids[span * SIZE : (span + 1) * SIZE]), parent)
            seq.prefixes.append(parent)
    return seq


def content(number):
    return bytes([number]) * Contents.block_bytes


def contents(num_blocks):
    return Contents({number: content(number) for number in range(num_blocks)})


def written(folder, seq, *, states=None, num_groups=1):
    """A store to which all blocks of a sequence were offered, closed."""
    store = opened(folder, memory=contents(len(seq.prefixes)), states=states, num_groups=num_groups)
    store.offer(seq, range(len(seq.prefixes)), lambda *_: True)
    if states is not None:
        states[5] = b"s" * States.block_bytes
        store.offer_state(seq, 2, seq.prefixes[1], 5, lambda *_: True)
    store.close(0.5)
    return store


def test_facts_begin_with_nothing():
    facts = StoreFacts()
    assert not any(getattr(facts, name) for name in StoreFacts.__slots__)


def test_what_is_written_is_found_and_read_with_its_counts(tmp_path):
    seq, states = chained(range(6)), States()
    facts = written(tmp_path, seq, states=states).facts
    num_bytes = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert (facts.num_written_blocks, facts.num_written_states, facts.num_written_bytes) == (3, 1, num_bytes)
    assert not facts.not_kept
    memory, states = Contents(), States()
    store = opened(tmp_path, memory=memory, states=states)
    assert store.facts.num_found_blocks == 3
    assert store.found(seq, 3) == {0, 1, 2}
    assert store.found(seq, 2) == {0, 1}
    assert store.found_states(seq, {1: seq.prefixes[0], 2: seq.prefixes[1]}) == {2}
    assert store.read(seq, [2, 0]) == [content(2), content(0)]
    assert store.read_state(seq.prefixes[1]) == b"s" * States.block_bytes
    store.place_in_memory(7, content(2))
    store.place_state(1, b"s" * States.block_bytes)
    assert (memory[7], states[1]) == (content(2), b"s" * States.block_bytes)
    facts = store.facts
    counts = (facts.num_read_blocks, facts.num_read_states, facts.num_read_bytes)
    assert counts == (1, 1, Contents.block_bytes + States.block_bytes)
    store.offer(seq, range(3), lambda *_: True)
    store.close(0.5)
    assert not store.facts.num_written_blocks, "all of it is there"


def test_files_say_what_they_save(tmp_path):
    """0.5 seconds per token: of three blocks of 2 tokens, and of the state after two."""
    written(tmp_path, chained(range(6)), states=States())
    files = sorted(ContentFolder(tmp_path).files()[0], key=lambda file: file.head.depth)
    assert [(file.head.seconds, file.head.depth) for file in files] == [(2.0, 2), (3.0, 3)]
    written(tmp_path / "groups", chained(range(4), 2), num_groups=2)
    [file] = ContentFolder(tmp_path / "groups").files()[0]
    assert (file.head.seconds, file.head.depth, len(file.head.sizes)) == (2.0, 2, 4)


@pytest.mark.parametrize(
    ("other", "is_found"),
    [
        (chained([0, 1, 2, 3, 9, 9]), {0, 1}),
        (chained([0, 1]), {0}),
        (chained([9, 1, 2, 3]), set()),
        (chained(range(6), salt="s"), set()),
    ],
)
def test_only_equal_beginnings_of_the_same_salt_are_found(tmp_path, other, is_found):
    written(tmp_path, chained(range(6)))
    assert opened(tmp_path).found(other, 3) == is_found


def test_equal_hashes_of_other_tokens_or_another_place_are_no_hit(tmp_path):
    seq = chained(range(6))
    written(tmp_path, seq)
    store, other = opened(tmp_path), chained([9, 9, 9, 9, 9, 9])
    for mine, theirs in zip(other.prefixes, seq.prefixes, strict=True):
        mine.hash = theirs.hash
    assert store.found(other, 3) == set()
    moved = chained(range(6))
    moved.prefixes.reverse()
    assert store.found(moved, 3) == {1}


def test_files_of_no_use_are_named_and_no_longer_found(tmp_path):
    seq = chained(range(6))
    written(tmp_path, seq)
    other = opened(tmp_path, identity={"model": "b"})
    assert (other.facts.num_found_blocks, dict(other.facts.not_used)) == (0, {"other model": 1})
    store = opened(tmp_path)
    [path] = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"x")
    assert store.read(seq, [0]) == [content(0)]
    assert store.read(seq, [0, 2]) is None
    assert dict(store.facts.not_used) == {"other bytes than were written": 1}
    assert store.found(seq, 3) == set()
    path.write_bytes(whole)
    memory = Contents()
    narrow = opened(tmp_path, memory=memory)
    memory.block_bytes = 32
    assert narrow.read(seq, [0]) is None
    assert dict(narrow.facts.not_used) == {"its parts are no blocks of this engine": 1}


def test_states_are_of_no_use_without_slots_and_damaged_ones_are_named(tmp_path):
    seq = chained(range(6))
    written(tmp_path, seq, states=States())
    assert dict(opened(tmp_path).facts.not_used) == {"this engine has no state": 1}
    store = opened(tmp_path, states=States())
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert store.read_state(seq.prefixes[1]) is None
    assert store.found_states(seq, {2: seq.prefixes[1]}) == set()
    assert store.found(seq, 3) == {0, 1, 2}


def test_blocks_that_left_the_pool_or_are_not_written_yet_are_left_out(tmp_path):
    store, seq = opened(tmp_path, memory=contents(4)), chained(range(8))
    store.offer(seq, [0, None, 2, 3], lambda block_id, prefix: block_id != 2)
    store.offer(seq, [0], lambda *_: True)  # it is on its way
    store.keep(1.0)
    store.keep(1.0)
    assert (store.facts.num_written_blocks, store.found(seq, 4)) == (2, {0, 3})
    assert not store._coming
    store.offer(seq, [0, 1, 2, 3], lambda *_: False)
    store.close(1.0)
    assert (store.facts.num_written_blocks, len(list(tmp_path.iterdir()))) == (2, 1)


def test_what_is_removed_again_does_not_count(tmp_path):
    store, seq = opened(tmp_path, memory=contents(2)), chained(range(4))
    store.offer(seq, [0, 1], lambda *_: True)
    store.keep(1.0)
    store.keep(1.0)
    for path in tmp_path.iterdir():
        path.unlink()
    store.close(1.0)
    facts = store.facts
    assert (facts.num_written_blocks, facts.num_written_bytes, facts.not_kept.total()) == (0, 0, 1)


def test_what_has_no_room_is_not_kept_and_its_reason_is_counted(tmp_path):
    store, seq = opened(tmp_path, memory=contents(2)), chained(range(4))
    store.folder.most_bytes = 10
    store.offer(seq, [0, 1], lambda *_: True)
    store.close(1.0)
    assert store.facts.not_kept == {"the bound is smaller than one file": 1}
    assert store.facts.num_written_blocks == 0


def test_a_folder_that_cannot_be_written_is_offered_nothing(tmp_path):
    store, seq = opened(tmp_path), chained(range(4))
    store.folder.is_writable = False
    store.offer(seq, [0, 1], lambda *_: True)
    store.close(1.0)
    assert not list(tmp_path.iterdir())


def test_a_block_larger_than_a_file_has_one_of_its_own(tmp_path, store_files_of):
    store_files_of(1)
    written(tmp_path, chained(range(6)))
    assert [len(file.head.sizes) for file in ContentFolder(tmp_path).files()[0]] == [1, 1, 1]
