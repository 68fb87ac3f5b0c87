"""The tables of docs/kv-cache.md are what the block manager does, those of docs/models.md what reads models."""

import re
from importlib import import_module
from pathlib import Path

import doc_tables
import pytest
import renew
import transformers

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def model_tables():
    return import_module("model_tables")


@pytest.fixture(scope="module")
def models_page():
    return renew.tables_in((ROOT / "docs" / "models.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["config", "families", "dump_kv", "kv_cache"])
def test_what_the_code_makes_of_a_file_is_there(name):
    for path, text in renew.WRITTEN[name]():
        assert path.read_text(encoding="utf-8") == text, f"python scripts/renew.py --write {name}"


def test_families_and_formats_of_the_models_page_are_those_of_the_code(model_tables, models_page):
    assert set(models_page) == set(model_tables.TABLES)
    for name, make in model_tables.FAST.items():
        assert models_page[name] == make(), f"{name}: run python scripts/renew.py --write models"


def test_backends_of_the_models_page_are_those_of_the_code(model_tables, models_page):
    pytest.importorskip("triton")
    assert models_page["attention_backends"] == model_tables.attention_backends()


@pytest.mark.slow  # it builds a model of each family of transformers
def test_the_models_page_says_what_runs_through_transformers(model_tables, models_page):
    if models_page["version"] != transformers.__version__:
        pytest.skip(f"docs/models.md was made with transformers {models_page['version']}")
    for name, make in model_tables.TABLES.items():
        assert models_page[name] == make(), f"{name}: run python scripts/renew.py --write models"


def test_the_classic_stories_come_out_as_everyone_tells_them():
    long_prompts = doc_tables.two_long_prompts()
    assert re.search(r"S1.*table \[0, 1, 2\]", long_prompts)
    assert re.search(r"S2.*512 cached, table \[0, 1, 3\]", long_prompts)
    assert [line.split(None, 2)[2] for line in doc_tables.growth().splitlines()[1:]] == [
        "full", "new, partial", "partial", "partial", "full", "new, partial",
    ]  # fmt: skip
    assert "B: table [0, 1, 2]  reuses 2 blocks" in doc_tables.three_prompts()
    assert "reuses 0 blocks" in doc_tables.three_prompts().splitlines()[2]
