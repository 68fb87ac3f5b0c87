"""The decoder that runs a whole step in the native library: transformers' logits, in bits that nothing else changes."""

import subprocess
import sys
import threading

import pytest
import torch
from conftest import native_library
from harness.engine import PagedHarness, assert_same_logits, loaded, paged_logits, ragged_sequences, transformers_logits
from model_zoo import COMPOSED_FAMILIES, NATIVE_FAMILIES, SLOW_FAMILIES, cached_model, load_model, tiny_model
from quantized_zoo import gptq, quantized_twins

from pagedcli.attention.base import AttentionSpec
from pagedcli.attention.select import load_backend
from pagedcli.layers.sampling import INVALID, likeliest_tokens
from pagedcli.models.cpu_decoder import CpuDecoder
from pagedcli.models.formats import FORMATS
from pagedcli.models.reading import read_spec
from pagedcli.native import load_library
from pagedcli.native.structs import bind

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _library():
    native_library()


def load(path, *, dtype=torch.float32, block_size=16, **options):
    spec = read_spec(path)
    layers, heads = frozenset(spec.attention_layers), (spec.num_heads, spec.num_kv_heads, spec.head_dim)
    backend = load_backend("cpu", AttentionSpec(CPU, dtype, block_size, *heads, layers=layers))
    options = {"max_model_len": 256, **options}
    return load_model(path, spec, backend=backend, dtype=dtype, device=CPU, **options), backend


@pytest.mark.parametrize("family", [*NATIVE_FAMILIES, *COMPOSED_FAMILIES, *SLOW_FAMILIES])
@pytest.mark.parametrize(("block_size", "chunk"), [(1, 7), (16, None)])
def test_logits_equal_transformers_in_float32(family, block_size, chunk, tmp_path_factory):
    path = cached_model(family, tmp_path_factory)
    sequences, num_prompt = ragged_sequences()
    model, backend = load(path, block_size=block_size)
    assert isinstance(model, CpuDecoder)
    options = {"num_prompt": num_prompt, "block_size": block_size, "chunk": chunk}
    assert_same_logits(paged_logits(model, backend, sequences, **options), transformers_logits(path, sequences))


# norms in float32 around layers, GELU, two rotary tables; norms after; experts with a shared one; multipliers
SHORT = [
    ("qwen3", torch.float16),
    *(
        (name, torch.bfloat16)
        for name in ("qwen3", "gemma3", "olmo2", "qwen2-moe", "granite", "ministral3", "glm4", "deepseek_v2")
    ),
]


@pytest.mark.slow_cases("qwen2-moe-*", "deepseek_v2-*")
@pytest.mark.parametrize(("family", "dtype"), SHORT)
def test_short_types_are_as_close_to_float32_as_transformers(family, dtype, tmp_path_factory):
    path = cached_model(family, tmp_path_factory)
    sequences, num_prompt = ragged_sequences()
    model, backend = load(path, dtype=dtype)
    options = {"num_prompt": num_prompt, "block_size": 16, "chunk": 7, "dtype": dtype}
    actual = paged_logits(model, backend, sequences, **options)
    exact, theirs = (transformers_logits(path, sequences, dtype=d) for d in (torch.float32, dtype))

    def error(logits):
        return torch.cat([(a.float() - b).flatten() for a, b in zip(logits, exact, strict=True)]).pow(2).mean().sqrt()

    assert 0 < error(actual) < 1.2 * error(theirs)


@pytest.mark.parametrize("family", ["qwen3-moe", "qwen2-moe", "gemma2"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_weights_give_the_logits_of_the_same_weights_layer_by_layer(family, quantization, tmp_path_factory):
    path = cached_model(family, tmp_path_factory)
    sequences, num_prompt = ragged_sequences()
    logits = []
    for decoder in ("native in one call", "native"):
        model, backend = load(path, quantization=quantization, decoder=decoder)
        logits += [paged_logits(model, backend, sequences, num_prompt=num_prompt, block_size=16, chunk=7)]
    in_one_call, layered = (torch.cat(parts) for parts in logits)
    # not closer: an activation between two steps may take either, and another expert follows
    assert (in_one_call - layered).pow(2).mean().sqrt() < 0.03 * layered.std()


@pytest.mark.quick("ministral3-None")
@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        *((name, None) for name in ("qwen3", "gemma3", "qwen2-moe", "ministral3", "glm4")),
        *(("qwen3-moe", name) for name in ("int8", "int4")),
    ],
)
def test_bfloat16_logits_do_not_depend_on_chunks_company_or_threads(family, quantization, tmp_path_factory):
    path = cached_model(family, tmp_path_factory)
    sequences, num_prompt = ragged_sequences()
    model, backend = load(path, dtype=torch.bfloat16, quantization=quantization)
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
    model, backend = load(path, quantization=weights if weights in FORMATS else None)
    sequences, options = [list(range(3, 12))], {"num_prompt": [2], "block_size": 16, "chunk": None}
    [whole] = paged_logits(model, backend, sequences, **options)
    try:
        for threads in (2, 3, 16):
            torch.set_num_threads(threads)
            [cut] = paged_logits(model, backend, sequences, **options)
            assert torch.equal(cut, whole)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("family", ["llama", "cohere2", "gpt_oss", "gemma4-e2b", "gemma4-12b", "qwen3_5", "lfm2"])
def test_tokens_that_nobody_asks_for_change_no_bit(family, tmp_path_factory):
    """They end at the last layer that keeps K and V or a state; the cache and the tokens asked for are the same."""
    path = cached_model(family, tmp_path_factory)
    model, backend = loaded(path)
    first = [(0, 0, list(range(3, 23))), (1, 0, [7]), (2, 0, list(range(9, 42)))]
    then = [(0, 20, [5, 6, 7]), (1, 1, [8]), (2, 33, [4, 4])]

    def steps(rows_of_first, rows_of_then):
        harness = PagedHarness(model, backend, lengths=[23, 2, 35], block_size=4)
        return harness.step(first, rows_of_first), harness.step(then, rows_of_then), harness.kv_cache.nan_to_num()

    *logits, cache = steps(range(54), range(6))
    for pair in ([[], [2, 3, 5]], [[20], [3]], [[19, 20, 53], []], [[5, 6, 9, 30, 31, 53], [0, 5]]):
        *found, kept = steps(*pair)
        assert torch.equal(kept, cache)
        for whole, rows, some in zip(logits, pair, found, strict=True):
            assert torch.equal(some, whole[rows])


def test_tied_embedding_is_kept_once(tmp_path_factory):
    path = cached_model("qwen2", tmp_path_factory)
    model, _ = load(path)
    spec = model.spec
    assert spec.tie_word_embeddings
    from safetensors.torch import load_file

    assert model.weight_bytes == sum(tensor.nbytes for tensor in load_file(path / "model.safetensors").values())


@pytest.mark.parametrize(
    ("family", "sizes"), [("llama", {"hidden_size": 52, "head_dim": 10}), ("starcoder2", {"hidden_size": 56})]
)
def test_odd_sizes_equal_transformers(family, sizes, tmp_path):
    path = tiny_model(family, tmp_path, intermediate_size=70, vocab_size=321, **sizes)
    sequences, num_prompt = ragged_sequences()
    model, backend = load(path)
    actual = paged_logits(model, backend, sequences, num_prompt=num_prompt, block_size=16, chunk=7)
    for ours, theirs in zip(actual, transformers_logits(path, sequences), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


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
