"""Files that earlier versions wrote are resumed, merged, replayed and loaded by this one: see data/kept/README.md."""

import json
import re
import shutil
from pathlib import Path

import pytest
from backports import zstd
from cli_harness import pagedcli, rows_of

from pagedcli.config import load_config
from pagedcli.distributed.parts import PartFolder
from pagedcli.distributed.worker import Worker

KEPT = sorted(path.parent for path in (Path(__file__).parent / "data" / "kept").glob("*/full.jsonl"))
TRACES = ("preemption", "samples", "windows", "state")
# Texts for people may be reworded.
WORDS = {"label", "reason", "note", "notes", "title", "text", "verdict"}

pytestmark = pytest.mark.parametrize("kept", KEPT, ids=lambda path: path.name)

# What an explanation says of the other prompt: its text from the place on, and the request.
_NAMED = re.compile(r"earlier .* \(request [^)]*\)")


# Figures and the divergences of lookups have taken the place of two tables of servers; a key said the block size twice.
GONE = {"churn", "twins", "minimum_cacheable_prefix_tokens"}
# That a sequence stands still for want of a block was not told apart before.
STALLED = (".status", ".waiting_reason")


def unpacked(path: Path) -> str:
    text = zstd.decompress(path.read_bytes()).decode()
    # snapshots of recurrent state had another name, which a reason to wait still has
    return re.sub(r'(?<!"waiting_reason":")checkpoint', "snapshot", text)


def differences(before, now, place="$"):
    """Places at which what was said before is no longer said; additions are none."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in before.keys() - WORDS - GONE:
            if key in now:
                yield from differences(before[key], now[key], f"{place}.{key}")
            else:
                yield f"{place}.{key} is missing"
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for number, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from differences(old, new, f"{place}[{number}]")
    elif place.endswith(".divergence"):
        # a prompt may part from several others at the same token, and one of them is named
        if _NAMED.sub("", before or "") != _NAMED.sub("", now or ""):
            yield f"{place}: {before!r} became {now!r}"
    elif before != now and not (place.endswith(STALLED) and now in ("stalled", "free_blocks")):
        yield f"{place}: {before!r} became {now!r}"


def names_of(rows):
    return [row.get("custom_id", row["id"]) for row in rows]


@pytest.fixture
def folder(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the input and the configuration of the kept runs, as the current one."""
    for name in ("prompts.jsonl", "run.yaml"):
        shutil.copy(kept / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def without_kernels(header: bytes) -> bytes:
    """The header of a journal made on any processor: the kernels are compared where both runs name them."""
    record = json.loads(header)
    del record["fingerprint"]["kernels"]
    return json.dumps(record, separators=(",", ":")).encode()


def test_a_kept_journal_is_resumed_with_its_rows(kept: Path, folder: Path) -> None:
    header, *records = (kept / "journal.jsonl").read_bytes().splitlines()
    (folder / "out.jsonl.partial").write_bytes(b"\n".join((without_kernels(header), *records)) + b"\n")
    result = pagedcli("generate", "prompts.jsonl", "-o", "out.jsonl", "-C", "run.yaml", "--resume", expect=3)
    assert "failed" in result.stderr
    rows = (folder / "out.jsonl").read_text().splitlines()
    for record in records:
        index, row = json.loads(record)["index"], record.decode().partition(',"row":')[2][:-1]
        assert rows[index] == row
    assert names_of(map(json.loads, rows)) == names_of(rows_of(kept / "full.jsonl"))


def test_a_kept_finished_run_needs_nothing_more(kept: Path, folder: Path) -> None:
    for suffix in ("", ".run.json"):
        shutil.copy(kept / f"full.jsonl{suffix}", folder)
    pagedcli("generate", "prompts.jsonl", "-o", "full.jsonl", "-C", "run.yaml", "--resume", expect=3)
    assert (folder / "full.jsonl").read_bytes() == (kept / "full.jsonl").read_bytes()


def test_kept_shards_are_merged(kept: Path, folder: Path) -> None:
    for name in ("shard1.jsonl", "shard2.jsonl"):
        for suffix in ("", ".run.json"):
            shutil.copy(kept / f"{name}{suffix}", folder)
    pagedcli("merge", "shard1.jsonl", "shard2.jsonl", "-o", "merged.jsonl", expect=3)
    assert names_of(rows_of(folder / "merged.jsonl")) == names_of(rows_of(kept / "full.jsonl"))


def test_kept_parts_of_a_distributed_run_are_finished_and_merged(kept: Path, folder: Path) -> None:
    shutil.copytree(kept / "parts", folder / "parts")
    done = (folder / "parts" / "part-00000.jsonl").read_bytes()
    journal = (folder / "parts" / "part-00001.jsonl.partial").read_text().splitlines()
    parts = PartFolder(folder / "parts")
    assert parts.missing() == [1, 2, 3]
    worker = Worker(parts.path, load_config(folder / "run.yaml", {}))
    assert all(worker.run_part(number) for number in parts.missing())
    assert parts.part(0).read_bytes() == done
    assert journal[1].partition(',"row":')[2][:-1] in parts.part(1).read_text().splitlines()
    pagedcli("merge", "parts", "-o", "merged.jsonl", expect=3)
    assert names_of(rows_of(folder / "merged.jsonl")) == names_of(rows_of(kept / "full.jsonl"))


@pytest.mark.parametrize("name", TRACES)
def test_a_kept_trace_keeps_the_laws_and_says_what_it_said(name: str, kept: Path) -> None:
    trace = kept / f"{name}.jsonl.zst"
    assert ": ok, " in pagedcli("trace", trace, "--check").stdout
    explained = json.loads(pagedcli("explain", trace, "--lookups", "--format", "json").stdout)
    assert not list(differences(json.loads(unpacked(kept / f"{name}.explain.json.zst")), explained))[:5]
    steps = rows_of(pagedcli("trace", trace, "--dump-kv", "--format", "json").stdout)
    assert not list(differences(rows_of(unpacked(kept / f"{name}.replay.jsonl.zst")), steps))[:5]


def test_a_kept_recording_of_kv_events_says_what_it_said(kept: Path) -> None:
    recording = kept / "kv_events.jsonl.zst"
    attached = json.loads(pagedcli("attach", recording, "--format", "json").stdout)
    assert not list(differences(json.loads((kept / "kv_events.attach.json").read_text()), attached))[:5]
    explained = json.loads(pagedcli("explain", recording, "--format", "json").stdout)
    assert not list(differences(json.loads(unpacked(kept / "kv_events.explain.json.zst")), explained))[:5]


@pytest.mark.long
@pytest.mark.usefixtures("folder")
def test_a_kept_calibration_is_read_or_made_again(kept: Path, step_times: Path) -> None:
    """Under each name that the cache of today would look for."""
    arguments = ("plan", "prompts.jsonl", "-C", "run.yaml", "--format", "json")
    pagedcli(*arguments, expect=3)
    (made,) = step_times.iterdir()
    shutil.copy(kept / "calibration.json", made)
    assert json.loads(pagedcli(*arguments, expect=3).stdout)
