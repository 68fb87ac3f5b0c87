"""Scores of continuations: the bits of uncached prompt_logprobs, whatever is cached, cut, forked or preempted, and each
token computed once."""

import random

import pytest
from bit_settings import by_default
from harness.core import finish
from harness.engine import make_engine, outputs_of, transformers_logits
from model_zoo import cached_model, tiny_model

from pagedcli import LLM
from pagedcli.errors import RequestError
from pagedcli.sampling_params import SamplingParams
from pagedcli.trace.check import TraceChecker

WHOLE = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
SIZE = 4  # tokens per block
LENGTH = 96  # max_model_len
ROOMY = {"block_size": SIZE, "max_model_len": LENGTH, "num_kvcache_blocks": 400}
# name -> (family, config)
FAMILIES = {
    "dense": ("qwen3", {}),
    "windows": ("gemma3", {"num_hidden_layers": 4, "sliding_window_pattern": 3, "sliding_window": 8}),
    "state": ("qwen3_5", {}),
    "mamba": ("bamba", {}),
    "convolution": ("lfm2", {}),
    "experts": ("qwen3-moe", {}),
    "sinks and experts": ("gpt_oss", {"num_hidden_layers": 4, "sliding_window": 8}),
    "shared layers": ("gemma4-e2b", {}),
}
LONGEST = 40  # tokens of the longest sequence


def rows(num_rows=8, seed=0, vocab_size=100):
    """Contexts of 1 to 30 tokens, of which some share their beginning, with continuations of 1 to 11 tokens."""
    rng = random.Random(seed)

    def draw(low, high):
        return [rng.randrange(3, vocab_size) for _ in range(rng.randint(low, high))]

    shared = draw(21, 21)
    contexts = [[*shared, *draw(0, 9)] if i % 2 else draw(1, 30) for i in range(num_rows)]
    return [(context, [draw(1, 11) for _ in range(rng.choice((1, 2, 4)))]) for context in contexts]


def outputs(engine, requests):
    """The output of each (context, continuations), with the pool checked after each step."""
    for place, (context, continuations) in enumerate(requests):
        engine.add_request(str(place), context, SamplingParams(), continuations=continuations)
    found = finish(engine)
    assert not engine.scheduler.contexts
    assert not engine.scheduler._num_scoring
    return [found[str(place)] for place in range(len(requests))]


def plain(output):
    return [list(map(tuple, score.tokens)) for score in output.scores]


def whole(path, requests, **config):
    """The same from prompt_logprobs of context and continuation, which computes everything alone."""
    engine = make_engine(path, enable_prefix_caching=False, max_model_len=LENGTH + 1, **config)
    prompts = [[*context, *continuation] for context, continuations in requests for continuation in continuations]
    found, expected = iter(outputs_of(engine, prompts, WHOLE)), []
    for context, continuations in requests:
        rows_of = [next(found).prompt_logprobs[len(context) :] for _ in continuations]
        expected.append([[(each.logprob, each.top[0][0] == each.token_id) for each in row] for row in rows_of])
    return expected


def num_computed(requests, hits):
    """n - hit + sum(c - 1) over the rows."""
    return sum(
        len(context) - hit + sum(len(continuation) - 1 for continuation in continuations)
        for (context, continuations), hit in zip(requests, hits, strict=True)
    )


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    """A tiny model, and the scores that it should give."""
    family, config = FAMILIES[request.param]
    if config:
        path = tiny_model(family, tmp_path_factory.mktemp(request.param), **config)
    else:
        path = cached_model(family, tmp_path_factory)
    return path, whole(path, rows())


LIKE_OTHERS = ("sinks and experts-*", "experts-*", "mamba-*", "convolution-*")


@pytest.mark.slow_cases(*LIKE_OTHERS)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"chunked_prefill_size": 3},
        {"chunked_prefill_size": 1, "async_scheduling": True},
        {"max_num_seqs": 1},
        {"max_num_seqs": 2, "async_scheduling": True},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 20, "eviction": "next-use"},
    ],
)
def test_scores_are_those_of_prompt_logprobs_bit_for_bit(model, config):
    path, expected = model
    requests, checker = rows(), TraceChecker()
    engine = make_engine(path, emit=checker, trace_tokens=True, **ROOMY, **config)
    found = outputs(engine, requests)
    assert [plain(output) for output in found] == expected
    assert not engine.stats.num_preemptions
    assert engine.stats.num_computed_tokens == num_computed(requests, [output.num_cached_tokens for output in found])


@pytest.mark.slow_cases(*LIKE_OTHERS)
@pytest.mark.bits
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("num_sequences", [1, 1.3, 2])
def test_preemptions_change_no_bit(model, num_sequences, ahead):
    path, expected = model
    requests, checker = rows(), TraceChecker()
    most = make_engine(path, **{**ROOMY, "max_model_len": 64}).limits.tables.most_blocks(LONGEST, 7)
    config = {"block_size": SIZE, "max_model_len": LONGEST, "num_kvcache_blocks": int(num_sequences * most)}
    config |= {"chunked_prefill_size": 7, "async_scheduling": ahead}
    engine = make_engine(path, emit=checker, trace_tokens=True, **config)
    found = outputs(engine, requests)
    assert [plain(output) for output in found] == expected
    once = num_computed(requests, [output.num_cached_tokens for output in found])  # but for what is found afterwards
    assert engine.stats.num_computed_tokens <= once + engine.stats.num_recomputed_tokens
    assert checker.state.num_recomputed_tokens == engine.stats.num_recomputed_tokens
    if num_sequences == 1:
        assert by_default(engine.stats.num_recomputed_tokens > 0)


@pytest.mark.slow_cases("windows", "sinks and experts", "mamba", "convolution")
def test_they_are_those_of_transformers(model):
    path, expected = model
    check_with_transformers(path, expected)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_models_through_transformers_have_scores_too(family, tmp_path):
    path = tiny_model(family, tmp_path / family)
    engine = make_engine(path, **ROOMY)
    found = outputs(engine, rows())
    check_with_transformers(path, [plain(output) for output in found])
    assert engine.stats.num_computed_tokens == num_computed(rows(), [output.num_cached_tokens for output in found])


def check_with_transformers(path, scores):
    pairs = [(context, each) for context, continuations in rows() for each in continuations]
    logits = transformers_logits(path, [[*context, *each] for context, each in pairs])
    for (context, each), row, found in zip(pairs, logits, [each for of_row in scores for each in of_row], strict=True):
        logprobs = row.log_softmax(-1)
        wanted = [logprobs[len(context) - 1 + place, token].item() for place, token in enumerate(each)]
        assert [logprob for logprob, _ in found] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.bits
def test_an_int8_cache_gives_the_bits_of_its_own_prompt_logprobs(tmp_path_factory):
    path = cached_model("qwen3", tmp_path_factory)
    expected = whole(path, rows(), kv_cache_dtype="int8")
    found = outputs(make_engine(path, chunked_prefill_size=5, kv_cache_dtype="int8", **ROOMY), rows())
    assert [plain(output) for output in found] == expected != whole(path, rows())


# ---------------------------------------------------------------------- LLM.score


@pytest.fixture(scope="module")
def llm():
    return LLM(dtype="float32", num_kvcache_blocks=256)


def test_texts_are_cut_as_lm_evaluation_harness_does(llm):
    encode = llm.tokenizer.encode
    (output,) = llm.score("Once upon a time there was ", ["a dog", " a", "a cat. The end"], use_tqdm=False)
    context = encode("Once upon a time there was")
    assert output.prompt_token_ids == context
    for score, text in zip(output.scores, ["a dog", " a", "a cat. The end"], strict=True):
        assert score.token_ids == encode("Once upon a time there was " + text)[len(context) :]
        assert score.num_tokens == len(score.token_ids) == len(score.logprobs)
        assert score.num_bytes == len(text)
        assert score.logprob == sum(score.logprobs)
    assert output.best["logprob"] == max(range(3), key=lambda i: output.scores[i].logprob)
    assert output.best["per_token"] == max(
        range(3), key=lambda i: output.scores[i].logprob / output.scores[i].num_tokens
    )


def test_what_the_model_generates_is_greedy(llm):
    (generated,) = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
    ids = generated.outputs[0].token_ids
    other = [*ids[:4], (ids[4] + 1) % 100, *ids[5:]]
    (output,) = llm.score("Once upon a time", [ids, other, ids[:1]], use_tqdm=False)
    assert [score.is_greedy for score in output.scores] == [True, False, True]
    assert output.scores[0].num_bytes is None


def test_results_are_in_the_order_of_the_prompts_whatever_order_they_are_computed_in(llm):
    prompts = [[9, 8, 7], [5, 6], {"prompt_token_ids": [9, 8], "cache_salt": "a"}, "Once"]
    continuations = [[[1, 2]], [[3], [4, 5]], [[6, 7]], ["a", "b c"]]
    together = llm.score(prompts, continuations, use_tqdm=False)
    alone = [
        llm.score([prompt], [given], use_tqdm=False)[0] for prompt, given in zip(prompts, continuations, strict=True)
    ]
    assert [output.scores for output in together] == [output.scores for output in alone]


@pytest.mark.parametrize(
    ("prompt", "continuations", "code"),
    [
        ([], [[1]], "empty_prompt"),
        ([1], [], "empty_continuation"),
        ("Once", ["a", ""], "empty_continuation"),
    ],
)
def test_what_can_never_be_scored_is_refused(llm, prompt, continuations, code):
    with pytest.raises(RequestError) as caught:
        llm.score([prompt], [continuations], use_tqdm=False)
    assert caught.value.code == code
    assert not llm.llm_engine.has_unfinished_requests()


def test_context_and_all_but_the_last_token_may_fill_the_model(llm):
    length = llm.llm_engine.limits.max_model_len
    context = [3 + i % 50 for i in range(length - 12)]
    (output,) = llm.score([context], [[[5] * 13, [7, 8]]], use_tqdm=False)
    assert [score.num_tokens for score in output.scores] == [13, 2]


@pytest.mark.parametrize(
    ("prompts", "continuations", "said"),
    [
        (["Once"], [" a"], "each prompt of a list has a list of continuations, not text"),
        (["Once", "Two"], [[" a"]], "2 prompts, but 1 list of continuations"),
        ("Once", " a", "a prompt has a list of continuations, not text"),
    ],
)
def test_continuations_of_another_shape_than_the_prompts_are_refused(llm, prompts, continuations, said):
    with pytest.raises(ValueError, match=said):
        llm.score(prompts, continuations, use_tqdm=False)
