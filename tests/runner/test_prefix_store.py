"""The prefix store: what is read back has the bits that would be computed, and whatever is damaged, foreign, stale or
private is no hit."""

import random
import shutil
from itertools import islice

import msgspec
import pytest
import torch
from harness.core import check_events
from harness.engine import outputs_of, ragged_prompts, run
from model_zoo import cached_model, tiny_model
from power_loss import left_behind

from pagedcli import content_files
from pagedcli.config import EngineConfig
from pagedcli.core.store import StoredNote
from pagedcli.errors import ConfigError, TraceError
from pagedcli.events import BlocksRestored, PrefixLookedUp
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.runner.store import store_identity
from pagedcli.sampling_params import SamplingParams
from pagedcli.trace.check import TraceChecker

pytestmark = pytest.mark.usefixtures("own_digests")
SCORED = SamplingParams(max_tokens=6, temperature=0, logprobs=3, ignore_eos=True)
ROOMY = {"num_kvcache_blocks": 400, "block_size": 4, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return cached_model("qwen3", tmp_path_factory)


def engine_with(path, folder=None, *, emit=None, **config):
    checker = TraceChecker()
    config = EngineConfig(
        model=str(path), device="cpu", prefix_store=folder and str(folder), **{"dtype": "float32", **ROOMY, **config}
    )
    engine = LLMEngine(config, emit=emit or checker, trace_tokens=True, with_store=True)
    engine.checker = checker
    return engine


def outcome(engine, prompts, params=SCORED, **request):
    """Tokens and log-probabilities of every prompt, checked after each step; the law of hits at the end."""
    found = outputs_of(engine, prompts, params, **request)
    facts = engine.close_store()
    stats = engine.stats
    if not stats.num_preemptions:  # found in memory, found on disk, and computed, are what was asked for
        generated = stats.num_generated_tokens - len(prompts)  # the last token of a sequence is not computed
        in_memory = stats.num_cached_tokens - stats.num_disk_tokens
        assert in_memory + stats.num_disk_tokens + stats.num_computed_tokens == stats.num_prompt_tokens + generated
    assert 0 <= stats.num_disk_tokens <= stats.num_cached_tokens
    if facts is not None:
        assert sum(each.num_disk_tokens or 0 for each in found) == stats.num_disk_tokens
    if engine.checker.state.engine is not None:
        engine.checker.result(())
    samples = [sample for each in found for sample in each.samples]
    scores = [[(each.token_id, each.logprob, each.top) for each in sample.logprobs or ()] for sample in samples]
    return [(sample.token_ids, *each) for sample, each in zip(samples, scores, strict=True)], facts, stats


MODELS = {
    "dense": ("qwen3", {}),
    "window": ("mistral", {}),
    "window in some layers": ("gemma3", {"num_hidden_layers": 4, "sliding_window_pattern": 3}),
    "experts": ("glm4-moe", {}),
    "latents": ("deepseek_v3", {}),
    "gated delta": ("qwen3_5", {}),
    "mamba 2": ("nemotron_h", {}),
    "short convolution": ("lfm2", {}),
}
RECURRENT = ("gated delta", "mamba 2", "short convolution")
SETTINGS = {
    "plain": {},
    "int8": {"kv_cache_dtype": "int8"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "blocks of 1": {"block_size": 1},
    "blocks of 16, chunks": {"block_size": 16, "chunked_prefill_size": 7},
    "a step ahead": {"async_scheduling": True},
    "quantized": {"quantization": "int8"},
    "next-use": {"eviction": "next-use"},
    "checkpoints": {"checkpoints": "8", "num_state_slots": 40},
}
QUICK = [("dense", name) for name in SETTINGS if "float16" not in name] + [("window in some layers", "plain")]
QUICK += [(model, "checkpoints") for model in RECURRENT] + [("gated delta", "plain"), ("gated delta", "int8")]
ALL = [(model, name) for model in MODELS for name in SETTINGS if model in RECURRENT or name != "checkpoints"]
CASES = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in ALL]


@pytest.mark.slow_cases("*-snapshots")
@pytest.mark.parametrize(("model", "setting"), CASES)
def test_restored_blocks_have_the_bits_of_computed_ones(model, setting, tmp_path_factory, tmp_path):
    family, changes = MODELS[model]
    path = tiny_model(family, tmp_path / "model", **changes) if changes else cached_model(family, tmp_path_factory)
    prompts, settings = ragged_prompts(vocab_size=100), SETTINGS[setting]
    expected, none, _ = outcome(engine_with(path, **settings), prompts)
    assert none is None
    first, written, _ = outcome(engine_with(path, tmp_path / "store", **settings), prompts)
    second, read, stats = outcome(engine_with(path, tmp_path / "store", **settings), prompts)
    assert first == second == expected
    assert written.num_written_blocks
    assert read.num_read_blocks
    assert stats.num_disk_tokens
    assert not (read.not_used)
    assert not (written.not_kept)
    if model in RECURRENT:
        assert written.num_written_states
        assert read.num_read_states


@pytest.mark.parametrize("eviction", ["lru", "prefix-lru", "next-use"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 14))])
def test_small_pools_preempt_and_restore(path, tmp_path, eviction, seed):
    """40 random runs, in which blocks are evicted, preempted and read again."""
    prompts = ragged_prompts(vocab_size=100, seed=seed)
    small = {"num_kvcache_blocks": 24, "eviction": eviction, "max_num_seqs": 4}
    expected, *_ = outcome(engine_with(path), prompts)
    outcome(engine_with(path, tmp_path), prompts)
    for _ in range(2):
        found, read, stats = outcome(engine_with(path, tmp_path, **small), prompts)
        assert found == expected
        assert stats.num_evictions
        assert read.num_read_blocks


def test_every_changed_field_of_a_restored_block_is_found(path, tmp_path):
    """Traces in which blocks come from elsewhere, are others, or count for more than they saved."""
    prompts, events = ragged_prompts(vocab_size=100), []
    outcome(engine_with(path, tmp_path), prompts)
    engine = engine_with(path, tmp_path, emit=events.append)
    outcome(engine, prompts)
    check_events(events)
    places = [i for i, event in enumerate(events) if isinstance(event, BlocksRestored)]
    changes = [(i, name) for i in places for name in BlocksRestored.__struct_fields__]
    changes += [(i, "disk_tokens") for i, event in enumerate(events) if isinstance(event, PrefixLookedUp)]
    assert len(changes) >= 20
    for place, name in changes:
        value = getattr(events[place], name)
        other = (*value[:-1], (value[-1] or 0) + 1) if isinstance(value, tuple) else value + 1
        changed = msgspec.structs.replace(events[place], **{name: other})
        with pytest.raises(TraceError):
            check_events([*events[:place], changed, *events[place + 1 :]])


def test_private_requests_neither_read_nor_write(path, tmp_path):
    prompts, scored = (
        ragged_prompts(vocab_size=100),
        SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1, n=2),
    )
    _, facts, _ = outcome(engine_with(path, tmp_path), prompts, is_private=True, cache_salt="alone")
    assert facts.num_written_blocks == 0
    engine = engine_with(path, tmp_path, max_num_seqs=2)
    run(engine, prompts, scored)
    assert engine.close_store().num_written_blocks == 0
    outcome(engine_with(path, tmp_path), prompts)
    assert outcome(engine_with(path, tmp_path), prompts, is_private=True)[1].num_read_blocks == 0


QUICK_BYTES = [(model, "plain", 1) for model in ("dense", "window in some layers", "gated delta")]
MORE_BYTES = {(*case, threads) for case in ALL for threads in (1, 2)} - set(QUICK_BYTES)


@pytest.mark.parametrize(
    ("model", "setting", "threads"),
    [*QUICK_BYTES, *(pytest.param(*case, marks=pytest.mark.slow) for case in sorted(MORE_BYTES))],
)
def test_blocks_and_states_have_the_same_bytes_in_any_company(model, setting, threads, tmp_path_factory, tmp_path):
    """Computed next to seven others, and two at once by another number of threads."""
    family, changes = MODELS[model]
    path = tiny_model(family, tmp_path / "model", **changes) if changes else cached_model(family, tmp_path_factory)
    slots = {"num_state_slots": 40} if model in RECURRENT else {}
    for name, num_threads, num_seqs in (("eight", 1, 8), ("two", threads, 2)):
        torch.set_num_threads(num_threads)
        try:
            engine = engine_with(path, tmp_path / name, **{**slots, **SETTINGS[setting], "max_num_seqs": num_seqs})
            outcome(engine, ragged_prompts(vocab_size=100))
        finally:
            torch.set_num_threads(1)
    eight, two = (checksums(tmp_path / name) for name in ("eight", "two"))
    both = eight.keys() & two.keys()
    assert {kind for kind, _ in both} == {"blocks", *(("state",) if model in RECURRENT else ())}
    assert len(both) > len(eight) / 2
    assert all(eight[each] == two[each] for each in both)


def checksums(folder):
    """Of each block and state in a store, by its kind and the hash of its chain."""
    files, _ = content_files.ContentFolder(folder).files()
    notes = [StoredNote.of(file) for file in files]
    return {
        (note.kind, block_hash): checksum
        for file, note in zip(files, notes, strict=True)
        for block_hash, checksum in zip(note.hashes, file.head.checksums, strict=True)
    }


# ---------------------------------------------------------------------- identity


@pytest.fixture(scope="module")
def stored(path, tmp_path_factory):
    """A folder with the blocks of some prompts."""
    folder = tmp_path_factory.mktemp("stored")
    outcome(engine_with(path, folder), ragged_prompts(vocab_size=100))
    return folder


def test_each_part_of_the_identity_alone_is_a_miss_with_its_name(path, stored, monkeypatch):
    engine = engine_with(path)
    parts = store_identity(engine.config, engine.decision, engine.model_path)
    assert len(parts) == 16
    for name in parts:
        monkeypatch.setattr("pagedcli.runner.store.store_identity", lambda *_: {**parts, name: "another"})  # noqa: B023
        store = engine_with(path, stored).cache.store
        assert (store.facts.num_found_blocks, list(store.facts.not_used)) == (0, [f"other {name}"])


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"block_size": 8}, ["block size"]),
        ({"kv_cache_dtype": "int8"}, ["KV dtype", "groups of layers"]),
        ({"quantization": "int8"}, ["quantization"]),
        ({"dtype": "bfloat16"}, ["dtype", "KV dtype", "groups of layers"]),
        ({"load_format": "dummy"}, ["load format", "model files"]),
    ],
)
def test_other_settings_find_nothing_and_say_why(path, stored, changes, names):
    config = {"model": str(path), "dtype": "float32", "device": "cpu", "prefix_store": str(stored), **ROOMY, **changes}
    facts = LLMEngine(EngineConfig(**config), with_store=True).close_store()
    [why] = facts.not_used
    assert (facts.num_found_blocks, sorted(why.removeprefix("other ").split(", "))) == (0, sorted(names))


def test_one_byte_in_the_middle_of_a_tensor_is_another_model(path, stored, tmp_path):
    shutil.copytree(path, tmp_path / "other")
    [weights] = (tmp_path / "other").glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    store = engine_with(tmp_path / "other", stored).cache.store
    assert (store.facts.num_found_blocks, list(store.facts.not_used)) == (0, ["other model files"])


@pytest.mark.slow_cases("qwen3-config2-*")
@pytest.mark.parametrize(
    ("family", "config", "why"),
    [
        ("qwen3", {"attention_backend": "sdpa"}, "attention backend sdpa"),
        ("qwen3", {"enable_prefix_caching": False}, "prefix caching is off"),
        ("qwen3", {"tensor_parallel_size": 2}, "it keeps the blocks of one rank"),
        ("gpt2", {}, "GPT2"),
    ],
)
def test_where_no_bits_are_promised_it_is_refused_by_name(family, config, why, tmp_path_factory, tmp_path):
    with pytest.raises(ConfigError, match=f"prefix_store cannot be used: .*{why}"):
        engine_with(cached_model(family, tmp_path_factory), tmp_path / "store", **config)
    assert not (tmp_path / "store").exists()


def test_a_bound_without_a_store_is_refused(path):
    with pytest.raises(ConfigError, match="prefix_store_size is for a prefix store"):
        engine_with(path, prefix_store_size=1000)


# ---------------------------------------------------------------------- damages


def damaged(folder, kind, rng):
    """Damage one file of a store."""
    files = sorted(folder.glob("*.kept"))
    path = rng.choice(files)
    content = bytearray(path.read_bytes())
    if kind == "byte":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del content[rng.randrange(len(content)) :]
    elif kind == "zeros":
        start = rng.randrange(len(content))
        content[start : start + 4096] = bytes(len(content[start : start + 4096]))
    elif kind == "swap":
        content = rng.choice(files).read_bytes()
    path.write_bytes(content)
    if kind == "gone":
        path.unlink()


KINDS = ("byte", "cut", "zeros", "swap", "gone")


@pytest.mark.quick("gone-after the start")
@pytest.mark.parametrize("late", [False, True], ids=["before the start", "after the start"])
@pytest.mark.parametrize("kind", KINDS)
def test_damages_are_misses_and_never_an_answer(path, stored, tmp_path, store_files_of, kind, late):
    store_files_of(10_000)
    prompts, rng = ragged_prompts(vocab_size=100), random.Random(f"{kind} {late}")
    expected, *_ = outcome(engine_with(path), prompts)
    outcome(engine_with(path, tmp_path / "whole"), prompts)
    for turn in range(4):
        folder = tmp_path / str(turn)
        shutil.copytree(tmp_path / "whole", folder)
        if not late:
            damaged(folder, kind, rng)
        engine = engine_with(path, folder)
        if late:
            damaged(folder, kind, rng)
        assert outcome(engine, prompts)[0] == expected


def test_a_run_says_why_a_file_with_a_damaged_head_was_of_no_use(path, stored, tmp_path):
    shutil.copytree(stored, tmp_path / "store")
    [file] = (tmp_path / "store").iterdir()
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    facts = engine_with(path, tmp_path / "store").close_store()
    assert dict(facts.not_used) == {"not a file of this program": 1}


def test_written_is_what_is_there_at_the_end(path, tmp_path, store_files_of):
    store_files_of(10_000)
    _, facts, _ = outcome(engine_with(path, tmp_path, prefix_store_size=25_000), ragged_prompts(vocab_size=100))
    files, _ = content_files.ContentFolder(tmp_path).files()
    assert facts.num_written_blocks == sum(len(file.head.sizes) for file in files) > 0
    assert facts.num_written_bytes == sum(file.num_bytes for file in files)
    assert facts.not_kept


def test_the_ceiling_of_a_run_counts_what_was_read_from_disk(path, stored):
    prompts = ragged_prompts(vocab_size=100)
    _, _, cold = outcome(engine_with(path), prompts)
    _, _, warm = outcome(engine_with(path, stored), prompts)
    assert warm.num_disk_tokens
    assert warm.num_ideal_tokens >= max(warm.num_cached_tokens, cold.num_ideal_tokens + 1)
    assert warm.longest_shared == cold.longest_shared


def test_a_bound_that_is_too_small_changes_no_row(path, tmp_path):
    prompts = ragged_prompts(vocab_size=100)
    expected, *_ = outcome(engine_with(path), prompts)
    for num_bytes in (1, 5_000, 60_000):
        found, facts, _ = outcome(engine_with(path, tmp_path, prefix_store_size=num_bytes), prompts)
        assert found == expected
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= num_bytes
    assert facts.num_written_blocks or facts.not_kept


@pytest.mark.parametrize(
    ("family", "file_bytes", "bound", "every"),
    [
        ("qwen3", 2**26, None, 9),
        pytest.param("qwen3", 2**26, None, 1, marks=pytest.mark.slow),
        pytest.param("qwen3", 10_000, None, 1, marks=pytest.mark.slow),
        pytest.param("qwen3", 10_000, 25_000, 1, marks=pytest.mark.slow),  # files are removed, too
        pytest.param("qwen3_5", 10_000, None, 1, marks=pytest.mark.slow),  # blocks and states
    ],
)
def test_after_a_power_cut_no_row_is_wrong_or_lost(
    family, file_bytes, bound, every, tmp_path_factory, tmp_path, store_files_of
):
    """Whatever it leaves of unsynced files and of their names: no folder is above its bound, and each file is whole or
    not there."""
    path, folder = cached_model(family, tmp_path_factory), tmp_path / "store"
    prompts = ragged_prompts(vocab_size=100)
    folder.mkdir()
    store_files_of(file_bytes)
    expected, *_ = outcome(engine_with(path), prompts)
    engine = engine_with(path, folder, prefix_store_size=bound)
    num_read, numbers = 0, set()
    for number, _, _ in islice(left_behind(folder, lambda: outcome(engine, prompts)), 0, None, every):
        rows, facts, _ = outcome(engine_with(path, folder, prefix_store_size=bound), prompts)
        assert rows == expected
        assert bound is None or sum(each.stat().st_size for each in folder.iterdir()) <= bound
        assert not facts.not_used
        num_read += facts.num_read_blocks
        numbers.add(number)
    assert max(numbers) >= (2 if file_bytes == 2**26 else 6)  # of each file the content and the name
    assert num_read
