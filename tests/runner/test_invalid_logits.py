"""A model with NaN among its weights: the request that meets it ends with an error, and its neighbours do not."""

import pytest
from harness.engine import make_engine, outputs_of
from model_zoo import tiny_model
from safetensors.torch import load_file, save_file

from pagedcli.sampling_params import SamplingParams

BAD = 7  # the token whose embedding is NaN


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tiny_model("llama-untied", tmp_path_factory.mktemp("nan"))
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][BAD] = float("nan")
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"seed": 1}, {"seed": 1, "top_p": 0.9, "logprobs": 2}], ids=str
)
def test_only_the_request_that_meets_nan_ends_with_an_error(model, ahead, backend, options):
    params = SamplingParams(max_tokens=6, ignore_eos=True, logit_bias={BAD: -100.0}, **options)
    prompts = [[5, 6, 8], [5, BAD, 8], [9, 10]]
    config = {"async_scheduling": ahead, "attention_backend": backend, "num_kvcache_blocks": 64}
    first, bad, last = outputs_of(make_engine(model, **config), prompts, params)
    assert bad.error.code == "invalid_logits"
    assert bad.samples[0].finish_reason == "error"
    for output, prompt in ((first, prompts[0]), (last, prompts[2])):
        [alone] = outputs_of(make_engine(model, **config), [prompt], params)
        assert output.error is None
        assert output.samples[0].token_ids == alone.samples[0].token_ids
