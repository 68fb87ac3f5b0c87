"""`pagedcli attach`, and `generate --kv-events`, which feeds it."""

import itertools
import json
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from cli_harness import pagedcli
from hostile_servers import OK, listening
from kv_event_harness import message, removed, stored

from pagedcli.kvevents.capture import CaptureWriter
from pagedcli.kvevents.fold import KVState
from pagedcli.kvevents.sockets import PublisherSocket, Subscriber
from pagedcli.kvevents.wire import MAX_PAYLOAD_BYTES
from pagedcli.trace.files import TraceReader
from pagedcli.trace.fold import Fold
from pagedcli.trace.state import PoolState

LOOPBACK = "tcp://127.0.0.1:*"
METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_running{engine="1"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.25
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total 1000.0
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total 400.0
"""


@pytest.fixture
def publisher():
    with PublisherSocket(LOOPBACK) as socket:
        for frames in [message(0, stored(1, 2)), message(1, removed(2)), message(2, stored(2, parent=1), stored(3))]:
            socket.send(frames[2])
        yield socket


def page(content):
    """A server of these metrics."""

    def talk(connection):
        text = (content() if callable(content) else content).encode()
        connection.sendall(OK + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(text) + text)

    return listening(talk)


def attached(publisher, *options):
    return pagedcli("attach", publisher.endpoint, "--replay", publisher.replay_endpoint, "--idle", "0.2", *options)


def test_the_summary_counts_what_was_published(publisher):
    document = json.loads(attached(publisher, "--format", "json").stdout)
    expected = {
        "num_batches": 3, "num_stored_blocks": 4, "num_removed_blocks": 1, "num_unique_blocks": 3,
        "num_blocks_stored_again": 1, "num_tokens_computed_twice": 2, "peak_resident_blocks": 3, "num_gaps": 0,
    }  # fmt: skip
    assert {key: document[key] for key in expected} == expected
    assert document["num_blocks_stored_again_evicted"] == 1
    assert "no requests" in document["limits"][0]


def test_prefixes_are_shown_as_text_with_a_tokenizer(publisher):
    row = json.loads(attached(publisher, "--format", "json", "-m", "builtin").stdout)["branches"][0]
    assert row["branch"].startswith("'")


def test_a_recording_gives_the_same_summary_as_the_stream(publisher, tmp_path):
    path = tmp_path / "events.jsonl.zst"
    live = json.loads(attached(publisher, "--format", "json", "--record", path).stdout)
    again = json.loads(pagedcli("attach", path, "--format", "json").stdout)
    for key in ("num_stored_blocks", "num_blocks_stored_again", "peak_resident_blocks", "num_removed_blocks"):
        assert live[key] == again[key]
    assert "already exists" in pagedcli("attach", publisher.endpoint, "--record", path, expect=2).stderr


def test_the_servers_own_figures_are_named_by_their_window(publisher, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nothing listens there
    with page(METRICS) as (url, _):
        rows = json.loads(attached(publisher, "--format", "json", "--metrics", url).stdout)["metrics"]
    values = {(row["key"], row["window"]): row["value"] for row in rows}
    assert values == {
        ("running", "now"): 5.0, ("usage", "now"): 0.25,
        ("queries", "since the server started"): 1000.0, ("queries", "since attach started"): 0.0,
        ("hits", "since the server started"): 400.0, ("hits", "since attach started"): 0.0,
        ("hit_rate", "since the server started"): 0.4,
    }  # fmt: skip


def test_a_server_that_works_and_sends_no_event_is_said_to():
    queries = itertools.count(1000, 1000)
    with PublisherSocket(LOOPBACK) as silent, page(lambda: METRICS.replace("1000.0", str(next(queries)))) as (url, _):
        said = pagedcli("attach", silent.endpoint, "--idle", "0.5", "--metrics", url)
    assert "prompt tokens since attach started, but no event came" in said.stderr
    with PublisherSocket(LOOPBACK) as silent, page(METRICS) as (url, _):
        said = pagedcli("attach", silent.endpoint, "--idle", "0.5", "--metrics", url)
    assert "check that the server publishes KV events there" in said.stderr


@pytest.mark.long
def test_after_a_message_over_the_limit_it_connects_again_and_says_so():
    with PublisherSocket(LOOPBACK) as socket, ThreadPoolExecutor(1) as pool:
        ran = pool.submit(pagedcli, "attach", socket.endpoint, "--idle", "2", "--format", "json")
        for number in range(40):
            socket.send(message(0, stored(1 + number))[2] if number != 20 else b"x" * (MAX_PAYLOAD_BYTES + 1))
            time.sleep(0.1)
        said = ran.result()
    document = json.loads(said.stdout)
    assert document["num_reconnects"] == 1
    assert document["num_gaps"] == 1
    assert document["num_missed_messages"] < 15
    assert "connection lost (the server ended or restarted, or a message over 16 MiB)" in said.stderr


@pytest.mark.slow
@pytest.mark.machine
def test_an_interrupt_under_a_flood_ends_in_about_a_second_with_the_summary():
    """About 0.5 s with 300,000 resident blocks; the limit leaves room for a busy machine."""
    payloads = [message(0, stored(*range(first, first + 1000)))[2] for first in range(0, 300_000, 1000)]
    ended = threading.Event()

    def flood(socket):
        for payload in itertools.cycle(payloads):
            if ended.is_set():
                return
            socket.send(payload)

    with PublisherSocket(LOOPBACK) as socket:
        command = [sys.executable, "-m", "pagedcli", "attach", socket.endpoint, "--format", "json"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        publisher = threading.Thread(target=flood, args=[socket])
        publisher.start()
        time.sleep(6)
        start_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
        seconds = time.monotonic() - start_s
        ended.set()
        publisher.join()
    assert process.returncode == 0, stderr
    assert json.loads(stdout)["num_resident_blocks"] > 100_000
    assert "stopped; summary of" in stderr
    assert seconds < 10  # 20 s before the summary was made from plain numbers


@pytest.mark.long
def test_a_flood_does_not_keep_receive_from_ending():
    with PublisherSocket(LOOPBACK) as socket, Subscriber([socket.endpoint]) as subscriber:
        ended = threading.Event()

        def flood():
            payload = message(0, stored(*range(1000)))[2]
            while not ended.is_set():
                socket.send(payload)

        publisher = threading.Thread(target=flood)
        publisher.start()
        longest_s, num_messages = 0.0, 0
        for _ in range(20):
            start_s = time.monotonic()
            for _ in subscriber.receive(0.1):
                num_messages += 1
                time.sleep(0.005)  # the fold takes longer than the publisher
            longest_s = max(longest_s, time.monotonic() - start_s)
        ended.set()
        publisher.join()
    assert num_messages > 20
    assert longest_s < 30, "it never ended"


def test_names_from_the_network_cannot_steer_the_terminal(tmp_path):
    path = tmp_path / "e.jsonl"
    evil = "\x1b]0;owned\x07\u202e"
    with CaptureWriter(path, ["x" + evil], tokens=True) as writer:
        writer.write(message(0, stored(1, medium=evil, lora_name=evil), {"type": evil}, topic=b"a"), 0.0)
        writer.write(message(0, stored(f"h{evil}"), topic=evil.encode()), 1.0)
    said = pagedcli("attach", path).stdout
    assert not set("\x1b\x07\u202e") & set(said)
    assert "owned" in said


def test_generate_publishes_its_prefix_cache(tmp_path):
    prompts, trace = tmp_path / "prompts.jsonl", tmp_path / "trace.jsonl"
    text = "Once upon a time there was a little fox who lived in a wood and "
    prompts.write_text("".join(json.dumps({"prompt": text * 3 + word}) + "\n" for word in ("ran", "slept", "ate")))
    with PublisherSocket(LOOPBACK) as unused:
        endpoint = unused.endpoint  # free once it is closed
    host, _, port = endpoint.rpartition(":")
    subscriber, ended = Subscriber([endpoint], [f"{host}:{int(port) + 1}"]), threading.Event()
    state = KVState(fetch=subscriber.replay)  # it connects during the run: the beginning is replayed

    def watch():
        with subscriber:
            while not ended.is_set():
                for source, frames in subscriber.receive(0.05):
                    state.take(frames, time.monotonic(), source)

    watcher = threading.Thread(target=watch)
    watcher.start()
    options = ("--block-size", "8", "--num-kvcache-blocks", "200", "--record", trace, "--kv-events", endpoint)
    long = ("--max-tokens", "400", "--ignore-eos")
    said = pagedcli("generate", prompts, "-o", tmp_path / "out.jsonl", *long, *options).stderr
    time.sleep(0.3)
    ended.set()
    watcher.join()
    assert f"KV events: {endpoint}, replay tcp://127.0.0.1:" in said
    pool = PoolState()
    fold = Fold(pool)
    for event in TraceReader(trace):
        fold(event)
        assert getattr(event, "token_ids", None) is None, "tokens are recorded on request only"
    (tree,) = state.trees
    assert {node.hash for node in tree.resident()} == pool.hash_to_block_id.keys()
    assert len(pool.hash_to_block_id) > 3
