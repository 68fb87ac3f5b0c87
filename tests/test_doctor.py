"""`pagedcli doctor`: passes on a sound machine, and fails where the cache or a backend gives wrong answers."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from pagedcli.attention import select
from pagedcli.attention.reference import ReferenceAttention
from pagedcli.cli.main import app
from pagedcli.kvcache.block_manager import BlockManager


def doctor(*arguments, expect=0):
    result = CliRunner().invoke(app, ["doctor", "--device", "cpu", *arguments])
    assert result.exit_code == expect, f"exit code {result.exit_code}\n{result.stderr}\n{result.stdout}"
    return result


def checks(result):
    return {row["check"]: row for row in json.loads(result.stdout)["self_test"]}


def test_a_sound_machine_passes_every_check():
    result = doctor("--format", "json")
    found = json.loads(result.stdout)
    assert found["passed"]
    assert found["device"] == "cpu"
    rows = checks(result)
    available = [row["backend"] for row in found["backends"] if row["available"]]
    assert list(rows)[3:] == [f"attention {name}" for name in available]
    assert "reference" in available
    assert all(row["reason"] for row in found["backends"] if not row["available"])
    assert "12 of 12 right" in rows["look-ups through prefix hits"]["detail"]
    assert "preemptions" in rows["look-ups through preemption"]["detail"]
    assert all(row["seconds"] > 0 for row in rows.values())
    assert {row["what"]: row["version"] for row in found["versions"]}["torch"] == torch.__version__
    assert found["devices"][0]["total_bytes"] > found["devices"][0]["free_bytes"] > 0
    assert "all " in result.stderr


def test_a_wrong_cache_fails_the_look_ups(monkeypatch):
    """Only the first cached block is given out, again and again. (Swapped ones do no harm: K knows its position.)"""
    sound = BlockManager.lookup

    def lookup(self, seq):
        hit = sound(self, seq)
        return replace(hit, block_ids=hit.block_ids[:1] * len(hit.block_ids))

    monkeypatch.setattr(BlockManager, "lookup", lookup)
    result = doctor("--format", "json", expect=1)
    rows = checks(result)
    assert not rows["look-ups through prefix hits"]["passed"]
    assert "answers are wrong" in rows["look-ups through prefix hits"]["detail"]
    assert rows["look-ups through preemption"]["passed"]  # runs without prefix caching
    assert "checks failed: look-ups through prefix hits" in result.stderr


class ShiftedAttention(ReferenceAttention):
    """Gives every token the result of the one before it."""

    name = "shifted"

    def attend(self, q, k_cache, v_cache, batch, scale):
        return super().attend(q, k_cache, v_cache, batch, scale).roll(1, dims=0)


class BrokenAttention(ReferenceAttention):
    name = "broken"

    def attend(self, q, k_cache, v_cache, batch, scale):
        raise RuntimeError("the driver has gone\nand more")


@pytest.mark.parametrize(
    ("backend", "words"),
    [(ShiftedAttention, "differs from the reference"), (BrokenAttention, "RuntimeError: the driver")],
)
def test_a_wrong_backend_fails_alone(monkeypatch, backend, words):
    module = SimpleNamespace(load=lambda spec: backend())
    monkeypatch.setitem(sys.modules, "pagedcli.attention.wrong", module)
    entry = select.Entry(backend.name, "pagedcli.attention.wrong", ())
    reference = next(entry for entry in select.REGISTRY if entry.name == "reference")
    monkeypatch.setattr(select, "REGISTRY", (entry, reference))
    result = doctor("--format", "json", expect=1)
    rows = checks(result)
    assert [name for name, row in rows.items() if not row["passed"]] == [f"attention {backend.name}"]
    assert rows[f"attention {backend.name}"]["detail"].startswith(words)
    assert "\n" not in rows[f"attention {backend.name}"]["detail"]


def test_a_device_that_is_not_there_is_a_usage_error():
    result = CliRunner().invoke(app, ["doctor", "--device", "cuda:77"])
    assert result.exit_code == 2
    assert "cuda:77" in result.stderr
