"""The verdict on a cache from its events."""

import json

from cli_harness import pagedcli
from conftest import shared_data
from kv_event_harness import message, removed, stored

from pagedcli.answers.cures import cures
from pagedcli.answers.why import why_of_server
from pagedcli.kvevents.capture import CaptureWriter
from pagedcli.kvevents.fold import KVState
from pagedcli.kvevents.tree import SIZES
from pagedcli.planning.prompt_sample import PromptSample


def judged(*messages):
    state = KVState(larger=SIZES)
    for number, events in enumerate(messages):
        state.take(message(number, *events), float(number))
    return why_of_server(state)


MORE_MEMORY = (
    "; give the cache more memory (vLLM: --gpu-memory-utilization, SGLang: --mem-fraction-static, TensorRT-LLM:"
    " free_gpu_memory_fraction)."
)


def test_what_was_evicted_and_stored_again_is_counted_with_the_blocks_that_would_have_kept_it():
    first = judged([stored(1, 2, 3, 4)], [removed(4), removed(3)], [stored(3, 4, parent=2)])
    counts = "33.3 % of the stored blocks (2 of 6) had been evicted before"
    assert first == f"{counts}; 2 more blocks would have kept at least 2 of these{MORE_MEMORY}"


def test_a_running_server_says_nothing_of_larger_caches():
    state = KVState()
    for number, events in enumerate(([stored(1, 2)], [removed(2), removed(1)], [stored(1, 2)])):
        state.take(message(number, *events), float(number))
    assert "more blocks would have kept" not in why_of_server(state)


def test_answers_that_are_generated_again_are_counted_apart():
    first = judged([stored(1, 2)], [removed(2)], [stored(2, parent=1)])
    assert first == (
        "No block of a prompt was stored again after an eviction; 1 block came back alone, as answers do that are"
        " generated again: a cache saves none of these."
    )


def test_what_a_larger_cache_would_have_kept_is_said_of_prompts_alone():
    """Two blocks of a prompt come back, and one by itself: the last block of an answer."""
    first = judged(
        [stored(1, 2, 3, 4)], [removed(4), removed(3), removed(2)], [stored(2, 3, parent=1)], [stored(4, parent=3)]
    )
    assert first == (
        "28.6 % of the stored blocks (2 of 7) had been evicted before; 2 more blocks would have kept at least 2 of"
        " these; 1 more block came back alone, as answers do that are generated again: a cache saves none of these"
        f"{MORE_MEMORY}"
    )


def test_a_block_after_one_that_came_back_in_the_same_message_is_no_answer():
    again = [stored(3, parent=2), stored(4, parent=3)]
    first = judged([stored(1, 2, 3, 4)], [removed(4), removed(3)], again)
    assert first.startswith("33.3 % of the stored blocks (2 of 6) had been evicted before; 2 more blocks")


def test_a_block_that_came_back_alone_after_the_cache_was_cleared_was_not_evicted():
    first = judged([stored(1, 2)], [{"type": "AllBlocksCleared"}], [stored(1)], [stored(2, parent=1)])
    assert first == "No block of a prompt was stored again after an eviction."


def test_an_empty_stream_is_not_judged():
    assert judged() == "No block was stored, so there is nothing to judge."


def test_the_commands_begin_with_the_answer(tmp_path):
    path = tmp_path / "events.jsonl.zst"
    with CaptureWriter(path, ["tcp://host:1"], tokens=True) as writer:
        for number, events in enumerate(([stored(1, 2, 3)], [removed(3), removed(2)], [stored(2, 3, parent=1)])):
            writer.write(message(number, *events), float(number))
    begins = "40.0 % of the stored blocks (2 of 5)"
    for command in ("explain", "attach"):
        assert pagedcli(command, path).stdout.startswith(begins)
        document = json.loads(pagedcli(command, path, "--format", "json").stdout)
        assert document["answer"][0].startswith(begins)
    pagedcli("explain", path, "-o", tmp_path / "page.html")
    assert begins in (tmp_path / "page.html").read_text()


def test_a_recording_with_tokens_says_where_prompts_diverge_as_other_commands_do(tmp_path):
    """Twenty chats that begin with another number each and are equal after it, as a server stores their blocks."""
    library = list(range(100, 164))
    rows = [[7, 200 + number, *library, *[300 + number] * 14] for number in range(20)]
    paths = [tmp_path / "tokens.jsonl", tmp_path / "digests.jsonl"]
    for path, tokens in zip(paths, (True, False), strict=True):
        with CaptureWriter(path, ["tcp://host:1"], tokens=tokens) as writer:
            for number, ids in enumerate(rows):
                hashes = range(10 * number + 1, 10 * number + 6)
                writer.write(message(number, stored(*hashes, tokens=ids, block_size=16)), float(number))
    with_tokens, without = (
        json.loads(pagedcli("explain", path, "--format", "json").stdout)["answer"] for path in paths
    )
    sample = PromptSample()
    for ids in rows:
        sample.add(ids)
    [expected] = cures(None, prompts=sample, block_size=16)
    assert with_tokens[1] == expected.text
    assert expected.text.startswith("19 of 20 prompts diverge at token 1. ")
    assert not any("raises hits" in each for each in without)
    assert pagedcli("attach", paths[0]).stdout.splitlines()[1] == expected.text


def test_the_verdict_on_events_of_a_real_server():
    path = shared_data("vllm_events") / "events.jsonl"
    document = json.loads(pagedcli("explain", path, "--format", "json").stdout)
    [found] = document["answer"]
    assert "stored again after an eviction" in found or "had been evicted before" in found
    assert document["lookups"]
