"""Guessed tokens on the native CPU path: the same bits with them and without, whatever is guessed, in every pool."""

import pytest
from bit_settings import by_default
from harness.core import EveryGuess, Oracle, finish
from harness.engine import make_engine, ragged_prompts
from model_zoo import cached_model, tiny_model

from pagedcli.config import EngineConfig
from pagedcli.models.formats import FORMATS
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams
from pagedcli.trace.check import TraceChecker

KINDS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=20, logprobs=3),
    SamplingParams(temperature=0.9, seed=1, max_tokens=22, logprobs=20, top_k=30, top_p=0.8, n=2),
    SamplingParams(temperature=1.1, seed=2, max_tokens=18, logprobs=1, prompt_logprobs=2, min_p=0.05),
    SamplingParams(temperature=1.0, seed=3, max_tokens=20, min_tokens=9, stop_token_ids=list(range(60))),
    SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.2, logprobs=2, ignore_eos=True),
    SamplingParams(beam_width=2, n=2, max_tokens=6),
    SamplingParams(temperature=0.8, seed=4, max_tokens=20, logit_bias={7: 2.0}, logprobs=2, presence_penalty=0.7, n=2),
]
PROMPTS = ragged_prompts(16, vocab_size=100)
ROOMY = {"max_model_len": 128, "num_kvcache_blocks": 200, "max_num_seqs": 64}
TINY = {"max_model_len": 96, "num_kvcache_blocks": 10, "chunked_prefill_size": 7, "max_num_seqs": 24}


def stop_twice():
    """A stop checker whose string is any token that comes twice in a row."""
    seen = []

    def check(token):
        seen.append(token)
        return "twice" if seen[-1:] == seen[-2:-1] else None

    return check


class NoneTwice:
    """A grammar of 14 tokens below 64, of which none is the one before; one below 8 forces the next one."""

    def __init__(self, last=None, left=14):
        self.last, self.left = last, left

    @property
    def allowed_tokens(self):
        if self.last is None:
            return (2**64 - 1).to_bytes(16, "little")
        bits = 1 << self.last + 9 if self.last < 8 else (2**64 - 1) ^ (1 << self.last)
        return bits.to_bytes(16, "little")

    def accept(self, token_id):
        assert int.from_bytes(self.allowed_tokens, "little") >> token_id & 1, "the grammar forbids it"
        self.last, self.left = token_id, self.left - 1

    def copy(self):
        return NoneTwice(self.last, self.left)

    @classmethod
    def find_allowed(cls, guides):
        return [not guide.left for guide in guides]


def outcome(path, *, drafter=None, speculation="ngram", **config):
    """Tokens, ends and log-probabilities of every sample, and the engine."""
    checker = TraceChecker()
    config = {"dtype": "float32", "seed": 5, **config}
    engine = LLMEngine(
        EngineConfig(model=str(path), device="cpu", speculation=speculation, **config),
        emit=checker, trace_tokens=True,
    )  # fmt: skip
    if drafter is not None:
        engine.scheduler.drafting = EveryGuess(drafter)
    for i, prompt in enumerate(PROMPTS):
        stops, guide = stop_twice if i % 8 in (1, 3) else None, NoneTwice if i % 8 in (0, 2) and i > 7 else None
        engine.add_request(str(i), prompt, KINDS[i % len(KINDS)], make_stop_checker=stops, make_guide=guide)
    outputs = finish(engine)
    checker.result(())
    found = {(each.request_id, sample.index): facts(sample) for each in outputs.values() for sample in each.samples}
    return found, engine


def facts(sample):
    logprobs = [(each.token_id, each.logprob, each.top) for each in sample.logprobs or ()]
    return sample.token_ids, sample.finish_reason, sample.stop_reason, logprobs


def same_with_drafts(path, wrongs, *, pools=(ROOMY,), **config):
    expected, engine = outcome(path, speculation="off", **ROOMY, **config)
    assert engine.stats.num_drafted_tokens == 0
    answers = {key: each[0] for key, each in expected.items()}
    for limits in pools:
        for wrong in wrongs:
            oracle = Oracle(answers, wrong=wrong, ragged=0 < wrong < 1)
            found, engine = outcome(path, drafter=oracle, **limits, **config)
            assert found == expected, (wrong, limits)
            stats = engine.stats
            assert by_default(stats.num_drafted_tokens > 100 or limits is not ROOMY)
            assert by_default(wrong or stats.num_accepted_tokens > 0.8 * stats.num_drafted_tokens)
            assert by_default(limits is ROOMY or stats.num_preemptions > 0)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return cached_model("qwen3", tmp_path_factory)


@pytest.mark.bits
@pytest.mark.parametrize(
    ("family", "limits"), [("qwen3", ROOMY), ("qwen3", TINY), ("qwen3_5", ROOMY)], ids=["roomy", "tiny", "state"]
)
def test_tokens_and_log_probabilities_are_the_same_bits(family, limits, tmp_path_factory):
    same_with_drafts(cached_model(family, tmp_path_factory), [0.3], pools=(limits,))


MODELS = {
    "dense": ("qwen3", {}),
    "window": ("mistral", {"sliding_window": 20}),
    "window in some layers": ("gemma3", {"num_hidden_layers": 4, "sliding_window_pattern": 3, "sliding_window": 20}),
    "experts": ("qwen3-moe", {}),
    "latents": ("deepseek_v3", {}),
    "attention beside an MLP": ("cohere2", {"num_hidden_layers": 2}),
    "gated delta": ("qwen3_5", {}),
    "gated delta, interleaved, with experts": ("qwen3_next", {}),
    "Mamba-2": ("bamba", {}),
    "Mamba-2 alone in its layers": ("nemotron_h", {}),
    "Mamba-2 beside attention": ("falcon_h1", {}),
    "short convolution": ("lfm2", {}),
    "short convolution and windows": ("lfm3", {}),
}


@pytest.mark.bits
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_kind_of_model_keeps_its_bits(model, tmp_path):
    family, changes = MODELS[model]
    tiny = {**TINY, "num_kvcache_blocks": 20} if "some layers" in model else TINY
    same_with_drafts(tiny_model(family, tmp_path, **changes), [0.0, 0.3, 0.7, 1.0], pools=(ROOMY, tiny))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FORMATS if name is not None])
def test_every_weight_format_keeps_its_bits(name, tmp_path):
    path = tiny_model("qwen3", tmp_path, hidden_size=128, intermediate_size=256, head_dim=32)
    same_with_drafts(path, [0.0, 0.5], quantization=name)


@pytest.mark.parametrize("max_num_seqs", [2, 5])
def test_few_sequences_have_room_for_the_rows_of_a_draft(path, max_num_seqs):
    expected, _ = outcome(path, speculation="off", **ROOMY)
    answers = {key: each[0] for key, each in expected.items()}
    found, engine = outcome(path, drafter=Oracle(answers), **{**ROOMY, "max_num_seqs": max_num_seqs})
    assert found == expected
    assert engine.stats.num_accepted_tokens > 50


def test_drafts_from_the_text_are_taken_where_it_repeats_itself(path):
    expected, _ = outcome(path, speculation="off", **ROOMY)
    found, engine = outcome(path, **{**ROOMY, "max_num_seqs": 5})
    assert found == expected
    assert engine.stats.num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"attention_backend": "sdpa"}, "no equal bits are promised with attention backend sdpa"),
        ({"async_scheduling": True}, "async_scheduling launches a step before"),
    ],
)
def test_where_nothing_is_guessed_the_plan_says_why(path, config, why):
    plan = make_engine(path, speculation="ngram", num_kvcache_blocks=20, **config).plan
    assert plan.speculation == "off"
    assert why in plan.no_drafts
