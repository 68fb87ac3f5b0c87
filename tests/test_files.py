"""No command destroys a file: neither one that it reads, nor one that exists."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from power_loss import left_behind

from pagedcli.errors import UsageError
from pagedcli.files import (
    TRACE,
    FileKind,
    PendingFile,
    check_files,
    check_new,
    is_in_use,
    is_stream,
    read_own,
    read_whole,
    whole_file,
)
from pagedcli.line_files import zstd


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("precious")
    return path


def other_names(path):
    """The same file by other names: relative, through a folder and back, a link, a hard link."""
    (path.parent / "sub").mkdir()
    (path.parent / "soft").symlink_to(path)
    (path.parent / "hard").hardlink_to(path)
    names = (os.path.relpath(path), path.parent / "sub" / ".." / path.name, path.parent / "soft", path.parent / "hard")
    return [Path(name) for name in names]


def test_a_file_that_is_read_is_never_written_by_whatever_name(data):
    for name in (data, *other_names(data)):
        with pytest.raises(UsageError, match="--record and the input are the same file"):
            check_files({"the input": data}, {"--record": name}, overwrite=True)


def test_two_outputs_are_two_files(tmp_path):
    new = tmp_path / "new"
    with pytest.raises(UsageError, match="--record and the output are the same file"):
        check_files({}, {"the output": new, "--record": tmp_path / "." / "new"}, overwrite=True)
    check_files({}, {"the output": new, "--record": tmp_path / "newer", "--metrics": None}, overwrite=False)


def test_a_file_that_exists_is_replaced_only_on_request(data):
    with pytest.raises(UsageError, match="already exists"):
        check_files({}, {"--record": data}, overwrite=False)
    check_files({}, {"--record": data}, overwrite=True)


def test_a_link_that_leads_nowhere_is_a_file_that_exists(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(UsageError, match="already exists"):
        check_new("--record", tmp_path / "link")


def test_an_earlier_file_of_the_same_kind_can_be_replaced(data):
    check_new("--metrics", data, kind=FileKind("precious", b"prec"), overwrite=True)
    for content in ("", "pr"):  # torn where it begins
        data.write_text(content)
        check_new("--metrics", data, kind=FileKind("precious", b"prec"), overwrite=True)


ROW = '{"index":0,"id":null,"text":"A","finish_reason":"stop","usage":{},"error":null}\n'


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (ROW, "rows of generate"),
        ('{"custom_id":"a","response":{},"error":null}\n', "rows of generate"),
        ('{"id": 1, "prompt": "A"}\n', "a file of prompts"),
        ('{"pagedcli_journal":1}\n', "the journal of a run"),
        ("GGUF\x03", "a model file"),
        ("index,id\n", None),
    ],
)
def test_a_file_of_another_kind_is_never_replaced(data, content, found):
    data.write_text(content)
    with pytest.raises(UsageError) as refused:
        check_new("--record", data, kind=TRACE, overwrite=True)
    assert refused.value.message.endswith(f"exists, and is {found}" if found else "exists, and is not a trace")
    assert refused.value.hint == "move it away, or use another name"


def test_an_output_without_a_kind_replaces_anything_but_traces_and_models(tmp_path, data):
    check_new("the output", data, overwrite=True)
    for suffix in (".jsonl", ".jsonl.zst"):
        trace = tmp_path / f"run{suffix}"
        content = b'{"event":"engine_started","schema_version":1}\n' + b"x" * 300_000
        trace.write_bytes(zstd.compress(content) if suffix.endswith("zst") else content)
        check_new("--record", trace, kind=TRACE, overwrite=True)
        with pytest.raises(UsageError, match="is a trace"):
            check_new("the output", trace, overwrite=True)
    (tmp_path / "config.json").write_text("{}")
    for name in ("config.json", "tokenizer.json", "model-00001-of-00002.safetensors"):
        (tmp_path / name).write_text("{}")
        with pytest.raises(UsageError, match="is a model file"):
            check_new("the output", tmp_path / name, overwrite=True)


def test_devices_and_pipes_may_be_named_twice_and_stay_what_they_are(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in map(Path, ("/dev/null", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", fifo)):
        assert is_stream(path)
        check_files({"the input": path}, {"the output": path, "--record": path}, overwrite=False)
    with whole_file(Path("/dev/null"), overwrite=False) as file:
        file.write(b"gone")
    assert Path("/dev/null").is_char_device()
    assert not is_stream(tmp_path / "new")
    assert not is_stream(Path("/dev/shm"))


def test_a_file_appears_when_it_is_whole(data):
    with whole_file(data, overwrite=True) as file:
        file.write(b"new")
        file.flush()
        assert data.read_text() == "precious"
    assert data.read_text() == "new"
    assert list(data.parent.iterdir()) == [data]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(data):
    def fail():
        with whole_file(data, overwrite=True) as file:
            file.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert data.read_text() == "precious"
    assert list(data.parent.iterdir()) == [data]


def test_a_file_that_appeared_meanwhile_is_not_replaced(tmp_path):
    path = tmp_path / "out"
    pending = PendingFile(path, overwrite=False)
    path.write_text("theirs")
    with pytest.raises(FileExistsError):
        pending.commit()
    pending.discard()
    assert path.read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_followed(data):
    link = data.parent / "link"
    link.symlink_to(data)
    with whole_file(link, overwrite=True) as file:
        file.write(b"new")
    assert link.is_symlink()
    assert data.read_text() == "new"


def test_a_pending_file_can_stand_under_a_name_of_its_own(tmp_path):
    pending = PendingFile(tmp_path / "run.jsonl", overwrite=False, temporary=tmp_path / "run.part.jsonl")
    pending.file.write(b"one")
    assert [path.name for path in tmp_path.iterdir()] == ["run.part.jsonl"]
    pending.commit()
    pending.discard()
    assert (tmp_path / "run.jsonl").read_bytes() == b"one"
    with pytest.raises(FileExistsError):
        PendingFile(tmp_path / "other", overwrite=True, temporary=tmp_path / "run.jsonl")


@pytest.mark.skipif(sys.platform != "linux", reason="files without names are Linux's")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
def test_a_killed_process_leaves_nothing_behind(tmp_path, number):
    code = f"""
import os, signal
from pathlib import Path
from pagedcli.files import whole_file
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup
with whole_file(Path({str(tmp_path / "out.json")!r}), overwrite=False) as file:
    file.write(b"half" * 100_000)
    os.kill(os.getpid(), {int(number)})
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -number
    assert list(tmp_path.iterdir()) == []


def test_without_unnamed_files_hidden_ones_are_used_and_cleared_away(data, no_unnamed_files):
    left = data.with_name(f".{data.name}.0123abcd.tmp")
    left.write_text("left by a killed process")
    with whole_file(data, overwrite=True) as file:
        file.write(b"new")
        assert len([each for each in data.parent.iterdir() if each.suffix == ".tmp"]) == 1
        assert not left.exists()
    assert data.read_text() == "new"
    assert list(data.parent.iterdir()) == [data]


def test_a_new_file_has_the_permissions_that_the_user_gives_new_files(tmp_path):
    before = os.umask(0o027)
    try:
        with whole_file(tmp_path / "out", overwrite=False) as file:
            file.write(b"new")
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o640


def test_a_small_file_is_read_up_to_a_limit(data):
    assert read_whole(data, len(data.read_bytes())) == data.read_bytes()
    for path in (data, Path("/dev/zero")):
        with pytest.raises(OSError, match="it has more than 3 bytes"):
            read_whole(path, 3)


def test_a_pipe_is_read_to_its_end_but_never_waited_for_without_end(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    threading.Timer(0.05, fifo.write_bytes, [b"precious"]).start()
    assert read_whole(fifo, 100) == b"precious"
    reads, writes = os.pipe()  # as of <(echo ...) in a shell
    os.write(writes, b"text")
    os.close(writes)
    assert read_whole(Path(f"/dev/fd/{reads}"), 100) == b"text"
    os.close(reads)
    with pytest.raises(OSError, match=r"nothing was written to this pipe for 0\.05 s"):
        read_whole(fifo, 100, wait_s=0.05)


def test_a_pipe_is_never_taken_for_a_file_of_ours(tmp_path):
    hidden = tmp_path / ".out.01234567.tmp"
    os.mkfifo(hidden)
    with pytest.raises(FileNotFoundError):
        read_own(hidden)
    assert not is_in_use(hidden)
    with whole_file(tmp_path / "out", overwrite=False) as file:
        file.write(b"new")
    assert (tmp_path / "out").read_bytes() == b"new"


def test_after_a_power_cut_a_file_is_the_old_one_or_the_new_one(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"old")

    def write():
        with whole_file(path, overwrite=True) as file:
            file.write(b"new" * 100)

    found = [(number, path.read_bytes()) for number, _, _ in left_behind(tmp_path, write)]
    last = found[-1][0]
    assert {content for _, content in found} == {b"old", b"new" * 100}
    assert {content for number, content in found if number == last} == {b"new" * 100}


def test_folders_are_refused(tmp_path):
    with pytest.raises(UsageError, match="is a folder"):
        check_files({}, {"the output": tmp_path}, overwrite=True)
    with pytest.raises(UsageError, match="there is no folder"):
        check_files({}, {"the output": tmp_path / "none" / "out"}, overwrite=True)
