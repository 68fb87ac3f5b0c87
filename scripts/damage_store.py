"""Damage a prefix store in every way, run with it, and compare the rows with those of a run without a store.

    python scripts/damage_store.py FOLDER [--scale 1.0] [--seed 0]

Per kind of damage: how many trials, blocks that were read all the same, rows that differ, rows that are missing, and
folders above their bound afterwards. A trial that ends with an error of its own (a folder that cannot be read) is
counted as refused. Exit code 1 if a row is wrong or lost, or a bound did not hold.
"""

import argparse
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pagedcli import content_files
from pagedcli.config import EngineConfig
from pagedcli.core import store as core_store
from pagedcli.errors import PagedcliError
from pagedcli.runner import store as runner_store
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams

BLOCKS_IN_FILE = 4
GREEDY = SamplingParams(max_tokens=6, temperature=0, logprobs=2, ignore_eos=True)
Rows = dict[str, Any]


def prompts() -> list[list[int]]:
    """Rows of two shared beginnings, of which one branches."""
    rng = random.Random(1)
    first, second = ([rng.randrange(5, 290) for _ in range(96)] for _ in range(2))
    branches = [[rng.randrange(5, 290) for _ in range(32)] for _ in range(2)]
    return [
        [*(first + branches[n % 2] if n % 3 else second), *(rng.randrange(5, 290) for _ in range(3 + n))]
        for n in range(8)
    ]


def run(folder: Path | None, **config: Any) -> tuple[Rows, core_store.StoreFacts | None]:
    """Tokens and log-probabilities of each row, with a store or without."""
    store = None if folder is None else str(folder)
    config = {"block_size": 8, "num_gpu_blocks_override": 200, "max_num_seqs": 3, "device": "cpu", **config}
    engine = LLMEngine(EngineConfig(prefix_store=store, **config), with_store=True)
    if folder is not None and engine.cache.store is not None:
        block_bytes = engine.cache.store._memories["blocks"].block_bytes
        core_store.FILE_BYTES = BLOCKS_IN_FILE * block_bytes
    for number, tokens in enumerate(prompts()):
        engine.add_request(str(number), tokens, GREEDY)
    rows: Rows = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            [sample] = output.samples
            scores = [(each.token_id, each.logprob) for each in sample.logprobs or ()]
            rows[output.request_id] = (list(sample.token_ids), scores)
    return rows, engine.close_store()


@dataclass(slots=True)
class Counts:
    """What the trials of one kind of damage gave."""

    num_trials: int = 0
    num_blocks_read: int = 0
    num_wrong: int = 0  # rows
    num_lost: int = 0  # rows
    num_above: int = 0  # folders above the bound
    refused: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)  # why files were not read or written

    @property
    def is_bad(self) -> bool:
        return bool(self.num_wrong or self.num_lost or self.num_above)


class Bench:
    """The trials: each on a copy of one whole store."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.rng = folder, random.Random(seed)
        self.expected, _ = run(None)
        self.whole = folder / "whole"
        shutil.rmtree(self.whole, ignore_errors=True)
        _, facts = run(self.whole)
        assert facts is not None, "there is a store"
        assert facts.num_written_blocks > 20, facts
        self.bound = sum(file.stat().st_size for file in self.whole.iterdir()) + 1000
        self.counts: dict[str, Counts] = {}
        self.trial = folder / "trial"

    def fresh(self) -> Path:
        shutil.rmtree(self.trial, ignore_errors=True)
        shutil.copytree(self.whole, self.trial)
        return self.trial

    def check(self, kind: str, expected: Rows | None = None, *, num_foreign: int = 0, **config: Any) -> None:
        """Run with the damaged copy, twice: what the first run has written is read by the second."""
        counts = self.counts.setdefault(kind, Counts())
        counts.num_trials += 1
        bound = config.pop("bound", self.bound)
        for _ in range(2):
            try:
                rows, facts = run(self.trial, prefix_store_size=bound, **config)
            except PagedcliError as error:
                counts.refused[error.message.replace(str(self.trial), "DIR")] += 1
                continue
            self.count(counts, rows, expected or self.expected)
            assert facts is not None
            counts.num_blocks_read += facts.num_read_blocks
            counts.reasons.update([*facts.not_used, *facts.not_kept])
        if bound is not None:
            counts.num_above += self.own_bytes() > max(0, bound - num_foreign)

    def count(self, counts: Counts, rows: Rows, expected: Rows) -> None:
        counts.num_lost += len(expected.keys() - rows.keys())
        counts.num_wrong += sum(rows[name] != expected[name] for name in rows)

    def own_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.trial.iterdir() if path.suffix == content_files.ENDING)

    # ------------------------------------------------------------------ damages

    def files(self) -> list[Path]:
        return sorted(self.trial.glob(f"*{content_files.ENDING}"))

    def bytes_(self) -> None:
        """Some bytes of one to three files."""
        self.fresh()
        for path in self.rng.sample(self.files(), self.rng.randint(1, 3)):
            content = bytearray(path.read_bytes())
            for _ in range(self.rng.randint(1, 4)):
                content[self.rng.randrange(len(content))] ^= 1 << self.rng.randrange(8)
            path.write_bytes(content)
        self.check("bytes")

    def cut(self) -> None:
        """The end of a file, or a hole of zeros in it."""
        self.fresh()
        path = self.rng.choice(self.files())
        content = bytearray(path.read_bytes())
        place = self.rng.randrange(len(content))
        if self.rng.random() < 0.5:
            del content[place:]
        else:
            content[place : place + 4096] = bytes(len(content[place : place + 4096]))
        path.write_bytes(content)
        self.check("cuts")

    def swap(self) -> None:
        """Two files with each other's content, or one that is gone."""
        self.fresh()
        one, other = self.rng.sample(self.files(), 2)
        if self.rng.random() < 0.8:
            first, second = one.read_bytes(), other.read_bytes()
            one.write_bytes(second)
            other.write_bytes(first)
        else:
            one.unlink()
        self.check("swaps")

    def late(self) -> None:
        """Damage after the run has opened the store: its heads were whole."""
        self.fresh()
        path, place = self.rng.choice(self.files()), self.rng.random()
        opened = core_store.PrefixStore.found
        done: list[bool] = []

        def found(*args: Any) -> set[int]:
            if not done:
                done.append(True)
                content = bytearray(path.read_bytes())
                content[int(place * len(content))] ^= 0x10
                path.write_bytes(content)
            return opened(*args)

        with patched(core_store.PrefixStore, "found", found):
            self.check("after the start")

    def another_model(self, model: Path, expected: Rows) -> None:
        self.fresh()
        self.check("other model", expected, model=str(model))

    def another_block_size(self) -> None:
        self.fresh()
        self.check("other block size", block_size=self.rng.choice([4, 16]))

    def foreign(self) -> None:
        """Files of others within, at and above the bound."""
        self.fresh()
        num_bytes = int(self.bound * self.rng.choice([0.3, 0.9, 0.999]))
        (self.trial / "of-others").write_bytes(bytes(num_bytes))
        self.check("files of others", num_foreign=num_bytes)

    def full(self) -> None:
        """ENOSPC at the n-th of all writes, links, renames and syncs."""
        self.fresh()
        for path in self.rng.sample(self.files(), len(self.files()) // 2):
            path.unlink()
        name, left = self.rng.choice(["fsync", "replace", "link", "open"]), [self.rng.randint(0, 6)]
        real = getattr(os, name)

        def fail(*args: Any, **given: Any) -> Any:
            if str(self.trial) in str(args) or name in ("fsync", "link"):
                left[0] -= 1
                if left[0] < 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **given)

        with patched(os, name, fail):
            self.check("full disk")

    def disk(self) -> None:
        """A disk with less than a tenth free."""
        self.fresh()
        usage = type("Usage", (), {"total": 10**9, "free": self.rng.choice([0, 10**7, 10**8 - 10_000])})
        with patched(shutil, "disk_usage", lambda path: usage):
            self.check("disk almost full", bound=None)

    def small(self) -> None:
        self.fresh()
        self.check("small bound", bound=self.rng.randint(1, self.bound))

    def killed(self, number: int) -> bool:
        """kill -9 at the n-th call that changes the folder. Returns False if there are fewer."""
        shutil.rmtree(self.trial, ignore_errors=True)
        ended = subprocess.run([sys.executable, __file__, str(self.trial), "--kill-at", str(number)], check=False)
        if ended.returncode == 0:
            return False
        assert ended.returncode == -signal.SIGKILL, ended
        self.check("kill -9")
        return True

    def forbidden(self) -> None:
        """Folders and files without permissions, as a user who is not root."""
        for mode, of_files in ((0o500, 0o600), (0o300, 0o600), (0o000, 0o600), (0o700, 0o000), (0o500, 0o400)):
            self.fresh()
            for path in [self.trial, *self.trial.iterdir()]:
                os.chown(path, 65534, 65534)
                path.chmod(mode if path == self.trial else of_files)
            begin = [sys.executable, __file__, str(self.trial), "--as-nobody", str(self.bound)]
            answer = json.loads(subprocess.run(begin, check=True, capture_output=True, text=True).stdout)
            counts = self.counts.setdefault("no permission", Counts())
            counts.num_trials += 1
            if "refused" in answer:
                counts.refused[answer["refused"].replace(str(self.trial), "DIR")] += 1
                continue
            plain = json.loads(json.dumps(self.expected))
            self.count(counts, answer["rows"], plain)
            counts.num_blocks_read += answer["blocks"]
            counts.reasons.update(answer["reasons"])
            counts.num_above += self.own_bytes() > self.bound


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Any:
    real = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, real)


def killed_run(folder: Path, number: int) -> None:
    """A run that is killed at the n-th change of the folder."""
    left = [number]

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **given: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **given)

        return call

    run(None)  # what is compiled and cached is no part of it
    for name in ("fsync", "replace", "link", "fchmod"):
        setattr(os, name, counting(getattr(os, name)))
    run(folder)


def run_as_nobody(folder: Path, bound: int) -> dict[str, Any]:
    digests: dict[Path, str] = {}

    def digest(path: Path) -> str:
        if path not in digests:
            digests[path] = content_files.file_digest(path)
        return digests[path]

    with patched(runner_store, "file_digest", digest):
        run(folder.parent / "warm")  # everything is loaded, compiled and digested
        return _as_nobody(folder, bound)


def _as_nobody(folder: Path, bound: int) -> dict[str, Any]:
    os.setgid(65534)
    os.setuid(65534)
    try:
        rows, facts = run(folder, prefix_store_size=bound)
    except PagedcliError as error:
        return {"refused": error.message}
    assert facts is not None
    return {"rows": rows, "blocks": facts.num_read_blocks, "reasons": [*facts.not_used, *facts.not_kept]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the trials")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill-at", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--as-nobody", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.kill_at is not None:
        killed_run(given.folder, given.kill_at)
        return 0
    if given.as_nobody is not None:
        print(json.dumps(run_as_nobody(given.folder, given.as_nobody)))
        return 0
    given.folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(given.folder, given.seed)
    model = other_model(given.folder / "other-model")
    expected, _ = run(None, model=str(model))
    trials: list[tuple[int, Callable[[], Any]]] = [
        (120, bench.bytes_), (70, bench.cut), (50, bench.swap), (50, bench.late), (20, bench.another_block_size),
        (20, lambda: bench.another_model(model, expected)), (30, bench.foreign), (60, bench.full), (20, bench.disk),
        (30, bench.small),
    ]  # fmt: skip
    for number, trial in trials:
        for _ in range(max(1, round(number * given.scale))):
            trial()
    most = max(1, round(60 * given.scale))
    for number in range(most):
        if not bench.killed(number):
            break
    if os.geteuid() == 0:
        bench.forbidden()
    print_counts(bench.counts)
    return int(any(counts.is_bad for counts in bench.counts.values()))


def other_model(folder: Path) -> Path:
    """The built-in model with one other byte in the middle of its weights."""
    from pagedcli.models.hub import resolve_model

    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(resolve_model("builtin"), folder)
    [weights] = folder.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    return folder


def print_counts(counts: dict[str, Counts]) -> None:
    names, widths = (
        ("trials", "blocks read", "wrong rows", "lost rows", "above bound", "refused"),
        (7, 12, 11, 10, 12, 8),
    )
    print(f"{'damage':<18}" + "".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True)))
    rows = [*counts.items(), ("all", total(list(counts.values())))]
    for kind, each in rows:
        figures = (
            *(each.num_trials, each.num_blocks_read, each.num_wrong, each.num_lost, each.num_above),
            each.refused.total(),
        )
        print(f"{kind:<18}" + "".join(f"{value:>{width},}" for value, width in zip(figures, widths, strict=True)))
    for kind, each in counts.items():
        for why, count in (each.reasons + each.refused).most_common():
            print(f"  {kind}: {count:,} x {why}")


def total(counts: list[Counts]) -> Counts:
    names = ("num_trials", "num_blocks_read", "num_wrong", "num_lost", "num_above")
    whole = Counts(**{name: sum(getattr(each, name) for each in counts) for name in names})
    for each in counts:
        whole.refused.update(each.refused)
    return whole


if __name__ == "__main__":
    sys.exit(main())
