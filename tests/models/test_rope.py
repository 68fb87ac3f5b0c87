"""The layers of the decoder equal transformers' to the last bit, in float32 and in bfloat16."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from pagedcli.layers.basic import ACTIVATIONS, add_rms_norm, rms_norm, rotary_rows, rotate, split_heads
from pagedcli.models.rope import RopeSpec, read_rope_spec
from pagedcli.models.rope_tables import inverse_frequencies, rope_table

HEAD_DIM = 64
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": YARN,
    "yarn untruncated": {**YARN, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn attention_factor": {**YARN, "attention_factor": 1.5},
    "yarn one border": {**YARN, "beta_fast": 1e-9, "beta_slow": 1e-9},
    "yarn implied factor": {**YARN, "factor": None},
}


def both(parameters, tmp_path):
    """transformers' rotary module and our RopeSpec for the same parameters."""
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM, num_attention_heads=4, max_position_embeddings=512, rope_parameters=dict(parameters)
    )
    return LlamaRotaryEmbedding(config), read_rope_spec({"rope_parameters": parameters}, 512)


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_and_table_equal_transformers_to_the_last_bit(name, tmp_path):
    theirs, rope = both(ROPES[name], tmp_path)
    assert torch.equal(inverse_frequencies(rope, HEAD_DIM, 512), theirs.inv_freq)
    assert rope.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-12)
    positions = torch.tensor([0, 1, 7, 127, 128, 511])
    for dtype in (torch.float32, torch.bfloat16):
        cos, sin = theirs(torch.empty(0, dtype=dtype), positions[None])
        table = rope_table(rope, HEAD_DIM, 512, dtype=dtype)[positions]
        assert torch.equal(table, torch.cat((cos[0, :, : HEAD_DIM // 2], sin[0, :, : HEAD_DIM // 2]), -1))


def test_llama3_by_hand():
    """Head size 4, theta 100: wavelengths 2 pi and 20 pi. The first stays; the second lies over 40 / 1 and is
    divided by the factor."""
    rope = RopeSpec(
        type="llama3",
        theta=100.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=40,
    )
    torch.testing.assert_close(inverse_frequencies(rope, 4, 40), torch.tensor([1.0, 0.1 / 8]))
    assert 2 * math.pi < 40 / 4 < 40 / 1 < 20 * math.pi


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_transformers_to_the_last_bit(dtype, tmp_path):
    theirs, rope = both(ROPES["default"], tmp_path)
    positions = torch.tensor([3, 0, 500, 17])
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(4, heads, HEAD_DIM, generator=generator).to(dtype) for heads in (6, 2))
    expected = apply_rotary_pos_emb(q, k, *(x[0] for x in theirs(q, positions[None])))
    cos, sin = rotary_rows(rope_table(rope, HEAD_DIM, 512, dtype=dtype), positions)
    assert torch.equal(rotate(q, cos, sin), expected[0])
    assert torch.equal(rotate(k, cos, sin), expected[1])


def test_split_heads_norms_and_rotates_q_and_k_and_leaves_v(tmp_path):
    _, rope = both(ROPES["default"], tmp_path)
    cos, sin = rotary_rows(rope_table(rope, HEAD_DIM, 16, dtype=torch.float32), torch.tensor([2, 9]))
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, (4 + 2 * 2) * HEAD_DIM, generator=generator)
    weight = torch.randn(6, HEAD_DIM, generator=generator)
    heads = qkv.view(2, 8, HEAD_DIM)
    q, k, v = split_heads(qkv.clone(), 4, 2, HEAD_DIM, norm=(weight, 1e-6), angles=(cos, sin))
    assert torch.equal(q, rotate(rms_norm(heads[:, :4], weight[:4], 1e-6), cos, sin))
    assert torch.equal(k, rotate(rms_norm(heads[:, 4:6], weight[4:], 1e-6), cos, sin))
    assert torch.equal(v, heads[:, 6:])
    q, k, v = split_heads(qkv, 4, 2, HEAD_DIM, norm=None, angles=(cos, sin))
    assert torch.equal(q, rotate(heads[:, :4], cos, sin))
    assert q.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_equals_transformers_to_the_last_bit(dtype):
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(5, 96, generator=generator).to(dtype) for _ in range(2))
    theirs = LlamaRMSNorm(96, eps=1e-5).to(dtype)
    weight = (1 + 0.3 * torch.randn(96, generator=generator)).to(dtype)
    theirs.weight.data = weight
    with torch.no_grad():
        assert torch.equal(rms_norm(x, weight, 1e-5), theirs(x))
        total = x + residual
        assert torch.equal(add_rms_norm(x, residual, weight, 1e-5), theirs(total))
    assert torch.equal(residual, total)


def test_silu_and_mul_takes_the_gate_first():
    gate, up = torch.randn(3, 8).bfloat16(), torch.randn(3, 8).bfloat16()
    assert torch.equal(ACTIVATIONS["silu"](torch.cat((gate, up), -1)), torch.nn.functional.silu(gate) * up)
