"""Log-probabilities of prompt tokens: those of transformers, and the same bits however the prompt is computed."""

import pytest
from bit_settings import by_default
from harness.engine import Harness, make_engine, outputs_of, ragged_prompts, run, transformers_logits
from model_zoo import cached_model

from pagedcli import LLM, SamplingParams
from pagedcli.batch.columns import Columns

PARAMS = SamplingParams(temperature=0, max_tokens=24, prompt_logprobs=4, ignore_eos=True)
PROMPTS = [*ragged_prompts(4), [7], [5, 6, 7, 8] * 12]
HARD = {"chunked_prefill_size": 7, "num_kvcache_blocks": 8, "max_model_len": 128}
WAYS = {
    "chunks": {"chunked_prefill_size": 1},
    "alone": {"max_num_seqs": 1},
    "preempted": HARD,
    "without a cache": {"enable_prefix_caching": False},
    "one step ahead": {"async_scheduling": True},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return cached_model("qwen3", tmp_path_factory)


def outputs(engine, prompts, params=PARAMS):
    return outputs_of(engine, prompts, params)


def plain(output):
    return [each and (each.token_id, each.logprob, each.top) for each in output.prompt_logprobs]


@pytest.mark.bits
def test_they_are_those_of_transformers(path):
    engine = make_engine(path, **HARD)
    reference = transformers_logits(path, PROMPTS)
    for prompt, output, logits in zip(PROMPTS, outputs(engine, PROMPTS), reference, strict=True):
        expected = logits.log_softmax(-1)
        assert len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs[0] is None
        for position, found in enumerate(output.prompt_logprobs[1:], 1):
            row = expected[position - 1]
            assert found.token_id == prompt[position]
            assert found.logprob == pytest.approx(row[prompt[position]].item(), abs=1e-4)
            top = row.topk(4)
            assert [value for _, value in found.top] == pytest.approx(top.values.tolist(), abs=1e-4)
            assert [row[token_id].item() for token_id, _ in found.top] == pytest.approx(top.values.tolist(), abs=1e-4)
    assert by_default(engine.stats.num_preemptions > 0)


@pytest.mark.bits
@pytest.mark.parametrize("way", WAYS)
def test_they_are_the_same_bits_however_the_prompt_is_computed(path, way):
    expected = outputs(make_engine(path, max_model_len=128), PROMPTS)
    found = outputs(make_engine(path, **({"max_model_len": 128} | WAYS[way])), PROMPTS)
    assert [plain(output) for output in found] == [plain(output) for output in expected]
    assert [output.samples[0].token_ids for output in found] == [output.samples[0].token_ids for output in expected]


def test_a_cached_prompt_is_computed_whole_and_neighbours_still_hit(path):
    engine = make_engine(path, max_model_len=128, block_size=4)
    prompt = PROMPTS[-1]
    expected = [plain(output) for output in outputs(engine, [prompt])]
    for _ in range(2):
        first, second = outputs(engine, [prompt, prompt])
        assert [plain(first), plain(second)] == expected * 2
        assert first.num_cached_tokens == second.num_cached_tokens == 0
    without = SamplingParams(temperature=0, max_tokens=3)
    outputs(engine, [prompt], without)
    (hit,) = outputs(engine, [prompt], without)
    assert hit.num_cached_tokens > 0
    assert hit.prompt_logprobs is None


@pytest.mark.bits
def test_they_change_no_tokens(path):
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    expected = [sample for [sample] in run(make_engine(path, max_model_len=128), PROMPTS, params)]
    assert [each.samples[0].token_ids for each in outputs(make_engine(path, **HARD), PROMPTS)] == expected


@pytest.mark.bits
def test_samples_of_a_prompt_share_its_logprobs(path):
    params = SamplingParams(temperature=1, seed=3, n=3, max_tokens=5, prompt_logprobs=0, logprobs=1)
    (found,) = outputs(make_engine(path, max_model_len=128), [PROMPTS[0]], params)
    assert len(found.samples) == 3
    assert all(each.top == [] for each in found.prompt_logprobs[1:])
    (expected,) = outputs(make_engine(path, max_model_len=128), [PROMPTS[0]])
    assert [each.logprob for each in found.prompt_logprobs[1:]] == [
        each.logprob for each in expected.prompt_logprobs[1:]
    ]


def test_llm_returns_them_by_token_id_as_vllm_does():
    llm = LLM(dtype="float32", num_kvcache_blocks=64)
    (output,) = llm.generate("Once upon a time there was", PARAMS, use_tqdm=False)
    first, *others = output.prompt_logprobs
    assert first is None
    for token_id, found in zip(output.prompt_token_ids[1:], others, strict=True):
        assert len(found) in (4, 5)
        assert found[token_id].decoded_token == llm.tokenizer.token_text(token_id)
        assert found[token_id].rank in (1, 2, 3, 4, None)


def test_lines_ask_for_them_one_by_one():
    harness = Harness()
    prompt = "Once upon a time"
    chat = {"custom_id": "c", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "Hi"}]}}
    chat["body"] |= {"prompt_logprobs": 0}
    lines = [
        {"prompt": prompt, "prompt_logprobs": 2},
        {"prompt": prompt},
        {"prompt": [prompt, "Hello"], "prompt_logprobs": 1, "n": 2},
        chat,
    ]
    one, none, several, openai = harness.rows(lines, columns=Columns())
    assert len(one["prompt_logprobs"]) == one["usage"]["prompt_tokens"]
    assert one["prompt_logprobs"][0] is None
    assert "".join(each["token"] for each in one["prompt_logprobs"][1:]) in prompt
    assert [len(each["top_logprobs"]) for each in one["prompt_logprobs"][1:]] == [2] * (len(one["prompt_logprobs"]) - 1)
    ids = harness.tokenizer.encode(prompt)
    assert [each["token_id"] for each in one["prompt_logprobs"][1:]] == ids[1:]
    listed = [(top["token"], top["token_id"]) for each in one["prompt_logprobs"][1:] for top in each["top_logprobs"]]
    assert listed == [(harness.tokenizer.token_text(token_id), token_id) for _, token_id in listed]
    assert "prompt_logprobs" not in none
    assert ["prompt_logprobs" in sample for sample in several["outputs"]] == [True, False, True, False]
    assert openai["response"]["body"]["choices"][0]["prompt_logprobs"][0] is None
