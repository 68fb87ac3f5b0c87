"""Prefix stores of earlier versions: their files are found whole, and each is read or refused by name, with blocks and
with states; the rows are those of a run without a store. See data/kept/README.md."""

import json
import shutil
from pathlib import Path

import pytest
from cli_harness import pagedcli, rows_of

from pagedcli.content_files import ContentFolder
from pagedcli.core.store import StoredNote

pytestmark = pytest.mark.usefixtures("own_digests")
KEPT = sorted(path.parent for path in (Path(__file__).parent / "data" / "kept").glob("*/store"))
STORES = ("store", "encrypted", "states")
FLAGS = ("--dtype", "float32", "--block-size", "4", "--num-kvcache-blocks", "200", "--max-num-seqs", "2")


@pytest.fixture(params=KEPT, ids=lambda path: path.name)
def folder(request, tmp_path):
    """A copy, as a run changes when files were used."""
    shutil.copytree(request.param, tmp_path / "kept")
    return tmp_path / "kept"


@pytest.mark.parametrize("name", STORES)
def test_kept_files_of_a_store_are_whole(folder, name):
    files, wrong = ContentFolder(folder / name).files()
    assert not wrong
    if name != "encrypted":
        kinds = {StoredNote.of(file).kind for file in files}
        assert kinds == ({"blocks", "state"} if name == "states" else {"blocks"})
    assert f"{len(files)} file" in pagedcli("store", folder / name, "--check").stdout
    [settings] = json.loads(pagedcli("store", folder / name, "--format", "json").stdout)["settings"]
    assert settings["num_files"] == len(files)


@pytest.mark.parametrize("name", STORES)
def test_a_run_reads_kept_files_or_says_why_not(folder, name):
    """Where the machine, the libraries and this version compute the same blocks they are read; the store of another
    model is refused by that name, and an encrypted one in a sentence that says what to do."""
    given = ("generate", folder / "prompts.jsonl", *FLAGS, "--max-tokens", 4)
    pagedcli(*given, "-o", folder / "without.jsonl")
    said = pagedcli(*given, "-o", folder / "with.jsonl", "--prefix-store", folder / name).stderr
    texts = [[row["text"] for row in rows_of(folder / f"{each}.jsonl")] for each in ("without", "with")]
    assert texts[0] == texts[1]
    num_read = sum(
        row["usage"]["prompt_tokens_details"]["disk_cached_tokens"] for row in rows_of(folder / "with.jsonl")
    )
    if name == "encrypted":
        assert not num_read
        assert "encryption was removed: use another folder, or remove this one" in said
    else:
        assert num_read > 0 or "other " in said
        assert "model files" in said or name != "states"
