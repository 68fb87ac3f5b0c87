"""MXFP4 experts of gpt-oss: read exactly, kept in four bits on a CPU, and multiplied by the file's numbers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness.engine import loaded, logits_of, planned_and_made
from model_zoo import BASE
from quantized_zoo import mxfp4_twins, numbers_of, random_mxfp4

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
    for exact, read in zip(*(logits_of(path, "reference") for path in twins), strict=True):
        assert torch.equal(exact, read)


def test_native_products_are_those_of_the_numbers_within_the_rounding_of_activations(twins):
    exact, read = (torch.cat(logits_of(path, block_size=16)) for path in twins)
    kept = [loaded(path)[0].weight_bytes for path in twins]
    assert (exact - read).abs().median() < 0.02 * exact.std()
    assert kept[1] < 0.45 * kept[0]  # experts of 4.75 bits, all else of 32


@pytest.mark.usefixtures("own_panels")
def test_forecast_of_kept_bytes_is_what_is_kept(twins):
    decision, engine = planned_and_made(twins[1], dtype="bfloat16", max_model_len=128)
    assert decision.terms.weights == engine.plan.weight_bytes


SCRIPT = """
import sys, torch
sys.path.insert(0, sys.argv[2])
from model_zoo import load_model
from pathlib import Path
from pagedcli.attention.base import AttentionSpec
from pagedcli.attention.cpu import load as load_cpu
from pagedcli.models.reading import read_spec
from pagedcli.runner.memory import host_peak, process_memory
torch.set_num_threads(1)
spec, cpu = read_spec(Path(sys.argv[1])), torch.device("cpu")
backend = load_cpu(AttentionSpec(cpu, torch.bfloat16, 16, spec.num_heads, spec.num_kv_heads, spec.head_dim))
before = process_memory()
options = dict(backend=backend, dtype=torch.bfloat16, device=cpu, max_model_len=64, load_format="dummy")
model = load_model(Path(sys.argv[1]), spec, **options)
most = host_peak()  # not ru_maxrss, which a child inherits from the process that started it
print(process_memory() - before, most - before, model.weight_bytes)
"""


@pytest.mark.slow
def test_packed_experts_leave_no_copy_in_memory(tmp_path):
    """Nor while the model is loaded. Of tensors of 4 MiB, which malloc takes from its heap after the first ones: freed,
    they stayed in memory."""
    sizes = {"hidden_size": 2048, "intermediate_size": 1440, "num_hidden_layers": 4, "num_local_experts": 32}
    content = {"model_type": "gpt_oss", "head_dim": 64, "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps({**BASE, **sizes, **content}))
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
