"""A power cut at any moment, whatever it leaves of unsynced files of a prefix store and of their names: no row is wrong
or lost, no folder is above its bound, and each file is whole or not there."""

from itertools import islice

import pytest
from harness.engine import ragged_prompts
from model_zoo import cached_model
from power_loss import left_behind
from test_prefix_store import engine_with, outcome

from pagedcli.core import store as core_store

pytestmark = pytest.mark.usefixtures("own_digests")
PROMPTS = ragged_prompts(vocab_size=100)


@pytest.mark.parametrize(
    ("family", "file_bytes", "bound", "every"),
    [
        ("qwen3", 2**26, None, 9),
        pytest.param("qwen3", 2**26, None, 1, marks=pytest.mark.slow),
        pytest.param("qwen3", 10_000, None, 1, marks=pytest.mark.slow),
        pytest.param("qwen3", 10_000, 25_000, 1, marks=pytest.mark.slow),  # files are removed, too
        pytest.param("qwen3_5", 10_000, None, 1, marks=pytest.mark.slow),  # blocks and states
    ],
)
def test_after_a_power_cut_no_row_is_wrong_or_lost(
    family, file_bytes, bound, every, tmp_path_factory, tmp_path, monkeypatch
):
    path, folder = cached_model(family, tmp_path_factory), tmp_path / "store"
    folder.mkdir()
    monkeypatch.setattr(core_store, "FILE_BYTES", file_bytes)
    expected, *_ = outcome(engine_with(path), PROMPTS)
    engine = engine_with(path, folder, prefix_store_size=bound)
    num_read, numbers = 0, set()
    for number, _, _ in islice(left_behind(folder, lambda: outcome(engine, PROMPTS)), 0, None, every):
        rows, facts, _ = outcome(engine_with(path, folder, prefix_store_size=bound), PROMPTS)
        assert rows == expected
        assert bound is None or sum(each.stat().st_size for each in folder.iterdir()) <= bound
        assert not facts.not_used
        num_read += facts.num_read_blocks
        numbers.add(number)
    assert max(numbers) >= (2 if file_bytes == 2**26 else 6)  # of each file the content and the name
    assert num_read
