"""Our own engine's events, published as vLLM's and read back, are the pool's index: in process and through ZMQ."""

import random
import time
from contextlib import contextmanager

import msgspec
import pytest
from harness.core import Simulation
from kv_event_harness import message, stored

from pagedcli.errors import UsageError
from pagedcli.kvevents.fold import KVState
from pagedcli.kvevents.publisher import KVEventPublisher
from pagedcli.kvevents.sockets import PublisherSocket, Subscriber
from pagedcli.kvevents.tree import ServerTree
from pagedcli.sampling_params import SamplingParams
from pagedcli.show.kv_tables import facts, limits
from pagedcli.trace.fold import Fold
from pagedcli.trace.state import PoolState

LOOPBACK = "tcp://127.0.0.1:*"


def random_run(rng, send, *, num_requests=12):
    """A simulation under pressure: few blocks, shared prefixes, forks, beams, chunks, salts."""
    publish = Fold(PoolState(), KVEventPublisher(send))
    sim = Simulation(
        rng.randrange(9, 20),
        2,
        emit=publish,
        trace_tokens=True,
        max_num_seqs=rng.randrange(2, 6),
        max_num_batched_tokens=rng.randrange(5, 12),
        chunked_prefill_size=rng.choice([3, 5, None]),
    )
    for index in range(num_requests):
        prompt = [9] * rng.randrange(8) + [rng.randrange(3) for _ in range(rng.randrange(1, 5))]
        salt, num_new = "a" if index % 7 == 0 else None, rng.randrange(2, 9)
        if index % 6 == 1:
            params = SamplingParams(beam_width=2, max_tokens=min(4, num_new))
            sim.add(prompt[:5], params=params, cache_salt=salt)
        else:
            sim.add(prompt, num_new, n=1 + (index % 5 == 0), cache_salt=salt)
    return sim


def content(manager):
    """Of each block that a lookup can find: its hash, tokens and parent's hash; salts are roots without a block."""
    found = {}
    for block_hash, block_id in manager.hash_to_block_id.items():
        prefix = manager.blocks[block_id].prefix
        is_salt = prefix.parent is not None and prefix.parent.parent is not None and prefix.parent.parent.parent is None
        parent = None if prefix.parent is None else prefix.parent.hash
        found[block_hash] = (prefix.tokens, parent if not is_salt or parent in manager.hash_to_block_id else ...)
    return found


def rebuilt(tree):
    return {node.hash: (node.tokens, node.parent) for node in tree.resident()}


def step(sim, rng):
    """A step, which sometimes raises before or after the device had it: then False."""
    sim.executor.fail_launch, sim.executor.fail_read = rng.random() < 0.02, rng.random() < 0.02
    try:
        sim.step()
    except RuntimeError:
        return False
    return True


@pytest.mark.long
def test_the_rebuilt_tree_is_the_pools_index_after_every_step_of_100_random_runs():
    num_removed = num_preempted = num_failed = 0
    for seed in range(100):
        rng, sent = random.Random(seed), []
        state = KVState(keep_tokens=True)
        sim = random_run(rng, sent.append)
        while sim.has_unfinished_requests():
            num_failed += not step(sim, rng)
            for payload in sent:
                state.take([b"kv", state.num_batches.to_bytes(8, "big"), payload], 0.0)
            sent.clear()
            (tree,) = state.trees or [ServerTree()]
            expected = content(sim.block_manager)
            found = rebuilt(tree)
            assert found.keys() == expected.keys()
            for block_hash, (tokens, parent) in expected.items():
                assert found[block_hash][0] == tokens
                assert parent in (..., found[block_hash][1])
        assert state.num_malformed == state.total("num_unknown_removals") == state.total("num_more_copies") == 0
        num_removed += state.total("num_removed")
        num_preempted += sum(seq.num_preemptions for seq in sim.seqs)
    assert num_removed > 1_000
    assert num_preempted > 100
    assert num_failed > 50


@contextmanager
def subscribed(publisher, **options):
    """Publish empty batches until one arrives: what is sent before a connection is up is lost, as with every PUB."""
    with Subscriber([publisher.endpoint], **options) as subscriber:
        for _ in range(200):
            publisher.send(msgspec.msgpack.encode([time.time(), []]))
            if list(subscriber.receive(0.05)):
                break
        else:
            raise AssertionError("the subscriber never connected")
        yield subscriber


def received(subscriber, publisher, state):
    """Receive until the last batch is in."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for source, frames in subscriber.receive(0.05):
            state.take(frames, time.monotonic(), source)
        if any(known.sequence.next_seq == publisher.num_sent for known in state.publishers.values()):
            return
    raise AssertionError("the last batch never came")


def test_a_subscriber_that_starts_late_says_so_and_a_replay_tells_it_everything():
    with PublisherSocket(LOOPBACK) as publisher:
        sim = random_run(random.Random(6), publisher.send)
        for _ in range(6):
            sim.step()
        with (
            subscribed(publisher) as late,
            subscribed(publisher, replays=[publisher.replay_endpoint]) as told,
        ):
            without = KVState(late.endpoints)
            with_replay = KVState(told.endpoints, fetch=told.replay)
            sim.run()
            received(late, publisher, without)
            received(told, publisher, with_replay)
        assert any("is unknown" in line for line in limits(without))
        (tree,) = with_replay.trees
        assert {node.hash for node in tree.resident()} == sim.block_manager.hash_to_block_id.keys()
        assert not any("is unknown" in line for line in limits(with_replay))


def test_what_was_published_before_is_caught_up_with_although_nothing_new_comes():
    with PublisherSocket(LOOPBACK) as publisher:
        publisher.send(message(0, stored(1, 2))[2])
        with Subscriber([publisher.endpoint], [publisher.replay_endpoint]) as subscriber:
            state = KVState(fetch=subscriber.replay)
            state.catch_up(0, 0.0)
        assert state.num_resident == 2
    publisher.close()  # once more does nothing


def test_a_dropped_frame_is_noticed_and_fetched():
    with (
        PublisherSocket(LOOPBACK) as publisher,
        Subscriber([publisher.endpoint], [publisher.replay_endpoint]) as dealer,
    ):
        messages = [message(seq, stored(seq + 1)) for seq in range(4)]
        for frames in messages:
            publisher.send(frames[2])
        lossy, mended = KVState(), KVState(fetch=dealer.replay)
        for frames in (messages[0], messages[3]):
            lossy.take(frames, 0.0)
            mended.take(frames, 0.0)
    assert (facts(lossy)["num_missed_messages"], lossy.num_resident) == (2, 2)
    assert (facts(mended)["num_missed_messages"], mended.num_resident) == (0, 4)


def test_a_replay_to_a_slow_reader_drops_nothing():
    with (
        PublisherSocket(LOOPBACK) as publisher,
        Subscriber([LOOPBACK[:-1] + "9"], [publisher.replay_endpoint]) as reader,
    ):
        for number in range(5000):
            publisher.send(b"%d" % number)
        replayed = reader.replay(0, 1000)
        first = next(replayed)
        time.sleep(0.3)  # meanwhile the publisher's queue and the reader's fill up
        payloads = [frames[-1] for frames in (first, *replayed)]
    assert payloads == [b"%d" % number for number in range(1000, 5000)]


def test_a_silent_replay_endpoint_does_not_hold_the_view():
    with Subscriber(["tcp://127.0.0.1:9"], ["tcp://127.0.0.1:9"]) as subscriber:
        assert list(subscriber.replay(0, 0, idle_s=0.1)) == []


@pytest.mark.parametrize("endpoint", ["localhost", "tcp://localhost", "http://localhost:1", "tcp://127.0.0.1:99999"])
def test_an_impossible_endpoint_is_refused(endpoint):
    with pytest.raises(UsageError, match="endpoint"):
        Subscriber([endpoint])
    with pytest.raises(UsageError, match="cannot publish"):
        PublisherSocket(endpoint)


def test_every_publisher_needs_its_replay_endpoint():
    with pytest.raises(UsageError, match="2 endpoints need as many --replay, not 1"):
        Subscriber(["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"], ["tcp://127.0.0.1:3"])
