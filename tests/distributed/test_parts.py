"""The parts of a distributed run, without a cluster: cut, made, killed, made again and merged."""

import json
import os
import threading

import pytest
from cli_harness import pagedcli
from power_loss import synced_by
from ray_harness import rows, table_rows

from pagedcli.batch.columns import Columns
from pagedcli.batch.fingerprint import input_fingerprint, run_fingerprint
from pagedcli.batch.journal import Journal
from pagedcli.batch.prompts import Prompts, batch_options, open_source
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.config import load_config
from pagedcli.core.limits import Limits
from pagedcli.distributed.merge import merge_parts
from pagedcli.distributed.parts import PartFolder, weigh_rows
from pagedcli.distributed.worker import Worker
from pagedcli.errors import PagedcliError, UsageError
from pagedcli.models.hub import model_folder

FLAGS = {
    "sampling.max_tokens": 6,
    "sampling.temperature": 1.0,
    "engine.dtype": "float32",
    "engine.max_num_seqs": 4,
    "engine.num_kvcache_blocks": 64,
}
CLI_FLAGS = [word for name, value in FLAGS.items() for word in (f"--{name.split('.')[1].replace('_', '-')}", value)]


def lines():
    """Plain, OpenAI and bad rows, and ids that come twice."""
    for i in range(40):
        if i % 10 == 3:
            yield "{broken"
        elif i % 10 == 6:
            body = {"messages": [{"role": "user", "content": f"Tell me about number {i}."}], "temperature": 0}
            yield json.dumps({"custom_id": f"c{i}", "method": "POST", "url": "/v1/chat/completions", "body": body})
        elif i % 10 == 9:
            yield json.dumps({"id": "same", "prompt": f"Row {i}"})
        else:
            yield json.dumps({"prompt": f"Story number {i % 4}: Once upon a time there was a dog, {i}", "id": i})


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The folder of a run in one process."""
    folder = tmp_path_factory.mktemp("single")
    (folder / "in.jsonl").write_text("".join(line + "\n" for line in lines()))
    pagedcli("generate", folder / "in.jsonl", "-o", folder / "out.jsonl", *CLI_FLAGS, expect=3)
    return folder


def cut(input_file, path, *, num_workers=2, flags=None):
    loaded = load_config(None, FLAGS | (flags or {}))
    columns = Columns.of(loaded.config.run)
    source = open_source(str(input_file), columns)
    model = model_folder(loaded.config.engine)
    tokenizer = Tokenizer(model)
    fingerprint = run_fingerprint(loaded.config, model, tokenizer, shard="1/1") | input_fingerprint(source.scan()[0])
    options = batch_options(loaded, columns)
    plan = weigh_rows(Prompts(source, tokenizer, options, Limits()), block_size=16)
    folder = PartFolder(path)
    folder.cut(source, *plan.parts(num_workers), plan.duplicates, fingerprint)
    return folder, loaded


def make_parts(folder, loaded):
    """Those that are missing."""
    worker = Worker(folder.path, loaded)
    assert all(worker.run_part(number) for number in folder.missing())


@pytest.fixture
def parts(single, tmp_path):
    return cut(single / "in.jsonl", tmp_path / "parts")


def test_parts_made_in_any_order_are_the_rows_of_one_process(single, parts, tmp_path):
    folder, loaded = parts
    worker = Worker(folder.path, loaded)
    numbers = list(range(folder.manifest.num_parts))
    threads = [threading.Thread(target=worker.run_part, args=(number,)) for number in reversed(numbers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folder.missing() == []
    merged = merge_parts(folder.path, tmp_path / "merged.jsonl")
    assert rows(tmp_path / "merged.jsonl") == rows(single / "out.jsonl")
    assert (merged.num_rows, merged.num_failed) == (40, 7)
    assert worker.stats.num_done == 40
    assert worker.stats.error_codes == {"invalid_json": 4, "duplicate_id": 3}


def test_every_row_is_in_one_part_and_parts_hold_rows_that_begin_alike(parts):
    folder, _ = parts
    per_part = [[each.line.index for each in folder.lines(number)] for number in range(folder.manifest.num_parts)]
    assert sorted(index for part in per_part for index in part) == list(range(40))
    assert all(part == sorted(part) for part in per_part)
    assert folder.part_of_row().tolist() == [
        next(number for number, part in enumerate(per_part) if row in part) for row in range(40)
    ]


def test_a_stopped_worker_keeps_its_rows_and_the_next_one_makes_the_rest(single, parts, tmp_path):
    folder, loaded = parts
    worker = Worker(folder.path, loaded)
    assert worker.run_part(0)
    worker.stop()
    assert not worker.run_part(1)
    assert folder.missing() == list(range(1, folder.manifest.num_parts))
    with pytest.raises(UsageError, match=r"15 of 16 parts.*are not done"):
        merge_parts(folder.path, tmp_path / "merged.jsonl")
    late = Worker(folder.path, load_config(None, FLAGS | {"run.max_time": "0.000001s"}))
    assert not any(late.run_part(number) for number in folder.missing())
    assert late.stats.facts.num_steps == 0
    make_parts(folder, loaded)
    merge_parts(folder.path, tmp_path / "merged.jsonl")
    assert rows(tmp_path / "merged.jsonl") == rows(single / "out.jsonl")


def test_a_worker_killed_between_the_part_and_the_removal_of_its_journal_is_replaced(single, parts, tmp_path):
    folder, loaded = parts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "remove", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Worker(folder.path, loaded).run_part(0)
    assert folder.part(0).exists()
    assert not folder.is_done(0)
    make_parts(folder, loaded)
    merge_parts(folder.path, tmp_path / "merged.jsonl")
    assert rows(tmp_path / "merged.jsonl") == rows(single / "out.jsonl")


def test_a_part_that_is_not_as_it_was_written_is_not_merged(parts, tmp_path):
    folder, loaded = parts
    make_parts(folder, loaded)
    part = folder.part(3)
    part.write_bytes(part.read_bytes().replace(b"a", b"b", 1))
    with pytest.raises(PagedcliError, match=r"part-00003\.jsonl is not what its run wrote"):
        merge_parts(folder.path, tmp_path / "merged.jsonl")
    assert not (tmp_path / "merged.jsonl").exists()


def test_a_folder_with_something_else_in_it_is_not_touched(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(UsageError, match=r"contains thesis.txt"):
        PartFolder(tmp_path).check(resume=False, overwrite=True)
    with pytest.raises(UsageError, match="is a file"):
        PartFolder(tmp_path / "thesis.txt").check(resume=False, overwrite=True)


def test_a_power_cut_leaves_no_manifest_of_inputs_that_are_lost(single, tmp_path):
    synced = synced_by(lambda: cut(single / "in.jsonl", tmp_path / "parts"))
    folder, work = tmp_path / "parts", tmp_path / "parts" / ".work"
    first = synced.index((folder / "manifest.json").stat().st_ino)
    before = {path.stat().st_ino for path in (*work.iterdir(), work, folder / "rows.u64", folder, tmp_path)}
    assert before <= set(synced[:first])


def test_overwrite_removes_the_files_of_the_run_alone(parts):
    folder, loaded = parts
    Worker(folder.path, loaded).run_part(0)
    (folder.path / "mine.txt").write_text("precious")
    folder.clear()
    assert [each.name for each in folder.path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_parts_have_the_columns_of_one_process(tmp_path, suffix):
    data = [{"question": f"Story {i % 3}: once {i}", "qid": f"q{i}", "label": i, "other": "x"} for i in range(8)]
    if suffix == ".parquet":
        pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'pagedcli[parquet]'")
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(data), tmp_path / "in.parquet")
    else:
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    names = {"field": "question", "id_field": "qid", "output_field": "story", "keep": "label"}
    flags = [word for name, value in names.items() for word in (f"--{name.replace('_', '-')}", value)]
    source, single, merged = (tmp_path / f"{name}{suffix}" for name in ("in", "single", "merged"))
    pagedcli("generate", source, "-o", single, *flags, *CLI_FLAGS)
    folder, loaded = cut(source, tmp_path / "parts", flags={f"run.{name}": value for name, value in names.items()})
    make_parts(folder, loaded)
    merge_parts(folder.path, merged)
    with pytest.raises(UsageError, match=f"parts are {suffix} files"):
        merge_parts(folder.path, tmp_path / f"other{'.jsonl' if suffix == '.parquet' else '.parquet'}")
    read = table_rows if suffix == ".parquet" else rows
    assert read(merged) == read(single)
    assert [row["label"] for row in read(merged)] == list(range(8))
    assert "other" not in read(merged)[0]


def test_ids_that_no_vocabulary_has_are_error_rows_and_not_the_end_of_the_run(tmp_path):
    prompts = [[-1], [2**63 - 1], [2**70], [1, 2, 3]]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    folder, loaded = cut(tmp_path / "in.jsonl", tmp_path / "parts")
    make_parts(folder, loaded)
    merge_parts(folder.path, tmp_path / "merged.jsonl")
    assert [row["error"] is None for row in rows(tmp_path / "merged.jsonl")] == [False, False, False, True]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--order", "completion"], "--order"),
        (["--reorder", "prefix"], "--reorder"),
        (["--kv-events", "tcp://127.0.0.1:0"], "--kv-events"),
        (["--metrics", "m.prom"], "--metrics"),
        (["--record", "t.jsonl"], "--record"),
        (["--deduplicate"], "--deduplicate"),
        (["--verify", "2"], "--verify"),
        (["--summary-json", "in.jsonl"], "--summary-json and the input are the same file"),
        (["--summary-json", "notes.json"], "notes.json already exists"),
        (["--resume", "--overwrite"], "exclude each other"),
    ],
)
def test_a_distributed_run_refuses_what_it_would_ignore_or_destroy(tmp_path, flags, message):
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "notes.json").write_text("mine\n")
    flags = [str(tmp_path / flag) if flag.endswith((".jsonl", ".json", ".prom")) else flag for flag in flags]
    result = pagedcli("generate", tmp_path / "in.jsonl", "-o", tmp_path / "parts", "--ray", *flags, expect=2)
    assert message in " ".join(result.stderr.split())
    assert (tmp_path / "notes.json").read_text() == "mine\n"
    assert not (tmp_path / "parts").exists()


@pytest.mark.parametrize(
    "make", [os.mkfifo, os.mkdir, lambda path: path.write_text("{")], ids=["pipe", "folder", "torn"]
)
def test_what_is_no_manifest_is_refused_at_once(single, tmp_path, make):
    folder, _ = cut(single / "in.jsonl", tmp_path / "parts")
    (path,) = (each for each in folder.path.rglob("manifest.json"))
    path.unlink()
    make(path)
    with pytest.raises(UsageError, match="does not describe a distributed run"):
        PartFolder(folder.path)
