"""No command destroys a file: neither one that it reads, nor one that exists."""

import os
from pathlib import Path

import pytest

from pagedcli.errors import UsageError
from pagedcli.files import PendingFile, check_files, check_new, is_stream, whole_file


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
    check_new("--metrics", data, replaceable=b"prec")
    with pytest.raises(UsageError, match="already exists"):
        check_new("--metrics", data, replaceable=b"# HELP")


def test_folders_are_refused(tmp_path):
    with pytest.raises(UsageError, match="is a folder"):
        check_files({}, {"the output": tmp_path}, overwrite=True)
    with pytest.raises(UsageError, match="there is no folder"):
        check_files({}, {"the output": tmp_path / "none" / "out"}, overwrite=True)


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
