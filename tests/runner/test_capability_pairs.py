"""Every pair of capabilities: what must not change rows changes no bit of them next to any other, or is refused by
name.

A new capability is a line in NEUTRAL or ROWS, and is tried with all others. A run that is resumed, and one with Ray:
tests/batch/test_resume_pairs.py and tests/distributed/test_ray_pairs.py.
"""

from functools import cache
from itertools import combinations, product

import pytest
from harness.core import EveryGuess, Oracle, check_events
from harness.engine import FirstEight, ragged_prompts
from model_zoo import cached_model

from pagedcli.config import EngineConfig
from pagedcli.errors import ConfigError
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("own_digests")
MODELS = {
    "dense": "qwen3",
    "windows": "mistral",
    "state": "qwen3_5",
    "latents": "deepseek_v3",
    "experts": "glm4-moe",
}
# what a run may do without changing its rows
NEUTRAL = {
    "store": {"prefix_store": "store"},
    "recording": {},
    "preemption": {"num_kvcache_blocks": 36, "max_num_seqs": 6},
    "chunks": {"chunked_prefill_size": 7},
    "blocks of 1": {"block_size": 1, "num_kvcache_blocks": 1600},
    "no cache": {"enable_prefix_caching": False},
    "a step ahead": {"async_scheduling": True},
    "next-use": {"eviction": "next-use"},
    "speculation": {"speculation": "ngram"},
}
GREEDY = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
# what rows ask for
ROWS = {
    "plain": ({}, GREEDY),
    "log-probabilities": ({}, GREEDY | {"logprobs": 3}),
    "scores of prompts": ({}, GREEDY | {"prompt_logprobs": 2, "logprobs": 1}),
    "samples": ({}, {"max_tokens": 5, "ignore_eos": True, "n": 3, "seed": 7}),
    "beams": ({}, GREEDY | {"beam_width": 3, "n": 2}),
    "a guide": ({}, GREEDY),
    "continuations": ({}, GREEDY | {"max_tokens": 1}),
    "int8 KV": ({"kv_cache_dtype": "int8"}, GREEDY | {"logprobs": 1}),
    "int8 weights": ({"quantization": "int8"}, GREEDY | {"logprobs": 1}),
}
REFUSED = {  # pairs, and what names the reason
    frozenset(("store", "no cache")): "prefix caching is off",
    frozenset(("next-use", "no cache")): "without prefix caching there is nothing to evict",
}
NO_DRAFTS = {  # with what no token is guessed, and the reason that the run gives
    "a step ahead": "launches a step before the tokens of the last one are known",
    "two ranks": "no equal bits are promised",
}
REFUSED_BY_RANKS = {
    "store": "it keeps the blocks of one rank",
    "state": "keeps states of its sequences and is not split",
}
PAIRS = [*combinations(NEUTRAL, 2), *product(NEUTRAL, ROWS)]
CASES = [(model, *pair) for model in MODELS for pair in PAIRS]
PAIRS_OF_RANKS = [*(("dense", other) for other in (*NEUTRAL, *ROWS)), *((model, "chunks") for model in MODELS)]
QUICK = [("dense", "store", other) for other in (*NEUTRAL, *ROWS)]
QUICK += [("state", "store", other) for other in ("preemption", "samples", "continuations")]
QUICK += [("dense", "speculation", other) for other in ("preemption", "log-probabilities")]
QUICK += [(model, "store", "plain") for model in MODELS]


def rows_of(path, kind, config, *, emit=None, answers=None):
    """Tokens and scores of all rows of one kind, and the engine. `answers`: the tokens of each sample, of which an
    engine that guesses guesses most."""
    of_kind, params = ROWS[kind]
    roomy = {"block_size": 4, "num_kvcache_blocks": 400, "max_num_seqs": 8}
    config = EngineConfig(model=str(path), device="cpu", dtype="float32", **{**roomy, **of_kind, **config})
    engine = LLMEngine(config, emit=emit, trace_tokens=True, with_store=True)
    if engine.plan.speculation != "off":
        engine.scheduler.drafting = EveryGuess(Oracle(answers, wrong=0.3))
    request = {"make_guide": FirstEight} if kind == "a guide" else {}
    if kind == "continuations":
        request = {"continuations": [[9, 8], [4, 3, 2]]}
    for number, prompt in enumerate(ragged_prompts(num_prompts=8, vocab_size=300)):
        engine.add_request(str(number), prompt, SamplingParams(**params), **request)
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert not output.error, output.error
            tokens = [sample.token_ids for sample in output.samples]
            scores = [sample.logprobs for sample in output.samples], output.prompt_logprobs, output.scores
            found[output.request_id] = tokens, repr(scores)
        engine.cache.check([*engine.scheduler.running, *engine.scheduler.contexts])
    engine.close()
    return found, engine


def tokens_of(rows):
    return {(name, place): each for name, (tokens, _) in rows.items() for place, each in enumerate(tokens)}


@cache
def expected(path, kind, num_ranks=1):
    rows, _ = rows_of(path, kind, {"tensor_parallel_size": num_ranks})
    return rows


def check_drafts(engine, kind, capabilities):
    """Tokens are guessed, or the run says why none is."""
    why = [reason for name, reason in NO_DRAFTS.items() if name in capabilities]
    if why:
        assert any(each in engine.plan.no_drafts for each in why)
    elif engine.stats.num_undrafted:
        assert kind == "beams"
    else:
        assert engine.stats.num_drafted_tokens > 0 or ROWS[kind][1]["max_tokens"] == 1


@pytest.mark.bits
@pytest.mark.parametrize(
    ("model", "one", "other"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_pairs_of_capabilities_give_the_same_bits_or_are_refused_by_name(model, one, other, tmp_path_factory, tmp_path):
    path = cached_model(MODELS[model], tmp_path_factory)
    kind = other if other in ROWS else "log-probabilities"
    config = NEUTRAL[one] | NEUTRAL.get(other, {})
    if "blocks of 1" in (one, other) and "preemption" in (one, other):
        config |= {"num_kvcache_blocks": 144}
    if "store" in (one, other):
        config |= {"prefix_store": str(tmp_path / "store")}
    if (why := REFUSED.get(frozenset((one, other)))) is not None:
        with pytest.raises(ConfigError, match=why):
            rows_of(path, kind, config)
        return
    wanted, events = expected(path, kind), []
    for _ in range(1 + ("store" in (one, other))):  # the second run reads what the first has written
        events.clear()
        emit = events.append if "recording" in (one, other) else None
        found, engine = rows_of(path, kind, config, emit=emit, answers=tokens_of(wanted))
        assert found == wanted
        if "speculation" in (one, other):
            check_drafts(engine, kind, (model, one, other))
    if events:
        check_events(events)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "other"), PAIRS_OF_RANKS)
def test_two_ranks_and_a_capability_give_the_tokens_of_one_or_are_refused_by_name(
    model, other, tmp_path_factory, tmp_path
):
    """Not the bits: sums over ranks are added in another order. Of int8 weights each rank rounds its own part."""
    path = cached_model(MODELS[model], tmp_path_factory)
    kind = other if other in ROWS else "log-probabilities"
    config, events = {"tensor_parallel_size": 2} | NEUTRAL.get(other, {}), []
    if (why := REFUSED_BY_RANKS.get(model) or REFUSED_BY_RANKS.get(other)) is not None:
        config |= {"prefix_store": str(tmp_path / "store")} if other == "store" else {}
        with pytest.raises(ConfigError, match=why):
            rows_of(path, kind, config)
        return
    found, engine = rows_of(path, kind, config, emit=events.append if other == "recording" else None)
    num_ranks = 2 if other == "int8 weights" else 1
    assert tokens_of(found) == tokens_of(expected(path, kind, num_ranks))
    if other == "speculation":
        check_drafts(engine, kind, ("two ranks", other))
    if events:
        check_events(events)
