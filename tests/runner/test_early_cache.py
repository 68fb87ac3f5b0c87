"""Memory of the KV cache that is touched while weights load."""

import mmap

import psutil
import pytest
import torch
from model_zoo import tiny_model

from pagedcli.config import EngineConfig
from pagedcli.native.system import HUGE_PAGE, populate
from pagedcli.runner import early_cache, loading
from pagedcli.runner.early_cache import EarlyCache
from pagedcli.runner.loading import load_engine

pytestmark = pytest.mark.skipif(
    not populate(torch.empty(HUGE_PAGE, dtype=torch.uint8), lambda: False), reason="this system cannot populate pages"
)


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(early_cache, "usable_cores", lambda: 2)


@pytest.fixture
def begun(monkeypatch):
    """The early caches of load_engine, each after its thread has touched all that it was to touch."""
    caches = []

    def begin(*args, **options):
        cache = early_cache.begin_early_cache(*args, **options)
        if cache is not None:
            cache.thread.join()
            caches.append(cache)
        return cache

    monkeypatch.setattr(loading, "begin_early_cache", begin)
    return caches


def fresh(num_bytes):
    """Memory that nobody has written, which the C library may not have."""
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def test_populated_memory_is_resident_and_keeps_its_content():
    memory = fresh(24 * HUGE_PAGE)
    memory[5 * HUGE_PAGE] = 7
    before = resident()
    assert populate(memory[HUGE_PAGE : 7 * HUGE_PAGE], lambda: False)
    assert 4 * HUGE_PAGE < resident() - before < 7 * HUGE_PAGE
    assert int(memory[5 * HUGE_PAGE]) == 7


def test_only_the_first_blocks_of_each_layer_are_touched():
    memory = fresh(2 * 3 * 8 * HUGE_PAGE).view(2, 3, 8, HUGE_PAGE)  # a block is a huge page
    before = resident()
    cache = EarlyCache.begin(memory, 2)
    cache.thread.join()
    assert cache.num_bytes == 2 * 3 * 2 * HUGE_PAGE
    assert cache.num_bytes / 2 < resident() - before < 2 * cache.num_bytes < memory.nbytes


def test_the_engine_takes_the_memory_that_was_touched(tmp_path, two_cores, begun):
    config = EngineConfig(
        model=str(tiny_model("qwen3", tmp_path)), device="cpu", num_gpu_blocks_override=24, block_size=4
    )
    loaded = load_engine(config, expected_tokens=17)
    assert [(cache.num_blocks, cache.memory.data_ptr()) for cache in begun] == [(5, loaded.runner.kv_cache.data_ptr())]
    assert loaded.plan.limits.num_blocks == 24


def test_no_memory_is_touched_without_known_requests(tmp_path, two_cores, begun):
    load_engine(EngineConfig(model=str(tiny_model("qwen3", tmp_path)), device="cpu", num_gpu_blocks_override=24))
    assert begun == []


def test_no_more_blocks_are_touched_than_the_pool_has(tmp_path, two_cores, begun):
    config = EngineConfig(
        model=str(tiny_model("qwen3", tmp_path)), device="cpu", num_gpu_blocks_override=24, block_size=4
    )
    load_engine(config, expected_tokens=10_000)
    assert [cache.num_blocks for cache in begun] == [24]


def test_weights_that_cannot_be_loaded_end_the_thread(tmp_path, two_cores, begun):
    folder = tiny_model("qwen3", tmp_path)
    (folder / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(Exception, match=r"model\.safetensors"):
        load_engine(EngineConfig(model=str(folder), device="cpu"), expected_tokens=100)
    assert [(cache.stop.is_set(), cache.thread.is_alive()) for cache in begun] == [(True, False)]
