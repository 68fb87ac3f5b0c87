"""The requests that a recording shows, and what `pagedcli diff` says of two of them."""

import html
from array import array
from collections import Counter

import msgspec
import pytest
import xxhash
from cli_harness import pagedcli
from conftest import shared_data
from kv_event_harness import CLEARED, message, removed, stored

import pagedcli.events as ev
from pagedcli.cli.attach import _secret
from pagedcli.errors import UsageError
from pagedcli.kvevents.capture import CaptureReader, CaptureWriter, stored_runs
from pagedcli.kvevents.lookups import hits_by_salt, read_lookups
from pagedcli.kvevents.publisher import KVEventPublisher
from pagedcli.simulation.difference import Comparison
from pagedcli.simulation.difference_tables import cause_rows, sentence
from pagedcli.simulation.requests import TraceRequest, Workload
from pagedcli.simulation.run import plan_for, simulate
from pagedcli.simulation.sides import captured_sides
from pagedcli.trace.fold import Fold
from pagedcli.trace.state import PoolState

KEY = b"a secret of more than 16 bytes"


def record(path, batches, *, tokens=True, key=None, sources=1):
    """Each batch is a list of events, or (source, list of events)."""
    counts = [0] * sources
    with CaptureWriter(path, [f"tcp://host:{n}" for n in range(sources)], tokens=tokens, key=key) as writer:
        for time_s, batch in enumerate(batches):
            source, events = batch if isinstance(batch, tuple) else (0, batch)
            writer.write(message(counts[source], *events), float(time_s), source)
            counts[source] += 1
    return path


def chains(path):
    found = read_lookups(CaptureReader(path))
    return [(request.num_hit, request.num_prompt, len(found.chain(request))) for request in found.requests]


def difference(*paths):
    return Comparison(*captured_sides(paths))


def test_what_comes_before_a_stored_run_was_found(tmp_path):
    path = record(
        tmp_path / "a.jsonl",
        [
            [stored(1, 2, 3)],
            [stored(4, 5, parent=2)],
            [stored(6, parent=5)],
            [stored(7, parent=6)],
            [stored(8, 9, parent=3)],
        ],
    )
    # the second hits 2 blocks and generates 2 alone; the third continues the first after a while, and hits 3
    assert chains(path) == [(0, 3, 3), (2, 4, 6), (3, 5, 5)]


def test_the_next_chunk_of_a_prompt_is_the_same_request(tmp_path):
    path = record(
        tmp_path / "a.jsonl", [[stored(1, 2)], [stored(3, 4, parent=2)], [stored(9, 10)], [stored(5, 6, parent=4)]]
    )
    assert chains(path) == [(0, 4, 4), (0, 2, 2), (4, 6, 6)]


def batches_of(pool, requests):
    """An LRU cache of so many blocks serves chains of blocks, and publishes what it stores and removes."""
    cache, batches = {}, []
    for chain in requests:
        num_hit = next((place for place, each in enumerate(chain) if each not in cache), len(chain))
        for each in reversed(chain[:num_hit]):
            cache[each] = cache.pop(each)
        new = chain[num_hit:]
        events, gone = [], []
        while cache and len(cache) + len(new) > pool:
            gone.append(next(iter(cache)))
            del cache[gone[-1]]
        if gone:
            events.append(removed(*gone))
        for each in chain:
            cache.pop(each, None)
        cache |= dict.fromkeys(reversed(chain))
        if new:
            events.append(stored(*new, parent=chain[num_hit - 1] if num_hit else None))
        batches += [events] if events else []
    return batches


FAMILIES = [[family * 100 + place for place in range(6)] + [family * 100 + 10 + turn, 10_000 + 10 * turn + family]
            for turn in range(6) for family in (1, 2, 3)]  # fmt: skip


def parts_of(found):
    return {row.cause: row.change for row in cause_rows(found) if row.change}


def test_a_smaller_pool_is_named_and_shares_add_up(tmp_path):
    found = difference(
        record(tmp_path / "a.jsonl", batches_of(100, FAMILIES)), record(tmp_path / "b.jsonl", batches_of(14, FAMILIES))
    )
    parts = parts_of(found)
    assert parts["pool"] < -0.3
    assert sum(parts.values()) == pytest.approx(float(found.change["hit_rate"]))
    assert found.details["pool"] == "at least 54 -> 14 blocks"
    assert "another pool or eviction" in sentence(found)


def test_what_events_do_not_show_is_listed_as_not_visible(tmp_path):
    path = record(tmp_path / "a.jsonl", batches_of(100, FAMILIES))
    rows = {row.cause: row for row in cause_rows(difference(path, path))}
    hidden = {cause for cause, row in rows.items() if not row.visible}
    assert hidden == {"pool", "sequences", "checkpoints", "engine", "store"}
    assert all(rows[cause].change is None for cause in hidden)
    assert "no block was evicted" in rows["pool"].detail


def test_a_reset_and_another_router_are_named(tmp_path):
    batches = batches_of(100, FAMILIES)
    whole = record(tmp_path / "a.jsonl", batches)
    again = [*batches_of(100, FAMILIES[:9])[:], [CLEARED], *batches_of(100, FAMILIES[9:])]
    found = difference(whole, record(tmp_path / "reset.jsonl", again))
    assert set(parts_of(found)) == {"restarts"}
    assert found.details["restarts"] == "0 -> 1"
    routed = [(source, batch) for source in (0, 1) for batch in batches_of(100, FAMILIES[source::2])]
    found = difference(whole, record(tmp_path / "routed.jsonl", routed, sources=2))
    assert "1 -> 2 publishers" in (found.details["routing"] or "")
    parts = parts_of(found)
    assert parts["routing"] < 0
    assert sum(parts.values()) == pytest.approx(float(found.change["hit_rate"]))


def rehashed(batches):
    """The same prompts on a server that gives its blocks other hashes, as each start of vLLM does."""
    names = ("block_hashes", "parent_block_hash")

    def other(value):
        if isinstance(value, list):
            return [other(each) for each in value]
        return None if value is None else value * 7 + 5

    return [[{name: other(value) if name in names else value for name, value in event.items()} for event in batch]
            for batch in batches]  # fmt: skip


def test_recordings_without_tokens_are_compared_if_their_key_is_the_same(tmp_path):
    batches = batches_of(100, FAMILIES)
    one = record(tmp_path / "a.jsonl", batches, tokens=False, key=KEY)
    other = record(tmp_path / "b.jsonl", rehashed(batches_of(14, FAMILIES)), tokens=False, key=KEY)
    found = difference(one, other)
    assert found.details["prompts"] is None
    assert parts_of(found)["pool"] < -0.3
    own = record(tmp_path / "c.jsonl", batches_of(14, FAMILIES), tokens=False)
    third = record(tmp_path / "d.jsonl", batches_of(14, FAMILIES), tokens=False, key=KEY + b"x")
    for path in (own, third):
        hidden = difference(one, path).hidden
        assert {"prompts", "order", "outputs", "routing"} <= set(hidden)
        assert "same --key" in hidden["prompts"]


def test_the_key_is_not_in_the_recording(tmp_path):
    path = record(tmp_path / "a.jsonl", batches_of(100, FAMILIES), tokens=False, key=KEY)
    assert KEY not in path.read_bytes()
    assert b'"tokens":false,"key":"' in path.read_bytes()
    assert b'"key"' not in record(tmp_path / "b.jsonl", batches_of(100, FAMILIES), tokens=False).read_bytes()


def seen_requests(recording):
    """The requests that a recording shows, as (prompt, output)."""
    reader = CaptureReader(recording)
    found = read_lookups(reader)
    tokens = {}
    for run, _, _ in stored_runs(CaptureReader(recording)):
        for start in range(0, len(run.token_ids), run.block_size):
            block = run.token_ids[start : start + run.block_size]
            tokens[xxhash.xxh64_intdigest(block.tobytes())] = block.tolist()
    for request in found.requests:
        ids = [token for each in found.chain(request) for token in tokens[each]]
        num_prompt = request.num_prompt * found.block_size
        yield ids[:num_prompt], [*ids[num_prompt:], 0]


def true_requests(_):
    """All requests, as the server itself told them."""
    truth = msgspec.json.decode((shared_data("vllm_events") / "truth.json").read_bytes())
    return [(each["prompt_token_ids"], each["token_ids"]) for each in truth["rows"]]


def replayed(path, requests, num_blocks, block_size):
    """Requests that are simulated with a pool of this size and published as KV events."""
    workload = Workload(requests=[
        TraceRequest(str(number), None, len(prompt), len(output), token_ids=array("q", prompt),
                     output_ids=[array("q", output)], stopped=[False], max_new_tokens=len(output))
        for number, (prompt, output) in enumerate(requests)
    ])  # fmt: skip
    plan = plan_for(workload, num_blocks=num_blocks, block_size=block_size, max_num_seqs=2, max_num_batched_tokens=4096)
    num_sent, of_seq, num_sampled = 0, {}, Counter()
    with CaptureWriter(path, ["tcp://host:1"], tokens=True) as writer:

        def send(payload):
            nonlocal num_sent
            writer.write([b"kv", num_sent.to_bytes(8, "big"), payload], float(num_sent))
            num_sent += 1

        publish = Fold(PoolState(), KVEventPublisher(send))

        def with_tokens(event):
            if isinstance(event, ev.RequestAdded):
                of_seq[event.seq_id] = request = workload.requests[int(event.request_id)]
                event = msgspec.structs.replace(event, token_ids=tuple(request.token_ids))
            elif isinstance(event, ev.TokensSampled):
                ids = [of_seq[seq_id].output_ids[0][num_sampled[seq_id]] for seq_id in event.seq_ids]
                num_sampled.update(event.seq_ids)
                event = msgspec.structs.replace(event, token_ids=tuple(ids))
            publish(event)

        simulate(workload, plan, emit=with_tokens)
    return path


@pytest.mark.parametrize("requests", [seen_requests, true_requests])
def test_a_servers_recording_against_its_own_requests_with_half_the_blocks_names_the_pool(tmp_path, requests):
    recording = shared_data("vllm_events") / "events.jsonl"
    half = replayed(tmp_path / "half.jsonl", list(requests(recording)), 35, 32)  # of 70 blocks
    found = difference(recording, half)
    parts = parts_of(found)
    assert max(parts, key=lambda cause: abs(parts[cause])) == "pool", found.details
    assert parts["pool"] < 0
    assert sum(parts.values()) == pytest.approx(float(found.change["hit_rate"]))


def test_the_command_compares_recordings_and_refuses_two_kinds(tmp_path):
    one = record(tmp_path / "a.jsonl", batches_of(100, FAMILIES))
    other = record(tmp_path / "b.jsonl", batches_of(14, FAMILIES))
    output = pagedcli("diff", one, other, "--format", "json").stdout
    document = msgspec.json.decode(output)
    assert sum(row["change"] or 0 for row in document["causes"]) == pytest.approx(document["change"])
    assert document["requests"][0]["lost"] > 0
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "x"}\n')
    refused = pagedcli("diff", one, prompts, expect=2).stderr
    assert "a recording of KV events" in refused
    assert "compare two of the same kind" in refused
    assert "only for prompt files" in pagedcli("diff", one, other, "--block-size", "8", expect=2).stderr


@pytest.mark.parametrize("tokens", [True, False])
def test_salts_keep_requests_apart_and_have_hit_rates_of_their_own(tmp_path, tokens):
    """The same three blocks for tenant a, twice for tenant b, and without a salt."""
    one, other = ({"extra_keys": [[salt], None, None]} for salt in ("tenant-a", "tenant-b"))
    same = [7, 7, 8, 8, 9, 9]
    batches = [
        [stored(1, 2, 3, tokens=same, **one)],
        [stored(11, 12, 13, tokens=same, **other)],
        [stored(14, parent=13, tokens=[5, 5]), stored(15, 16, parent=13, tokens=[6, 6, 7, 7])],
        [stored(21, 22, 23, tokens=same)],
    ]
    path = record(tmp_path / "a.jsonl", batches, tokens=tokens)
    found = read_lookups(CaptureReader(path))
    assert [request.num_hit for request in found.requests] == [0, 0, 3, 0]
    rows = {row.salt: (row.num_requests, row.num_tokens, row.tokens_hit) for row in hits_by_salt(found)}
    assert rows == {"1": (1, 6, 0), "2": (2, 16, 6), "none": (1, 6, 0)}
    assert hits_by_salt(read_lookups(CaptureReader(record(tmp_path / "b.jsonl", [[stored(1, 2)]])))) == []
    document = msgspec.json.decode(pagedcli("explain", path, "--format", "json").stdout)
    assert [row["salt"] for row in document["salts"]] == ["2", "1", "none"]
    assert "tenant" not in pagedcli("attach", path).stdout
    assert {row.change for row in cause_rows(difference(path, path)) if row.visible} <= {0}


def test_a_key_is_made_once_for_its_owner_alone_and_a_short_one_is_refused(tmp_path):
    path = tmp_path / "kv.key"
    made = _secret(path)
    assert len(made) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    assert _secret(path) == made
    path.write_text("short")
    with pytest.raises(UsageError, match="5 bytes, too few for a secret"):
        _secret(path)
    with pytest.raises(UsageError, match="cannot be used: Is a directory"):
        _secret(tmp_path)
    for flags in (["--tokens", "--record", tmp_path / "e.jsonl"], []):
        refused = pagedcli("attach", "tcp://localhost:1", "--key", path, *flags, expect=2).stderr
        assert "--key is for recordings without tokens" in refused


def test_the_page_has_the_answer_and_a_bar_for_each_cause(tmp_path):
    one = record(tmp_path / "a.jsonl", batches_of(100, FAMILIES))
    other = record(tmp_path / "b.jsonl", batches_of(14, FAMILIES))
    output = pagedcli("diff", one, other, "-o", tmp_path / "why.html").stdout
    page = (tmp_path / "why.html").read_text()
    answer = output.splitlines()[0]
    assert answer.startswith("The hit rate fell from ")
    assert html.escape(answer) in page
    assert page.count('<rect class="series1"') == len(parts_of(difference(one, other)))
    assert "already exists" in pagedcli("diff", one, other, "-o", tmp_path / "why.html", expect=2).stderr
