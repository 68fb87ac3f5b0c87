"""Every family gives transformers' tokens natively: in a small pool, whatever the cache, the blocks, the chunks and the
backend, past the windows of those that have some, from the states of those that keep some, and for several samples."""

import random
from dataclasses import dataclass, field

import pytest
from bit_settings import by_default
from harness.engine import make_engine, ragged_prompts, run, transformers_tokens
from model_zoo import (
    COMPOSED_FAMILIES,
    DATA_FAMILIES,
    GEMMA4_FAMILIES,
    NATIVE_FAMILIES,
    RECURRENT_FAMILIES,
    cached_model,
    tiny_model,
)
from msgspec import structs

from pagedcli.attention.select import REGISTRY
from pagedcli.errors import BackendError
from pagedcli.models.reading import read_spec
from pagedcli.models.spec import layer_groups
from pagedcli.runner.cuda_graphs import DecodeGraphs
from pagedcli.sampling_params import SamplingParams

pytestmark = pytest.mark.bits
CPU_BACKENDS = [entry.name for entry in REGISTRY if "cpu" in entry.auto_devices]


def windowed_prompts():
    """Shorter than a window of 24, as long, and longer; two share a beginning longer than the window."""
    rng = random.Random(0)
    shared = [rng.randrange(3, 320) for _ in range(40)]
    tails = [[rng.randrange(3, 320) for _ in range(n)] for n in (5, 24, 25, 70, 9, 31)]
    return [*tails[:4], shared + tails[4], shared + tails[5]]


def tokens_alone(path, prompts, num_new):
    """Greedy tokens of transformers, each prompt alone: padding passes through convolutions with a bias."""
    return [row for prompt in prompts for row in transformers_tokens(path, [prompt], num_new)]


@dataclass
class Kind:
    """Families that are tested alike."""

    models: dict  # name -> (family, what differs from it)
    prompts: list
    num_new: int
    max_model_len: int
    hard: dict  # caching with eviction, preemption and chunks
    pools: dict  # blocks that are too few for all sequences at once, by the number of groups of layers
    easy: list  # each alone
    quick: tuple = ()
    quick_easy: tuple = ()
    expected: object = transformers_tokens
    overrides: dict = field(default_factory=dict)


def same(*families):
    names = (getattr(each, "values", [each])[0] for each in families)  # of a pytest.param
    return {name: (name, {}) for name in names}


WINDOW = {"overrides": {"sliding_window": 24}, "prompts": windowed_prompts(), "max_model_len": 160}
KINDS = {
    "layers": Kind(
        models=same(*NATIVE_FAMILIES, *COMPOSED_FAMILIES, *DATA_FAMILIES), prompts=ragged_prompts(5), num_new=64,
        max_model_len=128, hard={"chunked_prefill_size": 7}, pools=dict.fromkeys(range(1, 9), 14),
        quick=("llama-yarn", "qwen3", "granite", "phi3"), quick_easy=("qwen3",),
        easy=[
            {"enable_prefix_caching": False, "block_size": 1, "num_kvcache_blocks": 200},
            {"block_size": 256},
            {"max_num_seqs": 1},
            {"max_num_seqs": 3, "max_num_batched_tokens": 11, "block_size": 7},
        ],
    ),
    "windows": Kind(  # in all layers or in some, natively in one call or not, and through transformers
        models={
            **same("mistral", "phi3", "gemma2", "granite_swa", "starcoder2", "cohere2", "laguna"),
            **same("olmo3", "granitemoe_swa", "cwm", "mellum", "exaone_moe", "cohere2_moe"),
            "gemma3": ("gemma3", {"num_hidden_layers": 4, "sliding_window_pattern": 3}),
            "gpt_oss": ("gpt_oss", {"num_hidden_layers": 4}),
            "qwen2": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
            "vaultgemma": ("vaultgemma", {"num_hidden_layers": 4}),
            "exaone4": ("exaone4", {"num_hidden_layers": 4, "sliding_window_pattern": 2}),
            "cohere2_moe-rms": ("cohere2_moe-rms", {"num_hidden_layers": 4}),
        },
        **WINDOW, num_new=64, hard={"chunked_prefill_size": 7, "block_size": 4}, pools={1: 20, 2: 50, 3: 70, 4: 90},
        quick=("starcoder2", "laguna"), quick_easy=("mistral", "phi3", "laguna"),
        easy=[
            {"enable_prefix_caching": False, "block_size": 1},
            {"block_size": 16, "chunked_prefill_size": 7},
            {"block_size": 256},
        ],
    ),
    "gemma4": Kind(  # layers that differ in their heads, read the K and V of others, have inputs of their own
        models=same(*GEMMA4_FAMILIES), **WINDOW, num_new=48, hard={"chunked_prefill_size": 7, "block_size": 4},
        pools={2: 60, 3: 96}, quick=("gemma4-31b",),
        easy=[
            {"enable_prefix_caching": False, "block_size": 1},
            {"chunked_prefill_size": 64, "block_size": 16},
            {"block_size": 256},
        ],
    ),
    "states": Kind(  # recurrent layers: few slots, too
        models=same(*RECURRENT_FAMILIES), prompts=ragged_prompts(4), num_new=20, max_model_len=96,
        hard={"chunked_prefill_size": 7, "num_state_slots": 5}, pools={1: 9}, expected=tokens_alone,
        quick=("kimi_linear", "lfm2-bias"), quick_easy=("kimi_linear", "lfm2-bias", "falcon_h1-norm"),
        easy=[
            {"enable_prefix_caching": False, "block_size": 4, "num_kvcache_blocks": 120},
            {"chunked_prefill_size": 64, "checkpoints": "end", "block_size": 4},
            {"max_num_seqs": 1, "checkpoints": "16"},
            {"checkpoints": "none", "attention_backend": "reference"},
        ],
    ),
}  # fmt: skip
CASES = [(name, model) for name, kind in KINDS.items() for model in kind.models]
QUICK = [f"{name}-{model}" for name, kind in KINDS.items() for model in kind.quick]
QUICK_EASY = [f"{name}-{model}" for name, kind in KINDS.items() for model in kind.quick_easy]


class Case:
    """A tiny model and its expected tokens."""

    def __init__(self, name, model, factory):
        self.kind, (family, overrides) = KINDS[name], KINDS[name].models[model]
        overrides = self.kind.overrides | overrides
        make = (lambda: tiny_model(family, factory.mktemp(model), **overrides)) if overrides else None
        self.path = make() if make else cached_model(family, factory)
        self.expected = self.kind.expected(self.path, self.kind.prompts, self.kind.num_new)
        self.greedy = SamplingParams(temperature=0, max_tokens=self.kind.num_new, ignore_eos=True)
        num_groups = len(layer_groups(read_spec(self.path).attention_layers))
        self.hard = {**self.kind.hard, "num_kvcache_blocks": self.kind.pools[num_groups]}

    def engine(self, **config):
        return make_engine(self.path, max_model_len=self.kind.max_model_len, **config)

    def check(self, engine):
        assert run(engine, self.kind.prompts, self.greedy) == self.expected


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request, tmp_path_factory):
    return Case(*request.param, tmp_path_factory)


@pytest.mark.quick(*QUICK)
def test_tokens_equal_transformers_in_a_small_pool(case):
    engine = case.engine(**case.hard)
    assert not engine.spec.is_fallback or case.kind is KINDS["windows"]
    assert engine.plan.in_one_call or not case.kind.hard.get("num_state_slots")
    assert any(mixer.window for mixer in engine.spec.attentions) or not case.kind.overrides
    case.check(engine)
    assert by_default(engine.stats.num_preemptions > 0)
    assert by_default(engine.stats.num_cached_tokens > 0) or case.kind is KINDS["states"]


@pytest.mark.quick(*QUICK_EASY)
def test_tokens_equal_transformers_whatever_cache_chunk_and_block_size(case):
    for variant in case.kind.easy:
        case.check(case.engine(**variant))


@pytest.mark.slow
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_tokens_equal_transformers_through_each_backend(case, backend):
    try:
        engine = case.engine(attention_backend=backend, **case.hard)
    except BackendError as error:
        pytest.skip(error.message)
    case.check(engine)


@pytest.mark.slow
def test_three_samples_of_a_prompt_share_its_blocks_and_state_and_are_the_tokens_of_transformers(case):
    engine = case.engine(**{**case.hard, "num_kvcache_blocks": 3 * case.hard["num_kvcache_blocks"]})
    found = run(engine, case.kind.prompts, structs.replace(case.greedy, n=3))
    assert found == [3 * sample for sample in case.expected]


@pytest.mark.quick("mistral-window")
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in ("ministral3", "glm4", "exaone4", "deepseek_v3", "cohere2_moe", "minimax_m2")),
        ("gemma4-e2b", {}),
        *((name, {"sliding_window": 24}) for name in ("mistral", "gemma2")),
    ],
    ids=lambda value: value if isinstance(value, str) else "window" * bool(value),
)
def test_samples_and_beams_do_not_depend_on_the_pool_or_the_decoder(name, changes, tmp_path):
    path = tiny_model(name, tmp_path, **changes)
    for params in (
        SamplingParams(n=3, temperature=1.0, max_tokens=40, seed=1, ignore_eos=True),
        SamplingParams(beam_width=3, max_tokens=40, ignore_eos=True),
    ):
        variants = [
            {"num_kvcache_blocks": 400, "enable_prefix_caching": False},
            {"num_kvcache_blocks": 150, "chunked_prefill_size": 7},
            {"num_kvcache_blocks": 150, "attention_backend": "reference"},
        ]
        engines = (make_engine(path, block_size=4, max_model_len=160, **each) for each in variants)
        found = [run(engine, KINDS["windows"].prompts[:3], params) for engine in engines]
        assert found[0] == found[1] == found[2]


@pytest.mark.quick("mistral")
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_samples_and_steps_ahead_on_padded_batches_give_the_same_tokens(name, tmp_path):
    path, prompts = tiny_model(name, tmp_path, sliding_window=24), KINDS["windows"].prompts[:3]
    params = SamplingParams(n=3, temperature=1.0, max_tokens=40, seed=1, ignore_eos=True)
    config = {"attention_backend": "reference", "block_size": 4, "max_model_len": 160, "num_kvcache_blocks": 80}
    expected = run(make_engine(path, **config), prompts, params)
    engine = make_engine(path, **config, async_scheduling=True)
    runner = engine.runner
    runner.graphs = DecodeGraphs(
        runner.model, runner.state, runner.parallel, max_model_len=runner.limits.max_model_len, capture=False
    )
    assert run(engine, prompts, params) == expected
