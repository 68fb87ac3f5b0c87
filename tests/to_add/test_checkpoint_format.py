"""To add a format of quantized checkpoints, touch READERS in models/quantization.py for what config.json says of it.

LAYOUTS in models/packed_formats.py has its tensors and their packing.
"""

import json

import pytest
import torch
from harness.engine import make_engine, ragged_prompts, run
from model_zoo import tiny_model
from quantized_zoo import quantized_twins, random_codes

from pagedcli.errors import ModelError
from pagedcli.layers.quantized import CodedWeight
from pagedcli.models.formats import StoredTensor
from pagedcli.models.packed_formats import LAYOUTS
from pagedcli.models.quantization import READERS, refusal
from pagedcli.models.reading import read_spec
from pagedcli.models.stored_quantization import StoredQuantization
from pagedcli.sampling_params import SamplingParams

GROUP = 32


def read_beads(content, where):
    if content.get("colour") != "red":
        raise refusal(where, "beads", f"beads that are {content.get('colour')}")
    stored = StoredQuantization(method="beads", layout="beads", bits=4, group_size=GROUP, skipped=("lm_head",))
    return (stored,)


def stored_beads(quantization):
    """A code per byte, and scales."""
    scales = StoredTensor("strings", "float16", 0, 1, 1, quantization.group_size, converts=False, init=1.0)
    return StoredTensor("beads", "uint8", init="bits", converts=False), scales


def coded(tensors, quantization):
    codes, scales = tensors["beads"] & 15, tensors["strings"]
    return CodedWeight(codes, 4, scales, 8, quantization.group_size)


def beads(weight, generator):
    codes, scales, _ = random_codes(weight, 4, GROUP, generator, symmetric=True)
    widened = (codes - 8).float() * scales.float().repeat_interleave(GROUP, 1)
    return {"beads": codes.to(torch.uint8), "strings": scales}, widened


@pytest.fixture(autouse=True)
def added(monkeypatch):
    monkeypatch.setitem(READERS, "beads", read_beads)
    monkeypatch.setitem(LAYOUTS, "beads", (stored_beads, coded))


@pytest.fixture
def twins(tmp_path):
    plain = tiny_model("qwen3", tmp_path / "model", intermediate_size=128)
    return quantized_twins(plain, tmp_path, beads, {"quant_method": "beads", "colour": "red"})


def test_its_tokens_are_those_of_the_widened_weights(twins):
    prompts, params = ragged_prompts(4), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    packed, plain = (run(make_engine(path, attention_backend="sdpa"), prompts, params) for path in twins)
    assert packed == plain


def test_the_cpu_kernels_keep_its_codes(twins):
    packed, plain = (make_engine(path).model for path in twins)
    assert any("beads, 4 bits in groups of 32, kept so" in note for note in packed.notes)
    assert packed.weight_bytes < plain.weight_bytes


def test_what_it_does_not_read_is_refused_by_name(twins):
    config = json.loads((twins[0] / "config.json").read_text())
    config["quantization_config"]["colour"] = "blue"
    (twins[0] / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"'beads' is not supported \(beads that are blue"):
        read_spec(twins[0])
