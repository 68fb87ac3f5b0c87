"""To add an attention backend, touch its module and one line in attention/select.py."""

import json

import pytest
import torch
from cli_harness import FAST, PROMPTS, pagedcli, rows_of
from harness.engine import make_engine, ragged_prompts, run
from model_zoo import cached_model

from pagedcli.attention import reference, select
from pagedcli.errors import BackendError
from pagedcli.sampling_params import SamplingParams


class Abacus(reference.ReferenceAttention):
    """The reference under another name, for blocks of even size."""

    name = "abacus"
    capabilities = reference.ReferenceAttention.capabilities
    num_attended = 0

    def attend(self, *given):
        Abacus.num_attended += 1
        return super().attend(*given)


def check(spec):
    if spec.device.type != "cpu":
        raise BackendError(f"beads do not fit on {spec.device}")
    return Abacus


@pytest.fixture(autouse=True)
def added(add_backend):
    """The new module and its line in the registry, first choice on a CPU."""
    add_backend("abacus", "cpu", check=check, load=lambda spec: check(spec)())


def test_generate_takes_it_first_and_by_name(tmp_path):
    rows = []
    for flags in ((), ("--attention-backend", "abacus"), ("--attention-backend", "reference")):
        out = tmp_path / f"{len(rows)}.jsonl"
        pagedcli("generate", "-", "-o", out, *FAST, "--dtype", "float32", *flags, stdin=PROMPTS)
        rows.append([row["text"] for row in rows_of(out)])
    assert rows[0] == rows[1] == rows[2]


def test_the_engine_runs_every_kind_of_request_with_it(tmp_path_factory):
    path = cached_model("qwen3", tmp_path_factory)
    kinds = [
        SamplingParams(temperature=0, max_tokens=4),
        SamplingParams(temperature=1, seed=1, max_tokens=4, n=2),
        SamplingParams(beam_width=2, max_tokens=4),
    ]
    prompts = ragged_prompts(6)
    engine = make_engine(path, block_size=4, chunked_prefill_size=7)
    assert engine.plan.backend == "abacus"
    expected = make_engine(path, attention_backend="reference")
    assert run(engine, prompts, kinds * 2) == run(expected, prompts, kinds * 2)


@pytest.mark.long
def test_doctor_lists_and_checks_it():
    found = json.loads(pagedcli("doctor", "--device", "cpu", "--format", "json").stdout)
    assert found["backends"][0] == {"backend": "abacus", "available": True, "reason": None}
    assert any(row["check"] == "attention abacus" and row["passed"] for row in found["self_test"])


def test_profile_memory_runs_with_it():
    before = Abacus.num_attended
    profile = json.loads(pagedcli("profile-memory", "--device", "cpu", "--format", "json").stdout)
    assert Abacus.num_attended > before
    assert profile


def test_what_it_refuses_is_said_and_an_unknown_name_lists_it():
    spec = select.AttentionSpec(torch.device("cuda"), torch.float32, 16, 4, 2, 64)
    with pytest.raises(BackendError, match="beads do not fit on cuda"):
        select.choose_backend("abacus", spec, is_here=False)
    said = pagedcli("generate", "-", "--attention-backend", "abakus", stdin=PROMPTS, expect=2).stderr
    assert "abacus" in said
