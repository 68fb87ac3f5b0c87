"""What only a GPU asks of the engine, with nothing but the GPU missing (see pretend_cuda)."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from harness.engine import outputs_of, ragged_prompts, run
from interpreter import INTERPRETED, interpreted, plain
from model_zoo import tiny_model
from safetensors.torch import load_file, save_file

from pagedcli.attention.base import AttentionSpec
from pagedcli.attention.select import available_backends, select_backend
from pagedcli.config import EngineConfig
from pagedcli.errors import BackendError, ConfigError
from pagedcli.planning.features import bucket_sizes
from pagedcli.runner import loading
from pagedcli.runner.cuda_graphs import GRAPH_TOKENS
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.runner.memory import Holder
from pagedcli.sampling_params import SamplingParams

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model("qwen3", tmp_path_factory.mktemp("pretend"), num_hidden_layers=1)


def make_engine(path, device, **config):
    # few tokens per step, as loading runs a step of as many
    config = {"max_num_seqs": 3, "num_kvcache_blocks": 20, "max_model_len": 64, **config}
    config = {"max_num_batched_tokens": 24, **config}
    return LLMEngine(EngineConfig(model=str(path), dtype="float32", device=device, **config))


@interpreted
@pytest.mark.slow
def test_a_graph_serves_lengths_of_several_splits_without_growing_its_memory(model, gpu):
    config = {"max_model_len": 300, "num_kvcache_blocks": 60, "max_num_seqs": 2}
    prompts = [[5 + i % 300 for i in range(length)] for length in (254, 3)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    expected = run(make_engine(model, "cpu", attention_backend="reference", **config), prompts, params)
    engine = make_engine(model, "cuda", **config)
    reserved = engine.model._backend._partials[0]
    assert reserved.shape[0] == 2 * 2 * engine.spec.num_heads, "two sequences of two splits"
    assert run(engine, prompts, params) == expected
    assert engine.model._backend._partials[0] is reserved


@interpreted
def test_partial_results_take_as_much_room_as_there_are_rows():
    from attention_cases import Case, worst_error
    from attention_cases import run as attend

    from pagedcli.attention.base import AttentionSpec
    from pagedcli.attention.triton_paged import TritonAttention

    backend = TritonAttention(AttentionSpec(torch.device("cpu"), torch.float32, 16, 4, 2, 16))
    case = Case([(600, 3), (20, 4), (257, 1), (50, 40)], 16, 4, 2, 16, torch.float32)
    assert worst_error(attend(backend, case), case.expected()) < 1e-6
    num_parts = 3 * 3 + 2 * 1  # splits x new tokens, of those with several splits; 50 is a prefill
    assert backend._partials[0].shape[0] == num_parts * 4


@interpreted
def test_blocks_beyond_2_31_elements_of_a_cache_are_found():
    """Of the large caches only the last block is touched: the system gives them no memory for the others."""
    from attention_cases import make_batch

    from pagedcli.attention.base import AttentionSpec
    from pagedcli.attention.layer import AttentionLayer
    from pagedcli.attention.triton_paged import TritonAttention

    backend = TritonAttention(AttentionSpec(torch.device("cpu"), torch.float16, 16, 2, 1, 128))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(12, heads, 128, generator=generator).half() for heads in (2, 1, 1))
    outs, layer = [], AttentionLayer(scale=0.1)
    for last in (1, 2**31 // (16 * 128) + 1):
        shape = backend.kv_shape(last + 1, 16, 1, 128)
        k_cache, v_cache = (torch.empty(shape, dtype=torch.float16) for _ in range(2))
        for first in (0, 11):  # a prompt, then a decode
            slots = [last * 16 + place for place in range(first, 12)]
            batch = make_batch([(12, 12 - first)], torch.tensor([[last]], dtype=torch.int32), slots, "cpu")
            backend.write(k[first:], v[first:], (k_cache, v_cache), batch.slots, layer)
            outs.append(backend.attend(q[first:], (k_cache, v_cache), batch, layer))
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[3])


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("ahead", [True, False])
def test_samples_forked_in_a_graph_step_get_the_tokens_of_the_reference(model, gpu, ahead):
    """The last piece of a prompt is one token, so that its step is served by a graph and its logits by several rows."""
    prompts = [[5, 6, 7], [8 + i for i in range(10)]]
    params = [
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=0.9, max_tokens=3, ignore_eos=True, seed=3, n=2),
    ]
    config = {"chunked_prefill_size": 9, "max_num_seqs": 4}
    expected = run(make_engine(model, "cpu", attention_backend="reference", **config), prompts, params)
    engine = make_engine(model, "cuda", async_scheduling=ahead, **config)
    graphs, plain = engine.runner.graphs, []
    run_graph = graphs.run
    graphs.run = lambda step, sampling: (plain.append(sampling is not None), run_graph(step, sampling))[1]
    assert run(engine, prompts, params) == expected
    assert plain.count(False) == 1, "the step that forks is served by a graph, and its choice made outside"


@interpreted
@pytest.mark.parametrize(
    "options",
    [pytest.param({"temperature": 0}, marks=pytest.mark.slow), {"temperature": 0.8, "seed": 2, "top_p": 0.9}],
    ids=str,
)
def test_logits_that_are_not_numbers_end_their_request_only(tmp_path, gpu, options):
    path = tiny_model("llama-untied", tmp_path / "model", num_hidden_layers=1)
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = float("nan")
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    params = SamplingParams(max_tokens=3, ignore_eos=True, **options)
    [alone] = run(make_engine(path, "cpu", attention_backend="reference"), [[5, 6, 8]], params)
    waits = len(gpu.waits)
    gpu.runs_kernels = False  # of the steps that measure and compile
    engine = make_engine(path, "cuda")
    gpu.runs_kernels = True
    del gpu.waits[waits:]
    good, bad = outputs_of(engine, [[5, 6, 8], [5, 7, 8]], params)
    assert bad.error.code == "invalid_logits"
    assert good.error is None
    assert good.samples[0].token_ids == alone[0]
    assert not gpu.waits, "a step never waits for the device"


@interpreted
def test_steps_run_on_their_device_in_any_thread(model, idle_gpu):
    """A thread's current device is GPU 0 until it chooses one, and Triton launches there."""
    gpu = idle_gpu
    engine = make_engine(model, "cuda")
    gpu.current_elsewhere = 1

    def steps():
        with gpu:
            return run(engine, [[5, 6, 7]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))

    with ThreadPoolExecutor(1) as pool:
        assert len(pool.submit(steps).result()[0][0]) == 2


@interpreted
def test_an_fp8_cache_is_found_its_scales_and_used(model, gpu):
    engine = make_engine(model, "cuda:0", kv_cache_dtype="fp8", max_num_seqs=1)
    assert engine.plan.kv_dtype == "float8_e4m3fn"
    assert engine.runner.kv_cache.dtype == torch.float8_e4m3fn
    assert min(engine.plan.kv_scales) > 0
    tokens = run(engine, ragged_prompts(1), SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert [len(row[0]) for row in tokens] == [2]


@interpreted
def test_an_engine_that_nobody_uses_gives_its_cache_back_at_once(model, idle_gpu):
    import gc
    import weakref

    engine = make_engine(model, "cuda")
    run(engine, ragged_prompts(2), SamplingParams(temperature=0, max_tokens=2))
    cache = weakref.ref(engine.runner)
    gc.disable()
    try:
        del engine
        assert cache() is None
    finally:
        gc.enable()


@plain
def test_without_a_c_compiler_triton_is_refused_for_attention_and_layers(monkeypatch):
    from pagedcli.attention import triton_paged
    from pagedcli.layers.basic import fused_layers

    monkeypatch.setattr(triton_paged.shutil, "which", lambda _: None)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    shape = {"block_size": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    found = dict(available_backends(AttentionSpec(torch.device("cuda", 0), torch.float32, **shape)))
    assert "C compiler" in found["triton"]
    assert found["sdpa"] is None
    fused_layers.cache_clear()
    assert fused_layers() is None
    fused_layers.cache_clear()


@plain
@pytest.mark.parametrize("cause", ["no Python.h", "no libcuda", "another"])
def test_a_launcher_that_cannot_be_built_is_reported_with_the_package_that_helps(monkeypatch, tmp_path, cause):
    """Before anything is loaded; otherwise the first launch would fail."""
    from triton.runtime.driver import DriverConfig

    from pagedcli.attention import triton_paged

    class Driver:
        @property
        def utils(self):
            if cause == "no libcuda":
                raise AssertionError("libcuda.so cannot found!\nPlease make sure GPU is set up")
            raise RuntimeError("gcc returned 1\nand more")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(DriverConfig, "active", Driver())
    headers = tmp_path if cause == "no Python.h" else Path(triton_paged.sysconfig.get_paths()["include"])
    monkeypatch.setattr(triton_paged.sysconfig, "get_paths", lambda: {"include": str(headers)})
    shape = {"block_size": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    device = torch.device("cuda", 0)
    with pytest.raises(BackendError) as caught:
        select_backend("triton", device=device, dtype=torch.float32, **shape)
    found, hint = {
        "no Python.h": (r"Python.h is missing", "python3-dev"),
        "no libcuda": (r"AssertionError: libcuda.so cannot found!$", "TRITON_LIBCUDA_PATH"),
        "another": (r"RuntimeError: gcc returned 1$", "sdpa"),
    }[cause]
    assert re.search(found, caught.value.message)
    assert hint in caught.value.hint
    selection = select_backend("auto", device=device, dtype=torch.float32, **shape)
    assert selection.backend.name == "sdpa"
    assert re.search(found, selection.refused[0])


@interpreted
@pytest.mark.parametrize("what", ["the weights", "a step of", "a KV cache of"])
def test_a_full_gpu_is_reported_with_what_had_no_room_and_who_holds_it(model, idle_gpu, monkeypatch, what):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    if what == "a KV cache of":
        monkeypatch.setattr(loading, "ModelRunner", fail)
    else:
        monkeypatch.setattr(loading, "load_decoder" if what == "the weights" else "measure_device", fail)
    holder = Holder(17, "other", 3 * 2**30)
    monkeypatch.setattr(loading, "other_holders", lambda _: [holder])
    with pytest.raises(ConfigError, match=f"^cuda:0 has no room for {what}.*0.20 of 0.25 GiB are free.*pid 17.*3.00"):
        make_engine(model, "cuda")


@interpreted
def test_a_capture_that_fails_names_the_batch_size_and_the_way_without_graphs(model, idle_gpu, monkeypatch):
    graph = torch.cuda.graph
    captured = []

    def fail_at_the_second(which, **options):
        captured.append(which)
        if len(captured) == 2:
            raise RuntimeError("CUDA error: operation not permitted\nCompile with TORCH_USE_CUDA_DSA")
        return graph(which, **options)

    monkeypatch.setattr(torch.cuda, "graph", fail_at_the_second)
    with pytest.raises(
        ConfigError, match=r"of 2 sequences was not captured: CUDA error: operation not permitted$"
    ) as got:
        make_engine(model, "cuda")
    assert "--enforce-eager" in got.value.hint


def test_no_graph_asks_for_a_longer_work_list_than_the_device_makes():
    """However the tokens of a step are spread over its sequences, each begins at most one more split."""
    from pagedcli.attention.triton_paged import DEVICE_LIST_ITEMS, SPLIT

    assert GRAPH_TOKENS // SPLIT + max(bucket_sizes(1000)) <= DEVICE_LIST_ITEMS


@interpreted
def test_a_step_by_a_graph_makes_no_views_of_what_it_uploads(model, idle_gpu, monkeypatch):
    from pagedcli.runner import device_state

    engine = make_engine(model, "cuda", async_scheduling=False)
    engine.add_request("0", [5, 6, 7], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    for _ in range(2):
        engine.step()
    replays = idle_gpu.replays
    monkeypatch.setattr(device_state, "unpack", None)  # the block has room, so that only the graph's inputs are sent
    engine.step()
    assert idle_gpu.replays == replays + 1


@interpreted
def test_a_model_longer_than_what_graphs_serve_is_captured(tmp_path, idle_gpu, monkeypatch):
    """Its work list would be longer than those that the device makes, and an upload cannot be captured."""
    from pagedcli.attention import triton_paged
    from pagedcli.runner import cuda_graphs

    monkeypatch.setattr(triton_paged, "DEVICE_LIST_ITEMS", 4)
    monkeypatch.setattr(cuda_graphs, "GRAPH_TOKENS", 2 * triton_paged.SPLIT)
    path = tiny_model("qwen3", tmp_path / "model", num_hidden_layers=1, max_position_embeddings=2048)
    engine = make_engine(path, "cuda", max_model_len=2000, num_kvcache_blocks=200, max_num_seqs=2)
    replays = idle_gpu.replays
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    run(engine, [[5] * 10, [6] * 700], params)
    assert idle_gpu.replays == replays


@pytest.mark.skipif(INTERPRETED, reason="the interpreter specializes nothing")
def test_steps_of_any_size_are_served_by_one_compiled_kernel():
    """Else kernels would be compiled in the middle of a run, a second each time: where lists of a step are in one
    buffer, and rows of [groups, T] or [groups, B, W] belong to groups of layers, alignment depends on sizes."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend

    from pagedcli.attention import triton_kernels as attention
    from pagedcli.layers import triton_experts as experts
    from pagedcli.layers import triton_layers as layers
    from pagedcli.layers import triton_products as products
    from pagedcli.layers import triton_recurrent as recurrent
    from pagedcli.layers import triton_sampling as sampling

    changing = {
        attention.store_kvcache_kernel: ["slots_ptr"],
        attention.decode_kernel: ["first_part_ptr", "item_seq_ptr", "item_split_ptr", "table_ptr", "table_stride"],
        attention.combine_kernel: ["first_part_ptr"],
        attention.prefill_kernel: ["item_token_ptr", "table_ptr", "table_stride"],
        layers.rotate_and_store_kernel: ["slots_ptr"],
        products.linear_kernel: ["num_tokens"],
        experts.align_kernel: ["num_choices"],
        recurrent.conv_kernel: ["num_tokens"],
        sampling.sample_chunks_kernel: ["mass_ptr"],
        sampling.sample_rows_kernel: ["mass_ptr"],
    }
    numbers = torch.zeros(64, dtype=torch.int32)
    for kernel, names in changing.items():
        params = {param.name: param for param in kernel.params}
        for name in names:
            values = [numbers, numbers[1:], numbers[4:]] if name.endswith("_ptr") else [1, 16, 17]
            flags = not params[name].do_not_specialize, not params[name].do_not_specialize_on_alignment
            keys = {str(native_specialize_impl(BaseBackend, value, False, *flags)) for value in values}
            assert len(keys) == 1, (kernel, name)


@interpreted
def test_a_kernel_that_ignores_strides_is_noticed(idle_gpu):
    from pagedcli.layers.basic import rms_norm
    from pagedcli.layers.triton_layers import add_rms_norm_kernel

    x, weight = torch.zeros(2, 64, device="cuda"), torch.ones(32, device="cuda")
    rms_norm(x[:, :32], weight, 1e-6)
    constants = {"E": 32, "BLOCK_E": 32, "ADD": False, "NORM_ADDED": False, "MULTIPLY": False, "SCALE": False}
    with pytest.raises(AssertionError, match="reads rows one after the other"):
        add_rms_norm_kernel[(2,)](x[:, :32], x, x, weight, x, 1e-6, 1.0, 1.0, **constants, NORM=True)


@interpreted
def test_what_cuda_does_not_compute_for_a_type_is_noticed(idle_gpu):
    numbers = torch.ones(2, 2, dtype=torch.int32, device="cuda")
    with pytest.raises(AssertionError, match=r"matmul.*int32"):
        numbers @ numbers
    with pytest.raises(AssertionError, match=r"cat.*float8"):
        torch.cat([numbers.to(torch.float8_e4m3fn)] * 2)
