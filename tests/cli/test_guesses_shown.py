"""What a run with guesses says of them: its summary, JSON, metrics, explain and the panel, each by the same counts."""

import json
import re

import pytest
from cli_harness import FAST, pagedcli

from pagedcli.errors import ConfigError
from pagedcli.events import DRAFT_WORDS
from pagedcli.llm_keywords import engine_config
from pagedcli.show.panels import work_lines
from pagedcli.trace.files import TraceReader
from pagedcli.trace.fold import fold
from pagedcli.views.moment import Moment


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Equal stories one by one, of which each is guessed from the one before, and a regex that forces tokens."""
    folder = tmp_path_factory.mktemp("guesses")
    rows = [{"id": f"story-{number}", "prompt": "The fox", "max_tokens": 24} for number in range(2)]
    rows.append({"id": "forced", "prompt": "The", "regex": "(abcdefgh){3}", "max_tokens": 40})
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = pagedcli(
        "generate", folder / "in.jsonl", "-o", folder / "out.jsonl", "--speculation", "ngram", "--max-num-seqs", 1,
        "--all",
        "--record", folder / "trace.jsonl", "--metrics", folder / "run.prom", "--summary-json", folder / "summary.json",
    )  # fmt: skip
    return folder, json.loads((folder / "summary.json").read_text()), result.stderr


def test_json_has_the_guesses_of_each_source(run):
    _, summary, _ = run
    guesses = summary["guesses"]
    assert {"answers", "grammar"} <= guesses.keys()
    assert guesses["grammar"]["accepted"] == guesses["grammar"]["drafted"] > 0
    assert summary["drafted_tokens"] == sum(each["drafted"] for each in guesses.values())
    assert summary["again_tokens"] == 0  # the model has no recurrent state
    assert summary["accepted_tokens"] == sum(each["accepted"] for each in guesses.values())


def test_metrics_are_labelled_by_source(run):
    folder, summary, _ = run
    text = (folder / "run.prom").read_text()
    for name, key in (("drafted_tokens_total", "drafted"), ("accepted_tokens_total", "accepted")):
        assert f"# TYPE pagedcli_{name} counter" in text
        found = dict(re.findall(rf'^pagedcli_{name}{{source="(\w+)"}} (\d+)$', text, re.MULTILINE))
        assert {source: int(count) for source, count in found.items()} == {
            source: each[key] for source, each in summary["guesses"].items()
        }


def test_the_summary_says_how_many_were_right_and_where_they_came_from(run):
    _, summary, said = run
    [line] = re.findall(r"^  speculation +(.*)$", said, re.MULTILINE)
    assert line.startswith(f"{summary['accepted_tokens']} of {summary['drafted_tokens']} draft tokens accepted: ")
    for source, each in summary["guesses"].items():
        assert f"{each['accepted']} of {each['drafted']} from {DRAFT_WORDS[source]}" in line
    assert "speculation: ngram, at most 8 tokens at a time" in said


def test_explain_says_it_of_the_run_and_of_each_request(run):
    folder, summary, _ = run
    counts = [summary["drafted_tokens"], summary["accepted_tokens"]]
    told = " ".join(pagedcli("explain", folder / "trace.jsonl").stdout.split())
    assert "{1} of {0} draft tokens accepted.".format(*counts) in told
    found = []
    for name in ("story-0", "story-1", "forced"):
        told = pagedcli("explain", folder / "trace.jsonl", "--request", name).stdout
        found += re.findall(r"^(\d+) of (\d+) draft tokens? accepted\.$", told, re.MULTILINE)
    assert [sum(map(int, column)) for column in zip(*found, strict=True)] == counts[::-1]


def test_the_panel_of_the_application_counts_them(run):
    folder, _, said = run
    moment = Moment()
    fold(TraceReader(folder / "trace.jsonl"), moment)
    [line] = re.findall(r"^  speculation +(.*)$", said, re.MULTILINE)
    assert f"drafts    {line}" in work_lines(moment).plain


def test_a_run_that_cannot_guess_says_why(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "The fox"}\n')
    flags = ("--speculation", "ngram", "--attention-backend", "sdpa")
    said = pagedcli("generate", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", *FAST, *flags).stderr
    assert "speculation: off, as no equal bits are promised with attention backend sdpa" in said


@pytest.mark.parametrize("value", ["mtp", "auto"])
def test_ways_to_guess_of_earlier_versions_are_refused_in_a_sentence(value):
    with pytest.raises(ConfigError, match=f"^speculation {value}: removed; use off or ngram$"):
        engine_config("builtin", {"speculation": value})
