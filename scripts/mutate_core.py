"""Change one place of core/ or of the journal at a time, run its own tests, and list the changes that none has noticed.

    python scripts/mutate_core.py FOLDER [--of core|journal] [--mutants 500] [--seed 0] [--limit 60] [--again]

Mutants are drawn by seed from all comparisons, operators, numbers, conditions and calls of the code; where it
changes, those of other functions stay the same. Each runs the tests that reach its line, in a process of its own
that ends at the first test that fails; tests that have found most per second run first. A test that takes several times
its usual processor time, or all of them the limit, ends the process, too: the mutant is out of time, as good as found.
What is known is in FOLDER/results.jsonl: a run that was stopped continues there. `--again` runs those that survived
once more, after new tests.
"""

import argparse
import ast
import compileall
import copy
import hashlib
import json
import os
import resource
import shutil
import signal
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "pagedcli"
# name -> room, its files that are changed, and the tests that are to notice
TARGETS = {
    "core": ("core", "*.py", ["tests/core"]),
    "journal": (
        "batch",
        "journal.py",
        ["tests/batch/test_batch_journal.py", "tests/batch/test_batch_resume.py", "tests/batch/test_power_loss.py"],
    ),
}
MOST_WAITING = 10  # times the limit: a test that waits uses no processor
TIMES_USUAL, MORE_S = 2, 3  # a test may take so many times what it takes while lines are recorded, and so many seconds
QUICK_S = 0.1  # of a test while lines are recorded
MEASURING_S = 600  # of processor time, for all tests while their lines are recorded
MOST_BYTES = 16 * 2**30  # of addresses: a mutant may never stop to allocate

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
Key = tuple[str, str, str, str, int]
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of one place."""

    module: str
    function: str  # qualified name; of code outside of functions that of its class, or none
    before: str
    after: str
    number: int  # among equal changes in this function
    line: int
    lines: tuple[int, int] | None  # of the statement; None: it runs as the module is imported
    place: int  # of the changed node among all nodes of the module, and which of its changes
    which: int

    @property
    def key(self) -> Key:
        """What stays as it is where other code changes."""
        return self.module, self.function, self.before, self.after, self.number


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
        case ast.Call(func=ast.Name(id="zip")):  # strict=True: lists of one length
            return list(node.keywords)
        case ast.arg(annotation=annotation) | ast.AnnAssign(annotation=annotation):
            return [annotation] if annotation else []
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return list(ast.iter_child_nodes(node))
    return []


class Place(NamedTuple):
    """A node of a module, and where it is: as in Mutant."""

    node: ast.AST
    function: str
    lines: tuple[int, int] | None


def places(tree: ast.Module) -> Iterator[Place]:
    """All of a module, always in the same order, without those that are skipped."""
    stack = [(Place(tree, "", None), False)]
    while stack:
        place, in_function = stack.pop()
        yield place
        node, function, lines = place
        skipped = {id(each) for each in _skipped(node)}
        body = node.body if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
        for child in ast.iter_child_nodes(node):
            if id(child) in skipped:
                continue
            is_inside = in_function or (isinstance(node, ast.FunctionDef) and child in body)
            name = f"{function}.{node.name}".strip(".") if child in body else function
            is_statement = is_inside and isinstance(child, ast.stmt)
            place = Place(child, name, (child.lineno, _last_line(child)) if is_statement else lines)
            stack.append((place, is_inside))


def _last_line(node: ast.stmt) -> int:
    """Of a statement, without those in it."""
    body = getattr(node, "body", None)
    return max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno


def mutants(paths: Iterator[Path]) -> list[Mutant]:
    """All there are in these files."""
    found: list[Mutant] = []
    numbers: Counter[tuple[str, str, str, str]] = Counter()
    for path in sorted(paths):
        for number, (node, function, lines) in enumerate(places(ast.parse(path.read_text()))):
            for which, changed in enumerate(changes(node)):
                before, after = (
                    ast.unparse(ast.fix_missing_locations(each)).splitlines()[0] for each in (node, changed)
                )
                name = path.name, function, before, after
                found.append(Mutant(*name, numbers[name], node.lineno, lines, number, which))
                numbers[name] += 1
    return found


def drawn(everything: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """So many of them, in an order that depends on nothing but the seed and what each changes."""
    return sorted(everything, key=lambda each: hashlib.sha256(repr((seed, each.key)).encode()).digest())[:count]


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else super().visit(node)


def source(mutant: Mutant, room: Path) -> str:
    """The changed module."""
    tree = ast.parse((room / mutant.module).read_text())
    node = next(each.node for number, each in enumerate(places(tree)) if number == mutant.place)
    changed = _Replace(node, changes(node)[mutant.which]).visit(tree)
    return ast.unparse(ast.fix_missing_locations(changed))


# ---------------------------------------------------------------------------------------------------------------------
# Runs


class Watch:
    """A plugin of pytest: runs some tests in this order, and notes their times and the one that has failed."""

    def __init__(self, tests: list[str], usual_s: dict[str, float], limit_s: int) -> None:
        self.places = {name: place for place, name in enumerate(tests)}  # none: all run
        self.usual_s, self.limit_s, self.failed = usual_s, limit_s, None
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.places:
            chosen = [item for item in items if item.nodeid in self.places]
            items[:] = sorted(chosen, key=lambda item: self.places[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        begin_s = self.seconds[nodeid] = _used_s(resource.RUSAGE_SELF)
        if nodeid in self.usual_s:
            end_s = begin_s + TIMES_USUAL * self.usual_s[nodeid] + MORE_S
            resource.setrlimit(resource.RLIMIT_CPU, (min(int(end_s) + 1, self.limit_s), self.limit_s + 1))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.seconds[nodeid] = _used_s(resource.RUSAGE_SELF) - self.seconds[nodeid]

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and self.failed is None:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and self.failed is None:
            self.failed = report.nodeid


class Lines:
    """A plugin of pytest: the lines of core that each test reaches."""

    def __init__(self, core: Path) -> None:
        self.core = f"{core}{os.sep}"
        self.tests: defaultdict[str, list[str]] = defaultdict(list)  # "module:line" -> names
        self.found: set[tuple[str, int]] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        self.found = set()
        sys.settrace(self.call)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            for name, line in self.found:
                self.tests[f"{name.removeprefix(self.core)}:{line}"].append(item.nodeid)

    def call(self, frame: FrameType, event: str, arg: object) -> Any:
        return self.line if frame.f_code.co_filename.startswith(self.core) else None

    def line(self, frame: FrameType, event: str, arg: object) -> Any:
        self.found.add((frame.f_code.co_filename, frame.f_lineno))
        return self.line


class Runs:
    """Runs of a room's tests with a copy of the package in which one module is another."""

    def __init__(self, folder: Path, room: Path, given_tests: list[str], limit_s: int) -> None:
        self.folder, self.room, self.given_tests, self.limit_s = folder, room, given_tests, limit_s
        package = folder / "src" / "pagedcli"
        self.copied = package / room.name
        shutil.rmtree(folder / "src", ignore_errors=True)
        self.copied.mkdir(parents=True)
        for path in PACKAGE.iterdir():
            if path.name not in (room.name, "__pycache__"):
                (package / path.name).symlink_to(path)
        for path in room.glob("*.py"):
            shutil.copy2(path, self.copied)
        for each in (ROOT / "src", ROOT / "tests", self.copied):  # processes with a mutant write no bytecode
            compileall.compile_dir(each, quiet=2)
        self.kills: Counter[str] = Counter()
        self.usual_s: dict[str, float] = {}
        self.tests: dict[str, list[str]] = {}

    def measure(self) -> None:
        """Without a mutant: the time of each test and its lines. All pass."""
        verdict, found = self._run([], MEASURING_S, Lines(self.copied))
        assert verdict == "survived", f"without a mutant: {verdict}, {found['failed']}"
        self.usual_s, self.tests = found["seconds"], found["tests"]

    def outcome(self, mutant: Mutant) -> Outcome:
        path = self.copied / mutant.module
        path.write_text(source(mutant, self.room))
        before_s = _used_s(resource.RUSAGE_CHILDREN)
        try:
            verdict, found = self._run(self.of(mutant), self.limit_s)
        finally:
            shutil.copy2(self.room / mutant.module, path)
        test = found["failed"]
        if test is not None:
            self.kills[test] += 1
        return Outcome(mutant, verdict, test, round(_used_s(resource.RUSAGE_CHILDREN) - before_s, 1))

    def of(self, mutant: Mutant) -> list[str]:
        """The tests that reach its line, those first that have found most per second, where each has nearly found one.
        Those that reach any of its module and those that take no time, if it runs as that is imported."""
        first, last = mutant.lines or (1, 10_000)
        names = {name for line in range(first, last + 1) for name in self.tests.get(f"{mutant.module}:{line}", ())}
        if mutant.lines is None:
            names |= {name for name, each_s in self.usual_s.items() if each_s < QUICK_S}
        return sorted(names or self.usual_s, key=lambda each: (self.usual_s[each] + 0.01) / (self.kills[each] + 0.1))

    def _run(self, tests: list[str], limit_s: int, lines: Lines | None = None) -> tuple[str, dict[str, Any]]:
        found = self.folder / "found.json"
        found.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            self._child(found, tests, limit_s, lines)
        deadline_s = time.monotonic() + MOST_WAITING * limit_s
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

    def _child(self, found: Path, tests: list[str], limit_s: int, lines: Lines | None) -> None:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 1))
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
        os.chdir(ROOT)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        sys.path.insert(0, str(self.folder / "src"))
        sys.dont_write_bytecode = True
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        watch, code = Watch(tests, self.usual_s, limit_s), 3
        try:
            files = sorted({name.partition("::")[0] for name in tests}) or self.given_tests
            options = ["-x", "-q", "--assert=plain", "-p", "no:cacheprovider", "-m", "not slow and not machine"]
            code = pytest.main([*options, *files], plugins=[watch, *([lines] if lines else [])])
            result = {"failed": watch.failed, "seconds": watch.seconds, "tests": lines.tests if lines else {}}
            found.with_suffix(".new").write_text(json.dumps(result))
            found.with_suffix(".new").rename(found)
        finally:
            os._exit(int(code))


def _used_s(whose: int) -> float:
    """Of processor time."""
    used = resource.getrusage(whose)
    return used.ru_utime + used.ru_stime


def known(path: Path) -> dict[Key, Outcome]:
    """Outcomes of earlier runs, by what was changed; the last one counts."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        record = json.loads(line)
        outcome = Outcome(Mutant(**record.pop("mutant")), **record)
        found[outcome.mutant.key] = outcome
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--of", choices=TARGETS, default="core")
    parser.add_argument("--mutants", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=60, help="seconds of processor time")
    parser.add_argument("--again", action="store_true", help="those that survived once more")
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    import_what_tests_import()
    room, pattern, tests = TARGETS[given.of]
    everything = mutants((PACKAGE / room).glob(pattern))
    chosen = drawn(everything, given.mutants, given.seed)
    results = folder / "results.jsonl"
    before = known(results)
    runs = Runs(folder, PACKAGE / room, tests, given.limit)
    runs.kills.update(each.test for each in before.values() if each.test is not None)
    runs.measure()
    print(f"{len(chosen)} of {len(everything)} mutants; {len(runs.usual_s)} tests, {sum(runs.usual_s.values()):.0f} s")
    for mutant in chosen:
        earlier = before.get(mutant.key)
        if earlier is not None and not (given.again and earlier.verdict == "survived"):
            continue
        outcome = before[mutant.key] = runs.outcome(mutant)
        with results.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
        if outcome.verdict == "survived":
            print_mutant(mutant)
    ended = [(each, before[each.key].verdict) for each in chosen]
    print("survived:")
    for mutant in sorted((each for each, verdict in ended if verdict == "survived"), key=lambda each: each.key):
        print_mutant(mutant)
    verdicts = Counter(verdict for _, verdict in ended)
    print(f"{verdicts.total() - verdicts['survived']} of {verdicts.total()} found: {dict(verdicts)}")


def print_mutant(mutant: Mutant) -> None:
    print(f"  {mutant.module}:{mutant.line} {mutant.function}: {mutant.before}  ->  {mutant.after}", flush=True)


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
    hypothesis.settings.register_profile(
        "mutants",
        phases=phases,
        database=None,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("mutants")
    warnings.simplefilter("ignore")
    found = [name for name in sys.modules if name.partition(".")[0] == "pagedcli"]
    assert not found, f"a mutant would not be seen: {found}"


if __name__ == "__main__":
    main()
