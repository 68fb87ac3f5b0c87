"""Traces made to fill the memory or to confuse: a clear error, in little memory, from every reader."""

import io
import sys
import tracemalloc
from contextlib import suppress

import msgspec
import pytest
from harness.core import simulated

from pagedcli import line_files
from pagedcli.errors import TraceError
from pagedcli.line_files import zstd
from pagedcli.show.perfetto import export_perfetto
from pagedcli.show.report import render_report
from pagedcli.trace.check import check_trace
from pagedcli.trace.files import TraceReader
from pagedcli.views.explain import explain_trace
from pagedcli.views.moment import Replay

EVENTS = simulated(num_requests=4)
READERS = {
    "check": check_trace,
    "explain": explain_trace,
    "report": render_report,
    "perfetto": lambda source: export_perfetto(source, io.BytesIO()),
    "replay": Replay,
}
MB = 1 << 20
REFUSED = b'{"event":"request_refused","request_id":"a","code":"b","message":"c"}\n'


def lines(*events):
    return b"".join(msgspec.json.encode(event) + b"\n" for event in events)


def bomb(piece, num_bytes):
    """A zstd stream of so many bytes, made piece by piece."""
    compressor, out = zstd.ZstdCompressor(), io.BytesIO()
    out.write(compressor.compress(lines(EVENTS[0])))
    for _ in range(num_bytes // len(piece)):
        out.write(compressor.compress(piece))
    out.write(compressor.flush())
    return out.getvalue()


def changed(index, **changes):
    return msgspec.structs.replace(EVENTS[index], **changes)


@pytest.fixture
def peak_mb():
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1] / MB
    tracemalloc.stop()


@pytest.mark.parametrize("reader", READERS)
def test_a_small_file_of_gigabytes_is_refused_in_little_memory(tmp_path, peak_mb, reader):
    path = tmp_path / "bomb.jsonl.zst"
    path.write_bytes(bomb(b"x" * MB, 1000 * MB if reader == "check" else 80 * MB))
    assert path.stat().st_size < 100_000
    with pytest.raises(TraceError, match="longer than 64 MiB"):
        READERS[reader](TraceReader(path))
    assert peak_mb() < 140


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_a_small_file_of_many_events_is_refused_in_little_memory(tmp_path, monkeypatch, peak_mb, reader):
    monkeypatch.setattr(line_files, "_FREE_BYTES", MB)
    path = tmp_path / "bomb.jsonl.zst"
    path.write_bytes(bomb(REFUSED * 9999, 64 * MB))
    assert path.stat().st_size < 20_000
    with pytest.raises(TraceError, match="bytes decompress to more than"):
        READERS[reader](TraceReader(path))
    assert peak_mb() < 40


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lines(changed(0, num_blocks=10**12)), "a pool of 1,000,000,000,000 blocks"),
        (lines(changed(0, num_blocks=0)), "a pool of 0 blocks"),
        (lines(changed(0, block_size=2**70)), "a pool of"),
        (lines(changed(0, block_bytes=-1)), "bytes per block"),
        (lines(EVENTS[0]) + b"\n" * (8 * MB), r"hostile\.jsonl:2: "),
        (b"\n" * (8 * MB), r"hostile\.jsonl:1: not a trace"),
        (lines(EVENTS[0]) + b'{"event":"step_started","x":' + b"[" * 100_000 + b"\n", r"hostile\.jsonl:2: "),
        (lines(EVENTS[0]) + b'{"event":"request_refused","request_id":"\xff"}\n', r"hostile\.jsonl:2: .*utf-8"),
        (lines(EVENTS[0]) + b'{"event":"step_started","step":0,"time_ns":%d}\n' % 2**64, "step_started: step 0 at"),
        (lines(EVENTS[0]) + b'{"event":"step_started","step":0,"time_ns":-1}\n', "step_started: step 0 at"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value[:30],
)
def test_impossible_figures_and_bytes_are_refused_by_every_reader(tmp_path, peak_mb, reader, content, message):
    path = tmp_path / "hostile.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        READERS[reader](TraceReader(path))
    assert peak_mb() < 40


@pytest.mark.quick("-1")
@pytest.mark.parametrize("value", [-(2**62), -1, 0, 2**31, 2**63, 2**64 - 1])
def test_any_number_in_any_field_is_a_trace_error_or_harmless(tmp_path, value):
    """Each number of the first events of each kind, one at a time, through a view that keeps 64-bit columns."""
    seen: dict[tuple[type, str], int] = {}
    for index, event in enumerate(EVENTS[:200]):
        for name in event.__struct_fields__:
            if type(getattr(event, name)) is not int or seen.setdefault((type(event), name), index) != index:
                continue
            path = tmp_path / "run.jsonl"
            path.write_bytes(lines(*EVENTS[:index], changed(index, **{name: value}), *EVENTS[index + 1 : 260]))
            for read in (render_report, explain_trace, check_trace):
                with suppress(TraceError):
                    read(TraceReader(path))


@pytest.mark.parametrize("token_id", [-1, 0x110000, 2**31, 2**63])
def test_a_token_id_outside_any_vocabulary_is_refused_by_every_reader(tmp_path, token_id):
    path = tmp_path / "run.jsonl"
    index = next(i for i, event in enumerate(EVENTS) if getattr(event, "token_ids", None))
    token_ids = (token_id, *EVENTS[index].token_ids[1:])
    path.write_bytes(lines(*EVENTS[:index], changed(index, token_ids=token_ids)))
    for read in (render_report, explain_trace, check_trace):
        with pytest.raises(TraceError, match=r"token_ids\[0\]"):
            read(TraceReader(path))


@pytest.mark.skipif(sys.platform != "linux", reason="a sparse file")
def test_gigabytes_of_nothing_are_not_read(tmp_path, peak_mb):
    path = tmp_path / "run.jsonl"
    with path.open("wb") as file:
        file.write(lines(EVENTS[0]))
        file.truncate(4 << 30)
    with pytest.raises(TraceError, match=r"run\.jsonl:2: the line is longer than 64 MiB"):
        list(TraceReader(path))
    assert peak_mb() < 200
