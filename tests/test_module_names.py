"""Modules that docstrings name exist, and so do the functions and classes that they name in them."""

import ast
import re
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "pagedcli"
FILES = sorted(SRC.rglob("*.py"))
MODULES = {
    path.relative_to(SRC).with_suffix("").as_posix().removesuffix("/__init__").replace("/", ".") for path in FILES
}
PACKAGES = {path.parent.name for path in SRC.glob("*/__init__.py")}
FILE_NAMES = {path.name for path in FILES}
LAST_WORDS = {name.rpartition(".")[2] for name in MODULES}
# fields of an object whose variable has the name of a package, or whose field has that of a module
FIELDS = {"layers.3.qkv", "batch.late", "batch.slots", "batch.work", "plan.memory"}
DOTTED = re.compile(r"(?<![\w./@-])([a-z_]+(?:\.[a-z_0-9]+)+)(?![\w(-])")
ENDINGS = (".json", ".jsonl", ".zst", ".html", ".parquet", ".csv", ".h", ".cpp", ".dev", ".safetensors")


def defined_in(module):
    path = SRC.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        found.add(getattr(node, "name", getattr(node, "id", getattr(node, "attr", None))))
    return found


def is_stale(name):
    if name in FIELDS or name.endswith(ENDINGS):
        return False
    if name.startswith("pagedcli."):
        name = name.removeprefix("pagedcli.")
        if "." not in name:
            return name not in MODULES
    first, second, *more = name.split(".")
    if second == "py":
        return f"{first}.py" not in FILE_NAMES
    if first not in PACKAGES:
        return second in LAST_WORDS and first not in LAST_WORDS
    module = f"{first}.{second}"
    if module not in MODULES:
        return second not in defined_in(first)
    if more and f"{module}.{more[0]}" in MODULES:
        module, more = f"{module}.{more[0]}", more[1:]
    return bool(more) and more[0] not in defined_in(module)


def names_in(path):
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)]
    return {name for node in nodes for name in DOTTED.findall(ast.get_docstring(node) or "")}


def test_modules_that_docstrings_name_exist():
    stale = {str(path.relative_to(SRC)): names for path in FILES if (names := {*filter(is_stale, names_in(path))})}
    assert not stale


@pytest.mark.parametrize(
    "name", ["engine.decide", "runner.calibration", "executor.py", "layers.basic.gone", "core.gone"]
)
def test_a_stale_name_is_found(name):
    assert is_stale(name)
    assert not is_stale("layers.basic.norm_all" if name.startswith("layers") else "core.scheduler")
