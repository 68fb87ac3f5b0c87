"""Tokens whose logits nobody wants end at the last layer that keeps K and V or a state."""

import pytest
import torch
from bit_settings import by_default
from harness.engine import PagedHarness, loaded, make_engine, outputs_of, ragged_prompts
from model_zoo import ALL_FAMILIES, GEMMA4_FAMILIES, cached_model, tiny_model

from pagedcli.models.cpu_decoder import CpuDecoder
from pagedcli.models.decoder import Decoder
from pagedcli.sampling_params import SamplingParams

# the last layer of lfm2 keeps a state
FAMILIES = ["llama", "cohere2", "gpt_oss", "gemma4-e2b", "gemma4-12b", "gemma4-26b", "qwen3_5", "lfm2"]
FIRST = [(0, 0, list(range(3, 23))), (1, 0, [7]), (2, 0, list(range(9, 42)))]
THEN = [(0, 20, [5, 6, 7]), (1, 1, [8]), (2, 33, [4, 4])]
# of the 54 tokens of the first step and the 6 of the second one; an empty list is a chunk in the middle of a prompt
WANTED = [([], [2, 3, 5]), ([20], [3]), ([19, 20, 53], []), ([5, 6, 9, 30, 31, 53], [0, 5])]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=24, prompt_logprobs=2, ignore_eos=True),
    SamplingParams(beam_width=3, n=2, max_tokens=12),
]


@pytest.mark.parametrize("name", ["reference", "sdpa", "cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_asked_for_and_the_cache_are_those_of_a_step_in_which_all_are_asked_for(family, name, tmp_path_factory):
    """To the bit by the native decoder."""
    model, backend = loaded(cached_model(family, tmp_path_factory), name)
    assert isinstance(model, CpuDecoder if name == "cpu" else Decoder)
    logits_atol, cache_atol = (0, 0) if name == "cpu" else (1e-4, 1e-5)

    def steps(rows_of_first, rows_of_then):
        harness = PagedHarness(model, backend, lengths=[23, 2, 35], block_size=4)
        return harness.step(FIRST, rows_of_first), harness.step(THEN, rows_of_then), harness.kv_cache.nan_to_num()

    *logits, cache = steps(range(54), range(6))
    for pair in WANTED:
        *found, kept = steps(*pair)
        torch.testing.assert_close(kept, cache, atol=cache_atol, rtol=0)
        for whole, rows, some in zip(logits, pair, found, strict=True):
            torch.testing.assert_close(some, whole[rows], atol=logits_atol, rtol=0)
            assert torch.equal(some.argmax(-1), whole[rows].argmax(-1))


# families whose head size follows from the rest
OWN_HEADS = {"helium", "olmoe", "phi3-longrope", "phimoe", "stablelm", "stablelm-parallel", *GEMMA4_FAMILIES}
BY_TRANSFORMERS = {"vaultgemma", "gemma3n", "gpt2", "gpt_neox", "opt"}  # families that the decoder does not compute


@pytest.mark.parametrize("family", [family for family in ALL_FAMILIES if family not in BY_TRANSFORMERS])
def test_a_step_of_chunks_in_the_middle_of_prompts_leaves_the_cache_of_one_that_asks_for_all(family, tmp_path):
    """Heads of 24 elements, which together are wider than the model."""
    tiny_model(family, tmp_path / "model", **({} if family in OWN_HEADS else {"head_dim": 24}))
    model, backend = loaded(tmp_path / "model", "reference")
    assert isinstance(model, Decoder)
    caches = []
    for rows in (range(54), []):
        harness = PagedHarness(model, backend, lengths=[23, 2, 35], block_size=4)
        assert harness.step(FIRST, rows).shape[0] == len(rows)
        caches.append(harness.kv_cache.nan_to_num())
    torch.testing.assert_close(*caches, atol=1e-5, rtol=0)


@pytest.mark.quick("qwen3")
@pytest.mark.bits
@pytest.mark.parametrize("family", ["gemma4-e2b", "qwen3"])
def test_tokens_beams_and_scores_of_prompts_are_those_of_the_native_decoder(family, tmp_path_factory):
    path = cached_model(family, tmp_path_factory)
    prompts = ragged_prompts(9, seed=3)

    def outputs(**config):
        engine = make_engine(path, block_size=4, max_model_len=96, **config)
        return engine, outputs_of(engine, prompts, PARAMS * 3)

    _, expected = outputs(attention_backend="cpu")
    engine, found = outputs(attention_backend="sdpa", chunked_prefill_size=7, num_kvcache_blocks=66)
    assert not engine.plan.in_one_call
    assert by_default(engine.stats.num_preemptions > 0)
    for ours, theirs in zip(found, expected, strict=True):
        assert [sample.token_ids for sample in ours.samples] == [sample.token_ids for sample in theirs.samples]
        scores, exact = ([each.logprob for each in (one.prompt_logprobs or [None])[1:]] for one in (ours, theirs))
        assert scores == pytest.approx(exact, abs=1e-4)
