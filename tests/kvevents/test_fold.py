"""What the state says of small streams that one can follow by hand."""

from kv_event_harness import CLEARED, message, removed, state_of, stored

from pagedcli.kvevents.tree import TreeShape, largest_branches, token_ids
from pagedcli.show.kv_tables import (
    LoraRow,
    cache_rows,
    facts,
    limits,
    lora_rows,
    medium_class,
    summary,
)


def resident(state):
    return {node.hash for tree in state.trees for node in tree.resident()}


def test_one_removal_does_not_hide_another_copy():
    twice = [message(0, stored(1)), message(1, stored(1))]
    assert resident(state_of(*twice, message(2, removed(1)))) == {1}
    assert resident(state_of(*twice, message(2, removed(1)), message(3, removed(1)))) == set()


def test_copies_are_counted_per_medium():
    state = state_of(
        message(0, stored(1), stored(1, medium="CPU")), message(1, removed(1, medium="gpu")), message(2, removed(1))
    )
    assert resident(state) == {1}
    rows = [(row.medium, row.num_blocks) for row in cache_rows(state)]
    assert rows == [("CPU", 1), ("GPU", 0)]
    assert facts(state)["num_unknown_removals"] == 1


def test_a_removal_without_a_medium_takes_whatever_copy_is_there():
    assert resident(state_of(message(0, stored(1, medium="CPU")), message(1, removed(1, medium=None)))) == set()


def test_cache_groups_are_trees_of_their_own():
    state = state_of(message(0, stored(1, group_idx=0), stored(1, group_idx=1)), message(1, removed(1, group_idx=1)))
    assert [(row.group, row.num_blocks) for row in cache_rows(state)] == [("0", 1), ("1", 0)]


def test_the_group_that_vetoed_a_hit_is_named():
    """Group 1 drops block 2, so the engine computes it again, though group 0 still has it."""
    both = (stored(1, 2, group_idx=0), stored(1, 2, group_idx=1))
    again = (stored(2, parent=1, group_idx=0), stored(2, parent=1, group_idx=1))
    for order in (again, again[::-1]):
        state = state_of(message(0, *both), message(1, removed(2, group_idx=1)), message(2, *order))
        assert {row.group: row.num_vetoed_blocks for row in cache_rows(state)} == {"0": 0, "1": 1}
        text = "\n".join(note for table in summary(state, None)[1] for note in table.notes)
        assert "group 1 vetoed hits: 1 block that another group still had was recomputed" in text


def test_two_requests_that_compute_the_same_at_once_are_no_veto():
    both = (stored(1, 2, group_idx=0), stored(1, 2, group_idx=1))
    state = state_of(message(0, *both), message(1, *both))
    assert [row.num_vetoed_blocks for row in cache_rows(state)] == [0, 0]


def test_churn_counts_blocks_stored_again_by_cause_and_how_long_they_were_gone():
    state = state_of(
        message(0, stored(1, 2)), message(3, removed(2)), message(10, stored(2, parent=1)),
        message(11, CLEARED), message(13, stored(1)), message(0, stored(1), time_s=20.0),
    )  # fmt: skip
    figures = facts(state)
    assert [figures[f"num_blocks_stored_again_{cause}"] for cause in ("evicted", "cleared", "restarted")] == [1, 1, 1]
    assert (figures["num_blocks_stored_again"], figures["num_tokens_computed_twice"]) == (3, 6)
    assert (figures["num_unique_blocks"], figures["num_stored_blocks"]) == (2, 5)
    assert figures["median_lifetime_s"] == 3.0
    assert figures["median_pause_s"] == 2.0  # of 7, 2 and 0


def test_a_copy_that_comes_back_from_another_medium_is_not_computed_twice():
    state = state_of(message(0, stored(1), stored(1, medium="CPU")), message(1, removed(1)), message(2, stored(1)))
    assert facts(state)["num_blocks_stored_again"] == 0
    assert facts(state)["num_more_copies"] == 2


def test_the_peak_is_that_after_every_event_not_after_every_message():
    state = state_of(message(0, stored(1, 2)), message(1, stored(3), removed(1), removed(2)))
    assert facts(state)["peak_resident_blocks"] == 3
    two_groups = state_of(message(0, stored(1, group_idx=0), stored(1, group_idx=1), removed(1, group_idx=0)))
    assert facts(two_groups)["peak_resident_blocks"] == 2


def test_blocks_that_come_again_one_by_one_may_be_answers_and_are_counted_on_their_own():
    first = [message(0, stored(1, 2)), message(1, stored(3, parent=2)), message(2, removed(3, 2))]
    prompt = state_of(*first, message(3, stored(2, 3, parent=1)))
    assert (facts(prompt)["num_blocks_stored_again"], facts(prompt)["num_blocks_stored_again_alone"]) == (2, 0)
    in_one_message = state_of(*first, message(3, stored(2, parent=1), stored(3, parent=2)))
    answer = state_of(*first, message(3, stored(2, parent=1)), message(4, stored(3, parent=2)))
    alone = [facts(state)["num_blocks_stored_again_alone"] for state in (in_one_message, answer)]
    assert alone == [0, 2]
    assert any("answers that were generated again" in line for line in limits(answer))
    assert not any("answers that were generated again" in line for line in limits(prompt))


def test_a_late_start_is_said():
    state = state_of(message(5, stored(3, parent=2)), message(6, removed(9)))
    assert "tcp://host:1: what happened before message 5 is unknown" in limits(state)
    assert facts(state)["num_unknown_removals"] == 1
    assert cache_rows(state)[0].num_orphans == 1


def test_a_gap_is_noticed_counted_and_said():
    state = state_of(message(0, stored(1)), message(4, stored(2)))
    assert list(state.notes) == ["tcp://host:1: messages 1 to 3 are missing"]
    assert (facts(state)["num_gaps"], facts(state)["num_missed_messages"]) == (1, 3)
    assert resident(state) == {1, 2}


def test_a_restarted_publisher_is_noticed_and_its_old_blocks_are_gone():
    state = state_of(message(7, stored(1)), message(8, stored(2)), message(0, stored(3), time_s=9.5))
    assert resident(state) == {3}
    assert facts(state)["num_restarts"] == 1
    assert "restarted" in state.notes[-1]


def test_what_a_replay_sends_again_is_ignored():
    first, second = message(0, stored(1)), message(1, removed(1))
    state = state_of(first, second, first, second, message(2, stored(2)))
    assert resident(state) == {2}
    assert (facts(state)["num_repeated_messages"], facts(state)["num_restarts"]) == (2, 0)


def test_publishers_with_topics_of_their_own_are_numbered_on_their_own():
    state = state_of(message(0, stored(1), topic=b"a"), message(5, stored(2), topic=b"b"), message(1, topic=b"a"))
    assert facts(state)["num_gaps"] == 0
    assert len(state.publishers) == 2


def test_event_ids_number_events_where_messages_have_no_numbers():
    def event(event_id, data):
        return [b'{"event_id": %d, "data": %s}' % (event_id, data)]

    block = b'{"type": "stored", "parent_hash": null, "blocks": [{"block_hash": %d, "tokens": [{"token_id": 1}]}]}'
    created = b'{"type": "created", "num_blocks_per_cache_level": [8, 2]}'
    state = state_of(
        event(0, created), event(1, block % 1), event(4, block % 2), event(0, created), event(1, block % 3)
    )
    assert resident(state) == {3}
    assert (facts(state)["num_gaps"], facts(state)["num_restarts"]) == (1, 1)
    assert {row.medium: row.capacity_blocks for row in cache_rows(state)} == {"GPU": 8, "CPU": 2}


def test_a_store_says_where_its_objects_lie_and_each_replica_is_a_copy():
    def placed(*media, new=False):
        place = ["key", [[medium, "somewhere"] for medium in media]]
        return ["BlockStoreEvent", *place, "model", 64, "h", "", [1, 2]] if new else ["BlockUpdateEvent", *place]

    state = state_of(message(0, placed("memory", "memory", new=True)), message(1, placed("memory", "disk")))
    assert [(row.medium, row.class_, row.num_copies) for row in cache_rows(state)] == [
        ("DISK", "storage", 1), ("MEMORY", "CPU", 1),
    ]  # fmt: skip
    state.take(message(2, placed()), 2.0)
    assert resident(state) == set()


def test_media_have_three_classes():
    assert [medium_class(name) for name in ("GPU", "CPU_PINNED", "MEMORY", "LOCAL_DISK")] == [
        "GPU", "CPU", "CPU", "storage",
    ]  # fmt: skip


def test_blocks_are_counted_per_adapter():
    state = state_of(message(0, stored(1, 2, lora_name="sql"), stored(3)))
    assert lora_rows(state) == [LoraRow("sql", 2, 4), LoraRow("none", 1, 2)]
    assert lora_rows(state_of(message(0, stored(1)))) == []


def test_where_a_copy_lies_and_whose_it_is_are_counted():
    state = state_of(message(0, stored(1, locality="LOCAL", ownership="OWNED"), removed(1, locality="LOCAL")))
    assert facts(state)["field_values"] == {"locality=LOCAL": 2, "ownership=OWNED": 1}


def test_rates_are_of_the_last_ten_seconds():
    state = state_of(*(message(second, stored(second)) for second in range(31)))
    assert facts(state)["stored_blocks_per_s"] == 1.1  # eleven messages from second 20 to 30
    assert len(state.recent) == 11


def test_branches_are_runs_without_a_fork_largest_first():
    #  1 - 2 - 3 - 4      and 9
    #       \\- 5
    state = state_of(message(0, stored(1, 2, 3, 4), stored(5, parent=2), stored(9)), keep_tokens=True)
    shape = TreeShape(state.trees[0])
    rows = [
        ([node.hash for node in branch.nodes], branch.level, branch.depth, branch.num_blocks, branch.num_children)
        for branch in largest_branches(shape, 10)
    ]
    assert rows == [
        ([1, 2], 0, 1, 5, 2), ([3, 4], 1, 3, 2, 0), ([5], 1, 3, 1, 0), ([9], 0, 1, 1, 0),
    ]  # fmt: skip
    assert [branch.nodes[0].hash for branch in largest_branches(shape, 2)] == [1, 3]
    assert (shape.max_depth, token_ids([shape.nodes[0], shape.nodes[-1]])) == (4, [1, 1, 9, 9])


def test_blocks_that_name_each_other_as_parents_do_no_harm():
    shape = TreeShape(state_of(message(0, stored(1, parent=2), stored(2, parent=1), stored(3, parent=3))).trees[0])
    assert largest_branches(shape, 5) == []
    assert shape.max_depth == 0
