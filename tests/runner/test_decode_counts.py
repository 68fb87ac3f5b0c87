"""What a decode step asks of a GPU is what docs/lab/performance.md says: kernels, operations of torch, uploads."""

import re
from pathlib import Path

import pytest
from decode_counts import FAMILIES, KINDS, counts_of_a_family, counts_of_a_step
from interpreter import interpreted
from model_zoo import tiny_model

pytest.importorskip("triton")
DOC = (Path(__file__).parents[2] / "docs/lab/performance.md").read_text()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model("qwen3", tmp_path_factory.mktemp("counts"), num_hidden_layers=2)


@pytest.fixture
def gpu(monkeypatch):
    from pretend_cuda import PretendGpu

    with PretendGpu(runs_kernels=False).install(monkeypatch) as gpu:
        yield gpu


def documented(title, head="| requests"):
    """The table under a heading with this head: {first column: the last number of each other column}."""
    table = DOC.split(f"## {title}\n")[1].split(f"\n{head} ")[1].split("\n\n")[0]
    rows = re.findall(r"^\| ([^|]+) \|(.+)\|$", table, re.M)[1:]
    return {name: [re.findall(r"[\d.]+|yes|no", cell)[-1] for cell in cells.split("|")] for name, cells in rows}


@interpreted
def test_the_counts_of_every_kind_of_request(model, gpu):
    table = documented("What a decode step asks of a GPU")
    assert table.keys() == KINDS.keys()
    for kind, expected in table.items():
        found = counts_of_a_step(gpu, model, kind)
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


@interpreted
def test_the_counts_of_a_layer_with_a_state(tmp_path, gpu):
    table = documented("What a decode step asks of a GPU", "| a layer with a state")
    assert table.keys() == RECURRENT.keys()
    for mechanism, expected in table.items():
        few, more = (
            counts_of_a_step(
                gpu, tiny_model(family, tmp_path / f"{family}-{others}", num_hidden_layers=1 + others, **sizes)
            )
            for others in (1, 2)
            for family, sizes in [RECURRENT[mechanism](others)]
        )
        assert [str(more[name] - few[name]) for name in ("kernels", "operations", "uploads")] == expected, mechanism


@interpreted
@pytest.mark.parametrize("kind", ["repetition penalty", "logit bias", "grammar"])
def test_more_rows_ask_for_no_more(model, gpu, kind):
    few, many = (counts_of_a_step(gpu, model, kind, num_rows=rows) for rows in (2, 7))
    assert few == many


@interpreted
def test_the_counts_of_every_family(gpu, tmp_path):
    def make(family, **options):
        return tiny_model(family, tmp_path / f"{family}-{options['num_hidden_layers']}", **options)

    table = documented("What a layer asks of a GPU", "| family")
    assert table.keys() == FAMILIES.keys()
    for name, expected in table.items():
        assert counts_of_a_family(gpu, make, name) == expected, name


@interpreted
def test_a_kind_of_request_adds_as_much_for_every_family(model, gpu, tmp_path):
    other = tiny_model("gemma3", tmp_path / "gemma3")
    names, added = ("kernels", "operations", "uploads"), []
    for path in (model, other):
        plain, changed = (counts_of_a_step(gpu, path, kind) for kind in ("greedy", "repetition penalty"))
        added.append([changed[name] - plain[name] for name in names])
    assert added[0] == added[1]
