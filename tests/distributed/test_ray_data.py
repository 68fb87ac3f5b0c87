"""`PagedBatchGenerator` inside Ray Data, and the pipeline of docs/distributed.md."""

import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
if find_spec("ray") is None:
    pytest.skip("ray is not installed: pip install 'pagedcli[ray]'", allow_module_level=True)

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "distributed.md"


@pytest.fixture(scope="module")
def ray():
    """A small cluster on the loopback interface."""
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")
    import ray

    ray.init(
        address="local",
        num_cpus=3,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        logging_level="error",
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    assert {node["NodeManagerAddress"] for node in ray.nodes()} == {"127.0.0.1"}
    yield ray
    ray.shutdown()


def test_the_pipeline_of_the_document_gives_the_answers_of_a_run(ray, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq
    from cli_harness import pagedcli

    [code] = re.findall(r"test_ray_data\.py -->\n```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len(code.strip().splitlines()) <= 15
    prompts = [f"Story number {row}: Once upon" if row % 5 else "" for row in range(40)]
    pq.write_table(pa.table({"prompt": prompts, "label": list(range(40))}), tmp_path / "prompts.parquet")
    for name in ("prompts.parquet", "answers"):  # the workers of this cluster have another current folder
        code = code.replace(f'"{name}"', repr(str(tmp_path / name)))
    exec(compile(code, str(DOCUMENT), "exec"), {})
    answers = {row["label"]: row["text"] for row in pq.read_table(tmp_path / "answers").to_pylist()}
    assert sorted(answers) == [row for row in range(40) if row % 5]
    pagedcli("generate", tmp_path / "prompts.parquet", "-o", tmp_path / "single.parquet", "--max-tokens", 16, expect=3)
    single = pq.read_table(tmp_path / "single.parquet").to_pylist()
    assert answers == {row["label"]: row["text"] for row in single if row["prompt"]}
