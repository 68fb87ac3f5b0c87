"""A power cut at any moment, whatever it leaves of unsynced bytes and names, loses no row and makes no wrong one."""

import io
import json
import re

import pytest
from harness.engine import comparable_rows, is_complete
from power_loss import left_behind

from pagedcli.batch import journal
from pagedcli.batch.job import Job, OpenJob
from pagedcli.config import load_config
from pagedcli.errors import PagedcliError
from pagedcli.runner.llm_engine import LLMEngine

FLAGS = {"engine.dtype": "float32", "engine.num_kvcache_blocks": 64, "sampling.ignore_eos": True}
LINES = [{"prompt": f"Row {i}", "max_tokens": 1 + i} for i in range(4)]
NO_JOURNAL = "is not the journal of a run"  # its first line was never synced
OTHER = f"{NO_JOURNAL}|is of a run with other settings; sampling.temperature: 0.5 -> 1.0"


@pytest.fixture(scope="module")
def engine():
    return LLMEngine(load_config(None, FLAGS).config.engine)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return tmp_path / "run"


def generate(engine, folder, name="out.jsonl", *, temperature=1.0, resume=False, overwrite=False):
    loaded = load_config(None, FLAGS | {"sampling.temperature": temperature})
    job = Job(loaded, str(folder / "in.jsonl"), folder / name, resume=resume, overwrite=overwrite)
    job.check_files()
    work = OpenJob(job)
    work.load_tokenizer()
    if work.finished() is None:
        sink = work.open_sink(io.BytesIO())
        unseen = {"observe": lambda stats: None, "observe_row": lambda row, answers: None}
        work.start(engine, sink, **unseen, stop_requested=lambda: False).run()


def engine_with_store(folder):
    keys = {"engine.prefix_store": str(folder / "store"), "engine.block_size": 4, "engine.max_num_seqs": 2}
    return LLMEngine(load_config(None, FLAGS | keys).config.engine, with_store=True)


def content_of(path):
    return path.read_bytes() if path.exists() else None


@pytest.mark.long
@pytest.mark.quick("True-1.0")
@pytest.mark.parametrize(
    ("older", "sync_s"),
    [(False, 1.0), (True, 1.0), *(pytest.param(older, -1.0, marks=pytest.mark.slow) for older in (False, True))],
)
def test_after_a_power_cut_the_rows_are_those_of_an_undisturbed_run(engine, folder, monkeypatch, older, sync_s):
    """Where there is an error instead, it is one of a few, and an older output is as it was."""
    monkeypatch.setattr(journal, "_SYNC_EVERY_S", sync_s)
    generate(engine, folder, "undisturbed.jsonl")
    if older:
        generate(engine, folder, temperature=0.5)
    out, want, num_whole = folder / "out.jsonl", comparable_rows(folder / "undisturbed.jsonl"), 0
    for _, content, _ in left_behind(folder, lambda: generate(engine, folder, overwrite=older)):
        before = content_of(out)
        try:
            generate(engine, folder, resume=True)
        except PagedcliError as raised:
            error = raised
        else:
            assert comparable_rows(out) == want
            assert is_complete(out)
            num_whole += 1
            continue
        assert re.search(OTHER if older else NO_JOURNAL, error.message)
        assert older or content == "noise"
        assert error.hint
        assert content_of(out) == before
    assert num_whole > 60


@pytest.mark.slow
@pytest.mark.usefixtures("own_digests")
def test_after_a_power_cut_a_run_with_a_store_is_resumed_to_the_same_rows(engine, folder):
    """Journal, output and store are on the same disk, and each run reads what the cut has left of the store."""
    lines = [{"prompt": f"Once upon a time there was a little fox who lived in the woods. {i}"} for i in range(4)]
    (folder / "in.jsonl").write_text("".join(json.dumps(line | {"max_tokens": 3}) + "\n" for line in lines))
    generate(engine, folder, "undisturbed.jsonl")
    out, want, num_read, num_refused = folder / "out.jsonl", comparable_rows(folder / "undisturbed.jsonl"), 0, 0

    def run(*, resume):
        one = engine_with_store(folder)
        try:
            generate(one, folder, resume=resume)
        finally:
            facts.append(one.close_store())

    facts = []
    for _, content, _ in left_behind(folder, lambda: run(resume=False)):
        if content == "noise":
            try:
                run(resume=True)
            except PagedcliError:
                num_refused += 1
                continue
        else:
            run(resume=True)
        assert comparable_rows(out) == want
        assert is_complete(out)
        num_read += facts[-1].num_read_blocks
    assert len(facts) - num_refused > 60
    assert num_read
