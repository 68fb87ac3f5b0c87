"""What only a GPU asks of the engine, with nothing but the GPU missing (see pretend_cuda)."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from harness.engine import outputs_of, run
from interpreter import interpreted, plain
from model_zoo import tiny_model
from safetensors.torch import load_file, save_file

from pagedcli.attention.select import select_backend
from pagedcli.config import EngineConfig
from pagedcli.errors import BackendError, ConfigError
from pagedcli.planning.features import bucket_sizes
from pagedcli.runner import loading
from pagedcli.runner.cuda_graphs import GRAPH_TOKENS
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.runner.memory import Holder
from pagedcli.sampling_params import SamplingParams

pytest.importorskip("triton")
from triton.runtime.driver import DriverConfig

from pagedcli.attention import triton_paged
from pagedcli.layers.basic import rms_norm
from pagedcli.layers.triton_layers import add_rms_norm_kernel


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model("qwen3", tmp_path_factory.mktemp("pretend"), num_hidden_layers=1)


def make_engine(path, device, **config):
    # few tokens per step, as loading runs a step of as many
    config = {"max_num_seqs": 3, "num_kvcache_blocks": 20, "max_model_len": 64, **config}
    config = {"max_num_batched_tokens": 24, **config}
    return LLMEngine(EngineConfig(model=str(path), dtype="float32", device=device, **config))


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


@plain
@pytest.mark.parametrize("cause", ["no C compiler", "no Python.h", "no libcuda", "another"])
def test_a_launcher_that_cannot_be_built_is_reported_with_the_package_that_helps(
    monkeypatch, torch_cuda, tmp_path, cause
):
    """Before anything is loaded; otherwise the first launch would fail."""

    class Driver:
        @property
        def utils(self):
            if cause == "no libcuda":
                raise AssertionError("libcuda.so cannot found!\nPlease make sure GPU is set up")
            raise RuntimeError("gcc returned 1\nand more")

    if cause == "no C compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CC", raising=False)
    torch_cuda(is_available=lambda: True, get_device_capability=lambda _: (9, 0))
    monkeypatch.setattr(DriverConfig, "active", Driver())
    headers = tmp_path if cause == "no Python.h" else Path(triton_paged.sysconfig.get_paths()["include"])
    monkeypatch.setattr(triton_paged.sysconfig, "get_paths", lambda: {"include": str(headers)})
    shape = {"block_size": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    device = torch.device("cuda", 0)
    with pytest.raises(BackendError) as caught:
        select_backend("triton", device=device, dtype=torch.float32, **shape)
    found, hint = {
        "no C compiler": ("C compiler", "install gcc"),
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
@pytest.mark.parametrize(
    ("fails", "what"),
    [("load_decoder", "the weights"), ("measure_device", "a step of"), ("ModelRunner", "a KV cache of")],
)
def test_a_full_gpu_is_reported_with_what_had_no_room_and_who_holds_it(model, idle_gpu, monkeypatch, fails, what):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setattr(loading, fails, fail)
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
    assert GRAPH_TOKENS // triton_paged.SPLIT + max(bucket_sizes(1000)) <= triton_paged.DEVICE_LIST_ITEMS


@interpreted
def test_a_kernel_that_ignores_strides_is_noticed(idle_gpu):
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
