"""Closed and full standard streams, runs through pipes, folders as outputs, and files that killed runs have left."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_harness import FAST, PROMPTS, pagedcli, rows_of
from effort import Effort
from harness.core import simulated, write

from pagedcli import files
from pagedcli.cli.session import StopRequest
from pagedcli.errors import UsageError
from pagedcli.events import StepFinished
from pagedcli.files import PendingFile, whole_file
from pagedcli.kvevents.capture import CaptureWriter
from pagedcli.trace.files import TraceReader, TraceWriter


def shell(command, *, expect, stdin=""):
    """A command line of a shell, with `pagedcli` as its first word."""
    command = command.replace("pagedcli", f"{sys.executable} -m pagedcli", 1)
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, input=stdin)
    assert result.returncode == expect, result.stderr
    assert "bug" not in result.stderr
    assert "Traceback" not in result.stderr
    return result


def test_stdout_shows_a_question_mark_for_what_its_locale_has_not(tmp_path):
    trace = write(tmp_path / "run.jsonl", simulated())
    shown = shell(f"export PYTHONIOENCODING=ascii; pagedcli trace {trace} --step 3", expect=0).stdout
    assert shown.startswith("?? step 3, as its forward pass sees the cache")


@pytest.mark.long
def test_rows_do_not_need_stderr(prompts):
    result = shell(f"pagedcli generate {prompts} {' '.join(FAST)} 2>&-", expect=0)
    assert [row["index"] for row in rows_of(result.stdout)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("stdout", "why"),
    [
        (">/dev/full", "No space left on device"),
        pytest.param(">&-", "Bad file descriptor", marks=pytest.mark.slow),
    ],
)
def test_rows_that_cannot_be_written_are_a_plain_error(prompts, stdout, why):
    result = shell(f"pagedcli generate {prompts} {' '.join(FAST)} {stdout}", expect=1)
    assert result.stderr.endswith(f"error: cannot write to standard output: {why}\n")


@pytest.mark.quick("")
@pytest.mark.parametrize("flags", ["", "--dump-kv", "--dump-kv --format json"])
def test_steps_whose_reader_has_gone_end_as_a_broken_pipe_does(tmp_path, flags):
    trace = write(tmp_path / "run.jsonl", simulated())
    result = shell(f"{{ pagedcli trace {trace} {flags}; echo $? >&2; }} | true", expect=0)
    assert result.stderr == "141\n"


@pytest.mark.slow
def test_a_full_disk_is_an_error_of_the_rows_even_if_the_trace_cannot_be_written_either(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "Once", "ignore_eos": true}\n' * 60)
    files = f"{tmp_path}/in.jsonl -o {tmp_path}/out.jsonl --record {tmp_path}/run.jsonl"
    flags = "--max-tokens 30 --num-kvcache-blocks 64"
    result = shell(f"ulimit -f 8; pagedcli generate {files} {flags}", expect=1)  # 4 or 8 KiB, as the shell counts
    *_, notice, error, hint = result.stderr.splitlines()
    assert notice == f"cannot write the trace {tmp_path}/run.jsonl: File too large"
    assert error.startswith(f"error: cannot write {tmp_path}/out.jsonl.partial: File too large")
    assert "--resume" in hint


@pytest.mark.long
@pytest.mark.parametrize("streams", [">&- 2>/dev/full", ">/dev/full"])
def test_a_file_needs_neither_stdout_nor_room_for_messages(prompts, tmp_path, streams):
    files = f"-o {tmp_path}/out.jsonl --summary-json {tmp_path}/summary.json"
    shell(f"pagedcli generate {prompts} {' '.join(FAST)} {files} {streams}", expect=0)
    assert len(rows_of(tmp_path / "out.jsonl")) == 3
    assert json.loads((tmp_path / "summary.json").read_text())["cures"] == []


@pytest.mark.long
def test_a_closed_stdin_is_a_plain_error():
    result = shell(f"pagedcli generate - {' '.join(FAST)} <&-", expect=1)
    assert "error: cannot read standard input after line 0: Bad file descriptor" in result.stderr


@pytest.mark.parametrize("command", ["--version", "--help", "doctor --help"])
def test_text_for_a_full_stdout_is_a_plain_error(command):
    result = shell(f"pagedcli {command} >/dev/full", expect=1)
    assert result.stderr == "error: cannot write to standard output: No space left on device\n"


@pytest.mark.parametrize("flag", ["-o", "--summary-json", "--dump-kv", "--record", "--metrics"])
@pytest.mark.parametrize("path", ["/proc/no-such/out.jsonl", "/dev/fd/999"])
def test_a_device_that_is_not_there_is_refused_before_the_run(prompts, flag, path):
    result = pagedcli("generate", prompts, flag, path, *FAST, expect=2)
    assert "bug" not in result.stderr
    assert not result.stdout


@pytest.mark.quick("simulate")
@pytest.mark.parametrize("command", ["generate", "simulate"])
def test_millions_of_blank_lines_end_in_seconds(tmp_path, command):
    path = tmp_path / "blank.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(60):
            file.write(b"\n" * 10**7)
    with Effort() as spent:
        result = pagedcli(command, path, expect=1)
    assert "1,000,000 consecutive blank lines" in result.stderr
    assert spent.pieces < 500, "a hundred at most; tens of thousands for all of them"


# ---------------------------------------------------------------------- a recorded run through a pipe, or on stdin


@pytest.mark.parametrize(("name", "on_stdin", "in_a_pipe"), [("run.jsonl", "trace", "explain"),
                                                             ("run.jsonl.zst", "explain", "trace")])  # fmt: skip
def test_a_run_through_a_pipe_reads_as_its_file(tmp_path, name, on_stdin, in_a_pipe):
    path = write(tmp_path / name, simulated())
    for command, given in ((on_stdin, f"- --format json < {path}"), (in_a_pipe, f"<(cat {path}) --format json")):
        expected = pagedcli(command, path, "--format", "json")
        result = shell(f"pagedcli {command} {given}", expect=0)
        assert (result.stdout, result.stderr) == (expected.stdout, expected.stderr)


def test_kv_events_through_a_pipe_are_no_prompts(tmp_path):
    path = tmp_path / "events.jsonl"
    CaptureWriter(path, ["tcp://127.0.0.1:5557"], tokens=False).close()
    result = shell(f"pagedcli trace - < {path}", expect=0)
    assert (result.stdout, result.stderr) == ("", "")


def test_prompts_through_a_pipe_are_generated_from_or_refused_as_a_run(prompts):
    assert "3 rows in " in shell(f"pagedcli trace <(cat {prompts}) --max-tokens 2", expect=0).stderr
    said = pagedcli("trace", "-", "--check", stdin=PROMPTS, expect=1).stderr
    assert "stdin.jsonl:1: not a trace, but a file of prompts" in said


def test_damage_in_a_pipe_is_not_hinted_at_by_the_name_of_its_copy(tmp_path):
    path = write(tmp_path / "run.jsonl", simulated())
    lines = path.read_bytes().splitlines(keepends=True)
    for damaged in ([*lines[:3], b"no event\n", *lines[3:]], [b'{"event":"engine_started"}\n']):
        path.write_bytes(b"".join(damaged))
        said = shell(f"pagedcli explain - < {path}", expect=1).stderr
        assert "pagedcli-" not in said.partition("hint:")[2]


def test_two_runs_are_not_read_from_one_pipe(tmp_path):
    path = write(tmp_path / "run.jsonl", simulated())
    said = shell(f"pagedcli diff - - < {path}", expect=2).stderr
    assert said == "error: standard input can be read only once\nhint: pass one of the two as a file\n"


def test_an_interrupt_leaves_no_copy_of_the_run(tmp_path):
    trace = write(tmp_path / "run.jsonl", simulated())
    copies = tmp_path / "tmp"
    copies.mkdir()
    command = [sys.executable, "-m", "pagedcli", "explain", "-"]
    environment = os.environ | {"TMPDIR": str(copies)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as child:
        child.stdin.write(trace.read_bytes())
        child.stdin.flush()  # its end is still to come
        end_s = time.monotonic() + 60
        while not any(copies.rglob("stdin.jsonl")):
            assert time.monotonic() < end_s
            time.sleep(0.02)
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 130
    assert list(copies.iterdir()) == []


# ---------------------------------------------------------------------- what killed runs leave


def test_a_hidden_copy_of_a_killed_run_is_removed_by_the_next_one(tmp_path):
    path = tmp_path / "out.jsonl"
    code = (
        "import os, sys; from pathlib import Path; from pagedcli import files\n"
        "files._unnamed_file = lambda folder: None  # as on a network file system\n"
        "files.PendingFile(Path(sys.argv[1]), overwrite=True).file.write(b'half'); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.jsonl.")
    (tmp_path / ".other.jsonl.01234567.tmp").write_text("of another file")
    with whole_file(path, overwrite=True) as file:
        file.write(b"whole")
    assert {each.name for each in tmp_path.iterdir()} == {"out.jsonl", ".other.jsonl.01234567.tmp"}


def test_the_copy_of_a_run_that_is_still_writing_stays(tmp_path):
    path = tmp_path / "out.jsonl"
    pending = PendingFile(path, overwrite=True)
    with whole_file(path, overwrite=True) as file:
        file.write(b"other")
    pending.file.write(b"mine")
    pending.commit()
    assert path.read_bytes() == b"mine"


def test_a_new_file_that_another_run_took_for_a_leftover_gets_another_name(tmp_path, monkeypatch, no_unnamed_files):
    """Between its opening and its locking the other one may remove it."""
    taken = []

    def lock(file):
        if not taken:
            taken.append(Path(file.name))
            taken[0].unlink()
        return True

    monkeypatch.setattr(files, "lock", lock)
    with whole_file(tmp_path / "out.jsonl", overwrite=False) as file:
        file.write(b"whole")
    assert taken
    assert [each.name for each in tmp_path.iterdir()] == ["out.jsonl"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_two_runs_that_record_under_one_name_fail_at_the_start(tmp_path, overwrite):
    path, event = tmp_path / "t.jsonl", StepFinished(1, 0, 1, 1, 1, 1)
    first, second = (TraceWriter(path, overwrite=overwrite) for _ in range(2))
    first(event)
    with pytest.raises(UsageError, match=r"another run is writing .*recording"):
        second(event)
    first.close()
    assert path.exists()


def test_a_closed_terminal_says_what_becomes_of_the_rows(capsys):
    stop = StopRequest(rows_are_kept=lambda: True)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    try:
        with stop.listening():
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.requested
        assert "stopping after this step; finished rows are kept" in capsys.readouterr().err
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        with stop.listening():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_a_pager_that_does_not_read_takes_no_time_of_the_run(prompts):
    """The pipe is full after a few steps; the reader begins after three seconds."""
    flags = ("--max-tokens", "60", "--ignore-eos", "--num-kvcache-blocks", "64", "--dump-kv", "--record")
    trace = prompts.with_name("run.jsonl")
    command = [sys.executable, "-m", "pagedcli", "trace", str(prompts), *flags, str(trace)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pipesize=4096) as process:
        while process.poll() is None and not list(prompts.parent.glob("run*")):
            time.sleep(0.05)
        time.sleep(3)
        assert process.poll() is None, "the pipe is full"
        process.communicate()
    times = [event.time_ns for event in TraceReader(trace) if isinstance(event, StepFinished)]
    assert len(times) == 60
    assert times[-1] - times[0] < 1.5e9


@pytest.mark.parametrize("name", ["OUT.CSV", "OUT.CSV.GZ", "Out.Jsonl.GZ", "OUT.PARQUET"])
def test_an_output_is_what_its_name_says_in_any_case(prompts, tmp_path, name):
    if "PARQUET" in name:
        pytest.importorskip("pyarrow")
    pagedcli("generate", prompts, "-o", tmp_path / name, *FAST)
    content = (tmp_path / name).read_bytes()
    content = gzip.decompress(content) if name.endswith(".GZ") else content
    assert content.startswith(b"index,sample," if "CSV" in name else b"PAR1" if "PARQUET" in name else b'{"index":')
