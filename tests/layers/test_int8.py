"""int8 linear layers: exactly the product of rounded numbers, close to the real one, and the demo model still right."""

import pytest
import torch
from harness.engine import outputs_of
from linear_harness import rounded_by_32

from pagedcli.config import EngineConfig
from pagedcli.errors import ConfigError
from pagedcli.layers.native_linear import NativeLinear
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams


def rounded(weight):
    """Each 32 numbers in whole steps, up to 127, of a whole multiple of a 255th of what the row's largest needs."""
    unit = weight.abs().amax(-1, keepdim=True) / 127 / 255
    groups = []
    for group in weight.split(32, dim=-1):
        step = unit * (group.abs().amax(-1, keepdim=True) / unit / 127 - 1e-5).ceil().clamp(1, 255)
        groups.append((group / step).round().clamp(-127, 127) * step)
    return torch.cat(groups, -1)


@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize(("out", "columns"), [(32, 64), (97, 50), (64, 1100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_is_that_of_the_rounded_numbers(library, tokens, out, columns, dtype):
    generator = torch.Generator().manual_seed(out)
    x, weight = (torch.randn(n, columns, generator=generator).to(dtype) for n in (tokens, out))
    expected = rounded_by_32(x.double()) @ rounded(weight.double()).T
    actual = NativeLinear(library, weight, quantization="int8")(x).double()
    # a number half-way between two steps may go either way: one step of one factor
    torch.testing.assert_close(actual, expected, atol=0.08 * columns**0.5 / 7, rtol=0.01)
    if dtype == torch.float32:
        assert (actual - expected).abs().mean() < 1e-3 * expected.abs().mean()


def test_rows_of_zeros_stay_zero(library):
    linear = NativeLinear(library, torch.randn(32, 64), quantization="int8")
    assert torch.equal(linear(torch.zeros(2, 64)), torch.zeros(2, 32))
    assert torch.equal(
        NativeLinear(library, torch.zeros(32, 64), quantization="int8")(torch.randn(2, 64)), torch.zeros(2, 32)
    )


def test_rounding_costs_about_one_percent_of_a_product(library):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(50, 1024, generator=generator), torch.randn(200, 1024, generator=generator)
    exact = x @ weight.T
    error = (NativeLinear(library, weight, quantization="int8")(x) - exact).pow(2).mean().sqrt() / exact.pow(
        2
    ).mean().sqrt()
    assert 0.001 < error < 0.02


def test_rounded_weights_take_less_memory_and_give_nearly_the_same_tokens(library):
    params, results = SamplingParams(temperature=0, max_tokens=1, logprobs=5), []
    for quantization in (None, "int8", "int4"):
        engine = LLMEngine(EngineConfig(quantization=quantization, max_model_len=128, dtype="float32"))
        [output] = outputs_of(engine, [list(range(40, 70))], params)
        results.append((engine.plan.weight_bytes, output.samples[0].logprobs[0]))
    (wide, exact), (narrow, eight), (narrowest, four) = results
    assert narrowest < narrow < 0.6 * wide
    assert eight.token_id == exact.token_id
    assert abs(eight.logprob - exact.logprob) < 0.3
    assert four.token_id in {token for token, _ in eight.top}


def test_int8_is_refused_where_the_native_decoder_does_not_run():
    with pytest.raises(ConfigError, match="int8 weights need the native CPU kernels, but attention is 'reference'"):
        LLMEngine(EngineConfig(quantization="int8", attention_backend="reference", max_model_len=128))
