"""The journal survives what can happen to a file, and the output appears whole or not at all."""

import gzip
import io
import json
import resource
import signal

import pytest
from power_loss import synced_by

from pagedcli.batch.journal import Journal, check_output, journal_path, open_journal, read_record
from pagedcli.batch.lines import InputScan
from pagedcli.batch.sinks import FileSink, StreamSink
from pagedcli.errors import PagedcliError, UsageError

FINGERPRINT = {"model": "m", "seed": "0", "shard": "1/1"}
READ = InputScan("digest", 4)
ROWS = {3: b'{"index":3}', 0: b'{"index":0,"text":"\\n,\\"row\\":"}', 1: b'{"index":1}', 2: b'{"index":2}'}


def fill(journal, rows=ROWS):
    for index, row in rows.items():
        journal.append(index, 1000 + index, row, key=None if index == 2 else b"%016d" % index)
    journal.flush()
    return journal


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.jsonl.partial"


def held(journal):
    return {index for index in ROWS if journal.holds(index, 1000 + index)}


def test_every_line_of_a_journal_is_json(path):
    fill(Journal.create(path, FINGERPRINT)).close()
    header, *records = map(json.loads, path.read_text().splitlines())
    assert header["fingerprint"] == FINGERPRINT
    assert [record["index"] for record in records] == list(ROWS)


def test_a_journal_cut_at_any_byte_is_resumed_with_its_whole_rows(path):
    fill(Journal.create(path, FINGERPRINT)).close()
    content = path.read_bytes()
    ends = [place + 1 for place, byte in enumerate(content) if byte == 10]
    for cut in range(len(content) + 1):
        path.write_bytes(content[:cut])
        journal = Journal.resume(path, FINGERPRINT)
        num_whole = max(sum(end <= cut for end in ends) - 1, 0)
        assert held(journal) == set(list(ROWS)[:num_whole])
        fill(journal, {index: row for index, row in ROWS.items() if index not in held(journal)})
        assert list(journal.rows("input")) == sorted(ROWS.items())
        journal.close()


@pytest.mark.parametrize("damage", [b"\0", b"\xff", b"}", b"\n"])
def test_a_damaged_record_is_made_again_and_the_others_are_kept(path, damage):
    fill(Journal.create(path, FINGERPRINT)).close()
    lines = path.read_bytes().splitlines(keepends=True)
    middle = len(lines[2]) // 2
    lines[2] = lines[2][:middle] + damage + lines[2][middle + 1 :]
    path.write_bytes(b"".join(lines))
    journal = Journal.resume(path, FINGERPRINT)
    assert held(journal) == {3, 1, 2}
    fill(journal, {0: ROWS[0]})
    assert list(journal.rows("input")) == sorted(ROWS.items())


def test_a_row_that_is_there_twice_counts_once(path):
    fill(fill(Journal.create(path, FINGERPRINT))).close()
    journal = Journal.resume(path, FINGERPRINT)
    assert journal.num_rows == 4
    assert len(list(journal.rows("completion"))) == 4


@pytest.mark.parametrize("index", [10**12, 2**63, 2**64 - 1])
def test_a_row_of_a_huge_index_costs_no_memory_and_stays_beyond_the_input(path, index):
    fill(Journal.create(path, FINGERPRINT)).close()
    path.write_bytes(path.read_bytes().replace(b'"index":3,', b'"index":%d,' % index, 1))
    journal = Journal.resume(path, FINGERPRINT)
    assert held(journal) == {0, 1, 2}
    assert journal.end_index == index + 1
    assert [each for each, _ in journal.rows("input")] == [0, 1, 2, index]
    with pytest.raises(UsageError, match="this is not the input of that run"):
        FileSink(path.with_name("out.jsonl"), journal, order="input").finish(READ)


def test_other_settings_are_refused_and_named(path):
    fill(Journal.create(path, FINGERPRINT)).close()
    with pytest.raises(UsageError, match="seed: 0 -> 1") as refused:
        Journal.resume(path, FINGERPRINT | {"seed": "1"})
    assert "model" not in refused.value.message
    assert "--overwrite" in refused.value.hint


def test_another_input_line_is_refused(path):
    journal = fill(Journal.create(path, FINGERPRINT))
    with pytest.raises(UsageError, match="the input has changed"):
        journal.holds(1, 7)


def test_a_file_that_is_no_journal_is_refused_and_left_alone(path):
    path.write_text("hello\nworld\n")
    with pytest.raises(UsageError, match="not the journal"):
        Journal.resume(path, FINGERPRINT)
    assert path.read_text() == "hello\nworld\n"


def test_two_runs_cannot_write_one_journal(path):
    journal = Journal.create(path, FINGERPRINT)
    for opened in (Journal.create, Journal.resume):
        with pytest.raises(UsageError, match="another run is writing"):
            opened(path, FINGERPRINT)
    journal.close()
    Journal.resume(path, FINGERPRINT).close()


# ---------------------------------------------------------------------- the output


def open_sink(tmp_path, name="out.jsonl", *, resume=False, overwrite=False, order="input"):
    path = tmp_path / name
    return FileSink(path, open_journal(path, FINGERPRINT, resume=resume, overwrite=overwrite), order=order)


def write_all(sink):
    for index, row in ROWS.items():
        sink.write(index, 1000 + index, row, key=bytes(16))
    return sink


WHOLE = b"".join(ROWS[index] + b"\n" for index in sorted(ROWS))


def test_the_output_appears_only_when_it_is_whole(tmp_path):
    sink = write_all(open_sink(tmp_path))
    sink.flush()
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl.partial"]
    sink.finish(READ)
    assert {path.name for path in tmp_path.iterdir()} == {"out.jsonl", "out.jsonl.run.json"}
    assert (tmp_path / "out.jsonl").read_bytes() == WHOLE
    record = read_record(tmp_path / "out.jsonl")
    assert (record.num_rows, record.num_failed_rows, record.input) == (4, 0, READ)


def test_an_output_that_ends_in_gz_is_compressed(tmp_path):
    sink = write_all(open_sink(tmp_path, "out.jsonl.gz", order="completion"))
    sink.finish(READ)
    assert gzip.decompress((tmp_path / "out.jsonl.gz").read_bytes()) == b"".join(row + b"\n" for row in ROWS.values())


def test_an_existing_output_is_never_lost_silently(tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("precious\n")
    with pytest.raises(UsageError, match="already exists"):
        check_output(out, resume=False, overwrite=False)
    open_sink(tmp_path, overwrite=True).journal.close()  # as after a kill before the first row
    with pytest.raises(UsageError, match="already exists"):
        check_output(out, resume=False, overwrite=False)
    sink = write_all(open_sink(tmp_path, overwrite=True))
    assert out.read_text() == "precious\n", "it stays until the new one is whole"
    sink.finish(READ)
    assert out.read_bytes().startswith(ROWS[0])


def test_a_journal_with_rows_needs_resume_or_overwrite(tmp_path):
    sink = write_all(open_sink(tmp_path))
    sink.abandon()
    with pytest.raises(UsageError, match="stopped run") as refused:
        open_sink(tmp_path)
    assert "--resume" in refused.value.hint
    assert open_sink(tmp_path, resume=True).journal.num_rows == 4


def test_a_run_that_stops_before_its_first_row_leaves_nothing_behind(tmp_path):
    open_sink(tmp_path).abandon()
    assert list(tmp_path.iterdir()) == []


def test_a_journal_without_rows_is_no_obstacle(tmp_path):
    sink = open_sink(tmp_path)  # as after a kill while the model was loading
    sink.journal.close()
    check_output(tmp_path / "out.jsonl", resume=False, overwrite=False)


def test_a_file_that_only_bears_the_name_of_a_journal_or_record_is_left_alone(tmp_path):
    for name in ("out.jsonl.partial", "out.jsonl.run.json"):
        (tmp_path / name).write_text("precious")
        with pytest.raises(UsageError, match="already exists"):
            check_output(tmp_path / "out.jsonl", resume=True, overwrite=False)
        (tmp_path / name).unlink()


def test_an_output_that_appeared_during_the_run_is_not_replaced(tmp_path):
    sink = write_all(open_sink(tmp_path))
    (tmp_path / "out.jsonl").write_text("precious")
    with pytest.raises(PagedcliError, match="cannot write") as refused:
        sink.finish(READ)
    assert "all rows are safe in" in refused.value.hint
    (tmp_path / "out.jsonl").rename(tmp_path / "moved")
    again = open_sink(tmp_path, resume=True)
    assert again.journal.num_rows == 4
    again.finish(READ)
    assert (tmp_path / "moved").read_text() == "precious"
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 4


# ---------------------------------------------------------------------- a journal that others touch


def test_a_journal_that_is_deleted_still_becomes_the_output(tmp_path):
    sink = write_all(open_sink(tmp_path))
    sink.flush()
    journal_path(tmp_path / "out.jsonl").unlink()
    other = open_sink(tmp_path)  # another run takes the name
    sink.finish(READ)
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 4
    assert journal_path(tmp_path / "out.jsonl").exists(), "it is the other run's"
    other.journal.close()


def test_rows_of_a_deleted_journal_are_not_called_safe(tmp_path, full_disk):
    sink = write_all(open_sink(tmp_path))
    sink.flush()
    journal_path(tmp_path / "out.jsonl").unlink()
    full_disk(10)
    with pytest.raises(PagedcliError, match="cannot write") as failed:
        sink.finish(READ)
    assert "rows are lost" in failed.value.hint
    full_disk(resource.RLIM_INFINITY)
    stopped = write_all(open_sink(tmp_path, "other.jsonl"))
    journal_path(tmp_path / "other.jsonl").unlink()
    stopped.abandon()
    assert not stopped.rows_are_kept


@pytest.mark.parametrize("cut", [0, 1, 100, 160])
def test_a_journal_that_is_cut_during_the_run_ends_it_and_its_whole_rows_are_resumed(tmp_path, cut):
    sink = write_all(open_sink(tmp_path))
    sink.flush()
    partial = journal_path(tmp_path / "out.jsonl")
    num_bytes = partial.stat().st_size
    with partial.open("r+b") as file:
        file.truncate(num_bytes - cut if cut else 0)
    sink.write(4, 1004, b"4", key=bytes(16))
    with pytest.raises(PagedcliError, match="another program has changed"):
        sink.flush()
    sink.abandon()
    again = open_sink(tmp_path, resume=True)
    assert again.journal.num_rows < 4
    missing = [index for index in ROWS if not again.holds(index, 1000 + index)]
    for index in missing:
        again.write(index, 1000 + index, ROWS[index], key=bytes(16))
    again.finish(READ)
    assert (tmp_path / "out.jsonl").read_bytes() == WHOLE


def test_a_journal_rewritten_in_its_length_is_no_bug(tmp_path):
    sink = write_all(open_sink(tmp_path))
    sink.flush()
    partial = journal_path(tmp_path / "out.jsonl")
    with partial.open("r+b") as file:
        file.write(b"\n" * partial.stat().st_size)
    with pytest.raises(PagedcliError, match="another program has changed"):
        sink.finish(READ)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.fixture
def full_disk():
    """Files of this process cannot grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limit(num_bytes):
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_stops_the_run_and_keeps_what_was_written(tmp_path, full_disk):
    sink = open_sink(tmp_path)
    sink.write(3, 1003, ROWS[3], key=bytes(16))
    sink.flush()
    full_disk(journal_path(tmp_path / "out.jsonl").stat().st_size + 20)
    sink.write(0, 1000, ROWS[0], key=bytes(16))
    with pytest.raises(PagedcliError, match="cannot write") as failed:
        sink.flush()
    assert "--resume" in failed.value.hint
    sink.abandon()
    full_disk(resource.RLIM_INFINITY)
    again = open_sink(tmp_path, resume=True)
    assert again.journal.num_rows == 1
    write_all(again)
    again.finish(READ)
    assert (tmp_path / "out.jsonl").read_bytes() == WHOLE


def test_a_disk_that_is_full_at_the_end_loses_no_row(tmp_path, full_disk):
    sink = write_all(open_sink(tmp_path))
    sink.flush()
    full_disk(10)
    with pytest.raises(PagedcliError, match="cannot write"):
        sink.finish(READ)
    full_disk(resource.RLIM_INFINITY)
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl.partial"]
    again = open_sink(tmp_path, resume=True)
    again.finish(READ)
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 4


def test_a_stream_gets_rows_in_input_order_as_soon_as_possible():
    stream = io.BytesIO()
    sink = StreamSink(stream, order="input")
    seen = []
    for index in (1, 0, 3, 2):
        sink.write(index, 0, b"%d" % index, key=bytes(16))
        seen.append(stream.getvalue().split())
    assert seen == [[], [b"0", b"1"], [b"0", b"1"], [b"0", b"1", b"2", b"3"]]


def test_a_stopped_stream_still_gets_the_rows_that_were_done():
    stream = io.BytesIO()
    sink = StreamSink(stream, order="input")
    sink.write(2, 0, b"2", key=bytes(16))
    sink.write(1, 0, b"1", key=bytes(16))
    sink.abandon()
    assert stream.getvalue() == b"1\n2\n"


def test_a_sharded_stream_counts_its_own_rows():
    stream = io.BytesIO()
    sink = StreamSink(stream, order="input", first_index=1, step=3)
    sink.write(4, 0, b"4", key=bytes(16))
    sink.write(1, 0, b"1", key=bytes(16))
    assert stream.getvalue() == b"1\n4\n"


def test_after_a_power_cut_a_new_journal_has_its_name(tmp_path):
    """The file first, then its folder: a file's own sync may not keep its name."""
    path = tmp_path / "runs" / "out.jsonl.partial"
    path.parent.mkdir()
    synced = synced_by(lambda: Journal.create(path, FINGERPRINT).close())
    assert synced == [path.stat().st_ino, path.parent.stat().st_ino]


def test_a_journal_that_was_killed_before_its_first_line_may_still_overwrite(tmp_path):
    out = tmp_path / "out.jsonl"
    journal_path(out).touch()
    journal = open_journal(out, {}, resume=True, overwrite=True)
    assert journal.header.overwrite
    journal.close()


def test_a_run_that_ends_while_its_resume_begins_leaves_it_nothing_to_compute(tmp_path):
    (out := tmp_path / "out.jsonl").touch()
    with pytest.raises(UsageError, match="another run has just finished"):
        open_journal(out, FINGERPRINT, resume=True, overwrite=False)
    assert not journal_path(out).exists()
