"""Quantized GGUF files on the native decoder, whose products keep the numbers of the file."""

import pytest
import torch
from gguf_files import gguf_twins
from harness.engine import loaded, logits_of, planned_and_made
from model_zoo import tiny_model

from pagedcli.errors import ConfigError, ModelError
from pagedcli.layers.parallel import ParallelContext
from pagedcli.models.gguf.types import GgufQuantization
from pagedcli.models.loading import weight_format
from pagedcli.models.parameters import decoder_parameters
from pagedcli.models.reading import read_spec
from pagedcli.models.sharding import shard_parameters
from pagedcli.models.weights import open_weights

CPU = torch.device("cpu")
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def medium(name):
    """As in a Q4_K_M file: some of the most sensitive tensors in Q6_K."""
    sensitive = ("token_embd", "output.", "blk.1.attn_v", "blk.1.ffn_down")
    return "Q6_K" if name.startswith(sensitive) else "Q4_K"


def dynamic(name):
    """Any tensor may have any type, also gate and up."""
    kinds = {"attn_q": "Q5_K", "attn_k": "F16", "attn_v": "Q8_0", "ffn_gate": "Q3_K", "ffn_up": "IQ4_XS"}
    return next((kind for part, kind in kinds.items() if part in name), "Q4_0")


PLAIN_YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128},
    "truncate": False,  # as gpt-oss has it
}
# family, what differs in its config, types
FILES = {
    "medium": ("qwen3", {}, medium),
    "tied": ("llama", {}, medium),
    "dynamic": ("qwen3", {}, dynamic),
    "biased": ("qwen2", {}, lambda name: "IQ4_NL"),
    "experts": ("qwen3-moe", {"mlp_only_layers": [], "moe_intermediate_size": 256, "num_experts": 4}, medium),
    "fused": ("phi3", {}, lambda name: "Q4_0"),
    "gpt-oss": (
        "gpt_oss",
        {"num_local_experts": 3, "rope_parameters": PLAIN_YARN},
        lambda name: "MXFP4" if "exps" in name else "F16",
    ),
}


@pytest.fixture(scope="module", params=FILES)
def twins(request, tmp_path_factory):
    family, sizes, type_of = FILES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    source = tiny_model(family, folder / "source", **WIDE | sizes)
    return gguf_twins(source, folder, type_of=type_of)


@pytest.mark.slow_cases("experts", "gpt-oss")
def test_logits_are_those_of_the_numbers_and_on_the_cpu_kernels_but_for_the_rounding_of_activations(twins, library):
    path, plain = twins
    options = (plain, "reference"), (path, "reference"), (path, "cpu")
    exact, widened, ours = (torch.cat(logits_of(*each, chunk=None)) for each in options)
    torch.testing.assert_close(widened, exact, atol=2e-4, rtol=2e-4)
    assert (ours - exact).norm() < 0.06 * exact.norm()
    assert any("activations are rounded to 8 bits in groups of 32" in note for note in loaded(path)[0].notes)


def test_the_note_names_what_is_widened():
    types = {"token_embd.weight": "Q6_K", "blk.0.ffn_gate_inp.weight": "F32"}
    same = types | {"blk.0.ffn_gate.weight": "Q4_K", "blk.0.ffn_up.weight": "Q4_K"}
    mixed = {"output.weight": "Q6_K", "blk.1.ffn_gate_exps.weight": "Q5_K", "blk.1.ffn_up_exps.weight": "Q4_K"}
    assert GgufQuantization(same, dict.fromkeys(same, 1)).note("float32", "cpu") == (
        "weights are GGUF: Q4_K 67 %, Q6_K 33 %, kept so; activations are rounded to 8 bits in groups of 32"
    )
    found = GgufQuantization(same | mixed, dict.fromkeys(same | mixed, 1)).note("bfloat16", "cpu")
    assert "kept so apart from the embedding, gate and up of 1 layer, widened to bfloat16; activations" in found


@pytest.mark.usefixtures("own_panels")
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_plan_counts_the_weights_as_the_engine_keeps_them(twins, backend):
    decision, engine = planned_and_made(twins[0], attention_backend=backend)
    assert decision.terms.weights == pytest.approx(engine.plan.weight_bytes, rel=0.01)
    assert decision.plan.notes[-1] in engine.model.notes


def test_ranks_get_parts_between_blocks_and_a_split_within_one_is_refused(tmp_path):
    source = tiny_model("qwen3", tmp_path / "source", **WIDE)
    path, _ = gguf_twins(source, tmp_path, type_of=lambda name: "Q8_0")
    spec = read_spec(path)
    parameters = decoder_parameters(spec, weight_format(None, spec))

    def tensors(parameters):
        return open_weights(path, "auto", 0, spec).load(
            parameters, ignored=frozenset(), dtype=torch.float32, device=CPU
        )

    whole = tensors(parameters)
    parts = [tensors(shard_parameters(parameters, spec, ParallelContext(rank, 2))) for rank in (0, 1)]
    for key, dim in {"layers.0.qkv[1].weight": 0, "layers.1.down[0].weight": 1, "lm_head[0].weight": 0}.items():
        assert torch.equal(torch.cat([part[key] for part in parts], dim), whole[key])
    path, _ = gguf_twins(source, tmp_path, type_of=lambda name: "Q4_K")
    stored = decoder_parameters(read_spec(path), weight_format(None, read_spec(path)))
    with pytest.raises(ConfigError, match="groups of 256"):
        shard_parameters(stored, spec, ParallelContext(0, 2))


def test_a_quantized_file_is_not_rounded_again_and_has_no_dummy_weights(tmp_path):
    source = tiny_model("qwen3", tmp_path / "source", **WIDE)
    path, _ = gguf_twins(source, tmp_path, type_of=lambda name: "Q8_0")
    with pytest.raises(ConfigError, match="quantized already: GGUF: Q8_0 100 %"):
        weight_format("int8", read_spec(path))
    with pytest.raises(ModelError, match="one file with its weights"):
        open_weights(path, "dummy", 0, read_spec(path))
