"""The Triton product with the blocks of GGUF files: every number is the file's."""

import numpy as np
import pytest
import torch
from gguf_files import gguf, random_blocks
from interpreter import interpreted
from quantized_zoo import exact_activations

from pagedcli.models.gguf.types import TYPES
from pagedcli.models.gguf.weights import numbers

pytest.importorskip("triton")
IN_TRITON = [number for number, kind in TYPES.items() if kind.in_triton]


@interpreted
@pytest.mark.parametrize("number", IN_TRITON)
def test_a_product_has_the_numbers_of_the_file_and_takes_the_bytes_of_the_table(number):
    from pagedcli.layers.triton_products import TritonLinear, unpacked_weight

    kind, rows = TYPES[number], 40
    raw = random_blocks(gguf.GGMLQuantizationType(number), rows, 512, np.random.default_rng(number))
    module = {"weight": torch.from_numpy(raw).reshape(rows, -1, kind.num_bytes)}
    linear = kind.linear([module], None, torch.float32, "triton")
    assert isinstance(linear, TritonLinear)
    assert linear.nbytes == kind.kept_bytes((rows, 512), 4, "triton")
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(unpacked_weight(linear._weight, dtype), numbers(module["weight"], kind, dtype))
    x = exact_activations(3, 512) / 127
    exact = x.double() @ numbers(module["weight"], kind, torch.float32).double().T
    torch.testing.assert_close(linear(x).double(), exact, rtol=1e-5, atol=1e-3)


@interpreted
def test_an_engine_gives_the_tokens_of_the_numbers_and_names_what_is_widened(tmp_path):
    from engine_harness import make_engine, ragged_prompts, run
    from gguf_files import gguf_twins
    from model_zoo import tiny_model

    from pagedcli.sampling_params import SamplingParams

    def mixed(name):
        return "Q6_K" if name.startswith("token_embd") or "attn_v" in name else "Q4_K"

    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}
    source = tiny_model("qwen3", tmp_path / "source", tie_word_embeddings=True, **sizes)
    path, twin = gguf_twins(source, tmp_path, type_of=mixed)
    params = [SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)] * 3
    engine = make_engine(path, attention_backend="triton")
    expected = run(make_engine(twin, attention_backend="reference"), ragged_prompts(3), params)
    assert run(engine, ragged_prompts(3), params) == expected
    [note] = [note for note in engine.model.notes if "GGUF" in note]
    assert "kept so apart from the embedding and output, q, k and v of 1 layer, widened to float32" in note
