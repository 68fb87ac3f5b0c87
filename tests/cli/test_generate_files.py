"""`pagedcli generate` and files: pipes as input, what may be replaced, what --resume accepts."""

import gzip
import json
import os
import shlex
import shutil
import threading

import pytest
from cli_harness import FAST, PROMPTS, pagedcli, rows_of, write_rows
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from pagedcli import LLM, SamplingParams
from pagedcli.batch.journal import journal_path
from pagedcli.models.hub import resolve_model


def files_in(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---------------------------------------------------------------------- input that is a pipe


def through_fifo(path, content):
    """Someone who writes to a named pipe."""
    if not path.exists():
        os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(content,), daemon=True)
    writer.start()
    return writer


def test_a_named_pipe_gives_the_rows_of_a_file(prompts, out, tmp_path):
    expected = rows_of(pagedcli("generate", prompts, *FAST).stdout)
    fifo = tmp_path / "fifo"
    through_fifo(fifo, PROMPTS.encode())
    pagedcli("generate", fifo, "-o", out, *FAST)
    assert rows_of(out) == expected
    through_fifo(tmp_path / "fifo.gz", gzip.compress(PROMPTS.encode()))
    assert rows_of(pagedcli("generate", tmp_path / "fifo.gz", *FAST).stdout) == expected
    through_fifo(fifo, PROMPTS.encode())
    plan = pagedcli("plan", fifo, "--format", "json").stdout
    assert json.loads(plan)["num_rows"] == 3


def test_a_finished_run_from_a_pipe_is_known_by_its_lines(out):
    pagedcli("generate", "-", "-o", out, *FAST, stdin=PROMPTS)
    resume = ("generate", "-", "-o", out, *FAST, "--resume")
    assert "nothing to resume" in pagedcli(*resume, stdin=PROMPTS).stderr
    assert "input: 3 rows -> 4 rows" in pagedcli(*resume, stdin=PROMPTS + "no\n", expect=2).stderr
    assert "input: changed" in pagedcli(*resume, stdin=PROMPTS.replace("fox", "dog"), expect=2).stderr


# ---------------------------------------------------------------------- files that must not be lost


@pytest.mark.parametrize("flag", ["--record", "--summary-json", "--metrics", "-o"])
@pytest.mark.parametrize("more", [(), ("--overwrite",)])
def test_no_output_is_written_over_the_input(prompts, tmp_path, flag, more):
    (tmp_path / "link.jsonl").symlink_to(prompts)
    before = files_in(tmp_path)
    for name in (prompts, tmp_path / "link.jsonl"):
        said = pagedcli("generate", prompts, flag, name, *FAST, *more, expect=2).stderr
        assert "the input are the same file" in said
    assert files_in(tmp_path) == before


def test_summary_and_metrics_replace_only_what_they_wrote_themselves(prompts, out, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    for flag in ("--summary-json", "--metrics"):
        for more in ((), ("--overwrite",)):
            said = pagedcli("generate", prompts, flag, precious, *FAST, *more, expect=2).stderr
            assert "already exists" in said
            assert "use another name" in said
            assert precious.read_text() == "precious"
    summary = ("--summary-json", tmp_path / "run.json")
    pagedcli("generate", prompts, *FAST, *summary)
    assert "use --overwrite" in pagedcli("generate", prompts, *FAST, *summary, expect=2).stderr
    pagedcli("generate", prompts, *FAST, *summary, "--overwrite")
    metrics = ("--metrics", tmp_path / "run.prom")  # read by a collector all the time: every run rewrites it
    pagedcli("generate", prompts, "-o", out, *FAST, *metrics)
    pagedcli("generate", prompts, *FAST, *metrics)


def test_no_hint_and_no_flag_leads_to_lost_rows(prompts, out, tmp_path):
    """`explain` of an output of generate says what it is, and no recording takes its place."""
    pagedcli("generate", prompts, "-o", out, *FAST)
    before = files_in(tmp_path)
    for command in (("explain",), ("trace", "--check")):
        said = pagedcli(command[0], out, *command[1:], expect=1).stderr
        assert "rows of generate" in said
        assert "--overwrite" not in said
    for command in ("generate", "trace"):
        said = pagedcli(command, prompts, "--record", out, "--overwrite", *FAST, expect=2).stderr
        assert "and is rows of generate" in said
    said = pagedcli("attach", "tcp://127.0.0.1:1", "--record", out, "--overwrite", expect=2).stderr
    assert "and is rows of generate" in said
    said = pagedcli("simulate", prompts, "--record", out, "--overwrite", "--pool", "64", expect=2).stderr
    assert "and is rows of generate" in said
    assert files_in(tmp_path) == before


def test_rows_replace_no_trace_and_no_model_file(prompts, tmp_path):
    trace, page = tmp_path / "run.jsonl", tmp_path / "kv.csv"
    pagedcli("generate", prompts, "--record", trace, *FAST)
    pagedcli("generate", prompts, "--record", trace, "--overwrite", *FAST)
    (tmp_path / "kv.steps.csv").write_text("id,prompt\n")
    before = files_in(tmp_path)
    for arguments in (("generate", prompts, "-o", trace), ("generate", prompts, "--dump-kv", page)):
        assert "use another name" in pagedcli(*arguments, "--overwrite", *FAST, expect=2).stderr
    said = pagedcli("explain", trace, "-o", trace, "--overwrite", expect=2).stderr
    assert "same file" in said
    assert files_in(tmp_path) == before


# ---------------------------------------------------------------------- what --resume accepts


@pytest.mark.quick("flags3-input: 3 rows -> 2 rows")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--temperature", "0.5"), "sampling.temperature: 0.0 -> 0.5"),
        (("--seed", "7"), "seed: 0 -> 7"),
        (("--system-prompt", "You are a pirate"), "system_prompt: changed"),
        (("--limit", "2"), "input: 3 rows -> 2 rows"),
        (("--order", "completion"), "order: input -> completion"),
        (("--shard", "1/2"), "shard: 1/1 -> 1/2"),
    ],
)
def test_a_finished_output_of_other_settings_is_refused_and_each_change_named(prompts, out, flags, said):
    pagedcli("generate", prompts, "-o", out, *FAST)
    result = pagedcli("generate", prompts, "-o", out, *FAST, "--resume", *flags, expect=2).stderr
    assert said in result
    assert "{" not in result, "no dumps"


def test_any_other_file_is_no_finished_output(prompts, out):
    out.write_text("hello\n")
    said = pagedcli("generate", prompts, "-o", out, *FAST, "--resume", expect=2).stderr
    assert "out.jsonl.run.json, which says what run wrote it, cannot be read" in said
    assert "hint: put out.jsonl.run.json back next to out.jsonl" in said
    pagedcli("generate", prompts, "-o", out, *FAST, "--overwrite")
    out.write_bytes(out.read_bytes() + b"hello\n")
    assert "another program has changed it" in pagedcli(
        "generate", prompts, "-o", out, *FAST, "--resume", expect=2
    ).stderr  # fmt: skip


def test_a_run_that_may_overwrite_still_may_when_it_is_resumed(tmp_path, out):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(PROMPTS + "no\n" * 3)
    out.write_text("old\n")
    pagedcli("generate", bad, "-o", out, *FAST, "--overwrite", "--max-errors", 2, expect=1)
    assert out.read_text() == "old\n"
    pagedcli("generate", bad, "-o", out, *FAST, "--resume", expect=3)
    assert len(rows_of(out)) == 6


def test_an_output_that_appeared_while_the_run_was_stopped_is_not_replaced(tmp_path, out):
    bad = tmp_path / "bad.jsonl"
    bad.write_text("no\n" * 3)
    pagedcli("generate", bad, "-o", out, *FAST, "--max-errors", 2, expect=1)
    out.write_text("theirs\n")
    said = pagedcli("generate", bad, "-o", out, *FAST, "--resume", expect=2).stderr
    assert "move out.jsonl away" in said
    assert out.read_text() == "theirs\n"


def test_a_kill_between_the_rename_and_the_end_of_the_journal_is_complete(prompts, out):
    pagedcli("generate", prompts, "-o", out, *FAST)
    record = json.loads(out.with_name("out.jsonl.run.json").read_text())
    header = {"pagedcli_journal": 1, "created_s": 1, "fingerprint": record["fingerprint"]}
    out.with_name("out.jsonl.partial").write_text(json.dumps(header, separators=(",", ":")) + "\n")
    assert "nothing to resume" in pagedcli("generate", prompts, "-o", out, *FAST, "--resume").stderr
    assert not out.with_name("out.jsonl.partial").exists()


def test_the_printed_command_continues_after_max_errors_until_the_run_is_done(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text("no\n" * 5 + PROMPTS)
    arguments = ["generate", "bad.jsonl", "-o", "my out.jsonl", *FAST, "--max-errors", "2", "--summary-json", "s.json"]
    arguments.append("--overwrite")
    exit_codes = []
    for _ in range(4):
        exit_codes.append(1 if len(exit_codes) < 2 else 3)
        said = pagedcli(*arguments, expect=exit_codes[-1]).stderr
        if exit_codes[-1] == 3:
            break
        (line,) = [line for line in said.splitlines() if line.startswith("continue with: ")]
        arguments = shlex.split(line.partition(": pagedcli ")[2])
        assert "--overwrite" not in arguments
    assert exit_codes == [1, 1, 3]
    assert "5 of 8 rows failed, the first in line 1: " in said
    assert "(4 of them from the journal)" in said
    assert len(rows_of(tmp_path / "my out.jsonl")) == 8


def test_an_input_that_is_rewritten_during_the_run_ends_it_and_can_be_put_back(prompts, out, monkeypatch):
    from pagedcli.batch import job as job_module

    start = job_module.OpenJob.start

    def rewritten(work, *arguments, **options):
        prompts.write_text(PROMPTS.replace("Hello", "Changed"))
        return start(work, *arguments, **options)

    monkeypatch.setattr(job_module.OpenJob, "start", rewritten)
    said = pagedcli("generate", prompts, "-o", out, *FAST, expect=1).stderr
    assert "changed during the run: line 3 (row 2)" in said
    assert "--resume" in said
    assert not out.exists()
    monkeypatch.undo()
    prompts.write_text(PROMPTS)
    pagedcli("generate", prompts, "-o", out, *FAST, "--resume")
    assert len(rows_of(out)) == 3


def test_a_template_with_the_date_sees_that_of_the_first_start_after_a_resume(tmp_path, out):
    chats = [{"messages": [{"role": "user", "content": "Hi"}], "prompt_logprobs": 0} for _ in range(6)]
    write_rows(tmp_path / "in.jsonl", [*chats[:3], {"bad": 1}, *chats[3:]])
    run = ("generate", tmp_path / "in.jsonl", "-o", out, *FAST, "--chat-template", "It is {{ strftime_now('%Y') }}.")
    pagedcli(*run, "--max-errors", "1", "--max-num-seqs", "1", expect=1)
    header, *records = journal_path(out).read_text().splitlines(keepends=True)
    earlier = json.loads(header) | {"local_time": "1999-12-31T23:59:59"}
    assert "local_time" in json.loads(header)
    journal_path(out).write_text(json.dumps(earlier) + "\n" + "".join(records))
    pagedcli(*run, "--resume", "--max-num-seqs", "1", expect=3)
    last = rows_of(out)[-1]["prompt_logprobs"]
    assert "".join(each["token"] for each in last if each).endswith("1999.")


def test_two_bos_tokens_are_said_once(tmp_path, out):
    model = shutil.copytree(resolve_model("builtin"), tmp_path / "model")
    backend = Backend.from_file(str(model / "tokenizer.json"))
    bos = "<|endoftext|>"
    backend.post_processor = TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, 0)])
    backend.save(str(model / "tokenizer.json"))
    settings = json.loads((model / "tokenizer_config.json").read_text()) | {"bos_token": bos}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "in.jsonl").write_text(f'{{"prompt": "{bos}Hi"}}\n{{"prompt": "Hi"}}\n{{"prompt": [0, 0, 5]}}\n' * 2)
    said = pagedcli("generate", tmp_path / "in.jsonl", "-o", out, *FAST, "-m", model).stderr
    assert said.count("BOS") == 1
    assert "2 prompts with two BOS tokens at the start" in " ".join(said.split())
    llm = LLM(str(model), num_kvcache_blocks=64)
    with pytest.warns(UserWarning, match="two BOS tokens"):
        llm.generate([f"{bos}Hi"], SamplingParams(max_tokens=1))
