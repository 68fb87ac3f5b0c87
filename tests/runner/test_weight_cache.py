"""Packed weights kept on disk: the next start has the bits of the first; what is damaged or of others is not used."""

import shutil
import threading

import pytest
from cli_harness import pagedcli
from gguf_files import gguf_twins
from harness.engine import make_engine, outputs_of
from model_zoo import cached_model, tiny_model
from quantized_zoo import FORMATS, quantized_twins
from quick import slow_but

from pagedcli.runner import weight_cache
from pagedcli.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("own_digests", "library")
SCORED = SamplingParams(max_tokens=4, temperature=0, logprobs=3, ignore_eos=True)
WIDE = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 320}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """That of packed weights."""
    monkeypatch.setattr(weight_cache, "weight_folder", lambda: tmp_path / "weights")
    return tmp_path / "weights"


@pytest.fixture
def kept(folder, monkeypatch):
    """The folder, in which all weights are kept, however fast they were loaded."""
    monkeypatch.setattr(weight_cache, "LEAST_S", 0.0)
    return folder


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return cached_model("qwen3", tmp_path_factory)


def join_writers():
    for thread in threading.enumerate():
        if thread.name == "weight-cache":
            thread.join()


def outcome(path, **config):
    """The likeliest tokens of a prompt with their log-probabilities, what the engine says of its weights, and their
    size."""
    engine = make_engine(path, dtype="bfloat16", **config)
    join_writers()
    notes = [note for note in engine.plan.notes if "packed weights" in note]
    [output] = outputs_of(engine, [list(range(5, 40))], SCORED)
    return [each.top for each in output.samples[0].logprobs], notes, engine.plan.weight_bytes


USUAL = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "attn_q": "Q5_K", "output": "Q8_0"}


def gguf(tmp_path, types=USUAL):
    def type_of(name):
        return next((kind for part, kind in types.items() if part in name), "Q4_K")

    return gguf_twins(tiny_model("llama-untied", tmp_path / "source", **WIDE), tmp_path, type_of=type_of)[0]


def gptq(tmp_path):
    source = tiny_model("qwen3", tmp_path / "plain", intermediate_size=128, num_hidden_layers=2)
    return quantized_twins(source, tmp_path / "gptq", *FORMATS["gptq-act-order"])[0]


KINDS = {
    "as stored": (lambda tmp_path: None, {}),
    "int8": (lambda tmp_path: None, {"quantization": "int8"}),
    "int4": (lambda tmp_path: None, {"quantization": "int4"}),
    "biases": (lambda tmp_path: tiny_model("qwen2", tmp_path / "model"), {}),
    "experts": (lambda tmp_path: tiny_model("qwen3-moe", tmp_path / "model"), {"quantization": "int4"}),
    "latents": (lambda tmp_path: tiny_model("deepseek_v3", tmp_path / "model"), {"quantization": "int8"}),
    "a bias of the output": (lambda tmp_path: tiny_model("phimoe", tmp_path / "model"), {"quantization": "int8"}),
    "a codebook": (lambda tmp_path: gguf(tmp_path, {"attn_q": "IQ2_XS", "attn_output": "NVFP4"}), {}),
    "gguf": (gguf, {}),
    "gptq": (gptq, {}),
}


@pytest.mark.parametrize("kind", slow_but(("int4", "gguf"), KINDS))
def test_the_next_start_has_the_same_bits(kind, path, kept, tmp_path):
    make, config = KINDS[kind]
    path = make(tmp_path) or path
    first, [said], num_bytes = outcome(path, **config)
    assert "are kept in" in said
    second, [said], num_mapped_bytes = outcome(path, **config)
    assert "are those kept in" in said
    assert first == second
    assert num_bytes == num_mapped_bytes
    assert len(list(kept.iterdir())) == 1


def test_a_changed_byte_is_found_and_replaced(path, kept):
    expected, *_ = outcome(path)
    [file] = kept.iterdir()
    content = file.read_bytes()
    for place in (len(content) // 2, len(content) - 1):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        found, [why, said], _ = outcome(path)
        assert why == "packed weights that were kept are not used: other bytes than were written"
        assert "are kept in" in said
        assert found == expected
        assert outcome(path)[1][0].startswith("packed weights are those kept")


def test_a_folder_that_others_can_write_to_is_not_used(path, kept):
    first = outcome(path)
    kept.chmod(0o770)
    tops, notes, _ = outcome(path)
    assert tops == first[0]
    assert any("can be written by others" in note for note in notes)


def test_other_weights_and_other_formats_are_kept_apart(path, kept, tmp_path):
    outcome(path)
    other = tiny_model("qwen3", tmp_path / "other", seed=1)
    same = shutil.copytree(path, tmp_path / "copy")
    for folder, config in ((other, {}), (path, {"quantization": "int8"})):
        assert "for the next start" in outcome(folder, **config)[1][0]
    assert len(list(kept.iterdir())) == 3
    assert "are those kept" in outcome(same)[1][0]
    listed = weight_cache.kept_weights()
    assert sorted(each.model for each in listed) == sorted([path.name, path.name, "other"])
    assert sum(each.num_bytes for each in listed) == sum(file.stat().st_size for file in kept.iterdir())


def test_nothing_is_kept_without_the_cache_and_of_random_weights(path, kept):
    assert outcome(path, weight_cache=False)[1] == []
    assert outcome(path, load_format="dummy")[1] == []
    assert not kept.exists()


def test_weights_that_load_fast_are_not_kept(path, folder):
    assert outcome(path)[1] == []
    assert not folder.exists()


def test_weights_that_change_while_they_are_packed_are_not_kept(path, kept, tmp_path, monkeypatch):
    folder = shutil.copytree(path, tmp_path / "model")
    described = weight_cache.described

    def changed(layers):
        (folder / "model.safetensors").touch()
        return described(layers)

    monkeypatch.setattr(weight_cache, "described", changed)
    outcome(folder)
    assert list(kept.iterdir()) == []


def test_the_bound_holds(path, kept):
    assert "are not kept: weight_cache_size is 1,000 B" in outcome(path, weight_cache_size=1000)[1][0]
    assert not kept.exists()


def test_generate_says_what_is_kept_used_and_damaged(tmp_path, kept):
    """It was noted in the plan, and nobody printed it."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "Once", "max_tokens": 1}\n')
    command = ("generate", str(tmp_path / "in.jsonl"), "--num-kvcache-blocks", "16")

    def said():
        done = pagedcli(*command)
        join_writers()
        return [line for line in done.stderr.splitlines() if line.startswith("note: ") and "packed weights" in line]

    assert "are kept in" in said()[0]
    assert "are those kept in" in said()[0]
    (file,) = kept.iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    damaged, again = said()
    assert "are not used: other bytes than were written" in damaged
    assert "are kept in" in again
