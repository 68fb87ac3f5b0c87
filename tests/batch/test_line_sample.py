"""Rows drawn by position: each as likely as any other, and totals with intervals that hold."""

import gzip
import io
import random

import pytest

from pagedcli.batch.line_sample import _rows_from, sample_lines
from pagedcli.batch.lines import BOM, MAX_LINE_BYTES, LineSource


@pytest.mark.parametrize("num_bytes", [1, 2, 7, 64, 1000])
def test_consecutive_spans_have_each_row_once(num_bytes):
    rng = random.Random(num_bytes)
    rows = [b"x" * rng.choice([1, 2, 3, 40, 300]) for _ in range(50)]
    ends = [rng.choice([b"\n", b"\r\n", b"\n\n", b"\n \n"]) for _ in rows]
    content = BOM + b"".join(row + end for row, end in zip(rows, ends, strict=True)).rstrip(b"\n")
    spans = [_rows_from(io.BytesIO(content), start, num_bytes) for start in range(0, len(content), num_bytes)]
    assert [row for span in spans for row in span] == rows


def test_a_row_that_is_too_long_is_a_row_without_content():
    most = MAX_LINE_BYTES
    content = b"one\n" + b"x" * (most + 70000) + b"\ntwo\n" + b"y" * most + b"\n" + b"z" * (most + 1)
    assert _rows_from(io.BytesIO(content), 0, len(content)) == [b"one", None, b"two", b"y" * most, None]
    assert _rows_from(io.BytesIO(content), 4, 1) == [None]
    assert _rows_from(io.BytesIO(content), 5, most) == []


def lengths_of(kind, rng):
    """Bytes of 30,000 rows."""
    if kind == "sorted":
        return sorted(rng.randint(5, 400) for _ in range(30_000))
    if kind == "one after the other":
        return [5, 900] * 15_000
    if kind == "two halves":
        return [20] * 15_000 + [600] * 15_000
    return [int(rng.paretovariate(1.6) * 30) for _ in range(30_000)]


@pytest.mark.quick("two halves")
@pytest.mark.parametrize("kind", ["sorted", "one after the other", "two halves", "a few long ones"])
def test_totals_lie_in_their_intervals(kind, tmp_path):
    """Of 40 totals of 20 files 36 at least; 38 are expected."""
    held = 0
    for seed in range(20):
        rng = random.Random(seed)
        lengths = lengths_of(kind, rng)
        path = tmp_path / "in.jsonl"
        path.write_bytes(b"".join(b"x" * length + b"\n" for length in lengths))
        sample = sample_lines(LineSource(str(path)))
        found = [len(line.content) for line in sample]
        assert len(found) < 8000
        for per_row, whole in ((found, sum(lengths)), ([1.0] * len(found), len(lengths))):
            about = sample.about(per_row)
            assert about.value == pytest.approx(whole, rel=0.3)
            held += about.low <= whole <= about.high
    assert held >= 36


def test_a_short_file_and_what_cannot_be_read_from_anywhere_have_no_sample(tmp_path):
    path = tmp_path / "in.jsonl"
    for content in (b"", b"x", b"x\n" * 5000, b"x" * 300 + b"\n"):
        path.write_bytes(content)
        assert sample_lines(LineSource(str(path))) is None
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(b"%d\n" % i for i in range(500_000))))
    assert sample_lines(LineSource(str(path))) is None
