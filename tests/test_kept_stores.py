"""Prefix stores of earlier versions: their files are found whole, and each is read or refused by name, plain and
encrypted, with blocks and with states; the rows are those of a run without a store. See data/kept/README.md."""

import json
import shutil
from pathlib import Path

import pytest
from cli_harness import pagedcli, rows_of

from pagedcli.content_files import ContentFolder
from pagedcli.content_keys import ContentKey
from pagedcli.core.store import StoredNote

pytestmark = pytest.mark.usefixtures("own_digests")
KEPT = sorted(path.parent for path in (Path(__file__).parent / "data" / "kept").glob("*/store"))
STORES = ("store", "encrypted", "states")
FLAGS = ("--dtype", "float32", "--block-size", "4", "--num-gpu-blocks-override", "200", "--max-num-seqs", "2")


@pytest.fixture(params=KEPT, ids=lambda path: path.name)
def folder(request, tmp_path):
    """A copy, as a run changes when files were used."""
    shutil.copytree(request.param, tmp_path / "kept")
    (tmp_path / "kept" / "key").chmod(0o600)
    return tmp_path / "kept"


def key_flags(folder, name):
    return ("--prefix-store-key", folder / "key") if name == "encrypted" else ()


@pytest.mark.parametrize("name", STORES)
def test_kept_files_of_a_store_are_whole(folder, name):
    if name == "encrypted":
        pytest.importorskip("cryptography")
    key = ContentKey.of(folder / "key") if name == "encrypted" else None
    files, wrong = ContentFolder(folder / name, key=key).files()
    assert not wrong
    kinds = {StoredNote.of(ContentFolder(folder / name, key=key), file).kind for file in files}
    assert kinds == ({"blocks", "state"} if name == "states" else {"blocks"})
    assert f"{len(files)} file" in pagedcli("store", "check", folder / name).stdout
    [settings] = json.loads(pagedcli("store", "ls", folder / name, "--format", "json").stdout)["settings"]
    assert settings["num_files"] == len(files)


@pytest.mark.parametrize("name", STORES)
def test_a_run_reads_kept_files_or_says_why_not(folder, name):
    """Where the machine, the libraries and this version compute the same blocks they are read; the store of another
    model is refused by that name."""
    if name == "encrypted":
        pytest.importorskip("cryptography")
    given = ("generate", folder / "prompts.jsonl", *FLAGS, "--max-tokens", 4)
    pagedcli(*given, "-o", folder / "without.jsonl")
    store = ("--prefix-store", folder / name, *key_flags(folder, name))
    said = pagedcli(*given, "-o", folder / "with.jsonl", *store).stderr
    texts = [[row["text"] for row in rows_of(folder / f"{each}.jsonl")] for each in ("without", "with")]
    assert texts[0] == texts[1]
    num_read = sum(
        row["usage"]["prompt_tokens_details"]["disk_cached_tokens"] for row in rows_of(folder / "with.jsonl")
    )
    assert num_read > 0 or "other " in said
    if name == "states":
        assert "model files" in said
