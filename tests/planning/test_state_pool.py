"""One budget for blocks and for slots of recurrent state."""

import pytest

from pagedcli.config import EngineConfig, load_config
from pagedcli.core.budget import Terms
from pagedcli.core.limits import Limits
from pagedcli.core.plan import Plan
from pagedcli.errors import ConfigError
from pagedcli.planning.decision import CPU_KV_BYTES, choose_pool

MIB = 2**20


def plan(*, state_bytes=MIB, max_num_seqs=4):
    limits = Limits(max_num_seqs=max_num_seqs, max_model_len=2**20, max_num_batched_tokens=512, state_bytes=state_bytes)
    return Plan(limits=limits, model="m", device="cpu", block_bytes=MIB // 4)


def sizes(plan, available=2**40, terms=None, **config):
    pool = choose_pool(EngineConfig(**config), plan, available=available, terms=terms)
    return pool.num_blocks, pool.num_state_slots


def test_slots_are_two_per_sequence_within_half_of_the_memory_and_blocks_get_the_rest():
    assert sizes(plan(), kv_cache_memory=100 * MIB) == (4 * 92, 8)
    assert sizes(plan(max_num_seqs=1), kv_cache_memory=100 * MIB) == (4 * 92, 8)
    assert sizes(plan(max_num_seqs=20), kv_cache_memory=100 * MIB) == (4 * 60, 40)
    assert sizes(plan(max_num_seqs=80), kv_cache_memory=100 * MIB) == (4 * 50, 50)
    assert sizes(plan(), kv_cache_memory=100 * MIB, num_state_slots=90) == (4 * 10, 90)
    assert sizes(plan(), num_kvcache_blocks=10) == (10, 8)
    assert sizes(plan(state_bytes=1000 * MIB)) == ((CPU_KV_BYTES // MIB - 2000) * 4, 2)
    terms = Terms(total=120 * MIB, weights=20 * MIB, activations=0)
    assert sizes(plan(), terms=terms) == (4 * 92, 8)


def test_a_model_without_state_gets_no_slots_and_the_blocks_that_it_always_got():
    assert sizes(plan(state_bytes=0), kv_cache_memory=100 * MIB) == (400, None)


def test_slots_that_leave_no_block_or_exceed_the_memory_are_refused():
    with pytest.raises(ConfigError, match="no KV block fits"):
        sizes(plan(), kv_cache_memory=100 * MIB, num_state_slots=100)
    with pytest.raises(ConfigError, match=r"100.00 MiB, 8 slots of recurrent state included, but only 50.00 MiB"):
        sizes(plan(), available=50 * MIB, kv_cache_memory=100 * MIB)


def test_an_interval_in_a_file_is_a_number(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("engine:\n  checkpoints: 512\n")
    assert load_config(path).config.engine.checkpoints == "512"
