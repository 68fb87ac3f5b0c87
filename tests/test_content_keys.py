import pytest

from pagedcli.content_files import ContentFolder, DamagedFile
from pagedcli.content_keys import ContentKey
from pagedcli.errors import UsageError

pytest.importorskip("cryptography", reason="cryptography is not installed: pip install 'pagedcli[encryption]'")

SECRET, PARTS = b"k" * 32, [b"first part", b"second part"]


def kept(path, key):
    file = ContentFolder(path, key=key).write({"a": "b"}, b"the note", PARTS, seconds=1.0)
    assert not isinstance(file, str)
    return file


def test_what_is_encrypted_comes_back_and_nothing_of_it_is_on_disk(tmp_path):
    file = kept(tmp_path, ContentKey(SECRET))
    folder = ContentFolder(tmp_path, key=ContentKey(SECRET))
    [found], _ = folder.files()
    assert (folder.note(found), folder.read(found, [1, 0])) == (b"the note", PARTS[::-1])
    content = file.path.read_bytes()
    assert not any(each in content for each in (b"the note", *PARTS))
    plain = kept(tmp_path / "plain", None)
    assert file.path.name != plain.path.name  # whoever guesses a note cannot compare its digest
    assert not {*file.head.checksums} & {*plain.head.checksums}


def test_each_writing_gives_other_bytes_under_the_same_name(tmp_path):
    file = kept(tmp_path, ContentKey(SECRET))
    before = file.path.read_bytes()
    assert kept(tmp_path, ContentKey(SECRET)).path == file.path
    assert file.path.read_bytes() != before


def test_another_key_and_moved_parts_are_damage(tmp_path):
    kept(tmp_path, ContentKey(SECRET))
    other = ContentFolder(tmp_path, key=ContentKey(b"o" * 32))
    [file], _ = other.files()
    with pytest.raises(DamagedFile, match="not what was encrypted with this key"):
        other.note(file)
    with pytest.raises(DamagedFile, match="not what was encrypted with this key"):
        other.read(file, [0])
    moved = file.path.with_name(file.path.name.replace(file.path.name[:4], "0000", 1))
    file.path.rename(moved)
    folder = ContentFolder(tmp_path, key=ContentKey(SECRET))
    [file], _ = folder.files()
    with pytest.raises(DamagedFile, match="not what was encrypted with this key"):
        folder.read(file, [0])


def test_a_key_file_is_made_for_its_user_alone(tmp_path):
    path = tmp_path / "key"
    made = ContentKey.of(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(path.read_text()) == 64
    assert ContentKey.of(path).digest == made.digest != ContentKey(SECRET).digest
    path.chmod(0o640)
    with pytest.raises(UsageError, match="can be read by other users"):
        ContentKey.of(path)
    path.write_text("short")
    path.chmod(0o600)
    with pytest.raises(UsageError, match="has 5 bytes, too few"):
        ContentKey.of(path)
    with pytest.raises(UsageError, match="cannot be used: Is a directory"):
        ContentKey.of(tmp_path)
