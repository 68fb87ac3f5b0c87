"""A power cut at any moment, whatever it leaves of unsynced files of a prefix store and of their names: no row is wrong
or lost, and no folder is above its bound."""

import pytest
from engine_harness import ragged_prompts
from model_zoo import cached_model
from power_loss import CONTENTS, left_behind
from test_prefix_store import engine_with, outcome

from pagedcli import content_files
from pagedcli.core import store as core_store

pytestmark = pytest.mark.usefixtures("own_digests")
PROMPTS = ragged_prompts(vocab_size=100)


def written(folder):
    return [path for path in folder.iterdir() if path.name.endswith(content_files.ENDING)]


@pytest.mark.parametrize(
    ("family", "num_files", "bound"),
    [
        ("qwen3", 1, None),
        pytest.param("qwen3", 6, None, marks=pytest.mark.slow),
        pytest.param("qwen3", 6, 30_000, marks=pytest.mark.slow),  # files are removed, too
        pytest.param("qwen3_5", 6, None, marks=pytest.mark.slow),  # blocks and states
    ],
)
def test_after_a_power_cut_no_row_is_wrong_or_lost(family, num_files, bound, tmp_path_factory, tmp_path, monkeypatch):
    path, folder = cached_model(family, tmp_path_factory), tmp_path / "store"
    folder.mkdir()
    monkeypatch.setattr(core_store, "FILE_BYTES", 2**26 if num_files == 1 else 10_000)
    expected, *_ = outcome(engine_with(path), PROMPTS)
    engine = engine_with(path, folder, prefix_store_size=bound)
    found, num_read, ends = set(), 0, set()
    for number, content, _ in left_behind(folder, lambda: outcome(engine, PROMPTS)):
        rows, facts, _ = outcome(engine_with(path, folder, prefix_store_size=bound), PROMPTS)
        assert rows == expected
        assert bound is None or sum(each.stat().st_size for each in folder.iterdir()) <= bound
        num_read += facts.num_read_blocks
        found.update(facts.not_used)
        ends.add((number, content))
    num_syncs = max(number for number, _ in ends)
    assert len(ends) == (num_syncs + 1) * len(CONTENTS)
    assert num_syncs >= 2 * num_files
    assert num_read
    assert found, "files are found that are not as they were written"
