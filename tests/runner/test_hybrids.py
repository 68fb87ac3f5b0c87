"""Models with recurrent layers through the engine: the tokens of transformers, whatever pool, slots and company."""

import pytest
import torch
from bit_settings import by_default
from engine_harness import make_engine, ragged_prompts, run
from model_zoo import RECURRENT_FAMILIES, cached_model
from msgspec import structs

from pagedcli.sampling_params import SamplingParams

pytestmark = pytest.mark.bits

NUM_NEW = 20
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
PROMPTS = ragged_prompts(4)
# caching with eviction, preemption, chunks and few slots; then each alone
HARD = {"chunked_prefill_size": 7, "num_kvcache_blocks": 9, "num_state_slots": 5, "max_model_len": 96}
EASY = [
    {"enable_prefix_caching": False, "block_size": 4, "num_kvcache_blocks": 120, "max_model_len": 96},
    {"chunked_prefill_size": 64, "checkpoints": "end", "block_size": 4, "max_model_len": 96},
    {"max_num_seqs": 1, "checkpoints": "16", "max_model_len": 96},
    {"checkpoints": "none", "attention_backend": "reference", "max_model_len": 96},
]


@torch.inference_mode()
def tokens_of_transformers(path, prompts, num_new):
    """Greedy tokens, each prompt alone: padding passes through convolutions with a bias."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    options = {"do_sample": False, "max_new_tokens": num_new, "pad_token_id": 0}
    ids = (torch.tensor([prompt]) for prompt in prompts)
    return [model.generate(each, **options)[:, each.shape[1] :].tolist() for each in ids]


@pytest.fixture(scope="module", params=RECURRENT_FAMILIES)
def family(request, tmp_path_factory):
    """A tiny model and its expected tokens."""
    path = cached_model(request.param, tmp_path_factory)
    return path, tokens_of_transformers(path, PROMPTS, NUM_NEW)


def test_tokens_equal_transformers_in_a_small_pool_with_few_slots(family):
    path, expected = family
    engine = make_engine(path, **HARD)
    assert engine.plan.in_one_call
    assert run(engine, PROMPTS, GREEDY) == expected
    assert by_default(engine.stats.num_preemptions > 0)


def test_tokens_equal_transformers_whatever_cache_chunk_and_snapshots(family):
    path, expected = family
    for variant in EASY:
        assert run(make_engine(path, **variant), PROMPTS, GREEDY) == expected, variant


@pytest.mark.slow
def test_three_samples_of_a_prompt_share_its_state_and_are_the_tokens_of_transformers(family):
    path, expected = family
    for variant in ({"block_size": 4, "max_model_len": 96}, {**HARD, "num_kvcache_blocks": 24}):
        assert run(make_engine(path, **variant), PROMPTS, structs.replace(GREEDY, n=3)) == [
            3 * sample for sample in expected
        ]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return cached_model("qwen3_5", tmp_path_factory)


def test_a_second_run_finds_snapshots_and_gives_the_same_tokens(path):
    engine = make_engine(path, block_size=4, checkpoints="end", max_model_len=96)
    prompts = [prompt for prompt in PROMPTS if len(prompt) > 8]
    first = run(engine, prompts, GREEDY)
    assert run(engine, prompts, GREEDY) == first
    assert by_default(engine.stats.num_cached_tokens > 0)


def test_samples_of_a_prompt_share_its_state(path):
    one = run(make_engine(path, block_size=4, max_model_len=96), PROMPTS, GREEDY)
    several = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, n=3)
    for variant in ({}, HARD):
        engine = make_engine(path, **{"block_size": 4, "max_model_len": 96, **variant, "num_kvcache_blocks": 60})
        assert run(engine, PROMPTS, several) == [3 * sample for sample in one]


def test_seeded_samples_do_not_depend_on_pool_or_company(path):
    params = SamplingParams(temperature=1.0, max_tokens=NUM_NEW, ignore_eos=True, n=2, seed=5)
    crowd = run(make_engine(path, block_size=4, num_kvcache_blocks=90, num_state_slots=4), PROMPTS, params)
    alone = make_engine(path, max_model_len=96, max_num_seqs=2, checkpoints="none")
    assert [run(alone, [prompt], params)[0] for prompt in PROMPTS] == crowd


@pytest.mark.parametrize("name", ["bamba", "lfm2"])
def test_log_probabilities_are_the_same_bits_alone_cached_preempted_and_in_a_crowd(name, tmp_path_factory):
    path = cached_model(name, tmp_path_factory)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)

    def logprobs(engine, prompts):
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), prompt, params)
        found = {}
        while engine.has_unfinished_requests():
            found |= {output.request_id: output.samples[0].logprobs for output in engine.step()}
        return [[(each.logprob, each.top) for each in found[str(number)]] for number in range(len(prompts))]

    alone = make_engine(path, max_model_len=96, max_num_seqs=1, checkpoints="none", enable_prefix_caching=False)
    expected = [logprobs(alone, [prompt])[0] for prompt in PROMPTS]
    assert len(expected[0]) == 8
    tight, wide = make_engine(path, **HARD), make_engine(path, block_size=4, max_model_len=96, checkpoints="end")
    assert logprobs(tight, PROMPTS) == expected
    for _ in range(2):
        assert logprobs(wide, PROMPTS) == expected
    assert by_default(wide.stats.num_cached_tokens > 0)


def test_beams_do_not_depend_on_slots_and_snapshots(path):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, beam_width=3)
    wide = run(make_engine(path, block_size=4, max_model_len=96), PROMPTS, params)
    tight = {"num_kvcache_blocks": 45, "num_state_slots": 8, "chunked_prefill_size": 7, "checkpoints": "end"}
    assert run(make_engine(path, block_size=4, max_model_len=96, **tight), PROMPTS, params) == wide
