"""The decoder that runs a whole step in the native library: transformers' logits, in bits that nothing else changes."""

import subprocess
import sys
import threading

import pytest
import torch
from harness.engine import assert_same_logits, loaded, logits_of, paged_logits, ragged_sequences, transformers_logits
from model_zoo import cached_model, tiny_model
from quantized_zoo import gptq, quantized_twins

from pagedcli.layers.sampling import INVALID, likeliest_tokens
from pagedcli.models.formats import FORMATS
from pagedcli.native import load_library
from pagedcli.native.structs import bind

pytestmark = pytest.mark.usefixtures("library")


@pytest.mark.parametrize("family", ["qwen3-moe", "qwen2-moe", "gemma2"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_weights_give_the_logits_of_the_same_weights_layer_by_layer(family, quantization, tmp_path_factory):
    path, logits = cached_model(family, tmp_path_factory), []
    for decoder in ("native in one call", "native"):
        logits.append(torch.cat(logits_of(path, block_size=16, quantization=quantization, decoder=decoder)))
    in_one_call, layered = logits
    # not closer: an activation between two steps may take either, and another expert follows
    assert (in_one_call - layered).pow(2).mean().sqrt() < 0.03 * layered.std()


@pytest.mark.quick("ministral3-None")
@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        *((name, None) for name in ("qwen3", "gemma3", "qwen2-moe", "ministral3", "glm4", "gemma4-e2b")),
        *(("qwen3-moe", name) for name in ("int8", "int4")),
    ],
)
def test_bfloat16_logits_do_not_depend_on_chunks_company_or_threads(family, quantization, tmp_path_factory):
    path = cached_model(family, tmp_path_factory)
    sequences, num_prompt = ragged_sequences()
    model, backend = loaded(path, dtype=torch.bfloat16, block_size=16, quantization=quantization)
    options = {"block_size": 16, "dtype": torch.bfloat16}
    together = paged_logits(model, backend, sequences, num_prompt=num_prompt, chunk=None, **options)
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            for chunk in (1, 5):
                again = paged_logits(model, backend, sequences, num_prompt=num_prompt, chunk=chunk, **options)
                assert all(torch.equal(a, b) for a, b in zip(together, again, strict=True))
            [alone] = paged_logits(model, backend, sequences[-1:], num_prompt=num_prompt[-1:], chunk=None, **options)
            assert torch.equal(alone, together[-1])
    finally:
        torch.set_num_threads(1)


@pytest.mark.quick("int8", "int4")
@pytest.mark.parametrize("weights", ["float32", "int8", "int4", "gptq"])
def test_cut_experts_give_the_bits_of_whole_ones(weights, tmp_path):
    """Wide enough for several pieces of an expert's features: with many threads one token's experts are cut."""
    sizes = {"hidden_size": 544, "moe_intermediate_size": 608, "num_experts": 4, "num_experts_per_tok": 2}
    path = tiny_model("qwen3-moe", tmp_path / "model", mlp_only_layers=[], num_hidden_layers=1, **sizes)
    if weights == "gptq":
        path, _ = quantized_twins(path, tmp_path, *gptq())
    model, backend = loaded(path, block_size=16, quantization=weights if weights in FORMATS else None)
    sequences, options = [list(range(3, 12))], {"num_prompt": [2], "block_size": 16, "chunk": None}
    [whole] = paged_logits(model, backend, sequences, **options)
    try:
        for threads in (2, 3, 16):
            torch.set_num_threads(threads)
            [cut] = paged_logits(model, backend, sequences, **options)
            assert torch.equal(cut, whole)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("family", "sizes"), [("llama", {"hidden_size": 52, "head_dim": 10}), ("starcoder2", {"hidden_size": 56})]
)
def test_odd_sizes_equal_transformers(family, sizes, tmp_path):
    path = tiny_model(family, tmp_path, intermediate_size=70, vocab_size=321, **sizes)
    assert_same_logits(logits_of(path, block_size=16), transformers_logits(path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 15, 16, 1000, 1024, 5000])
def test_likeliest_token_is_the_first_largest(dtype, size):
    logits = torch.randint(-50, 50, (7, size), generator=torch.Generator().manual_seed(size)).to(dtype)
    expected = [row.tolist().index(row.max().item()) for row in logits]
    assert likeliest_tokens(logits).tolist() == expected


def test_a_row_with_logits_that_are_no_numbers_has_no_likeliest_token():
    logits = torch.zeros(4, 3000)
    logits[0, 2500], logits[1, 7], logits[2, 1], logits[3, 5] = float("nan"), float("nan"), float("inf"), 1.0
    assert likeliest_tokens(logits).tolist() == [INVALID, INVALID, INVALID, 5]


def test_callers_on_two_python_threads_do_not_disturb_each_other():
    functions = bind(load_library().functions)
    logits = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0))
    expected = logits.argmax(-1)
    wrong = []

    def work():
        for _ in range(200):
            out = torch.empty(64, dtype=torch.int64)
            functions.sampling_argmax(0, logits.data_ptr(), 64, 4096, out.data_ptr(), 3)
            if not torch.equal(out, expected):
                wrong.append(out)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_a_forked_process_computes_without_its_parents_threads():
    program = """
import os, torch
from pagedcli.native import load_library
from pagedcli.native.structs import bind
functions = bind(load_library().functions)
logits = torch.arange(64 * 4096.).view(64, 4096)
def run():
    out = torch.empty(64, dtype=torch.int64)
    functions.sampling_argmax(0, logits.data_ptr(), 64, 4096, out.data_ptr(), 4)
    return out.tolist() == [4095] * 64
assert run()
child = os.fork()
if child == 0:
    os._exit(0 if run() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
