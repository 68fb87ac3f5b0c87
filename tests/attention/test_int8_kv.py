"""The int8 KV cache: exact attention over what the cache holds, whatever batch, chunk, pool and threads; its error on
logits and on the built-in model's look-ups; refused, with a way out, where it cannot be.
"""

import itertools
import re
from pathlib import Path

import pytest
import torch
from attention_cases import Case, fill_cache, held, run, worst_error
from bit_settings import by_default
from harness.engine import ragged_prompts
from harness.engine import run as run_engine
from model_zoo import tiny_model
from test_attention_conformance import backend_for

from pagedcli.attention import cpu
from pagedcli.attention.base import AttentionSpec
from pagedcli.attention.select import select_backend
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.config import EngineConfig
from pagedcli.core.budget import SCALE_BYTES, head_bytes
from pagedcli.errors import BackendError, ConfigError
from pagedcli.models.reading import read_spec
from pagedcli.planning.decide import decide, resolve_kv_dtype
from pagedcli.planning.machine import Gpu, this_machine
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.runner.self_test import look_up_texts
from pagedcli.sampling_params import SamplingParams

CPU = torch.device("cpu")
F32, F16, BF16, I8 = torch.float32, torch.float16, torch.bfloat16, torch.int8
RAGGED = [(1, 1), (300, 1), (20, 20), (130, 5), (16, 16), (17, 1), (258, 3), (90, 33), (1100, 40), (64, 1)]
ONE_HEAD = (16, 1, 1, 64)  # block size, key/value heads, group, head size


def make_case(lengths, shape, dtype, *, kv_dtype=I8):
    block_size, num_kv_heads, group, head_dim = shape
    return Case(lengths, block_size, num_kv_heads * group, num_kv_heads, head_dim, dtype, kv_dtype=kv_dtype)


# ---------------------------------------------------------------------- the kernel


def test_rounding_of_latents_costs_what_the_docs_state(library):
    case = Case(RAGGED, 16, 16, 1, 576, F32, kv_dtype=I8, value_dim=512)
    result, exact = run(backend_for("cpu", case), case).double(), case.expected()
    case.k = case.v = held(case.k)
    twin = case.expected()
    error = float((result - exact).norm() / exact.norm())
    document = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    stated = re.search(r"attention over random latents of 512 \+ 64 is\s+then off by (\S+) %", document)
    assert stated is not None
    assert f"{100 * error:.1f}" == stated[1]
    assert (result - twin).norm() < 0.01 * (twin - exact).norm(), "it is the twin's error: that of the latents"


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize("block_size", [16, 5], ids=["tiled", "packed"])
def test_each_value_is_held_to_half_a_step(library, block_size, dtype):
    """A sequence of one token returns its V, of any magnitude; a head of zeros stays zero."""
    case = make_case([(1, 1)] * 64, (block_size, 2, 1, 32), dtype)
    low, high = (-24, 100) if dtype != F16 else (-8, 12)
    case.v = case.v * 2.0 ** torch.linspace(low, high, 64)[:, None, None].to(dtype)
    case.v[5] = 0
    result = run(backend_for("cpu", case), case)
    step = case.v.double().abs().amax(-1, keepdim=True) / 127
    assert ((result.double() - case.v.double()).abs() <= step * 0.51 + case.v.double().abs() * 2**-8).all()
    assert not result[5].any()


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(BF16, I8), (BF16, None), (F32, None)], ids=str)
def test_threads_and_chunks_never_change_a_bit(library, dtype, kv_dtype):
    """One thread or more (which split long contexts), the prompt whole or in chunks."""
    results, before = [], torch.get_num_threads()
    try:
        for threads, new in itertools.product((1, 2, 5), (200, 1, 7)):
            torch.set_num_threads(threads)
            case = make_case([(1600, new)], (16, 2, 2, 64), dtype, kv_dtype=kv_dtype)
            results.append(run(backend_for("cpu", case), case)[-1])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], result) for result in results)


@pytest.mark.parametrize("kv_dtype", [None, I8], ids=["bf16", "int8"])
def test_threads_that_write_neighbours_lose_nothing(library, kv_dtype):
    """Two tokens share each word of V. Pieces of a long prompt that starts inside a block go to several threads."""
    case = make_case([(777, 777)], (16, 2, 1, 64), BF16)
    case.kv_dtype = kv_dtype
    spec = AttentionSpec(CPU, BF16, 16, 2, 2, 64, kv_dtype=kv_dtype)
    backend, before, caches = cpu.CpuAttention(spec, library), torch.get_num_threads(), []
    slots = torch.arange(5, 782, dtype=torch.int32)
    try:
        for threads in [1] + [4] * 20:
            torch.set_num_threads(threads)
            shape = backend.kv_shape(50, 16, 2, 64)
            pair = [torch.zeros(shape, dtype=kv_dtype or BF16) for _ in range(2)]
            backend.write(case.k, case.v, pair, slots, case.layer)
            caches.append(torch.cat(pair))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(caches[0], cache) for cache in caches)


def test_outliers_in_a_channel_of_keys_do_not_set_the_step_of_the_others(library):
    """As biases leave them in K: each key has the same large numbers, which no softmax sees."""
    case = make_case(RAGGED, ONE_HEAD, F32)
    case.k[..., 5], case.k[..., 40] = 30, -50
    error = worst_error(run(backend_for("cpu", case), case), case.expected())
    case.k = held(case.k)
    assert error < 0.5 * worst_error(case.expected(), make_case(RAGGED, ONE_HEAD, F32).expected())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_no_numbers_are_not_hidden(library, bad):
    case = make_case([(40, 1), (40, 1)], (16, 1, 2, 64), F32)
    case.v[25, 0, 3] = bad  # of the first sequence
    result = run(backend_for("cpu", case), case)
    assert not result[0].isfinite().any()
    assert result[1].isfinite().all()
    case = make_case([(40, 1), (40, 1)], (16, 1, 2, 64), F32)
    case.q[39, 0, 3] = bad
    result = run(backend_for("cpu", case), case)
    assert not result[0, 0].isfinite().any()
    assert result[0, 1].isfinite().all()


def test_a_wrong_cache_is_an_error_not_a_crash(library):
    case = make_case([(20, 1)], (16, 2, 2, 64), F32)
    backend = backend_for("cpu", case)
    k_cache, v_cache, batch = fill_cache(backend, case)
    for wrong in (k_cache[..., :64].contiguous(), k_cache.view(torch.uint8), k_cache[:, :, :8]):
        with pytest.raises(BackendError, match=r"not torch.int8 \[N, \*\(2, 16, 68\)\]"):
            backend.attend(case.q[19:], (wrong, v_cache), batch, case.layer)


# ---------------------------------------------------------------------- the engine


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model("qwen3", tmp_path_factory.mktemp("model"))


def engine_for(path, **config):
    config = {"dtype": "float32", "max_num_seqs": 16, "kv_cache_dtype": "int8", **config}
    return LLMEngine(EngineConfig(model=str(path), device="cpu", **config))


GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


@pytest.mark.quick("int8 weights")
@pytest.mark.bits
@pytest.mark.parametrize("quantization", [None, "int8"], ids=["weights as stored", "int8 weights"])
def test_cache_chunk_pool_and_batch_never_change_the_tokens(library, model, quantization):
    prompts = ragged_prompts()
    expected = run_engine(engine_for(model, quantization=quantization), prompts, GREEDY)
    assert expected != run_engine(engine_for(model, kv_cache_dtype="auto"), prompts, GREEDY), "int8 changes something"
    for caching, chunk, blocks in itertools.product([True, False], [None, 7], [None, 24]):
        config = {"enable_prefix_caching": caching, "chunked_prefill_size": chunk, "num_kvcache_blocks": blocks}
        engine = engine_for(model, quantization=quantization, **config)
        assert run_engine(engine, prompts, GREEDY) == expected, (caching, chunk, blocks)
        assert by_default((engine.stats.num_preemptions > 0) == (blocks is not None))
    assert run_engine(engine_for(model, max_num_seqs=1, quantization=quantization), prompts, GREEDY) == expected
    assert run_engine(engine_for(model, block_size=5, quantization=quantization), prompts, GREEDY) == expected


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_built_in_model_still_looks_up_right(library, quantization):
    engine = LLMEngine(EngineConfig(kv_cache_dtype="int8", device="cpu", quantization=quantization, max_model_len=512))
    tokenizer = Tokenizer(engine.model_path)
    texts = [text for seed in range(3) for text in look_up_texts(seed=seed)]
    asked = [tokenizer.encode(text) for text, _ in texts]
    answers = [tokenizer.encode(answer) for _, answer in texts]
    params = [SamplingParams(temperature=0, max_tokens=len(answer), ignore_eos=True) for answer in answers]
    given = [samples[0] for samples in run_engine(engine, asked, params)]
    right = sum(a == b for a, b in zip(given, answers, strict=True))
    print(f"{right} of {len(texts)} look-ups right")
    assert right == len(texts)


def test_the_plan_counts_elements_and_scales(library, model):
    engine, plain = engine_for(model), engine_for(model, kv_cache_dtype="auto")
    assert engine.plan.kv_dtype == "int8"
    assert engine.plan.kv_scales is None
    assert engine.runner.kv_cache.dtype == I8
    assert engine.plan.block_bytes == engine.runner.kv_cache[:, :, 0].nbytes
    assert engine.plan.block_bytes * 4 * 32 == plain.plan.block_bytes * (32 + 4)
    assert cpu.SCALE_BYTES == SCALE_BYTES["int8"] == head_bytes(64, "int8") - 64


# ---------------------------------------------------------------------- refusals


def test_backends_that_cannot_say_so_and_what_to_do(library, model):
    for name in ("sdpa", "reference"):
        with pytest.raises(BackendError, match="does not support a KV cache of int8") as caught:
            engine_for(model, attention_backend=name)
        assert "--kv-cache-dtype auto" in caught.value.hint
    with pytest.raises(ConfigError, match="needs a CPU, not a CUDA GPU") as caught:
        resolve_kv_dtype("int8", BF16, Gpu(name="any", total_bytes=1, free_bytes=1, capability=(9, 0)))
    assert "fp8" in caught.value.hint


def test_without_a_compiler_int8_is_refused_not_replaced(no_compiler, model):
    with pytest.raises(
        BackendError, match=re.escape(no_compiler) + ".*sdpa: does not support a KV cache of int8"
    ) as caught:
        engine_for(model)
    assert caught.value.hint == "use --kv-cache-dtype auto"


def test_a_model_through_transformers_is_refused(library, tmp_path):
    path = tiny_model("gpt2", tmp_path / "m")
    with pytest.raises(ConfigError, match="which runs through transformers") as caught:
        engine_for(path)
    assert "--kv-cache-dtype auto" in caught.value.hint
    config = EngineConfig(model=str(path), device="cpu", kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match="which runs through transformers"):  # `plan` says what the engine would say
        decide(config, read_spec(path), this_machine())


def test_heads_too_long_for_exact_sums_are_refused(library):
    sizes = {"block_size": 16, "num_heads": 2, "num_kv_heads": 1, "dtype": BF16, "device": CPU}
    assert select_backend("cpu", head_dim=1024, kv_dtype=I8, **sizes).backend.name == "cpu"
    with pytest.raises(BackendError, match="head_dim up to 1024, not 1040") as caught:
        select_backend("cpu", head_dim=1040, kv_dtype=I8, **sizes)
    assert caught.value.hint == "use --kv-cache-dtype auto"
