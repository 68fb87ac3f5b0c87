"""Besides rows: CSV tables, metrics and summary for machines; and the order in which rows are served."""

import csv
import io
import json
import random

import pytest
from cli_harness import FAST, pagedcli, rows_of, write_rows
from harness.engine import Harness, encode, without_run_dependent_fields

from pagedcli.batch.run import PrefixWindow
from pagedcli.batch.sinks import StreamSink
from pagedcli.batch.stats import LogHistogram, SeenIds
from pagedcli.config import EngineConfig


@pytest.fixture
def prompts(tmp_path):
    """Plain rows, one of two samples, an OpenAI line and a bad one."""
    body = {"messages": [{"role": "user", "content": "Hello!"}]}
    lines = [
        {"prompt": "Once upon a time", "id": 7},
        {"prompt": 'The "fox",', "n": 2, "temperature": 1.0},
        {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body},
        {"prompt": 5},
    ]
    return write_rows(tmp_path / "in.jsonl", lines)


# ---------------------------------------------------------------------- CSV


def test_csv_has_the_rows_of_jsonl_one_line_per_sample(prompts, tmp_path):
    for name in ("out.jsonl", "out.csv"):
        pagedcli("generate", prompts, "-o", tmp_path / name, *FAST, "--logprobs", 1, "--output-token-ids", expect=3)
    with (tmp_path / "out.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    plain, two, chat, bad = rows_of(tmp_path / "out.jsonl")
    assert [line["text"] for line in table] == [
        plain["text"],
        *(sample["text"] for sample in two["outputs"]),
        chat["response"]["body"]["choices"][0]["message"]["content"],
        "",
    ]
    assert [line["sample"] for line in table] == ["0", "0", "1", "0", ""]
    assert [line["id"] for line in table] == ["7", "", "", "c", ""]
    assert table[0]["prompt_tokens"] == str(plain["usage"]["prompt_tokens"])
    assert table[4]["error_code"] == bad["error"]["code"]
    for column in ("prompt_tokens", "completion_tokens"):
        total = sum(row["usage"][column] for row in (plain, two, chat["response"]["body"]))
        assert sum(int(line[column] or 0) for line in table) == total
    for column in ("logprobs", "token_ids"):
        assert json.loads(table[0][column]) == plain[column]


def test_an_empty_table_has_its_header(tmp_path):
    (tmp_path / "in.jsonl").write_text("")
    pagedcli("generate", tmp_path / "in.jsonl", "-o", tmp_path / "out.csv", *FAST)
    assert (tmp_path / "out.csv").read_text().startswith("index,text\n")


# ---------------------------------------------------------------------- metrics and summary


def test_metrics_and_summary_say_what_the_rows_say(prompts, tmp_path):
    files = ("--metrics", tmp_path / "run.prom", "--summary-json", tmp_path / "run.json")
    pagedcli("generate", prompts, "-o", tmp_path / "out.jsonl", *FAST, *files, expect=3)
    lines = (tmp_path / "run.prom").read_text().splitlines()
    metrics = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    summary = json.loads((tmp_path / "run.json").read_text())
    rows = rows_of(tmp_path / "out.jsonl")
    generated = sum((row.get("response", {}).get("body", row) or row)["usage"]["completion_tokens"] for row in rows[:3])
    assert metrics['pagedcli_rows_total{status="ok"}'] == "3"
    assert metrics['pagedcli_rows_total{status="failed"}'] == "1"
    assert metrics['pagedcli_row_errors_total{code="invalid_request"}'] == "1"
    assert int(metrics["pagedcli_generated_tokens_total"]) == summary["generated_tokens"] == generated
    assert float(metrics['pagedcli_time_to_first_token_seconds{quantile="0.5"}']) > 0
    assert 0 <= summary["queued_s"]["p50"] <= summary["ttft_s"]["p50"]
    assert (summary["outcome"], summary["rows"], summary["rows_failed"]) == ("complete", 4, 1)
    assert summary["error_codes"] == {"invalid_request": 1}
    typed = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    assert all(any(name.startswith(each) for each in typed) for name in metrics)
    assert not list(tmp_path.glob("*.tmp"))


def test_metrics_have_the_names_of_opentelemetry(prompts, tmp_path):
    """Counters are those of our own names; buckets grow up to the number of rows, and quantiles lie where they say."""
    pagedcli("generate", prompts, "-o", tmp_path / "out.jsonl", *FAST, "--metrics", tmp_path / "run.prom", expect=3)
    lines = (tmp_path / "run.prom").read_text().splitlines()
    metrics = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    model = EngineConfig().model
    labels = f'{{gen_ai_operation_name="text_completion",gen_ai_request_model="{model}"}}'
    for otel, ours in (
        ("gen_ai_usage_input_tokens_total", "pagedcli_prompt_tokens_total"),
        ("gen_ai_usage_cache_read_input_tokens_total", "pagedcli_prompt_tokens_cached_total"),
        ("gen_ai_usage_output_tokens_total", "pagedcli_generated_tokens_total"),
    ):
        assert metrics[otel + labels] == metrics[ours]
    for name, ours in (
        ("gen_ai_server_time_to_first_token_seconds", "pagedcli_time_to_first_token_seconds"),
        ("gen_ai_server_time_per_output_token_seconds", "pagedcli_time_per_output_token_seconds"),
        ("gen_ai_server_request_duration_seconds", None),
    ):
        found = {key.split('le="')[1][:-2]: int(value) for key, value in metrics.items() if key.startswith(name + "_b")}
        assert list(found.values()) == sorted(found.values())
        assert found["+Inf"] == int(metrics[f"{name}_count{labels}"]) == 3
        assert 0 < float(metrics[f"{name}_sum{labels}"]) < 600
        if ours is not None:
            median = float(metrics[ours + '{quantile="0.5"}'])
            assert all(count >= 2 for bound, count in found.items() if float(bound) > 1.02 * median)
            assert all(count < 2 for bound, count in found.items() if float(bound) < median / 1.02)
    assert "# TYPE gen_ai_server_time_to_first_token_seconds histogram" in lines
    assert any(
        line.startswith("# HELP gen_ai_usage_cache_read_input_tokens_total gen_ai.usage.cache_read.") for line in lines
    )


def test_percentiles_are_exact_to_a_percent_without_keeping_the_values():
    rng = random.Random(0)
    values = sorted(rng.lognormvariate(0, 2) for _ in range(20_000))
    histogram = LogHistogram()
    assert histogram.percentile(50) is None
    for value in values:
        histogram.add(value)
    for percent in (1, 50, 95, 99):
        exact = values[int(len(values) * percent / 100) - 1]
        assert histogram.percentile(percent) == pytest.approx(exact, rel=0.011)
    assert len(histogram._counts) < 1500


def test_a_bucket_counts_the_values_up_to_its_bound():
    histogram = LogHistogram()
    for value in (0.001, 0.01, 0.011, 0.02, 5.0):
        histogram.add(value)
    assert [histogram.num_up_to(bound) for bound in (0.0005, 0.001, 0.005, 0.01, 0.015, 0.02, 1, 10)] == [
        0, 1, 1, 2, 3, 4, 4, 5
    ]  # fmt: skip
    assert histogram.total == pytest.approx(5.042, rel=0.01)


def test_ids_are_new_once_and_text_and_numbers_are_different_ids():
    seen = SeenIds()
    ids = [*range(5000), *map(str, range(5000))]
    assert all(seen.add(row_id) for row_id in ids)
    assert not any(seen.add(row_id) for row_id in ids)


# ---------------------------------------------------------------------- --reorder prefix


def add(window, index, token_ids, salt=None):
    window.add(index, [token_ids], salt)


def test_a_window_gives_out_common_beginnings_one_after_the_other():
    window = PrefixWindow()
    for index, token_ids in enumerate([[1, 2, 3], [9], [1, 2], [9, 1], [1, 2, 3]]):
        add(window, index, token_ids)
    add(window, 5, [0], salt="s")
    assert window.take(partial=False) is None, "it waits for more"
    taken = [window.take(partial=True) for _ in range(6)]
    assert [{2}, {0, 4}, {1}, {3}, {5}] == [{taken[0]}, set(taken[1:3]), {taken[3]}, {taken[4]}, {taken[5]}]
    assert not window


@pytest.mark.parametrize("resume", [False, True])
def test_an_empty_prompt_among_others_is_only_an_error_row(tmp_path, resume):
    lines = [{"prompt": prompt} for prompt in ("The fox", [], "", [[]], "Hello", [5, 6])]
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_bytes(encode([lines[0], b"no", *lines[1:]]))
    run = ("generate", prompts, "-o", out, "--reorder", "prefix", "--max-tokens", 4)
    if resume:
        pagedcli(*run, "--max-errors", 1, expect=1)
    pagedcli(*run, *(("--resume",) if resume else ()), expect=3)
    rows = rows_of(out)
    assert [row["index"] for row in rows] == list(range(7))
    assert [row["index"] for row in rows if row["error"]] == [1, 2, 3, 4]


def test_a_window_is_bounded_in_rows_and_tokens():
    by_rows, by_tokens = PrefixWindow(max_rows=3), PrefixWindow(max_tokens=10)
    for index in range(3):
        add(by_rows, index, [index])
    add(by_tokens, 0, [1] * 10)
    assert by_rows.full
    assert by_tokens.full
    assert by_rows.take(partial=False) == 0
    assert not by_rows.full, "the next window fills while this one is given out"


def shuffled_groups(num_groups, per_group):
    """Rows of groups with a long common beginning, in random order."""
    lines = [
        {"prompt": [10 + group] * 24 + [600 + member]} for group in range(num_groups) for member in range(per_group)
    ]
    random.Random(0).shuffle(lines)
    return lines


def test_reordered_rows_are_the_same_and_hit_the_cache_more_often():
    lines = [*shuffled_groups(20, 6), b"{broken"]
    results = {}
    for reorder in ("none", "prefix"):
        harness = Harness(num_kvcache_blocks=40, max_num_seqs=4)
        results[reorder] = harness.run(lines, reorder=reorder)
    (plain, plain_rows), (reordered, reordered_rows) = results["none"], results["prefix"]
    assert [*map(without_run_dependent_fields, reordered_rows)] == [*map(without_run_dependent_fields, plain_rows)]
    assert [row["index"] for row in reordered_rows] == list(range(121))
    assert reordered.stats.facts.hit_rate > 2 * plain.stats.facts.hit_rate


def test_a_held_output_never_starves_a_window():
    """Rows to stdout wait for older ones: when no more may be held, those in the window still start."""
    stream = io.BytesIO()
    sink = StreamSink(stream, order="input", most_held=5)
    lines = [{"prompt": [900 - index]} for index in range(60)]  # the order of tokens is the reverse of the rows'
    Harness(max_num_seqs=2).run(lines, reorder="prefix", sink=sink)
    assert [json.loads(row)["index"] for row in stream.getvalue().splitlines()] == list(range(60))
