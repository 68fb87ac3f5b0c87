"""Weights that bitsandbytes rounded to 4 bits have its numbers, with and without double quantization."""

import json

import pytest
import torch
from harness.engine import loaded, logits_of
from model_zoo import cached_model
from quantized_zoo import quantized_twins
from safetensors.torch import load_file, save_file

from pagedcli.config import EngineConfig
from pagedcli.errors import ModelError
from pagedcli.models.reading import read_spec
from pagedcli.planning.decide import decide
from pagedcli.planning.machine import this_machine

# quantiles of a normal distribution, as QLoRA lists them
NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def rounded(weight, *, double, dtype="bfloat16"):
    """A weight as bitsandbytes stores it, and its numbers by loops over its blocks of 64."""
    flat, steps = weight.flatten(), 100  # the last block of steps is shorter
    blocks = flat.split(64)
    largest = torch.stack([block.abs().max() for block in blocks])
    parts, said = {}, {"quant_type": "nf4", "blocksize": 64, "shape": list(weight.shape), "dtype": dtype}
    if double:
        offset = largest.mean().item()
        levels = torch.linspace(-1, 1, 256).pow(3)
        tops = torch.stack([each.abs().max() for each in (largest - offset).split(steps)])
        numbers = [
            (levels - (each - offset) / tops[i // steps]).abs().argmin().item() for i, each in enumerate(largest)
        ]
        parts |= {"weight.absmax": torch.tensor(numbers, dtype=torch.uint8), "weight.nested_absmax": tops}
        parts |= {"weight.nested_quant_map": levels}
        said |= {"nested_blocksize": steps, "nested_dtype": "float32", "nested_offset": offset}
        largest = torch.stack([levels[number] * tops[i // steps] + offset for i, number in enumerate(numbers)])
    else:
        parts |= {"weight.absmax": largest}
    table = torch.tensor(NF4)
    codes = [(table - (block / top)[:, None]).abs().argmin(1) for block, top in zip(blocks, largest, strict=True)]
    widened = torch.cat([table[code] * top for code, top in zip(codes, largest, strict=True)])
    pairs = torch.cat(codes).view(-1, 2)
    parts |= {"weight": (16 * pairs[:, :1] + pairs[:, 1:]).to(torch.uint8), "weight.quant_map": table}
    content = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
    parts |= {"weight.quant_state.bitsandbytes__nf4": content}
    return parts, widened.view(weight.shape).to(getattr(torch, dtype))


@pytest.mark.quick("False-float32")
@pytest.mark.parametrize(("double", "dtype"), [(False, "float32"), (True, "bfloat16"), (True, "float16")])
def test_numbers_are_those_of_bitsandbytes_to_the_bit(double, dtype, tmp_path, tmp_path_factory):
    path = cached_model("qwen3", tmp_path_factory)
    packed, plain = quantized_twins(path, tmp_path, lambda w, _: rounded(w, double=double, dtype=dtype), CONFIG)
    for own in (torch.float32, torch.bfloat16):
        found, expected = (logits_of(path, "reference", dtype=own) for path in (packed, plain))
        assert all(map(torch.equal, found, expected))
    assert (
        loaded(packed, "reference")[0]
        .notes[-1]
        .startswith("14 weights that bitsandbytes rounded to 4 bits are widened")
    )
    before = decide(EngineConfig(model=str(packed), device="cpu"), read_spec(packed), this_machine()).plan.notes
    assert before == ("weights are bitsandbytes, 4 bits, widened to float32 while loading",)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"weight.quant_state.bitsandbytes__nf4": torch.zeros(3, dtype=torch.uint8)}, "is damaged: Expecting value"),
        ({"weight.absmax": torch.ones(3)}, "is damaged: The size of tensor"),
        ({"weight": torch.zeros((5, 1), dtype=torch.uint8)}, "is damaged"),
        ({"weight.quant_map": None}, "is damaged: 'model.layers.0.mlp.up_proj.weight.quant_map'"),
    ],
)
def test_a_damaged_weight_is_refused_by_name(change, reason, tmp_path, tmp_path_factory):
    path = cached_model("qwen3", tmp_path_factory)
    packed, _ = quantized_twins(path, tmp_path, lambda w, _: rounded(w, double=False), CONFIG)
    tensors = load_file(packed / "model.safetensors")
    tensors |= {f"model.layers.0.mlp.up_proj.{name}": tensor for name, tensor in change.items()}
    save_file({k: v for k, v in tensors.items() if v is not None}, packed / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        loaded(packed, "reference")
    assert "model.layers.0.mlp.up_proj.weight" in caught.value.message
    assert reason in caught.value.message


def test_eight_bits_and_families_of_transformers_are_refused(tmp_path, tmp_path_factory):
    config = json.loads((cached_model("qwen3", tmp_path_factory) / "config.json").read_text())

    def read(**fields):
        (tmp_path / "config.json").write_text(json.dumps(config | fields))
        return read_spec(tmp_path)

    assert read(quantization_config=CONFIG).quantization is None
    with pytest.raises(ModelError, match=r"LLM\.int8"):
        read(quantization_config={**CONFIG, "load_in_4bit": False, "load_in_8bit": True})
    with pytest.raises(ModelError, match="opt runs through transformers"):
        read(quantization_config=CONFIG, model_type="opt")
