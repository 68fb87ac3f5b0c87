"""Counters that stay small however long the run is."""

import random

import pytest

from pagedcli.batch.stats import LogHistogram, SeenIds


def test_percentiles_are_exact_to_a_percent_without_keeping_the_values():
    rng = random.Random(0)
    values = sorted(rng.lognormvariate(0, 2) for _ in range(20_000))
    histogram = LogHistogram()
    assert histogram.percentile(50) is None
    for value in values:
        histogram.add(value)
    for percent in (1, 50, 95, 99):
        exact = values[int(len(values) * percent / 100) - 1]
        assert histogram.percentile(percent) == pytest.approx(exact, rel=0.011)
    assert len(histogram._counts) < 1500


def test_a_bucket_counts_the_values_up_to_its_bound():
    histogram = LogHistogram()
    for value in (0.001, 0.01, 0.011, 0.02, 5.0):
        histogram.add(value)
    assert [histogram.num_up_to(bound) for bound in (0.0005, 0.001, 0.005, 0.01, 0.015, 0.02, 1, 10)] == [
        0, 1, 1, 2, 3, 4, 4, 5
    ]  # fmt: skip
    assert histogram.total == pytest.approx(5.042, rel=0.01)


def test_ids_are_new_once_and_text_and_numbers_are_different_ids():
    seen = SeenIds()
    ids = [*range(5000), *map(str, range(5000))]
    assert all(seen.add(row_id) for row_id in ids)
    assert not any(seen.add(row_id) for row_id in ids)
