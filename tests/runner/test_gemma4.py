"""Gemma 4: layers that differ in their heads, that read the K and V of others, and that have inputs of their own (its
tokens are those of transformers by test_families)."""

import json
import re

import pytest
import torch
from harness.engine import (
    loaded,
    make_engine,
    paged_logits,
    ragged_sequences,
    run,
    transformers_logits,
    transformers_tokens,
)
from model_zoo import nested, tiny_model
from test_families import KINDS

from pagedcli.config import EngineConfig
from pagedcli.errors import BackendError
from pagedcli.models.reading import read_spec
from pagedcli.planning.decide import decide
from pagedcli.planning.machine import described_gpu
from pagedcli.sampling_params import SamplingParams

PUBLISHED = {
    "head_dim": 256,
    "global_head_dim": 512,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 40,  # of 512 or 1,024, so that sequences grow past it
}
PROMPTS, NUM_NEW = KINDS["gemma4"].prompts, 48
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
HARD = {"chunked_prefill_size": 7, "block_size": 4, "max_model_len": 160}


@pytest.mark.quick("gemma4-12b")
@pytest.mark.parametrize("family", ["gemma4-e2b", "gemma4-12b"])
def test_heads_and_rotations_of_published_models_equal_transformers(family, tmp_path):
    """256 and 512 elements: errors against float64 are those of transformers, in float32 and in bfloat16."""
    path = tiny_model(family, tmp_path, **PUBLISHED, **({"num_kv_shared_layers": 2} if "e2b" in family else {}))
    rope = json.loads((path / "config.json").read_text())["rope_parameters"]
    assert (rope["full_attention"]["partial_rotary_factor"], rope["full_attention"]["rope_theta"]) == (0.25, 1e6)
    spec = read_spec(path)
    assert {mixer.head_dim for mixer in spec.attentions} == {256, 512}
    sequences, num_prompt = ragged_sequences()
    options = {"num_prompt": num_prompt, "block_size": 16, "chunk": 32}
    exact = torch.cat(transformers_logits(path, sequences, dtype=torch.float64))
    for dtype in (torch.float32, torch.bfloat16):
        model, backend = loaded(path, dtype=dtype, block_size=16)
        ours = torch.cat(paged_logits(model, backend, sequences, dtype=dtype, **options))
        theirs = torch.cat(transformers_logits(path, sequences, dtype=dtype))
        errors = [float((each.double() - exact).square().mean().sqrt()) for each in (ours, theirs)]
        assert 0 < errors[0] < 2 * errors[1]
        assert errors[0] < (1e-3 if dtype == torch.float32 else 0.2) * float(exact.std())


def test_layers_that_read_others_hold_no_blocks(tmp_path):
    path = tiny_model("gemma4-e2b", tmp_path, sliding_window=24)
    engine = make_engine(path, **HARD)
    assert [group.layers for group in engine.plan.limits.groups] == [(0, 1), (2,)], "of six layers"
    assert [group.heads for group in engine.plan.limits.groups] == [(1, 32), (1, 64)]
    # K and V, 4 tokens, float32: two layers of one head of 32, or one of 64, in the same bytes
    assert engine.plan.block_bytes == 2 * 4 * 64 * 4 == engine.runner.kv_cache[:, :, 0].nbytes
    # a prompt again: all its full blocks hit that are still held, 17 of one group and those of the last window
    prompt = PROMPTS[3]
    for cached in (0, len(prompt) // 4 * 4):
        before = engine.stats.num_cached_tokens
        run(engine, [prompt], SamplingParams(temperature=0, max_tokens=1))
        assert engine.stats.num_cached_tokens - before == min(cached, (len(prompt) - 1) // 4 * 4)


@pytest.mark.bits
def test_text_of_a_multimodal_checkpoint(tmp_path):
    path = tiny_model("gemma4-e2b", tmp_path / "text", sliding_window=24)
    others = {
        f"model.{name}.weight": torch.ones(2) for name in ("vision_tower.patch_embedder", "embed_audio.projection")
    }
    # published ones have K and V of all layers
    others["model.language_model.layers.5.self_attn.k_proj.weight"] = torch.ones(64, 64)
    names = "gemma4", "Gemma4ForConditionalGeneration"
    engine = make_engine(nested(path, tmp_path / "whole", *names, others=others), block_size=16, max_model_len=160)
    assert any("2 tensors of the checkpoint are not read" in note for note in engine.plan.notes)
    assert run(engine, PROMPTS[:2], GREEDY) == transformers_tokens(path, PROMPTS[:2], NUM_NEW)


def test_on_cuda_it_runs_on_triton_and_backends_that_cannot_run_it_say_so(tmp_path):
    path = tiny_model("gemma4-26b", tmp_path, sliding_window=24)
    spec = read_spec(path)
    gpu = described_gpu(80 * 2**30, capability=(9, 0))
    plan = decide(EngineConfig(model=str(path), device="cuda", dtype="bfloat16"), spec, gpu).plan
    assert (plan.backend, plan.refused, plan.no_graphs) == ("triton", (), None)
    config = EngineConfig(model=str(path), device="cuda", dtype="bfloat16", attention_backend="flash", block_size=256)
    with pytest.raises(
        BackendError, match=re.escape("layers that differ in their heads (4 over 1 of 64, 4 over 2 of 32)")
    ):
        decide(config, spec, gpu)
