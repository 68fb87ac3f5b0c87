"""To add an MLP with experts under other names, with other routing, touch its family's class alone."""

import json
import re
import shutil

import pytest
from cli_harness import pagedcli
from harness.engine import make_engine, ragged_prompts, run
from model_zoo import cached_model
from safetensors.torch import load_file, save_file

from pagedcli.models.families.mixtures import Mixtral
from pagedcli.models.families.registry import FAMILIES, Family
from pagedcli.models.mlps import ExpertNames
from pagedcli.sampling_params import SamplingParams


class Crowd(Mixtral):
    renamed = Mixtral.renamed | {"crowd_size": "num_experts", "crowd_called": "num_experts_per_tok"}
    expert_names = ExpertNames(block="crowd", router="chooser", projections=("first", "third", "second"))


NAMES = {
    "block_sparse_moe.gate": "crowd.chooser",
    "block_sparse_moe": "crowd",
    "w1": "first",
    "w2": "second",
    "w3": "third",
}


@pytest.fixture
def twins(tmp_path, tmp_path_factory, monkeypatch):
    """A mixture of experts, and the same weights under the new names."""
    monkeypatch.setitem(FAMILIES, "crowd", Family("CrowdForCausalLM", Crowd))
    known = cached_model("mixtral", tmp_path_factory)
    new = shutil.copytree(known, tmp_path / "new")
    pattern = re.compile("|".join(map(re.escape, NAMES)))
    tensors = load_file(known / "model.safetensors")
    renamed = {pattern.sub(lambda found: NAMES[found[0]], name): tensor for name, tensor in tensors.items()}
    assert any(".crowd.experts.0.first." in name for name in renamed)
    save_file(renamed, new / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((known / "config.json").read_text())
    config |= {"model_type": "crowd", "architectures": ["CrowdForCausalLM"]}
    config |= {"crowd_size": config.pop("num_local_experts"), "crowd_called": config.pop("num_experts_per_tok")}
    (new / "config.json").write_text(json.dumps(config))
    return known, new


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_both_decoders_route_as_its_class_says(twins, backend):
    prompts, params = ragged_prompts(4), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    known, new = (run(make_engine(path, attention_backend=backend), prompts, params) for path in twins)
    assert new == known


def test_profile_memory_counts_them(twins):
    found = []
    for path in twins:
        profile = json.loads(pagedcli("profile-memory", "-m", path, "--gpu", "H100", "--format", "json").stdout)
        found.append(json.dumps({name: value for name, value in profile.items() if name not in ("model", "config")}))
    assert (
        found[0].replace("mixtral", "crowd").replace("Mixtral", "Crowd").replace(str(twins[0]), str(twins[1]))
        == found[1]
    )
