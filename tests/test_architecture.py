"""The one-way import order of the packages, and a command line that starts without torch."""

import ast
import os
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src" / "pagedcli"

# package or module -> pagedcli packages it may import (itself always)
LOW = {
    "process",
    "config_keys",
    "errors",
    "events",
    "files",
    "line_files",
    "printable",
    "records",
    "sampling_params",
    "config",
}
LOW |= {"buckets", "content_files", "later"}
COMPUTE = {"attention", "layers", "models", "native"}
BATCH = {*LOW, *COMPUTE, "core", "planning", "runner", "assets"}
ALLOWED = {
    "errors": set(),
    "process": set(),
    "events": {"errors"},
    "printable": set(),
    "records": {"printable"},
    "files": {"errors", "line_files", "process"},
    "line_files": {"errors"},
    "buckets": {"errors", "files", "printable"},
    "content_files": {"errors", "files", "printable"},
    "remote": {"errors", "later", "printable"},
    "config_keys": {"errors"},
    "sampling_params": {"config_keys", "errors"},
    "config": {"config_keys", "errors", "events", "files", "sampling_params"},
    "llm_keywords": LOW,
    "core": LOW,
    "later": set(),
    "native": {"errors", "files", "later"},
    "attention": {"errors", "native"},
    "layers": {"errors", "attention", "later", "native"},
    "models": {*LOW, "core", "attention", "layers", "native"},
    "planning": {*LOW, *COMPUTE, "core"},
    "answers": {*LOW, "core", "models", "planning", "batch", "trace", "views", "kvevents", "simulation"},
    "runner": {*LOW, *COMPUTE, "core", "planning", "answers", "assets"},
    "batch": BATCH,
    "trace": {*LOW, "core"},
    "views": {*LOW, "core", "planning", "trace"},
    "kvevents": {*LOW, "core", "trace", "views", "remote"},
    "simulation": {*LOW, "core", "planning", "models", "batch", "trace", "views", "kvevents"},
    "show": {*LOW, "core", "planning", "trace", "views", "batch", "kvevents", "simulation", "answers"},
    "app": {*LOW, "trace", "views", "show", "kvevents", "answers"},
    "audit": {"errors", "files", "later", "printable", "process", "records", "remote", "show"},
    "llm": {*LOW, "core", "models", "planning", "runner", "batch", "llm_keywords", "trace", "show"},
    "lm_eval": {*LOW, "llm", "batch"},
    "inspect_ai": {*LOW, "batch", "llm_keywords"},
    "distributed": {*BATCH, "batch", "llm_keywords"},
}
TORCH_FREE = (
    *sorted(LOW | {"llm_keywords"}), "core", "answers", "trace", "views", "show", "kvevents", "simulation", "app",
    "audit", "cli",
)  # fmt: skip
ONLY_IN = {
    "typer": {"cli"},
    "rich": {"cli", "show", "app"},
    "textual": {"app"},
    "flash_attn": {"attention"},
    "pyarrow": {"batch", "distributed", "show"},
    "ray": {"distributed"},
    "httpx": {"remote"},
}


def python_files():
    return sorted(SRC.rglob("*.py"))


@cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def import_statements(path):
    """All of a file, and those that only a type checker reads."""
    nodes = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.If | ast.Import | ast.ImportFrom)]
    blocks = [each for each in nodes if isinstance(each, ast.If) and getattr(each.test, "id", "") == "TYPE_CHECKING"]
    return nodes, {node for block in blocks for node in ast.walk(block)}


@cache
def imports(path, *, module_level_only=False, with_types=False):
    """Dotted names imported by a file; relative imports are not used in this project."""
    found, typing_only = import_statements(path)
    nodes = parsed(path).body if module_level_only else found
    names = set()
    for node in nodes if with_types else (node for node in nodes if node not in typing_only):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def package_of(path):
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def test_imports_only_go_downwards():
    for path in python_files():
        package, file = package_of(path), path.relative_to(SRC)
        used = {name.split(".")[1] for name in imports(path) if name.startswith("pagedcli.")} - {"__version__"}
        forbidden = used - ALLOWED.get(package, used) - {package}
        assert not forbidden, f"{file} must not import {sorted(forbidden)}"
        roots = {name.split(".")[0] for name in imports(path)}
        misplaced = {module: packages for module, packages in ONLY_IN.items() if module in roots}
        assert all(package in packages for packages in misplaced.values()), f"{file}: {misplaced}"


MAX_FILE_LINES, MAX_FUNCTION_LINES = 600, 60
LONGER_FILES = {"layers/triton_recurrent.py"}
# A third of it is its parameters, and Triton compiles a kernel from one function: parts would only pass them on.
LONGER_FUNCTIONS = {
    f"attention/triton_kernels.py: {name}" for name in ("decode_kernel", "prefill_kernel", "_prefill_tiles")
}
LONGER_FUNCTIONS |= {f"layers/triton_recurrent.py: {name}" for name in ("chunk_kernel", "step_kernel")}
LONGER_FUNCTIONS |= {f"layers/triton_sampling.py: {name}" for name in ("_border", "smallest_kept_kernel")}
LONGER_FUNCTIONS |= {"layers/triton_layers.py: store_heads", "layers/triton_experts.py: experts_kernel"}
LONGER_FUNCTIONS |= {"layers/triton_stream.py: product_kernel"}


@pytest.mark.parametrize("pattern", ["*.py", "*.cpp", "*.h"])
def test_no_file_is_longer_than_one_reads_in_one_go(pattern):
    lengths = {str(path.relative_to(SRC)): len(path.read_text().splitlines()) for path in SRC.rglob(pattern)}
    longer = {name: length for name, length in lengths.items() if length > MAX_FILE_LINES}
    assert {name: length for name, length in longer.items() if name not in LONGER_FILES} == {}


def test_no_function_is_longer_than_a_screen():
    longer = {
        f"{path.relative_to(SRC)}: {node.name}"
        for path in python_files()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    }
    assert longer == LONGER_FUNCTIONS


@cache
def modules():
    """Dotted name -> file of every module of the package."""
    found = {}
    for path in python_files():
        parts = path.relative_to(SRC.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def import_graph():
    """Module -> modules that it imports at any level and for types, or names in a string to import them later."""
    known = modules().copy()
    del known["pagedcli"]  # the package itself holds __version__, and LLM for its users only
    graph = {}
    for name, path in known.items():
        used = imports(path, with_types=True)
        # `from package import module` is an import of the module alone
        used -= {module.rpartition(".")[0] for module in used & known.keys()} - plain_imports(path)
        strings = {node.value for node in ast.walk(parsed(path))
                   if isinstance(node, ast.Constant) and isinstance(node.value, str)}  # fmt: skip
        graph[name] = (used | strings) & known.keys() - {name}
    return graph


def plain_imports(path):
    """Modules of which a name that is no module is imported."""
    known = modules()
    nodes = ast.walk(parsed(path))
    return {node.module for node in nodes if isinstance(node, ast.ImportFrom)
            and any(f"{node.module}.{alias.name}" not in known for alias in node.names)}  # fmt: skip


def test_no_modules_import_each_other_in_a_circle():
    TopologicalSorter(import_graph()).prepare()  # an error that names the circle


@pytest.mark.parametrize("part", TORCH_FREE)
def test_light_parts_never_import_torch(part):
    folder = SRC / part
    for path in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]:
        # a command may import torch inside its function, when it runs
        names = {name.split(".")[0] for name in imports(path, module_level_only=part == "cli")}
        heavy = names & {"torch", "transformers"}
        assert not heavy, f"{path.relative_to(SRC)} imports {heavy}"


def test_few_imports_are_indented():
    """A module that is imported late stands behind its package (see pagedcli.later)."""
    nodes = ((node, parsed(path).body) for path in python_files() for node in ast.walk(parsed(path)))
    assert sum(isinstance(node, ast.Import | ast.ImportFrom) and node not in body for node, body in nodes) < 80


def processor_seconds_of_children():
    times = os.times()
    return times.children_user + times.children_system


def test_help_starts_fast_and_loads_no_torch():
    program = (
        "import sys\n"
        "sys.argv = ['pagedcli', '--help']\n"
        "from pagedcli.cli.main import run\n"
        "try: run()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'textual'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    times = {program: [], "import typer, msgspec, yaml": []}  # of the processor, as other tests run at the same time
    for each in [*times] * 3:
        start = processor_seconds_of_children()
        result = subprocess.run([sys.executable, "-c", each], capture_output=True, text=True, check=False)
        times[each].append(processor_seconds_of_children() - start)
        assert result.returncode == 0, result.stderr
        assert "generate" in result.stdout or each != program
    help_s, libraries_s = map(min, times.values())
    assert help_s < 4 * libraries_s, f"pagedcli --help took {help_s:.2f} s, its libraries {libraries_s:.2f} s"


def test_no_command_loads_torch_for_its_help_and_errors():
    program = (
        "import importlib, sys\n"
        "from pagedcli.cli.main import COMMANDS\n"
        "for name in COMMANDS:\n"
        "    importlib.import_module('pagedcli.cli.' + name.replace('-', '_'))\n"
        "    heavy = {'torch', 'transformers', 'textual'} & set(sys.modules)\n"
        "    assert not heavy, f'{name} loads {heavy}'\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_nobody_outside_select_asks_which_backend_runs():
    """What differs between backends is data of their Capabilities."""
    from pagedcli.attention.select import REGISTRY

    names = "|".join(entry.name for entry in REGISTRY)
    backend = r"\b(?:backend|kind|choice)(?:\.name)?"
    asks = re.compile(
        rf"""{backend} [!=]= ["'](?:{names})["']|getattr\((?:self\.)?_?backend\b|isinstance\([^)]*Attention"""
    )
    found = [
        f"{path.relative_to(SRC)}: {line.strip()}"
        for path in python_files()
        if path.name != "select.py"
        for line in path.read_text(encoding="utf-8").splitlines()
        if asks.search(line)
    ]
    assert found == []


def _defined(path):
    """Names that a module binds."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name


@pytest.mark.parametrize("path", sorted((SRC.parents[1] / "scripts").glob("*.py")), ids=lambda path: path.name)
def test_what_a_script_imports_is_there(path):
    """Most scripts are run by hand, so a renamed class would be missed."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] == "pagedcli":
            place = SRC.joinpath(*node.module.split(".")[1:])
            module = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            names = {*_defined(module), *(each.stem for each in place.glob("*.py"))}
            assert {alias.name for alias in node.names} <= names, f"{node.module} of {path.name}"


def test_no_python_child_takes_modules_from_the_folder_that_it_runs_in():
    flags = [
        flag for path in SRC.rglob("*.py") for flag in re.findall(r"[\[(]sys\.executable, (\S+),", path.read_text())
    ]
    assert len(flags) >= 4
    assert set(flags) == {'"-P"'}


def test_the_picture_of_a_requests_path_names_what_files_hand_on():
    """Each name in docs/pictures/path.svg is used in the file that hands it on and in the one that takes it."""
    renew = import_module("renew")
    steps = [(a, name, b) for chain in renew.PATHS for (a, _, name), (b, *_) in pairwise(chain)]
    steps += [(file, name, renew.PATHS[chain][0][0]) for file, name, chain in renew.BRANCHES]
    for giver, name, taker in steps:
        for file in (giver, taker):
            nodes = list(ast.walk(parsed(SRC / file)))
            used = {getattr(node, key, None) for node in nodes for key in ("id", "attr", "name")}
            assert name in used, f"{file} does not use {name}"
