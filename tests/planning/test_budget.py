"""Memory arithmetic: checked by hand, against the decoder's own parameters, and against what a step really takes; one
budget for blocks and for slots of recurrent state."""

import gc
import json
from dataclasses import replace as changed
from pathlib import Path

import models_by_config
import pytest
import torch
from conftest import forget_library
from model_zoo import tiny_model
from msgspec import UNSET
from torch.profiler import ProfilerActivity, profile

from pagedcli.answers import fits
from pagedcli.answers.fits import Fit, block_formula, budget_formula, concurrency_rows, target_rows, waterfall
from pagedcli.config import EngineConfig, load_config
from pagedcli.core.budget import TERMS, StepShape, Terms
from pagedcli.core.groups import TableShape
from pagedcli.core.limits import Limits
from pagedcli.core.plan import Plan, Pool
from pagedcli.errors import ConfigError, UsageError
from pagedcli.events import CacheGroup
from pagedcli.models.footprint import footprint
from pagedcli.models.formats import AS_STORED
from pagedcli.models.reading import native_spec
from pagedcli.planning.cards import CARDS, find_card
from pagedcli.planning.decide import decide
from pagedcli.planning.decision import CPU_KV_BYTES, activation_bytes, choose_pool, missing_memory
from pagedcli.planning.machine import described_host, host_memory
from pagedcli.records import size
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.runner.memory import measure_step, other_holders, process_memory
from pagedcli.runner.memory_profile import profile_described, read_described

GIB = 2**30
ROOT = Path(__file__).resolve().parents[2]
QWEN3_06B = native_spec(Path("."), models_by_config.QWEN3_06B, "qwen3")
GROUP = CacheGroup(layers=tuple(range(28)), heads=(8, 128))


def test_a_qwen3_06b_block_and_a_card_with_known_numbers(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(models_by_config.QWEN3_06B))
    config = EngineConfig(model=str(tmp_path), block_size=256, gpu_memory_utilization=0.9)
    given = read_described(None, "23.48GiB", None, used="3.69GiB", others=None, peak="1.58GiB", current="1.14GiB")
    fit = profile_described(config, given)
    assert (fit.num_kvcache_blocks, fit.block_bytes) == (621, 28 * MIB)
    block = block_formula(fits.largest_group(fit), 256, "bfloat16")
    shown = [f"room for KV = {budget_formula(fit)}", f"bytes/block = {block}", *fits.cache_tensors(fit)]
    assert "\n".join(shown) in (ROOT / "docs" / "kv-cache.md").read_text()
    assert block_formula(GROUP, 256, "int8") == (
        "2 (K and V) x 28 layers x 256 tokens x 8 kv_heads x (128 head_dim x 1 bytes + 4 of scale) = 15,138,816"
    )
    assert footprint(QWEN3_06B, AS_STORED, "torch", 2).parameters == 596_049_920  # the number on its model card: 0.6B


@pytest.mark.parametrize("used", [0.5, 2.0])
def test_a_budget_that_is_spent_gives_no_blocks(used):
    terms = Terms(total=GIB, reserve=GIB // 10, others=int(used * GIB), weights=0, activations=GIB // 2)
    assert terms.kv_cache < 0
    assert fit_of(terms).num_blocks_left == 0


def test_concurrency_with_and_without_sharing():
    assert TableShape(4).concurrency(10, 8) == 5  # two blocks each
    assert TableShape(4).concurrency(10, 9) == pytest.approx(10 / 3)
    assert TableShape(4).concurrency(10, 8, shared_tokens=4) == 9  # one block for all, one for each
    assert TableShape(4).concurrency(10, 8, shared_tokens=7) == 9  # half a block is not shared
    assert TableShape(4).concurrency(10, 8, shared_tokens=100) == 9  # the last token is always a request's own
    assert TableShape(4).concurrency(0, 8) == 0


@pytest.mark.parametrize("shared", [0, 5, 64])
@pytest.mark.parametrize("num_tokens", [1, 16, 100, 4096])
@pytest.mark.parametrize("num_requests", [1, 7, 256])
def test_blocks_for_requests_is_the_inverse_of_concurrency(num_requests, num_tokens, shared):
    num_blocks = TableShape(16).blocks_for_requests(num_requests, num_tokens, shared_tokens=shared)
    assert TableShape(16).concurrency(num_blocks, num_tokens, shared_tokens=shared) == num_requests
    assert TableShape(16).concurrency(num_blocks - 1, num_tokens, shared_tokens=shared) < num_requests


def tensor_peak(run):
    """Bytes of tensors alive at most, from the allocator itself."""
    gc.collect()  # engines of earlier tests, which would count as freed by this run
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            run()
    finally:
        gc.enable()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def wide_engine(path, **config):
    return LLMEngine(EngineConfig(model=str(path), device="cpu", num_kvcache_blocks=128, max_num_seqs=64, **config))


@pytest.mark.quick("float32-changes1")
@pytest.mark.parametrize("changes", [{}, {"vocab_size": 4000}, {"intermediate_size": 1024}, {"head_dim": 128}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_predicted_activations_are_near_what_a_step_takes_in_torch(dtype, changes, tmp_path):
    forget_library()  # another test may have loaded it
    path = tiny_model("qwen3", tmp_path / "m", **changes)
    engine = wide_engine(path, dtype=dtype, attention_backend="reference")
    step = StepShape.largest(1024, 64, 512)
    predicted = activation_bytes(engine.spec, step, getattr(torch, dtype).itemsize)
    taken = tensor_peak(lambda: measure_step(engine.runner, step))
    assert taken == pytest.approx(predicted, rel=0.4)


def test_the_largest_step_has_as_many_tokens_and_sequences_as_allowed():
    assert StepShape.largest(2048, 256, 4096).lengths == [8] * 256
    assert StepShape.largest(10, 4, 100).lengths == [3, 3, 2, 2]
    assert StepShape.largest(4, 256, 100).lengths == [1] * 4
    assert StepShape.largest(2048, 2, 100).lengths == [100, 100]


def test_the_host_tells_its_memory_and_who_holds_it():
    total, available = host_memory()
    assert 0 < available < total
    resident = process_memory()
    assert resident is None or 50 * 2**20 < resident < total
    assert all(holder.num_bytes >= 0 and holder.name for holder in other_holders(torch.device("cpu")))


# ---------------------------------------------------------------------- rows


USED = Terms(
    total=100, reserve=10, others=20, runtime=5, weights=30, activations=7, graphs=3, measured=frozenset(TERMS)
)


def fit_of(terms=USED, num_blocks=10, **more):
    """A pool of blocks of 4 tokens, 4 bytes each."""
    config = EngineConfig(device="cpu", attention_backend="reference", block_size=4, gpu_memory_utilization=0.9)
    decision = decide(config, QWEN3_06B, described_host(GIB))
    decision = changed(decision, plan=changed(decision.plan, block_bytes=4))
    return Fit(decision, terms, Pool(num_blocks, "test"), **more)


def test_the_terms_of_the_waterfall_add_up():
    predicted = Terms(total=100, others=20, weights=33, activations=7)
    rows = {row.term: row for row in waterfall(fit_of(forecast=predicted))}
    spent = sum(rows[term].measured_bytes for term in TERMS if term != "total")
    assert rows["total"].measured_bytes - spent == rows["kv_cache"].measured_bytes == USED.kv_cache == 25
    assert rows["pool"].measured_bytes == 40
    assert rows["weights"].difference == pytest.approx(0.1)
    assert rows["others"].predicted_bytes is None  # not predicted, so not shown as if it were
    alone = {row.term: row for row in waterfall(fit_of())}
    assert (alone["weights"].measured_bytes, alone["weights"].predicted_bytes) == (30, None)
    unreported = changed(USED, measured=USED.measured - {"activations"})
    rows = {row.term: row for row in waterfall(fit_of(unreported))}
    assert (rows["activations"].measured_bytes, rows["activations"].predicted_bytes) == (None, 7)  # not told
    assert budget_formula(fit_of()) == (
        "total x utilization - used - (peak - current) - graphs = 100 B x 0.9 - 55 B - 7 B - 3 B = 25 B"
    )


def test_target_rows_invert_the_terms():
    [row] = target_rows(fit_of(), 3, {"p50": 8})
    assert (row.num_blocks, row.kv_cache_bytes, row.fits) == (6, 24, True)
    assert row.device_bytes == 20 + 5 + 30 + 7 + 3 + 24
    assert row.utilization == pytest.approx(0.89)
    [more] = target_rows(fit_of(), 4, {"p50": 8})
    assert not more.fits


def test_concurrency_rows_show_sharing_and_what_is_left_only_if_they_are_known():
    [plain] = concurrency_rows(fit_of(), {"max": 8}, None)
    [shared] = concurrency_rows(fit_of(num_blocks=4), {"max": 8}, 4)
    assert plain.max_concurrency_shared is plain.max_concurrency_left is UNSET
    assert (plain.max_concurrency, shared.max_concurrency, shared.max_concurrency_shared) == (5, 2, 3)
    assert shared.max_concurrency_left == 3  # 25 bytes are six blocks


@pytest.mark.parametrize(
    ("terms", "remedy"),
    [
        ({"others": 95 * GIB, "weights": GIB}, "end other processes"),
        ({"others": 0, "weights": 80 * GIB, "reserve": 25 * GIB}, "--gpu-memory-utilization 0.8"),
        ({"others": 0, "weights": GIB, "activations": 120 * GIB}, "--max-num-batched-tokens"),
        ({"others": 0, "weights": 120 * GIB}, "a larger device"),
    ],
)
def test_without_a_block_it_says_who_holds_the_memory_and_what_to_change(terms, remedy):
    found = Terms(**{"total": 100 * GIB, "activations": GIB, "reserve": 10 * GIB, **terms})
    message, hint = missing_memory(found, GIB)
    assert f"{size(GIB - found.kv_cache)} are missing" in message
    assert remedy in hint


def test_with_a_block_nothing_is_missing():
    assert missing_memory(USED, 25) is None
    assert missing_memory(USED, 26) is not None


def test_cards_are_found_by_any_spelling():
    assert find_card("H200") == CARDS["h200"]
    assert find_card("NVIDIA GeForce RTX 4090") == CARDS["rtx4090"]
    assert find_card("a100") == CARDS["a100-40gb"]  # the smallest of its variants
    assert find_card("A100 80GB") == CARDS["a100-80gb"]
    with pytest.raises(UsageError, match="known: "):
        find_card("a")


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
