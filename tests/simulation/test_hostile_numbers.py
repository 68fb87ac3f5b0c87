"""Numbers in traces that no run has: refused with a clear error, whatever their size."""

import json

import pytest
from cli_harness import pagedcli
from typer.testing import CliRunner

from pagedcli.cli.main import app

HUGE = 10**4000 - 1


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recording")
    (folder / "in.jsonl").write_text(json.dumps({"prompt": "the old fox " * 9, "max_tokens": 3}))
    pagedcli("generate", folder / "in.jsonl", "-o", folder / "out.jsonl", "--record", folder / "run.jsonl",
             "--record-tokens", "--num-kvcache-blocks", "8")  # fmt: skip
    return (folder / "run.jsonl").read_text().splitlines()


def changed(lines, event, field, value):
    """The lines with another value in the first event of this kind: of a list, its first item."""
    lines = list(lines)
    place, found = next((n, e) for n, e in enumerate(map(json.loads, lines)) if e["event"] == event)
    found[field] = [value, *found[field][1:]] if isinstance(found[field], list) else value
    lines[place] = json.dumps(found)
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("event", "field"),
    [
        ("request_added", "token_ids"), ("tokens_sampled", "token_ids"), ("engine_started", "max_num_seqs"),
        ("engine_started", "num_blocks"), ("engine_started", "block_size"), ("request_added", "num_prompt_tokens"),
        ("request_added", "sample_index"), ("request_added", "seq_id"), ("blocks_filled", "hashes"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", [HUGE, -HUGE, 2**62], ids=["huge", "negative", "64 bits"])
def test_a_recording_with_a_number_that_no_run_has_is_refused_or_simulated(recording, tmp_path, event, field, value):
    path = tmp_path / "run.jsonl"
    path.write_text(changed(recording, event, field, value))
    result = CliRunner().invoke(app, ["simulate", str(path), "--no-schedule"])
    assert result.exit_code in (0, 1, 2, 3), result.stderr
    assert "this is a bug" not in result.stderr
