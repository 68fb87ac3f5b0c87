"""Change one place of core/ at a time, run core's own tests, and list the changes that no test has noticed.

    python scripts/mutate_core.py FOLDER [--mutants 500] [--seed 0] [--limit 60] [--again]

Mutants are drawn by seed from all comparisons, operators, numbers, conditions and calls of src/pagedcli/core. Each runs
in a process of its own with a limit of processor time, and ends at the first test that fails; the tests that have found
most per second run first. What is known is in FOLDER/results.jsonl: a run that was stopped continues there. `--again`
runs those that survived once more, after new tests.
"""

import argparse
import ast
import copy
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "src" / "pagedcli" / "core"
TESTS = ROOT / "tests" / "core"
MOST_WAITING = 10  # times the limit: a test that waits uses no processor
MOST_BYTES = 16 * 2**30  # of addresses: a mutant may never stop to allocate

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
Key = tuple[str, int, int, str, str]
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of one place."""

    module: str
    line: int
    column: int
    before: str
    after: str
    place: int  # of the changed node among all nodes of the module, and which of its changes
    which: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a mutant."""

    mutant: Mutant
    verdict: str  # killed, survived, or out of time
    test: str | None  # that failed
    seconds: float  # of processor time


# ---------------------------------------------------------------------------------------------------------------------
# Mutants


def changes(node: ast.AST) -> list[ast.AST]:
    """What a node may become."""
    found: list[Any] = []
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            found = [_with(node, ops=[COMPARISONS[type(op)]()])]
        case ast.BinOp() | ast.AugAssign() if type(node.op) in OPERATORS:
            found = [_with(node, op=OPERATORS[type(node.op)]())]
        case ast.BoolOp():
            found = [_with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())]
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            found = [node.operand]
        case ast.Constant(value=bool()):
            found = [ast.Constant(not node.value)]
        case ast.Constant(value=int()):
            found = [ast.Constant(node.value + 1), ast.Constant(node.value - 1)]
        case ast.Call(func=ast.Name(id=name)) if name in FUNCTIONS:
            found = [_with(node, func=ast.Name(FUNCTIONS[name], ast.Load()))]
        case ast.If() | ast.IfExp() | ast.While():
            found = [_with(node, test=ast.UnaryOp(ast.Not(), node.test))]
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            found = [ast.Pass()]
        case ast.Break():
            found = [ast.Continue()]
        case ast.Continue():
            found = [ast.Break()]
    if isinstance(node, ast.AugAssign) and not isinstance(found[-1], ast.Pass):
        found.append(ast.Pass())
    return found


def _with(node: ast.AST, **fields: Any) -> Any:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _skipped(node: ast.AST) -> list[ast.AST]:
    """Children that no behaviour depends on: types, our own invariants, and what a data class is declared with."""
    match node:
        case ast.Assert():
            return list(ast.iter_child_nodes(node))
        case ast.FunctionDef(name="check" | "_check_tables" | "_check_holders"):
            return list(ast.iter_child_nodes(node))
        case ast.FunctionDef():
            return [*node.decorator_list, *([node.returns] if node.returns else [])]
        case ast.ClassDef():
            is_protocol = any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)
            return [*node.decorator_list, *node.keywords, *(node.body if is_protocol else [])]
        case ast.arg(annotation=annotation) | ast.AnnAssign(annotation=annotation):
            return [annotation] if annotation else []
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return list(ast.iter_child_nodes(node))
    return []


def places(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes of a module, always in the same order, without those that are skipped."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        yield node
        skipped = {id(each) for each in _skipped(node)}
        stack += [each for each in ast.iter_child_nodes(node) if id(each) not in skipped]


def mutants() -> Iterator[Mutant]:
    """All there are."""
    for path in sorted(CORE.glob("*.py")):
        for place, node in enumerate(places(ast.parse(path.read_text()))):
            for which, changed in enumerate(changes(node)):
                before, after = (
                    ast.unparse(ast.fix_missing_locations(each)).splitlines()[0] for each in (node, changed)
                )
                yield Mutant(path.name, node.lineno, node.col_offset, before, after, place, which)


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else super().visit(node)


def source(mutant: Mutant) -> str:
    """The changed module."""
    tree = ast.parse((CORE / mutant.module).read_text())
    node = next(node for place, node in enumerate(places(tree)) if place == mutant.place)
    changed = _Replace(node, changes(node)[mutant.which]).visit(tree)
    return ast.unparse(ast.fix_missing_locations(changed))


# ---------------------------------------------------------------------------------------------------------------------
# Runs


class Watch:
    """A plugin of pytest: the order of the tests, their times, and the one that has failed."""

    def __init__(self, scores: dict[str, float]) -> None:
        self.scores, self.failed = scores, None
        self.seconds: Counter[str] = Counter()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items.sort(key=lambda item: -self.scores.get(item.nodeid, 0.0))

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed and self.failed is None:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and self.failed is None:
            self.failed = report.nodeid


class Runs:
    """Runs of core's tests with a copy of the package in which one module is another."""

    def __init__(self, folder: Path, limit_s: int) -> None:
        self.folder, self.limit_s = folder, limit_s
        self.package = folder / "src" / "pagedcli"
        shutil.rmtree(folder / "src", ignore_errors=True)
        (self.package / "core").mkdir(parents=True)
        for path in CORE.parent.iterdir():
            if path.name not in ("core", "__pycache__"):
                (self.package / path.name).symlink_to(path)
        for path in CORE.glob("*.py"):
            shutil.copy(path, self.package / "core")
        self.kills: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}

    def measure(self) -> None:
        """Without a mutant: the time of each test, all of which pass."""
        verdict, watch = self._run()
        assert verdict == "survived", f"without a mutant: {verdict}, {watch['failed']}"
        self.seconds = watch["seconds"]

    def outcome(self, mutant: Mutant) -> Outcome:
        path = self.package / "core" / mutant.module
        path.write_text(source(mutant))
        before_s = _children_s()
        try:
            verdict, watch = self._run()
        finally:
            shutil.copy(CORE / mutant.module, path)
        test = watch["failed"]
        if test is not None:
            self.kills[test] += 1
        return Outcome(mutant, verdict, test, round(_children_s() - before_s, 1))

    def scores(self) -> dict[str, float]:
        """Of each test: mutants killed per second, where every test has nearly killed one."""
        return {name: (self.kills[name] + 0.1) / (each + 0.01) for name, each in self.seconds.items()}

    def _run(self) -> tuple[str, dict[str, Any]]:
        found = self.folder / "found.json"
        found.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            self._child(found)
        deadline_s = time.monotonic() + MOST_WAITING * self.limit_s
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                break
            if time.monotonic() > deadline_s:
                os.killpg(pid, signal.SIGKILL)
            time.sleep(0.02)
        if not found.exists():
            is_late = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
            return "out of time" if is_late else "killed", {"failed": None, "seconds": {}}
        watch = json.loads(found.read_text())
        return "survived" if watch["failed"] is None and os.WEXITSTATUS(status) == 0 else "killed", watch

    def _child(self, found: Path) -> None:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (self.limit_s, self.limit_s + 1))
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
        os.chdir(ROOT)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        sys.path.insert(0, str(self.folder / "src"))
        sys.dont_write_bytecode = True
        watch, code = Watch(self.scores()), 3
        try:
            marks = "not slow and not machine"
            code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", marks, str(TESTS)], plugins=[watch])
            found.with_suffix(".new").write_text(json.dumps({"failed": watch.failed, "seconds": watch.seconds}))
            found.with_suffix(".new").rename(found)
        finally:
            os._exit(int(code))


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def known(path: Path) -> dict[Key, Outcome]:
    """Outcomes of earlier runs, by what was changed; the last one counts."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        record = json.loads(line)
        outcome = Outcome(Mutant(**record.pop("mutant")), **record)
        found[key(outcome.mutant)] = outcome
    return found


def key(mutant: Mutant) -> Key:
    return mutant.module, mutant.line, mutant.column, mutant.before, mutant.after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mutants", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=60, help="seconds of processor time")
    parser.add_argument("--again", action="store_true", help="those that survived once more")
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    import_what_tests_import()
    everything = list(mutants())
    drawn = random.Random(given.seed).sample(everything, min(given.mutants, len(everything)))
    results = folder / "results.jsonl"
    before = known(results)
    runs = Runs(folder, given.limit)
    runs.kills.update(each.test for each in before.values() if each.test is not None)
    runs.measure()
    print(f"{len(drawn)} of {len(everything)} mutants; {len(runs.seconds)} tests, {sum(runs.seconds.values()):.0f} s")
    for mutant in drawn:
        earlier = before.get(key(mutant))
        if earlier is not None and not (given.again and earlier.verdict == "survived"):
            continue
        outcome = before[key(mutant)] = runs.outcome(mutant)
        with results.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
        if outcome.verdict == "survived":
            print_mutant(mutant)
    ended = [before[key(mutant)] for mutant in drawn]
    print("survived:")
    for each in sorted((each.mutant for each in ended if each.verdict == "survived"), key=key):
        print_mutant(each)
    verdicts = Counter(each.verdict for each in ended)
    print(f"{verdicts.total() - verdicts['survived']} of {verdicts.total()} found: {dict(verdicts)}")


def print_mutant(mutant: Mutant) -> None:
    print(f"  {mutant.module}:{mutant.line}: {mutant.before}  ->  {mutant.after}", flush=True)


def import_what_tests_import() -> None:
    """Packages of others, so that no process needs to import them again. Nothing of pagedcli: that is what changes."""
    import hypothesis
    import msgspec  # noqa: F401
    import numpy  # noqa: F401
    import torch
    import transformers  # noqa: F401
    import typer.testing  # noqa: F401

    torch.set_num_threads(1)
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)  # no smaller example is wanted
    hypothesis.settings.register_profile("mutants", phases=phases, database=None, derandomize=True)
    hypothesis.settings.load_profile("mutants")
    warnings.simplefilter("ignore")
    found = [name for name in sys.modules if name.partition(".")[0] == "pagedcli"]
    assert not found, f"a mutant would not be seen: {found}"


if __name__ == "__main__":
    main()
