"""MXFP4 experts of gpt-oss: read exactly, kept in four bits on a CPU, and multiplied by the file's numbers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness.engine import loaded, make_engine, paged_logits, ragged_prompts, ragged_sequences, run
from quantized_zoo import exact_activations, mxfp4_twins, numbers_of, random_mxfp4

from pagedcli.config import EngineConfig
from pagedcli.layers.native_linear import NativeLinear
from pagedcli.layers.quantized import E2M1, E2M1_ZERO, CodedWeight
from pagedcli.models.reading import read_spec
from pagedcli.native import load_library
from pagedcli.planning.decide import decide
from pagedcli.planning.machine import this_machine
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    return mxfp4_twins(tmp_path_factory.mktemp("twins"))


def test_transformers_reads_the_same_numbers():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = random_mxfp4(torch.Generator().manual_seed(1), 2, 6, 3)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(theirs.transpose(1, 2), numbers_of(blocks, scales))


def test_widened_weights_give_the_logits_of_the_unquantized_numbers(twins):
    sequences, num_prompt = ragged_sequences()
    found = []
    for path in twins:
        model, backend = loaded(path, "reference")
        found.append(paged_logits(model, backend, sequences, num_prompt=num_prompt, block_size=16, chunk=7))
    for exact, read in zip(*found, strict=True):
        assert torch.equal(exact, read)


def test_native_products_are_those_of_the_numbers_within_the_rounding_of_activations(twins):
    sequences, num_prompt = ragged_sequences()
    found, kept = [], []
    for path in twins:
        model, backend = loaded(path, block_size=16)
        options = {"num_prompt": num_prompt, "block_size": 16, "chunk": 7}
        found.append(torch.cat(paged_logits(model, backend, sequences, **options)))
        kept.append(model.weight_bytes)
    exact, read = found
    assert (exact - read).abs().median() < 0.02 * exact.std()
    assert kept[1] < 0.45 * kept[0]  # experts of 4.75 bits, all else of 32


@pytest.mark.parametrize("tokens", [1, 2, 5, 12, 40])
@pytest.mark.parametrize("shape", [(64, 96), (40, 32), (33, 320)])
def test_whole_activations_give_exact_products(shape, tokens):
    """Activations that are rounded to themselves: products have no error but sums'."""
    generator = torch.Generator().manual_seed(tokens)
    rows, columns = shape
    blocks, scales = random_mxfp4(generator, rows, columns // 32)
    numbers = numbers_of(blocks, scales)
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)
    halves = (2.0 ** (scales.float() - 128)).to(torch.bfloat16)
    weight = CodedWeight(codes, 4, halves, E2M1_ZERO, 32, levels=E2M1)
    assert torch.equal(weight.dequantized(torch.float32), numbers)
    x = exact_activations(tokens, columns)
    found = NativeLinear(load_library(), weight, None, dtype=torch.float32)(x)
    torch.testing.assert_close(found.double(), x.double() @ numbers.double().T, rtol=1e-5, atol=1e-4)


def test_tokens_do_not_depend_on_pool_company_and_chunks(twins):
    prompts, params = ragged_prompts(4), SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    _, packed = twins
    crowd = run(make_engine(packed, max_model_len=128), prompts, params)
    hard = make_engine(packed, max_model_len=128, chunked_prefill_size=7, num_kvcache_blocks=24)
    assert run(hard, prompts, params) == crowd
    assert run(make_engine(packed, max_model_len=128, max_num_seqs=1), prompts, params) == crowd


@pytest.mark.usefixtures("own_panels")
def test_forecast_of_kept_bytes_is_what_is_kept(twins):
    path = twins[1]
    config = EngineConfig(model=str(path), device="cpu", dtype="bfloat16", num_kvcache_blocks=8, max_model_len=128)
    assert decide(config, read_spec(path), this_machine()).terms.weights == LLMEngine(config).plan.weight_bytes


SCRIPT = """
import resource, sys, torch
sys.path.insert(0, sys.argv[2])
from model_zoo import load_model
from pathlib import Path
from pagedcli.attention.base import AttentionSpec
from pagedcli.attention.cpu import load as load_cpu
from pagedcli.models.reading import read_spec
from pagedcli.runner.memory import process_memory
torch.set_num_threads(1)
spec, cpu = read_spec(Path(sys.argv[1])), torch.device("cpu")
backend = load_cpu(AttentionSpec(cpu, torch.bfloat16, 16, spec.num_heads, spec.num_kv_heads, spec.head_dim))
before = process_memory()
options = dict(backend=backend, dtype=torch.bfloat16, device=cpu, max_model_len=64, load_format="dummy")
model = load_model(Path(sys.argv[1]), spec, **options)
most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(process_memory() - before, most - before, model.weight_bytes)
"""


@pytest.mark.slow
def test_packed_experts_leave_no_copy_in_memory(tmp_path):
    """Nor while the model is loaded. Of tensors of 4 MiB, which malloc takes from its heap after the first ones: freed,
    they stayed in memory."""
    config = {"hidden_size": 2048, "intermediate_size": 1440, "num_hidden_layers": 4, "num_local_experts": 32}
    spec = {
        "model_type": "gpt_oss",
        "vocab_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({**config, **spec, "quantization_config": {"quant_method": "mxfp4"}})
    )
    made = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path, str(Path(__file__).parents[1])],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    grown, most, weights = map(int, made.stdout.split())
    assert weights > 480 * 2**20
    assert grown < 1.1 * weights
    assert most < 1.2 * weights
