import errno
import os
import random
import stat
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from pagedcli import content_files
from pagedcli.content_files import NO_ROOM, ContentFolder, DamagedFile, digest_of, file_digest
from pagedcli.errors import UsageError

MINE = {"model": "a", "block size": "16"}


def kept(folder, note=b"n", parts=(b"one", b"", b"three"), **rest):
    file = folder.write(MINE, note, parts, **{"seconds": 1.0, **rest})
    assert not isinstance(file, str), file
    return file


def test_parts_come_back_as_they_were_written(tmp_path):
    file = kept(ContentFolder(tmp_path / "new"))
    again = ContentFolder(tmp_path / "new")
    [found], wrong = again.files()
    assert not wrong
    assert (found.head, found.num_bytes) == (file.head, file.path.stat().st_size)
    assert again.read(found, [2, 0, 1]) == [b"three", b"one", b""]
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_every_changed_byte_is_found(tmp_path):
    folder = ContentFolder(tmp_path)
    file = kept(folder)
    content = file.path.read_bytes()
    for place in range(len(content)):
        file.path.write_bytes(content[:place] + bytes([content[place] ^ 0x40]) + content[place + 1 :])
        files, wrong = folder.files()
        if files:
            with pytest.raises(DamagedFile, match="other bytes"):
                folder.read(files[0], [0, 1, 2])
        else:
            assert list(wrong) == [file.path.name]


def test_every_cut_is_found(tmp_path):
    folder = ContentFolder(tmp_path)
    file = kept(folder)
    content = file.path.read_bytes()
    for length in range(len(content)):
        file.path.write_bytes(content[:length])
        assert folder.files()[0] == []
    file.path.write_bytes(content + b"x")
    assert folder.files() == ([], {file.path.name: "cut or longer than written"})


def test_a_file_that_is_gone_is_no_content(tmp_path):
    folder = ContentFolder(tmp_path)
    file = kept(folder)
    file.path.unlink()
    with pytest.raises(DamagedFile, match="No such file"):
        folder.read(file, [0])


def test_the_bound_holds_for_all_files_and_takes_the_least_valuable(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "of-others").write_bytes(bytes(1000))
    folder = ContentFolder(tmp_path)
    sizes = [kept(folder, note=b"%d" % i, parts=[bytes(500)], seconds=float(i)).num_bytes for i in range(4)]
    bounded = ContentFolder(tmp_path, most_bytes=1000 + 2 * max(sizes) + 10)
    bounded.trim()
    assert sorted(each.head.note for each in bounded.files()[0]) == [b"2", b"3"]
    kept(bounded, note=b"new", parts=[bytes(500)], seconds=9.0)
    assert sorted(each.head.note for each in bounded.files()[0]) == [b"3", b"new"]
    assert bounded.used_bytes() <= 1000 + 2 * max(sizes) + 10
    assert bounded.write(MINE, b"huge", [bytes(5000)], seconds=1.0) == "the bound is smaller than one file"
    assert (tmp_path / "sub" / "of-others").exists()
    crowded = ContentFolder(tmp_path, most_bytes=1100)
    assert (
        crowded.write(MINE, b"x", [bytes(500)], seconds=1.0) == "other files in the folder or on the disk leave no room"
    )
    assert crowded.used_bytes() == 1000


def test_files_of_others_above_the_bound_remove_nothing_and_are_named(tmp_path):
    file = kept(ContentFolder(tmp_path))
    (tmp_path / "of-others").write_bytes(bytes(5000))
    trimmed = ContentFolder(tmp_path, most_bytes=4000).trim()
    assert [each.path for each in trimmed.files] == [file.path]
    assert (trimmed.num_removed, trimmed.no_room) == (
        0,
        f"{file.num_bytes / 1024 + 1000 / 1024:.1f} KiB more than the bound: {NO_ROOM}",
    )
    assert ContentFolder(tmp_path, most_bytes=4000).write(MINE, b"x", [b"y"], seconds=9.0) == NO_ROOM
    assert file.path.exists()


def test_a_file_removes_none_that_is_worth_more(tmp_path):
    first = kept(ContentFolder(tmp_path), parts=[bytes(100)], seconds=2.0)
    folder = ContentFolder(tmp_path, most_bytes=first.num_bytes + 50)
    assert folder.write(MINE, b"x", [bytes(100)], seconds=1.0) == "the files that are there are worth more"
    assert folder.write(MINE, b"x", [bytes(100)], seconds=1.0, depth=1) == "the files that are there are worth more"
    assert first.path.exists()
    kept(folder, note=b"x", parts=[bytes(100)], seconds=3.0)
    assert not first.path.exists()


def test_files_that_cannot_be_removed_are_not_counted(tmp_path, monkeypatch):
    kept(ContentFolder(tmp_path))
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(PermissionError(errno.EACCES, "no")))
    trimmed = ContentFolder(tmp_path, most_bytes=10).trim()
    assert (trimmed.num_removed, len(trimmed.files)) == (0, 1)
    assert trimmed.no_room


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    folder = ContentFolder(tmp_path)
    monkeypatch.setattr(content_files.os, "listdir", refuse)
    with pytest.raises(UsageError, match="Permission denied"):
        ContentFolder(tmp_path)
    folder.most_bytes = 1000
    (tmp_path / "of-others").write_bytes(bytes(990))
    assert folder.write(MINE, b"x", [b"y"], seconds=1.0) == "Permission denied"


def test_without_a_bound_a_tenth_of_the_disk_stays_free(tmp_path, monkeypatch):
    usage = type("Usage", (), {"total": 10_000, "free": 1500})
    monkeypatch.setattr(content_files.shutil, "disk_usage", lambda path: usage)
    folder = ContentFolder(tmp_path)
    kept(folder, parts=[bytes(100)])
    assert isinstance(folder.write(MINE, b"x", [bytes(400)], seconds=1.0), str)


def test_the_end_of_a_chain_goes_before_its_head(tmp_path):
    folder = ContentFolder(tmp_path)
    files = [kept(folder, note=b"%d" % depth, parts=[bytes(100)], depth=depth) for depth in (0, 16, 8)]
    ContentFolder(tmp_path, most_bytes=files[0].num_bytes).trim()
    assert [each.head.note for each in folder.files()[0]] == [b"0"]


def test_what_is_too_old_is_not_found_and_goes_first(tmp_path):
    folder = ContentFolder(tmp_path, most_age_s=3600)
    file = kept(folder)
    kept(folder, note=b"young")
    os.utime(file.path, (time.time() - 7200,) * 2)
    assert folder.files()[1] == {file.path.name: "not used for too long"}
    assert folder.trim().num_removed == 1
    assert [each.head.note for each in folder.files()[0]] == [b"young"]


def test_pipes_links_leftovers_and_files_of_others_in_the_folder(tmp_path):
    """What has not the name that this program gives is never touched, whatever its ending."""
    folder = ContentFolder(tmp_path)
    file, name = kept(folder), "0123456789abcdef-0123456789abcdef0123456789abcde"
    os.mkfifo(tmp_path / f"{name}0.kept")
    (tmp_path / f"{name}1.kept").symlink_to("/etc/hostname")
    (tmp_path / f".{name}2.kept.0123abcd.tmp").write_bytes(b"left by a killed process")
    (tmp_path / f"{name}3.kept").write_bytes(
        b'{"pagedcli_kept":1,"head_bytes":0,"xxh3":"%s"}\n' % digest_of(b"").encode()
    )
    others = {"notes.txt", "notes.kept", ".secret.kept", ".report.kept.deadbeef.tmp"}
    for each in others:
        (tmp_path / each).write_bytes(b"of others")
    assert set(folder.files()[1]) == {f"{name}{n}.kept" for n in (0, 1, 3)}
    folder.trim()
    assert {path.name for path in tmp_path.iterdir()} == {file.path.name, *others}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_keeps_nothing_and_says_so(tmp_path, monkeypatch, number):
    folder = ContentFolder(tmp_path)

    def fail(fd):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    assert folder.write(MINE, b"n", [b"part"], seconds=1.0) == os.strerror(number)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match="cannot be a folder"):
        ContentFolder(tmp_path / "file")


def test_a_digest_is_remembered_as_long_as_the_file_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "weights"
    path.write_bytes(bytes(1000))
    assert file_digest(path) == content_files.digest_of(bytes(1000))
    assert not (tmp_path / "cache").exists()  # it may change again within the resolution of its time
    os.utime(path, (1e9, 1e9))
    before = file_digest(path)
    [remembered] = (tmp_path / "cache/pagedcli/digests").iterdir()
    assert remembered.read_text() == before
    path.write_bytes(bytes(500) + b"x" + bytes(499))
    os.utime(path, (1e9, 1e9 + 1))
    assert file_digest(path) != before


def test_a_digest_that_others_may_have_written_is_not_believed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "weights"
    path.write_bytes(bytes(1000))
    os.utime(path, (1e9, 1e9))
    digest = file_digest(path)
    [remembered] = (tmp_path / "cache/pagedcli/digests").iterdir()
    remembered.write_text("0" * 32)
    assert file_digest(path) == "0" * 32
    remembered.parent.chmod(0o770)
    assert file_digest(path) == digest


@pytest.mark.parametrize("change", [{"checksums": ["0" * 32]}, {"checksums": []}, {"sizes": [3, -5, 10]}])
def test_a_head_without_a_checksum_for_each_part_is_damaged(tmp_path, change):
    folder = ContentFolder(tmp_path)
    file = kept(folder)
    content, head = file.path.read_bytes(), msgspec.structs.replace(file.head, **change)
    parts = content[content.index(b"\n") + 1 + len(msgspec.msgpack.encode(file.head)) :]
    encoded = msgspec.msgpack.encode(head)
    first = b'{"pagedcli_kept":1,"head_bytes":%d,"xxh3":"%s"}\n' % (len(encoded), digest_of(encoded).encode())
    file.path.write_bytes(first + encoded + parts)
    assert list(folder.files()[1]) == [file.path.name]


WRITER = """
import sys
from pathlib import Path
from pagedcli.content_files import ContentFolder
folder = ContentFolder(Path(sys.argv[1]), most_bytes=200_000)
print("ready", flush=True)
for i in range(100_000):
    folder.write({"a": "b"}, b"%d" % i, [bytes([i % 256]) * 20_000] * 2, seconds=1.0 + i)
"""


@pytest.mark.parametrize("turns", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_killed_writers_leave_whole_files_within_the_bound(tmp_path, turns):
    for turn in range(turns):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(0.01 + random.Random(turn).random() / 10)
        writer.kill()
        writer.communicate()
        folder = ContentFolder(tmp_path, most_bytes=200_000)
        folder.trim()
        files, wrong = folder.files()
        assert not wrong
        assert folder.used_bytes() == sum(file.num_bytes for file in files) <= 200_000
        for file in files:
            assert folder.read(file, [0, 1])[0] == bytes([int(file.head.note) % 256]) * 20_000
