"""Tokens guessed by a model's MTP head: what it computes, that guesses of a head that knows are right, and that none
changes a bit."""

import json
import random
import shutil
import threading
from pathlib import Path

import pytest
import quantized_zoo
import torch
from bit_settings import by_default
from engine_harness import make_engine, ragged_prompts
from gguf_conversions import converted
from model_zoo import cached_model
from mtp_models import HEAD_FAMILIES, ReferenceHead, model_with_head
from oracle import Oracle
from quick import slow_but
from safetensors.torch import load_file, save_file

from pagedcli.bench.calibration import calibration_config
from pagedcli.cli.plan_guesses import guess_note
from pagedcli.config import EngineConfig
from pagedcli.core.drafting import EveryGuess
from pagedcli.core.drafts import HeadDrafter
from pagedcli.errors import ConfigError, ModelError
from pagedcli.models.mlps import Experts, Mlp
from pagedcli.models.reading import native_spec, read_spec
from pagedcli.planning import step_time
from pagedcli.planning.decide import decide
from pagedcli.planning.machine import this_machine
from pagedcli.planning.step_time import StepTime, save_step_time
from pagedcli.records import size
from pagedcli.runner import weight_cache
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams
from pagedcli.trace.check import TraceChecker
from pagedcli.trace.state import PoolState
from pagedcli.views.whole_run import guess_words

ROOMY = {"max_model_len": 128, "num_gpu_blocks_override": 200, "max_num_seqs": 64}
TINY = {"max_model_len": 96, "num_gpu_blocks_override": 9, "chunked_prefill_size": 7, "max_num_seqs": 24}
PROMPTS = ragged_prompts(6, vocab_size=100)
KINDS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=20, logprobs=3),
    SamplingParams(temperature=0.5, seed=1, max_tokens=20, logprobs=4, top_k=30, n=3),
    SamplingParams(temperature=0.3, seed=2, max_tokens=18, logprobs=1, prompt_logprobs=2),
    SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.2, logprobs=2, ignore_eos=True),
    SamplingParams(beam_width=2, n=2, max_tokens=6),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Makes models of a family, each once."""

    def make(family, branches=None):
        path = tmp_path_factory.getbasetemp() / "mtp" / f"{family}-{branches}"
        return path if path.is_dir() else model_with_head(family, path, branches=branches)

    return make


class Pausing(EveryGuess):
    """Runs the head in some steps and not in others."""

    head_pauses = True

    def __init__(self):
        super().__init__(HeadDrafter())
        self.random = random.Random(0)

    def ahead(self, seqs, most):
        return [self.random.randint(0, each) for each in most()] if self.random.random() < 0.7 else None


def outcome(path, *, speculation="mtp", params=KINDS, drafting=None, **config):
    """Tokens, ends and log-probabilities of every sample, and the engine."""
    checker, rebuilt = TraceChecker(), PoolState()

    def emit(event):
        checker.apply(event)
        rebuilt.apply(event)

    engine = make_engine(path, emit=emit, trace_tokens=True, speculation=speculation, seed=5, **config)
    engine.scheduler.drafting = engine.scheduler.drafting if drafting is None else drafting(engine)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, params[i % len(params)])
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
        running = engine.scheduler.running
        engine.cache.check(running)
        assert {seq.seq_id: seq.block_table for seq in running} == {
            seq.seq_id: seq.block_table for seq in rebuilt.seqs.values() if seq.block_table
        }
    checker.result(())
    found = {
        (each.request_id, sample.index): (
            sample.token_ids, sample.finish_reason, [(one.logprob, one.top) for one in sample.logprobs or ()]
        )
        for each in outputs.values()
        for sample in each.samples
    }  # fmt: skip
    return found, engine


@pytest.mark.parametrize("family", slow_but(["qwen3_5"], HEAD_FAMILIES))
def test_guesses_are_those_of_the_published_formula(family, folder):
    path = folder(family)
    reference, prompt = ReferenceHead(path), PROMPTS[3]
    engine = make_engine(path, speculation="mtp", chunked_prefill_size=7, **ROOMY)
    computed, compute = [], engine.model.compute_logits
    engine.model.compute_logits = lambda hidden: computed.append(compute(hidden)) or computed[-1]
    engine.add_request("0", prompt, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    num_guesses, [seq] = [], engine.scheduler.waiting
    while engine.has_unfinished_requests():
        del computed[:]
        engine.step()
        if seq.ahead and seq.finish_reason is None:
            expected = reference.logits(seq.token_ids, len(seq.ahead))
            assert list(seq.ahead) == [each.argmax().item() for each in expected]
            assert torch.allclose(torch.cat(computed[1:]), torch.stack(expected), atol=1e-4)
            num_guesses.append(len(seq.ahead))
    assert len(num_guesses) > 4
    assert max(num_guesses) > 1


@pytest.mark.parametrize("family", slow_but(["qwen3_5"], HEAD_FAMILIES))
def test_after_steps_without_the_head_it_sees_the_tokens_since_then(family, folder):
    path, prompt = folder(family), PROMPTS[3]
    reference, num_compared = ReferenceHead(path), 0
    engine = make_engine(path, speculation="mtp", block_size=1, **{**ROOMY, "num_gpu_blocks_override": 400})
    engine.scheduler.drafting = Pausing()
    engine.add_request("0", prompt, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    [seq] = engine.scheduler.waiting
    while engine.has_unfinished_requests():
        engine.step()
        if seq.ahead and seq.finish_reason is None:
            expected = reference.logits(seq.token_ids, len(seq.ahead), begin=seq.head_begin)
            assert list(seq.ahead) == [each.argmax().item() for each in expected]
            num_compared += seq.head_begin > len(prompt)
    assert num_compared > 5


def test_samples_that_fork_begin_where_the_first_one_does(folder):
    engine = make_engine(folder("glm4-moe"), speculation="mtp", **ROOMY)
    engine.scheduler.drafting.head_pauses = True
    engine.add_request("0", PROMPTS[3], SamplingParams(temperature=1, seed=0, n=3, max_tokens=6, ignore_eos=True))
    begins = set()
    while engine.has_unfinished_requests():
        engine.step()
        begins |= {(seq.sample_index, seq.head_begin) for seq in engine.scheduler.running}
    assert begins == {(0, 0), (1, 0), (2, 0)}


@pytest.mark.bits
@pytest.mark.parametrize("limits", [pytest.param(ROOMY, marks=pytest.mark.slow), TINY], ids=["roomy", "tiny"])
@pytest.mark.parametrize("family", slow_but(["qwen3_5"], HEAD_FAMILIES))
def test_a_head_that_runs_in_some_steps_changes_no_bit(family, limits, folder):
    path = folder(family, 0.1)
    expected, _ = outcome(path, speculation="off", **ROOMY)
    found, engine = outcome(path, drafting=lambda _: Pausing(), **limits)
    assert found == expected
    assert by_default(engine.stats.drafted["mtp"] > 20)


@pytest.mark.parametrize(("branches", "num_tokens"), [(0.0, 30), pytest.param(None, 120, marks=pytest.mark.slow)])
def test_auto_uses_the_head_where_its_guesses_are_right(branches, num_tokens, folder):
    """By a clock on which steps take a second, and the head what it takes. Nothing is guessed from texts."""
    path, now_ns = folder("qwen3_5", branches), [0]

    def on_clock(engine):
        def observe(_):
            now_ns[0] += 10**9

        engine.observe_work, engine.scheduler.drafting.drafter = observe, Oracle({})
        return engine.scheduler.drafting

    params = SamplingParams(temperature=0.0 if branches == 0 else 1.0, max_tokens=num_tokens, ignore_eos=True, seed=1)
    limits = {**ROOMY, "max_model_len": 256, "max_num_seqs": 2}
    expected, without = outcome(path, speculation="off", params=[params], **limits)
    found, engine = outcome(path, speculation="auto", params=[params], drafting=on_clock, clock_ns=lambda: now_ns[0],
                            **limits)  # fmt: skip
    assert found == expected
    stats = engine.stats
    if branches == 0:
        assert stats.accepted["mtp"] > 0.9 * stats.drafted["mtp"] > 60
        assert stats.num_steps < 0.7 * without.stats.num_steps
    else:
        assert 0 < stats.drafted["mtp"] < 0.1 * stats.num_generated_tokens


@pytest.mark.parametrize("family", slow_but(["qwen3_5"], HEAD_FAMILIES))
def test_a_head_that_knows_what_follows_a_token_guesses_it(family, folder):
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    expected, without = outcome(folder(family, 0.0), speculation="off", params=[params], **ROOMY)
    found, engine = outcome(folder(family, 0.0), params=[params], **ROOMY)
    assert found == expected
    stats = engine.stats
    assert stats.drafted["mtp"] == stats.accepted["mtp"] > 100
    assert stats.num_steps < without.stats.num_steps / 2
    assert guess_words(stats).endswith("from the model's MTP head")


def same_as_without(path, limits, **config):
    expected, _ = outcome(path, speculation="off", **ROOMY, **config)
    found, engine = outcome(path, **{**limits, **config})
    assert found == expected
    stats = engine.stats
    assert by_default(0 < stats.accepted["mtp"] < stats.drafted["mtp"])
    assert by_default(limits is ROOMY or stats.num_preemptions > 0)


@pytest.mark.bits
@pytest.mark.parametrize("limits", [pytest.param(ROOMY, marks=pytest.mark.slow), TINY], ids=["roomy", "tiny"])
@pytest.mark.parametrize("family", slow_but(["qwen3_5"], HEAD_FAMILIES))
def test_tokens_and_log_probabilities_are_the_same_bits(family, limits, folder):
    same_as_without(folder(family, 0.1), limits)


SETTINGS = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "blocks of 1": {"block_size": 1, "num_gpu_blocks_override": 2000},
    "blocks of 64": {"block_size": 64},
    "no prefixes": {"enable_prefix_caching": False},
    "few at once": {"max_num_seqs": 2},
}


@pytest.mark.bits
@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v3"])
def test_every_setting_keeps_its_bits(family, setting, folder):
    if (family, setting) == ("deepseek_v3", "int8 cache"):
        pytest.skip("latents are not kept as int8")
    path, limits = folder(family, 0.03), {**ROOMY, **SETTINGS[setting]}
    expected, _ = outcome(path, speculation="off", **limits)
    found, engine = outcome(path, **limits)
    assert found == expected
    assert by_default(engine.stats.accepted["mtp"] > 0)


def decision(path, **config):
    config = EngineConfig(model=str(path), device="cpu", dtype="float32", max_num_seqs=4, max_model_len=64, **config)
    return decide(config, read_spec(path), this_machine())


@pytest.mark.usefixtures("own_panels")
@pytest.mark.parametrize("family", slow_but(["qwen3_5"], HEAD_FAMILIES))
def test_the_head_counts_in_the_plan_only_where_it_guesses(family, folder):
    path = folder(family)
    off, mtp, auto = (decision(path, speculation=each) for each in ("off", "mtp", "auto"))
    assert decision(path, speculation="ngram").footprint == off.footprint
    assert (auto.footprint, auto.plan.block_bytes) == (mtp.footprint, mtp.plan.block_bytes)
    assert auto.time_key == mtp.time_key == off.time_key
    per_block = f"{size(auto.plan.block_bytes)} per block instead of {size(off.plan.block_bytes)}"
    assert auto.plan.notes[-1].endswith(f" of weights, and {per_block}")
    names = load_file(path / "model.safetensors")
    own = [name for name in names if name.startswith(("mtp.", f"model.layers.{off.spec.num_layers}."))]
    tables = ("embed_tokens.weight", "shared_head.head.weight")
    count = sum(names[name].numel() for name in own if not name.endswith(tables))
    assert mtp.footprint.parameters - off.footprint.parameters == count
    assert mtp.plan.block_bytes > off.plan.block_bytes
    assert LLMEngine(mtp.config).plan.weight_bytes == mtp.footprint.num_bytes
    assert calibration_config(mtp).speculation == "off"  # it times steps of known numbers of tokens
    note = guess_note(mtp, None, None, knows_answers=True, forecast=None)
    assert note is not None
    assert note.startswith("speculation: mtp; how many of its guesses are right shows only a run, see --guesses")


def test_auto_does_without_the_head_where_it_would_be_of_no_use(folder, tmp_path, monkeypatch):
    path = folder("qwen3_5")
    assert not decision(path, speculation="auto", prefix_store=str(tmp_path)).spec.uses_head
    monkeypatch.setattr(step_time, "cache_folder", lambda: tmp_path)
    knots = ((1, 0.01), (3, 0.02))  # three rows take twice as long as one
    known = StepTime(prompts=knots, decodes=knots, attended_by_prompts_s=0.0, attended_by_decodes_s=0.0)
    assert decision(path, speculation="auto").spec.uses_head
    save_step_time(decision(path).time_key, known)
    assert not decision(path, speculation="auto").spec.uses_head


def test_a_model_without_a_head_is_refused_by_name(tmp_path_factory):
    path = cached_model("qwen3_5", tmp_path_factory)
    with pytest.raises(ConfigError, match="has no MTP head") as caught:
        decision(path, speculation="mtp")
    assert "--speculation auto" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("changes", "mlp"),
    [
        ({"mtp_layers_block_type": ["attention", "moe"]}, Experts),
        ({"mtp_layers_block_type": ["full_attention", "mlp"]}, Mlp),
        ({"mtp_hybrid_override_pattern": "*E"}, Experts),
        ({"mtp_hybrid_override_pattern": "*-"}, Mlp),
        ({"mtp_hybrid_override_pattern": "E*"}, None),
        ({"mtp_hybrid_override_pattern": "*E*E"}, None),
        ({"num_nextn_predict_layers": 2}, None),
        ({"num_nextn_predict_layers": 0}, None),
    ],
)
def test_a_head_of_nemotron_is_attention_and_an_mlp(changes, mlp):
    config = {
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "n_routed_experts": 8,
        "moe_intermediate_size": 8,
    }
    head = native_spec(Path(), config | {"num_nextn_predict_layers": 1} | changes, "nemotron_h").head
    assert (head is None) == (mlp is None)
    assert head is None or isinstance(head.layer.mlp, mlp)


def test_where_nothing_can_be_guessed_the_head_is_not_loaded(folder):
    path = folder("qwen3_5")
    plan = decision(path, speculation="mtp", attention_backend="sdpa").plan
    assert plan.speculation == "off"
    assert "attention backend sdpa" in plan.no_drafts
    assert plan.block_bytes == decision(path, attention_backend="sdpa").plan.block_bytes


def file_with_head(family, path, target):
    """The GGUF file of a model, as llama.cpp's conversion writes its head: a further layer, two of Nemotron."""
    spec, stored = read_spec(path), load_file(path / "model.safetensors")
    config, head, shift = json.loads((path / "config.json").read_text()), spec.head, float(family.startswith("qwen"))
    number = len(config.get("layers_block_type") or spec.layers)
    norms = {"enorm": head.embedding_norm, "hnorm": head.hidden_norm, "shared_head_norm": head.norm}

    def with_head(tensors, writer):
        writer.add_nextn_predict_layers(1)
        begin, after = f"blk.{number}.", f"blk.{number + 1}."
        of_mlp = {name: tensors.pop(name) for name in list(tensors) if name.startswith(after)}
        if of_mlp:
            writer.kv_data[0][f"{writer.arch}.block_count"].value = number + 1
            of_mlp[f"{after}post_attention_norm.weight"] = of_mlp.pop(f"{after}attn_norm.weight")
        tensors |= {name.replace(after, begin): each for name, each in of_mlp.items()}
        tensors[f"{begin}nextn.eh_proj.weight"] = stored[f"{head.projection}.weight"].numpy()
        parts = {part: stored[f"{name}.weight"].numpy() + shift for part, name in norms.items()}
        tensors |= {f"{begin}nextn.{part}.weight": each for part, each in parts.items()}

    return converted(path / "deep", target, change=with_head)


GGUF_HEADS = ["qwen3_5", "nemotron_h-moe", "glm4-moe", "deepseek_v3"]


@pytest.mark.parametrize("family", GGUF_HEADS)
def test_the_head_of_a_gguf_file_guesses_as_that_of_its_folder(family, folder, tmp_path):
    path = folder(family, 0.1)
    file = file_with_head(family, path, tmp_path / "model.gguf")
    params = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)]
    expected, engine = outcome(path, params=params, **ROOMY)
    found, of_file = outcome(file, params=params, **ROOMY)
    assert {key: each[0] for key, each in found.items()} == {key: each[0] for key, each in expected.items()}
    assert of_file.stats.drafted == engine.stats.drafted
    assert of_file.stats.accepted == engine.stats.accepted
    assert engine.stats.accepted["mtp"] > 0


@pytest.mark.parametrize("family", GGUF_HEADS)
def test_the_head_of_a_gguf_file_is_skipped_and_said_so_where_nothing_is_guessed(family, folder, tmp_path):
    path = folder(family)
    file = file_with_head(family, path, tmp_path / "model.gguf")
    params = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)]
    expected, _ = outcome(path, params=params, speculation="off", **ROOMY)
    found, of_file = outcome(file, params=params, speculation="off", **ROOMY)
    assert {key: each[0] for key, each in found.items()} == {key: each[0] for key, each in expected.items()}
    assert any("tensors of the file are not read, as they predict further" in note for note in of_file.model.notes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, writer: writer.add_moe_latent_size(16), "moe_latent_size is 16, which is not supported"),
        (
            lambda tensors, writer: [tensors.pop(name) for name in list(tensors) if not name.startswith("token")],
            "it has only layers that predict further tokens",
        ),
    ],
)
def test_experts_of_a_narrower_vector_and_a_head_alone_are_refused(change, message, folder, tmp_path):
    def changed(tensors, writer):
        writer.add_nextn_predict_layers(1)
        change(tensors, writer)

    path = converted(folder("nemotron_h-moe") / "deep", tmp_path / "model.gguf", change=changed)
    with pytest.raises(ModelError, match=message):
        read_spec(path)


@pytest.mark.slow
@pytest.mark.parametrize("family", HEAD_FAMILIES)
def test_scores_next_to_guesses_are_the_same_bits(family, folder):
    def found(speculation):
        engine = make_engine(folder(family, 0.1), speculation=speculation, **ROOMY)
        for i, prompt in enumerate(PROMPTS):
            continuations = [prompt[::-1][:5], prompt[:3]] if i % 2 else None
            engine.add_request(str(i), prompt, KINDS[0] if i % 4 else KINDS[1], continuations=continuations)
        outputs = {}
        while engine.has_unfinished_requests():
            outputs |= {each.request_id: (each.scores, each.samples) for each in engine.step()}
        return repr(outputs)

    assert found("mtp") == found("off")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "glm4-moe"])
def test_a_head_may_have_no_weights_on_disk(family, folder, tmp_path):
    shutil.copy(folder(family) / "config.json", tmp_path / "config.json")
    found, engine = outcome(tmp_path, load_format="dummy", **ROOMY)
    assert found == outcome(tmp_path, load_format="dummy", speculation="off", **ROOMY)[0]
    assert engine.stats.drafted["mtp"] > 0


@pytest.mark.slow
def test_the_head_of_a_model_that_sees_images_is_read(folder, tmp_path):
    path = folder("qwen3_5", 0.1)
    config = json.loads((path / "config.json").read_text())
    outer = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    body, within = "model.", "model.language_model."
    tensors = load_file(path / "model.safetensors")
    tensors = {name.replace(body, within) if name.startswith(body) else name: each for name, each in tensors.items()}
    save_file(tensors | {"model.visual.patch.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    found, engine = outcome(tmp_path, **ROOMY)
    expected, of_text = outcome(path, **ROOMY)
    assert found == expected
    assert engine.stats.accepted == of_text.stats.accepted


@pytest.mark.slow
@pytest.mark.usefixtures("own_digests", "library")
def test_kept_weights_and_kept_blocks_give_the_same_bits(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(weight_cache, "weight_folder", lambda: tmp_path / "weights")
    monkeypatch.setattr(weight_cache, "LEAST_S", 0.0)
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=3, ignore_eos=True)

    def found(speculation):
        store = {"prefix_store": str(tmp_path / "store"), "block_size": 4}
        config = EngineConfig(
            model=str(folder("glm4-moe", 0.1)),
            device="cpu",
            dtype="bfloat16",
            speculation=speculation,
            **store,
            **ROOMY,
        )
        engine = LLMEngine(config, with_store=True)
        for thread in threading.enumerate():
            if thread.name == "weight-cache":
                thread.join()
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(str(i), prompt, params)
        outputs = {}
        while engine.has_unfinished_requests():
            outputs |= {each.request_id: repr(each.samples) for each in engine.step()}
        engine.close_store()
        return outputs, engine.stats, [note for note in engine.plan.notes if "are those kept" in note]

    expected, stats, _ = found("off")
    first, second = found("mtp"), found("mtp")
    assert first[0] == second[0] == expected
    assert stats.num_disk_tokens == first[1].num_disk_tokens == 0  # blocks with a head are others
    assert second[1].num_disk_tokens > 0
    assert second[1].accepted["mtp"] > 0
    assert first[2]
    assert second[2]


QUANTIZED = {
    "projection as it is": ("glm4-moe", quantized_zoo.LAYERS),
    "all": ("glm4-moe", (*quantized_zoo.LAYERS, "eh_proj")),
    "Qwen": ("qwen3_5", quantized_zoo.LAYERS),
}


@pytest.mark.usefixtures("own_panels")
@pytest.mark.parametrize("case", slow_but(["all"], QUANTIZED))
def test_quantized_checkpoints_say_which_projection_of_a_head_is_quantized(case, folder, tmp_path, monkeypatch):
    family, layers = QUANTIZED[case]
    monkeypatch.setattr(quantized_zoo, "LAYERS", layers)
    path, _ = quantized_zoo.quantized_twins(folder(family, 0.1), tmp_path, *quantized_zoo.float8("channel"))
    params = [SamplingParams(temperature=0, max_tokens=20, logprobs=2, ignore_eos=True)]
    expected, _ = outcome(path, speculation="off", params=params, **ROOMY)
    found, engine = outcome(path, params=params, **ROOMY)
    assert found == expected
    assert engine.stats.accepted["mtp"] > 0
    assert engine.plan.weight_bytes == engine.decision.footprint.num_bytes
