"""A scenario: a batch of random prompts through a random engine, by processes that die, until the output is whole.

What must hold: the output is that of a run in peace, row for row; rows that a killed process had handed over, and those
that a power cut cannot take, are found again; the pool is sound after each step, and its events are lawful.
"""

import csv
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from harness.core import ScriptedExecutor, next_token, scripted_plan
from harness.engine import BUILTIN, MemorySource
from simulator.machine import Machine

from pagedcli.batch import journal as journals
from pagedcli.batch.columns import Columns, kind_of
from pagedcli.batch.delimited import CsvLines
from pagedcli.batch.lines import InputDigest, Line
from pagedcli.batch.prompts import BatchOptions
from pagedcli.batch.rows import RowWriter
from pagedcli.batch.run import BatchRun
from pagedcli.batch.sinks import FileSink, JsonLines
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.config import Config, RunConfig
from pagedcli.core.engine_core import EngineCore
from pagedcli.distributed import parts
from pagedcli.distributed.merge import merge_parts
from pagedcli.errors import PagedcliError
from pagedcli.files import JOURNAL
from pagedcli.sampling_params import SamplingParams
from pagedcli.trace.fold import pool_fold

MOST_LIVES, MOST_STEPS = 1000, 20_000
_RUN_DEPENDENT = re.compile(rb'"prompt_tokens_details":\{"cached_tokens":\d+\}|"created":\d+')
_tokenizer: list[Tokenizer] = []


class Stopped(Exception):
    """The run has ended early because it was asked to."""


class Violation(AssertionError):
    """Something that must hold does not."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a scenario draws from its seed."""

    lines: list[object]
    limits: dict[str, object]
    roomy: dict[str, object]  # limits of the run in peace
    name: str  # of the output
    num_parts: int  # 0: one file, without parts
    run: dict[str, object] = field(default_factory=dict)  # keys of the section `run`

    @classmethod
    def draw(cls, rng: random.Random) -> "Setting":
        block_size = rng.choice((1, 2, 4, 8))
        num_blocks = rng.randint(6, 40)
        room = num_blocks * block_size
        shared = [rng.randrange(5, 300) for _ in range(room)]
        lines = [_line(rng, number, shared, room) for number in range(rng.randint(1, 30))]
        limits = {
            "block_size": block_size, "num_blocks": num_blocks, "max_num_seqs": rng.randint(1, 8),
            "max_num_batched_tokens": rng.randint(8, 64), "enable_prefix_caching": rng.random() < 0.8,
            "eviction": rng.choice(("lru", "fifo", "next-use")), "preemption_policy": rng.choice(("last", "largest")),
        }  # fmt: skip
        if rng.random() < 0.3:
            limits["chunked_prefill_size"] = rng.randint(1, 8)
        # Refusals depend on the pool, so the run in peace has the same; nobody waits, shares or is preempted in it.
        roomy = {**limits, "max_num_seqs": 1, "enable_prefix_caching": False, "max_num_batched_tokens": 4096}
        roomy.pop("chunked_prefill_size", None)
        run = {"reorder": "prefix"} if rng.random() < 0.2 else {}
        num_parts = rng.randint(1, 4) if rng.random() < 0.25 else 0
        return cls(lines, limits, roomy, "parts" if num_parts else rng.choice(_NAMES), num_parts, run)


_NAMES = ("out.jsonl", "out.jsonl", "out.jsonl.gz", "out.csv")


def _line(rng: random.Random, number: int, shared: list[int], room: int) -> object:
    if rng.random() < 0.05:
        return b"{broken"
    length = rng.randint(1, max(1, room // 2 if rng.random() < 0.9 else 2 * room))
    num_shared = rng.choice((0, length // 2, length - 1))
    prompt = [*shared[:num_shared], *(rng.randrange(5, 300) for _ in range(length - min(num_shared, len(shared))))]
    line: dict[str, object] = {"id": number, "prompt": prompt, "max_tokens": rng.randint(1, max(1, room // 3))}
    if rng.random() < 0.2:
        line |= {"n": rng.randint(2, 3), "temperature": 1.0}
    if rng.random() < 0.1:
        line["cache_salt"] = "salt"
    return line


class Engine(EngineCore):
    """The engine core of a process, without a model; see scripted.py."""

    spec = SimpleNamespace(eos_token_ids=(), vocab_size=300)

    def __init__(self, machine: Machine, limits: dict[str, object]) -> None:
        size, num_blocks = int(str(limits["block_size"])), int(str(limits["num_blocks"]))
        others = {name: value for name, value in limits.items() if name not in ("block_size", "num_blocks")}
        plan = scripted_plan(num_blocks, size, vocab_size=300, **others)
        width = -(-plan.limits.max_model_len // size)
        executor = ScriptedExecutor(
            num_blocks,
            size,
            plan.limits.max_num_seqs,
            width,
            choose=lambda context, draw: 5 + 59 * next_token(context, draw),
        )
        self._machine = machine
        super().__init__(plan, executor, emit=pool_fold(), clock_ns=machine.clock_ns)

    def step(self):
        self._machine.step()
        self._machine.counts["steps"] += 1
        if self.stats.num_steps > MOST_STEPS:
            raise Violation("the scheduler makes no progress")
        finished = super().step()
        self.cache.check([*self.scheduler.running, *self.scheduler.contexts])
        return finished


class WatchedSink(FileSink):
    """Tells the machine what rows were handed over. `places`: of the rows of a part, by their index in the input."""

    def __init__(self, machine: Machine, places: dict[int, int] | None, *given, **named) -> None:
        super().__init__(*given, **named)
        self._machine, self._places = machine, places
        owed = machine.owed.pop(self.journal.path, 0)
        if self.journal.num_rows < owed:
            raise Violation(f"{owed} rows were safe, {self.journal.num_rows} are found")

    def _place(self, index: int) -> int:
        return index if self._places is None else self._places[index]

    def holds(self, index, line_digest):
        return super().holds(self._place(index), line_digest)

    def write(self, index, line_digest, row, *, key):
        super().write(self._place(index), line_digest, row, key=key)

    def flush(self):
        super().flush()
        self._machine.flushed(self.journal.path, self.journal.num_rows)


class Process:
    """One start of the program, which finds what others have left."""

    def __init__(self, machine: Machine, setting: Setting) -> None:
        self._machine, self._setting = machine, setting
        self._limits = setting.roomy if machine.is_calm else setting.limits
        self.is_done = False

    def __call__(self) -> None:
        try:
            if self._setting.num_parts:
                self._run_parts(self._machine.folder / self._setting.name)
            else:
                path = self._machine.folder / self._setting.name
                self._run_file(path, MemorySource(self._setting.lines), fingerprint={"shard": "1/1"}, options={})
            self.is_done = True
        except Stopped:
            pass
        except (PagedcliError, OSError) as error:
            if "is not the journal of a run" in str(error):
                self._clear()
            elif not self._machine.is_full:
                raise

    def _clear(self) -> None:
        """Move away what is no journal, as the error says: its first line was never whole on the disk."""
        for path in self._machine.folder.rglob("*.partial"):
            with suppress(PagedcliError):
                if JOURNAL.has(path) and journals.read_header(path) is not None:
                    continue
            if self._machine.owed.get(path):
                raise Violation(f"{path.name} had rows that were safe")
            path.unlink()

    def _run_file(self, path: Path, lines, *, fingerprint, options, places=None) -> None:
        if places is None and path.exists() and not journals.is_to_be_replaced(path):
            journals.check_finished(path, fingerprint, lines, order="input", limit=None)
            return
        columns = Columns(kind=kind_of(path), token_ids=True)
        journal = journals.open_journal(path, fingerprint, resume=True, overwrite=places is not None)
        rows_format = CsvLines(columns) if columns.kind == "csv" else JsonLines()
        sink = WatchedSink(self._machine, places, path, journal, order="input", rows_format=rows_format)
        tokenizer = _the_tokenizer()
        config = Config(sampling=SamplingParams(temperature=0.0), run=RunConfig(**self._setting.run))
        engine = Engine(self._machine, self._limits)
        batch_options = BatchOptions(config, columns, **options)
        writer = RowWriter(tokenizer, "simulated", "key", journal.header.created_s, columns)
        keywords = self._keywords(lines, places)
        result = BatchRun(engine, tokenizer, lines, sink, writer, batch_options, **keywords).run()
        if result.outcome == "interrupted":
            raise Stopped
        if engine.block_manager.num_free_blocks != engine.plan.num_blocks:
            raise Violation("blocks are still in use at the end")

    def _keywords(self, lines, places):
        found = {"stop_requested": lambda: self._machine.is_interrupted}
        if places is None:
            return found
        digest = InputDigest()
        for line in lines:
            digest.add(line)
        return found | {"read": digest.scan()}

    def _run_parts(self, path: Path) -> None:
        """What the driver and the workers of a distributed run do, one part after the other."""
        folder = parts.PartFolder(path)
        if not folder.is_cut:
            numbers = np.arange(len(self._setting.lines))
            cut = [each for each in np.array_split(numbers, self._setting.num_parts) if len(each)]
            folder.cut(MemorySource(self._setting.lines), cut, [1] * len(cut), set(), {"run": "1"})
        for number in folder.missing():
            lines: list[Line] = [each.line for each in folder.lines(number)]
            places = {line.index: place for place, line in enumerate(lines)}
            fingerprint = folder.manifest.fingerprint | {"shard": folder.manifest.shard(number)}
            options = {"check_ids": False}
            self._run_file(folder.part(number), lines, fingerprint=fingerprint, options=options, places=places)
        merge_parts(path, self._machine.folder / "merged.jsonl", overwrite=True)


def _the_tokenizer() -> Tokenizer:
    if not _tokenizer:
        _tokenizer.append(Tokenizer(BUILTIN))
    return _tokenizer[0]


def content_of(path: Path) -> list[object]:
    """The rows of an output, without what depends on the run."""
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            return [row | {"cached_tokens": ""} for row in csv.DictReader(file)]
    with journals.open_rows(path) as file:
        return [_RUN_DEPENDENT.sub(b"", line) for line in file]


def run_seed(
    seed: int, folder: Path, counts: Counter[str], plant: Callable[[], AbstractContextManager[object]] = nullcontext
) -> None:
    """One scenario, with a fault that is planted once the run in peace is over. Raises: Violation, or whatever the
    program raised."""
    setting = Setting.draw(random.Random(f"setting {seed}"))
    expected: list[object] = []
    for name, is_calm in (("peace", True), ("war", False)):
        place = folder / f"{seed}-{name}"
        place.mkdir(parents=True)
        machine = Machine(place, random.Random(f"{name} {seed}"), Counter() if is_calm else counts, is_calm=is_calm)
        start_s = machine.now_s
        with nullcontext() if is_calm else plant():
            found = _until_done(machine, setting)
        if is_calm:
            expected = found
        elif found != expected:
            different = next((at for at, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
            raise Violation(f"{len(found)} rows of {len(expected)}, different at {different}")
        counts["virtual seconds"] += 0 if is_calm else int(machine.now_s - start_s)
        machine.close()
        shutil.rmtree(place)
    counts["scenarios"] += 1


def _until_done(machine: Machine, setting: Setting) -> list[object]:
    for _ in range(MOST_LIVES):
        process = Process(machine, setting)
        if machine.run(process) and process.is_done:
            break
    else:
        raise Violation(f"not done after {MOST_LIVES} starts")
    path = machine.folder / ("merged.jsonl" if setting.num_parts else setting.name)
    left = [each.name for each in machine.folder.rglob("*") if each.suffix in (".partial", ".tmp")]
    if left:
        raise Violation(f"left behind: {left}")
    machine.cut_power()  # what is said to be done stays done
    if not setting.num_parts and (said := journals.read_record(path).num_rows) != len(setting.lines):
        raise Violation(f"the record says {said} rows of {len(setting.lines)}")
    return content_of(path)
