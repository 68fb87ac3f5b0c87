"""What a decode step asks of a GPU is what docs/lab/performance.md says: kernels, operations of torch, uploads."""

import re
from pathlib import Path

import pytest
from harness.engine import FirstEight
from interpreter import interpreted
from model_zoo import tiny_model

from pagedcli.config import EngineConfig
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams

pytest.importorskip("triton")
DOC = (Path(__file__).parents[2] / "docs/lab/performance.md").read_text()
NUM_ROWS = 4
KINDS = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.8},
    "top-k 20, top-p 0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "repetition penalty": {"temperature": 0.7, "repetition_penalty": 1.05, "top_p": 0.8, "top_k": 20},
    "presence and frequency penalty": {"temperature": 0, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "logit bias": {"temperature": 0, "logit_bias": {7: 2.0}},
    "min tokens": {"temperature": 0, "min_tokens": 30, "ignore_eos": False},
    "grammar": {"temperature": 0},
}


# as docs/lab/performance.md names them -> (family of model_zoo, what differs from it)
FAMILIES = {
    "Llama, Mistral": ("llama", {}),
    "Qwen3": ("qwen3", {}),
    "Gemma 2": ("gemma2", {}),
    "Gemma 3": ("gemma3", {}),
    "OLMo2": ("olmo2", {}),
    "Phi-3": ("phi3", {}),
    "Phi-4-mini": ("phi3-longrope", {}),
    "Granite": ("granite", {}),
    "Qwen3-MoE": ("qwen3-moe", {"mlp_only_layers": []}),
    "Qwen2-MoE": ("qwen2-moe", {}),
    "gpt-oss": ("gpt_oss", {}),
    "DeepSeek-V3": ("deepseek_v3", {"first_k_dense_replace": 0}),
    "Gemma 4 12B, 31B": ("gemma4-31b", {}),
    "Gemma 4 E2B, E4B": ("gemma4-e2b", {"num_kv_shared_layers": 0}),
    "Gemma 4 26B-A4B": ("gemma4-26b", {}),
}


def counts_of_a_family(gpu, make_model, name):
    """Kernels and operations of one layer and those of the rest of a step, as text, and uploads of the step."""
    family, given = FAMILIES[name]
    one, two = (
        counts_of_a_step(
            gpu, make_model(family, num_hidden_layers=layers, **options), enforce_eager=True, dtype="bfloat16"
        )
        for layers in (1, 2)
        for options in [given | ({"layer_types": ["full_attention"] * layers} if "gemma4" in family else {})]
    )
    layer = {name: two[name] - one[name] for name in ("kernels", "operations")}
    rest = [one[name] - layer[name] for name in layer]
    return [*(str(number) for number in (*layer.values(), *rest)), str(one["uploads"])]


def counts_of_a_step(gpu, path, kind="greedy", *, num_rows=NUM_ROWS, **options):
    """Kernels, operations, uploads and steps ahead of one decode step of so many such requests."""
    config = {"max_num_seqs": num_rows, "num_kvcache_blocks": 90, "max_model_len": 128}
    engine = LLMEngine(EngineConfig(model=str(path), device="cuda", **{"dtype": "float32", **config, **options}))
    options = {"ignore_eos": True, "max_tokens": 30, "seed": 1, **KINDS[kind]}
    for number in range(num_rows):
        make = FirstEight if kind == "grammar" else None
        engine.add_request(str(number), [5 + number, 6, 7], SamplingParams(**options), make_guide=make)
    for _ in range(6):
        engine.step()
    before, ahead = gpu.counts.copy(), engine.num_steps_ahead
    engine.step()
    found = gpu.counts - before
    return {**{name: found[name] for name in ("kernels", "operations", "uploads")},
            "ahead": engine.num_steps_ahead - ahead}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model("qwen3", tmp_path_factory.mktemp("counts"), num_hidden_layers=2)


def documented(title, head="| requests"):
    """The table under a heading with this head: {first column: the last number of each other column}."""
    table = DOC.split(f"## {title}\n")[1].split(f"\n{head} ")[1].split("\n\n")[0]
    rows = re.findall(r"^\| ([^|]+) \|(.+)\|$", table, re.M)[1:]
    return {name: [re.findall(r"[\d.]+|yes|no", cell)[-1] for cell in cells.split("|")] for name, cells in rows}


@interpreted
def test_the_counts_of_every_kind_of_request(model, idle_gpu):
    table = documented("What a decode step asks of a GPU")
    assert table.keys() == KINDS.keys()
    for kind, expected in table.items():
        found = counts_of_a_step(idle_gpu, model, kind)
        counts = [str(found[name]) for name in ("kernels", "operations", "uploads")]
        assert [*counts, "yes" if found["ahead"] else "no"] == expected, kind


# a model whose first layer attends, of so many others
RECURRENT = {
    "gated delta net": lambda others: ("qwen3_5", {"layer_types": ["full_attention", *["linear_attention"] * others]}),
    "Kimi delta attention": lambda others: (
        "kimi_linear",
        {
            "layer_types": ["full_attention", *["linear_attention"] * others],
            "mlp_layer_types": ["dense"] * (1 + others),
        },
    ),
    "Mamba-2": lambda others: ("bamba", {"attn_layer_indices": [0]}),
    "short convolution": lambda others: ("lfm2", {"layer_types": ["full_attention", *["conv"] * others]}),
}


@pytest.mark.slow
@interpreted
def test_the_counts_of_a_layer_with_a_state(tmp_path, idle_gpu):
    table = documented("What a decode step asks of a GPU", "| a layer with a state")
    assert table.keys() == RECURRENT.keys()
    for mechanism, expected in table.items():
        few, more = (
            counts_of_a_step(
                idle_gpu, tiny_model(family, tmp_path / f"{family}-{others}", num_hidden_layers=1 + others, **sizes)
            )
            for others in (1, 2)
            for family, sizes in [RECURRENT[mechanism](others)]
        )
        assert [str(more[name] - few[name]) for name in ("kernels", "operations", "uploads")] == expected, mechanism


@interpreted
@pytest.mark.parametrize("kind", ["repetition penalty", "logit bias", "grammar"])
def test_more_rows_ask_for_no_more(model, idle_gpu, kind):
    few, many = (counts_of_a_step(idle_gpu, model, kind, num_rows=rows) for rows in (2, 7))
    assert few == many


@pytest.mark.slow
@interpreted
def test_the_counts_of_every_family(idle_gpu, tmp_path):
    def make(family, **options):
        return tiny_model(family, tmp_path / f"{family}-{options['num_hidden_layers']}", **options)

    table = documented("What a layer asks of a GPU", "| family")
    assert table.keys() == FAMILIES.keys()
    for name, expected in table.items():
        assert counts_of_a_family(idle_gpu, make, name) == expected, name


@interpreted
def test_a_kind_of_request_adds_as_much_for_every_family(model, idle_gpu, tmp_path):
    other = tiny_model("gemma3", tmp_path / "gemma3")
    names, added = ("kernels", "operations", "uploads"), []
    for path in (model, other):
        plain, changed = (counts_of_a_step(idle_gpu, path, kind) for kind in ("greedy", "repetition penalty"))
        added.append([changed[name] - plain[name] for name in names])
    assert added[0] == added[1]
