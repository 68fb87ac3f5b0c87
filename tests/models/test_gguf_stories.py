"""A trained model as a GGUF file: transformers' tokens on the same numbers, text to text."""

import json

import pytest
import torch
import transformers
from conftest import shared_data
from gguf_files import gguf_twins
from harness.engine import make_engine, run

from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.sampling_params import SamplingParams


def with_tokenizer(folder):
    """Writes the tokenizer of a folder as `tokenizer.ggml.*`, its ranks of merges as scores."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    ranks = {left + right: rank for rank, (left, right) in reversed(list(enumerate(model["merges"])))}
    tokens = sorted(model["vocab"], key=model["vocab"].get)

    def write(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(ranks.get(token, len(ranks))) for token in tokens])
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259))

    return write


@pytest.mark.quick("F16")
@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0", "Q5_1"])
def test_a_trained_model_continues_a_story_as_transformers_does(kind, tmp_path):
    def type_of(name):
        return "F16" if "ffn_down" in name and kind != "F32" else kind  # its rows are not whole blocks

    source = shared_data("stories260k")
    path, plain = gguf_twins(source, tmp_path, type_of=type_of, extra=with_tokenizer(source))
    ids = Tokenizer(path).encode("Once upon a time, there was")
    assert ids == Tokenizer(source).encode("Once upon a time, there was")
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    expected = model.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False, eos_token_id=None)[0].tolist()
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    [[found]] = run(make_engine(path, attention_backend="sdpa"), [ids], params)
    assert [*ids, *found] == expected
