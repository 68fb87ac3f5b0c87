"""The layers of the decoder equal transformers' to the last bit, in float32 and in bfloat16."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pagedcli.models.rope import read_rope_spec
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


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_and_table_equal_transformers_to_the_last_bit(name):
    sizes = {"hidden_size": 4 * HEAD_DIM, "num_attention_heads": 4, "max_position_embeddings": 512}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=dict(ROPES[name])))
    rope = read_rope_spec({"rope_parameters": ROPES[name]}, 512)
    assert torch.equal(inverse_frequencies(rope, HEAD_DIM, 512), theirs.inv_freq)
    assert rope.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-12)
    positions = torch.tensor([0, 1, 7, 127, 128, 511])
    for dtype in (torch.float32, torch.bfloat16):
        cos, sin = theirs(torch.empty(0, dtype=dtype), positions[None])
        table = rope_table(rope, HEAD_DIM, 512, dtype=dtype)[positions]
        assert torch.equal(table, torch.cat((cos[0, :, : HEAD_DIM // 2], sin[0, :, : HEAD_DIM // 2]), -1))
