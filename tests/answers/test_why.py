"""Our own run and a server's recording of the same run have the same reasons, in the same words."""

import random

import pytest
from harness.core import Simulation
from kv_event_harness import read_lookups, record

from pagedcli.answers.why import ExplainedLookup, Reasons, why
from pagedcli.kvevents.capture import CaptureReader
from pagedcli.kvevents.publisher import KVEventPublisher
from pagedcli.trace.fold import pool_fold
from pagedcli.views.explain import Explainer

SIZE = 4


def both(path, prompts, *, num_blocks, tokens=True):
    """The reasons of a run whose requests come one after the other, and those that its published events show."""
    explainer, sent = Explainer(), []
    folding = pool_fold(explainer, KVEventPublisher(sent.append))
    sim = Simulation(num_blocks, SIZE, emit=folding, max_num_batched_tokens=1000, max_num_seqs=8, trace_tokens=True)
    for prompt in prompts:
        sim.add(prompt, 1)
        sim.run()
    explainer.finish()
    messages = [[b"kv", number.to_bytes(8, "big"), payload] for number, payload in enumerate(sent)]
    seen = read_lookups(CaptureReader(record(path, messages, tokens=tokens)))
    return why(explainer, folding.state), Reasons("", seen.lookups(), SIZE)


def missed(reasons):
    """The lookups that events show: those that computed a full block."""
    return [each for each in reasons.lookups if each.reason not in ("all_hit", "no_full_block")]


def words(reasons):
    return [(row.reason, row.lookups, row.meaning) for row in reasons.rows() if row.reason in {
        each.reason for each in missed(reasons)
    }]  # fmt: skip


def random_prompts(seed):
    """Prompts of which several blocks are new each: a single one could be generated text."""
    rng = random.Random(seed)
    heads = [[rng.randrange(50) for _ in range(rng.randrange(3, 5 * SIZE))] for _ in range(6)]
    return [rng.choice(heads) + [rng.randrange(50) for _ in range(3 * SIZE)] for _ in range(30)]


@pytest.mark.parametrize("num_blocks", [9, 300])
def test_a_servers_recording_has_the_reasons_of_the_run_in_the_same_words(tmp_path, num_blocks):
    found = set()
    for seed in range(8):
        run, seen = both(tmp_path / f"{seed}.jsonl", random_prompts(seed), num_blocks=num_blocks)
        assert words(run) == words(seen)
        for own, theirs in zip(missed(run), missed(seen), strict=True):
            assert own.event.blocks_hit == theirs.event.blocks_hit
            assert own.num_evicted == theirs.num_evicted
            assert own.num_more_blocks == theirs.num_more_blocks
            found.add(own.reason)
    expected = {"not_seen_before", "no_shared_prefix"} | ({"evicted"} if num_blocks == 9 else {"shorter_than_block"})
    assert found >= expected


def test_where_a_prompt_diverges_is_one_sentence(tmp_path):
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 9, 7, 8], [6] * 8, [1, 2, 3, 9, 5, 6, 7, 8]]
    run, seen = both(tmp_path / "tokens.jsonl", prompts, num_blocks=100)
    for own, theirs in zip(run.lookups[1:], seen.lookups[1:], strict=True):
        ours, served = (ExplainedLookup(each, None) for each in (own, theirs))
        assert ours.why == served.why
        # Generated tokens of a block that is not full are no events; the requests of a server have only a number.
        assert served.divergence.startswith(f"first divergence at token {own.divergence.num_shared_tokens}: ")
        assert served.divergence.split(" vs ")[1] == ours.divergence.split(" vs ")[1]
    digests = both(tmp_path / "digests.jsonl", prompts, num_blocks=100, tokens=False)[1]
    assert [each.divergence.num_shared_tokens for each in digests.lookups[1:]] == [5, 0, 3]
    assert ExplainedLookup(digests.lookups[1], None).divergence == "first divergence at token 5 from request 0"
