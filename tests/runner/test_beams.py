"""Beam search: tokens and scores are those of transformers' generate(num_beams=...), whatever the pool, block size,
chunks and prefix cache."""

import pytest
import torch
import transformers
from bit_settings import by_default
from harness.core import finish
from harness.engine import make_engine, ragged_prompts
from model_zoo import cached_model

from pagedcli.batch.lines import Line
from pagedcli.batch.requests import BatchRow, RequestParser
from pagedcli.config import RunConfig
from pagedcli.errors import ParameterError, RequestError
from pagedcli.sampling_params import SamplingParams
from pagedcli.trace.check import TraceChecker


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return cached_model("qwen3", tmp_path_factory)


@pytest.fixture(scope="module")
def reference(model):
    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def expected(reference, prompt, *, width, n=1, max_tokens=10, ends=(2,), **options):
    """Tokens and scores of transformers, best first."""
    found = reference.generate(
        torch.tensor([prompt]),
        num_beams=width,
        num_return_sequences=n,
        max_new_tokens=max_tokens,
        eos_token_id=list(ends),
        pad_token_id=0,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )
    lengths = (found.beam_indices >= 0).sum(1).tolist()
    rows = found.sequences[:, len(prompt) :].tolist()
    return [row[:length] for row, length in zip(rows, lengths, strict=True)], found.sequences_scores.tolist()


def beams_of(engine, prompt, *, width, n=1, max_tokens=10, ends=(2,), **options):
    params = SamplingParams(beam_width=width, n=n, max_tokens=max_tokens, stop_token_ids=list(ends[1:]), **options)
    engine.add_request("beams", prompt, params)
    samples = finish(engine)["beams"].samples
    return [sample.token_ids for sample in samples], [sample.score for sample in samples]


def assert_equal(found, wanted):
    assert found[0] == wanted[0]
    assert found[1] == pytest.approx(wanted[1], abs=1e-4)


@pytest.mark.slow_cases("*-0.0-*")
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("may_end", [False, True])
def test_beams_are_those_of_transformers(model, reference, length_penalty, early_stopping, may_end):
    engine = make_engine(model)
    options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    num_early = 0
    for seed, (width, n) in enumerate([(2, 2), (3, 1), (4, 4), (7, 5)]):
        prompt = torch.randint(3, 320, (4 + 3 * seed,), generator=torch.Generator().manual_seed(seed)).tolist()
        ends = (2,)
        if may_end:  # tokens that the beams take: the third of the best, the fourth of the last
            tokens, _ = beams_of(engine, prompt, width=width, n=n)
            ends = (2, tokens[0][2], tokens[-1][3])
        wanted = expected(reference, prompt, width=width, n=n, ends=ends, **options)
        assert_equal(beams_of(engine, prompt, width=width, n=n, ends=ends, **options), wanted)
        num_early += sum(len(tokens) < 10 for tokens in wanted[0])
    if length_penalty < 2:  # which favours long outputs
        assert (num_early > 0) == may_end


@pytest.mark.slow_cases("*'block_size': 256*", "*'max_num_seqs': 5*")
@pytest.mark.bits
@pytest.mark.parametrize(
    "config",
    [
        {"block_size": 1, "num_kvcache_blocks": 200},
        {"block_size": 16, "num_kvcache_blocks": 17},
        {"block_size": 256, "num_kvcache_blocks": 5},
        {"block_size": 4, "num_kvcache_blocks": 54, "chunked_prefill_size": 7, "async_scheduling": True},
        {"block_size": 4, "num_kvcache_blocks": 70, "enable_prefix_caching": False},
        {"block_size": 4, "max_num_seqs": 5, "max_num_batched_tokens": 7, "preemption_policy": "largest"},
    ],
    ids=str,
)
def test_pool_blocks_chunks_and_cache_never_change_the_beams(model, reference, config):
    checker = TraceChecker()
    engine = make_engine(model, max_model_len=128, **config)
    engine = type(engine)(engine.config, emit=checker)
    prompts = ragged_prompts(8, seed=3)
    params = SamplingParams(beam_width=4, n=3, max_tokens=10, length_penalty=0.5)
    for number, prompt in enumerate(prompts):
        one = SamplingParams(temperature=0, max_tokens=10) if number % 4 == 3 else params
        engine.add_request(str(number), prompt, one)
    outputs = finish(engine)
    for number in (0, 1, 4, 6):
        samples = outputs[str(number)].samples
        found = [sample.token_ids for sample in samples], [sample.score for sample in samples]
        assert_equal(found, expected(reference, prompts[number], width=4, n=3, length_penalty=0.5))
    assert checker.result(()).state.num_free_blocks == engine.plan.num_blocks
    if config.get("num_kvcache_blocks", 1000) < 20:
        assert by_default(engine.stats.num_preemptions > 0)


@pytest.mark.bits
def test_penalties_and_minimum_length_are_those_of_transformers(model, reference):
    engine, prompt = make_engine(model), [5, 9, 17, 5, 9]
    ends = (2, beams_of(engine, prompt, width=4)[0][0][1])
    wanted = expected(reference, prompt, width=4, n=2, ends=ends, repetition_penalty=1.7, min_new_tokens=6)
    found = beams_of(engine, prompt, width=4, n=2, ends=ends, repetition_penalty=1.7, min_tokens=6)
    assert_equal(found, wanted)
    assert found[0] != beams_of(engine, prompt, width=4, n=2, ends=ends)[0]


def test_log_probabilities_of_a_beam_sum_to_its_score(model):
    engine = make_engine(model)
    params = SamplingParams(beam_width=3, n=3, max_tokens=6, length_penalty=0.0, logprobs=2)
    engine.add_request("beams", [5, 9, 17], params)
    for sample in finish(engine)["beams"].samples:
        assert [position.token_id for position in sample.logprobs] == sample.token_ids
        assert [len(position.top) for position in sample.logprobs] == [2] * 6
        assert sum(position.logprob for position in sample.logprobs) == pytest.approx(sample.score, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n": 3}, "n is 3, but beam_width is 2"),
        ({"temperature": 0.5}, "temperature is 0.5, which beam search does not support"),
        ({"top_k": 3}, "top_k is 3"),
        ({"stop": "x"}, "use stop_token_ids"),
        ({"regex": "a"}, "a grammar"),
    ],
)
def test_what_beam_search_does_not_do_is_refused(options, words):
    with pytest.raises(ParameterError, match=words):
        SamplingParams(beam_width=2, **options)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ({"beam_width": 4, "early_stopping": "never"}, (4, 1, "never")),
        ({"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5}, (4, 2, False)),
        ({"use_beam_search": True, "best_of": 5, "n": 2}, (5, 2, False)),
        ({"use_beam_search": True, "n": 3, "early_stopping": True}, (3, 3, True)),
        ({"use_beam_search": False, "best_of": 1}, (None, 1, False)),
    ],
)
def test_lines_ask_for_beams_as_in_transformers_and_vllm(line, wanted):
    row = BatchRow(Line(0, 1, b"", 0))
    RequestParser(SamplingParams(), RunConfig()).parse({"prompt": "x", **line}, row)
    params = row.prompts[0].params
    assert (params.beam_width, params.n, params.early_stopping) == wanted


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"use_beam_search": True}, "use_beam_search needs 'beam_width'"),
        ({"best_of": 4, "n": 2}, "best_of is 4, which is only supported with use_beam_search"),
        ({"num_beams": 4, "temperature": 0.7}, "temperature is 0.7"),
    ],
)
def test_lines_that_contradict_themselves_are_refused(line, words):
    with pytest.raises(RequestError, match=words):
        RequestParser(SamplingParams(), RunConfig()).parse({"prompt": "x", **line}, BatchRow(Line(0, 1, b"", 0)))
