"""To add a model family, touch its class in models/families/ and its line in the registry there.

All commands then plan, list and run it."""

import json
import shutil

import pytest
from cli_harness import FAST, pagedcli, rows_of
from model_zoo import tiny_model

from pagedcli.models.families.dense import SmolLM3
from pagedcli.models.families.registry import FAMILIES, Family
from pagedcli.models.hub import resolve_model


class Lucky(SmolLM3):
    num_key_value_heads = 2
    head_dim = 32
    rms_norm_eps = 1e-5
    rope_theta = 1e4
    max_position_embeddings = 512
    tie_word_embeddings = False
    bos_token_id, eos_token_id = 1, 2
    biases = ("attention_bias", "attention_bias", False)
    qk_norm = "heads"


ENTRY = Family("LuckyForCausalLM", Lucky)
LINES = [{"prompt": "Once upon a time"}, {"prompt": "The fox", "n": 2, "temperature": 1}, {"prompt": "Hello"}]


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    """A model of an existing family, and the same weights as one of the new family."""
    builtin, folder = resolve_model("builtin"), tmp_path_factory.mktemp("twins")
    vocab_size = json.loads((builtin / "config.json").read_text())["vocab_size"]
    ropes = {"no_rope_layers": [1, 1], "rms_norm_eps": 1e-5}
    known = tiny_model("qwen3", folder / "known", vocab_size=vocab_size, rms_norm_eps=1e-5)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(builtin / name, known)
    new = shutil.copytree(known, folder / "new")
    config = json.loads((known / "config.json").read_text())
    config |= {"model_type": "lucky", "architectures": [ENTRY.architecture], **ropes}
    (new / "config.json").write_text(json.dumps(config))
    return known, new


@pytest.fixture(autouse=True)
def added(monkeypatch):
    monkeypatch.setitem(FAMILIES, "lucky", ENTRY)


@pytest.mark.quick("sdpa")
@pytest.mark.parametrize("backend", ["auto", "sdpa"])  # both decoders
def test_generate_runs_it(twins, tmp_path, backend):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    outputs = []
    for path in twins:
        out = tmp_path / f"{path.name}.jsonl"
        flags = ("-m", path, "-o", out, *FAST, "--attention-backend", backend, "--seed", "3", "--output-token-ids")
        pagedcli("generate", tmp_path / "in.jsonl", *flags)
        outputs.append([row.get("outputs") or row["token_ids"] for row in rows_of(out)])
    assert outputs[0] == outputs[1]


def test_plan_and_profile_memory_count_it_from_config_json_alone(twins, tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    known, new = twins
    found = []
    for path in (known, new):
        (tmp_path / path.name).mkdir()
        config = shutil.copy(path / "config.json", tmp_path / path.name)
        profile = json.loads(pagedcli("profile-memory", "-m", config, "--gpu", "H100", "--format", "json").stdout)
        flags = ("-m", path, "--no-calibrate", "--format", "json")
        plan = json.loads(pagedcli("plan", tmp_path / "in.jsonl", *flags).stdout)
        found.append((profile, plan))
    for document in found[0] + found[1]:
        for name in ("model", "config", "input"):
            document.pop(name, None)
    assert json.dumps(found[0]).replace(str(known), str(new)) == json.dumps(found[1])


def test_a_damaged_folder_is_refused_with_its_name(twins, tmp_path):
    shutil.copytree(twins[1], tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"hidden_act": "tan"}))
    said = pagedcli("generate", "-", "-m", tmp_path / "model", stdin="", expect=1).stderr
    assert "hidden_act 'tan' is not supported for lucky" in said
