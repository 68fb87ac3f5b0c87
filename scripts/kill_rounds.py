"""Kill runs of `pagedcli generate` at random moments, resume them, and compare the files with those of runs in peace.

    python scripts/kill_rounds.py FOLDER [--kills 8] [--seed 0] [--only MODE ...]

Each mode of MODES is another kind of rows, of file or of engine. A round starts the run, kills it (SIGKILL) while it
loads, when its journal has grown by a random number of bytes, or right after its last rows; sometimes it cuts off the
end of the journal, as a power cut would; and resumes until the run ends. Rounds are repeated with other random numbers
until every mode had its kills. The output must be that of the run in peace, byte for byte but for what depends on when
a run began and what its cache held: `created`, `cached_tokens`. Exit code 1 if one is not.
"""

import argparse
import gzip
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Line = dict[str, Any]
_SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
           "required": ["name", "age"], "additionalProperties": False}  # fmt: skip
_GUIDES: tuple[Line, ...] = (
    {"regex": "[a-z]{8,40}"},
    {"structured_outputs": {"grammar": 'start: /[0-9]{4,20}/ "+" /[0-9]{4,20}/'}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}},
    {"structured_outputs": {"choice": ["yes", "no", "maybe"]}},
)


def _story(n: int) -> Line:
    return {"id": f"row-{n}", "prompt": f"Story {n % 7}: Once upon a time there was a dog that went to river {n}"}


def _chat(n: int) -> Line:
    body = {"messages": [{"role": "user", "content": f"Tell me about number {n}."}], "temperature": n % 2}
    return {"custom_id": f"c{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def _several(n: int) -> Line:
    return {"qid": n, "prompt": [f"Story {n}", f"The fox {n}", f"A bear {n}"], "label": n % 3, "meta": {"n": n}}


def _guided(n: int) -> Line:
    return _story(n) | _GUIDES[n % len(_GUIDES)] | {"ignore_eos": False}


def _long(n: int) -> Line:
    return {"id": n, "prompt": [5 + (n % 4 * 31 + k * 13) % 290 for k in range(60 + n % 50)]}


@dataclass(frozen=True, slots=True)
class Mode:
    """One kind of run."""

    name: str
    flags: str
    num_lines: int = 150
    line: Callable[[int], Line] = _story
    input_name: str = "in.jsonl"  # "-": the lines come through a pipe
    output_name: str = "out.jsonl"
    broken_lines: bool = True  # every tenth line is no JSON


MODES = (
    Mode("greedy", ""),
    Mode("sampling", "--temperature 1 --top-p 0.9 --seed 7"),
    Mode("samples", "--temperature 1 --n 3", num_lines=60),
    Mode("beams", "--beam-width 4 --n 2 --logprobs 2", num_lines=40),
    Mode("logprobs", "--logprobs 5 --prompt-logprobs 3 --output-token-ids", num_lines=80),
    Mode("structured", "--temperature 1", num_lines=60, line=_guided),
    Mode("csv", "--logprobs 1 --output-token-ids", output_name="out.csv", num_lines=80),
    Mode("parquet", "--keep all --output-token-ids", input_name="in.parquet", output_name="out.parquet",
         broken_lines=False),
    Mode("gzip", "--output-token-ids", input_name="in.jsonl.gz", output_name="out.jsonl.gz"),
    Mode("several_prompts", "--id-field qid --keep label,meta --n 2 --temperature 1", num_lines=40, line=_several),
    Mode("openai_chat", "--logprobs 2", line=_chat),
    Mode("pipe", "--temperature 1", input_name="-"),
    Mode("preemption", "--num-kvcache-blocks 26 --output-token-ids --chunked-prefill-size 24", num_lines=80,
         line=_long),
    Mode("int8", "--quantization int8 --kv-cache-dtype int8 --logprobs 3"),
    Mode("record", "--record run.jsonl --record-tokens --output-metrics"),
    Mode("prefix_order", "--reorder prefix --eviction next-use --num-kvcache-blocks 60",
         line=_long),
)  # fmt: skip
_ALWAYS = "--max-tokens 60 --ignore-eos --max-num-seqs 8 --dtype float32"
_RUN_DEPENDENT = re.compile(
    rb'"prompt_tokens_details":\{"cached_tokens":\d+\}|"created":\d+|,"metrics":(?:null|\{[^{}]*\})'
)


def write_input(mode: Mode, folder: Path) -> None:
    """The input of a mode, the same each time."""
    lines = [json.dumps(mode.line(n)) for n in range(mode.num_lines)]
    if mode.broken_lines:
        lines[3::10] = ["{broken" for _ in lines[3::10]]
    content = "".join(line + "\n" for line in lines).encode()
    if mode.input_name.endswith(".parquet"):
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist([json.loads(line) for line in lines]), folder / mode.input_name)
    elif mode.input_name.endswith(".gz"):
        (folder / mode.input_name).write_bytes(gzip.compress(content))
    else:
        (folder / "in.jsonl").write_bytes(content)


def output_of(path: Path) -> bytes | list[Line]:
    """What must be equal in two outputs."""
    if path.suffix == ".parquet":
        from pyarrow import parquet

        rows = parquet.read_table(path).to_pylist()
        return [
            row | {"usage": {**row["usage"], "prompt_tokens_details": None}} if row.get("usage") else row
            for row in rows
        ]
    if path.suffix == ".csv":
        import csv

        with path.open(newline="") as file:
            return [row | {"cached_tokens": ""} for row in csv.DictReader(file)]
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return _RUN_DEPENDENT.sub(b"", content)


def run_in_child(folder: Path, mode: Mode, more: list[str]) -> None:
    """One run of the command line, in a process that has imported everything."""
    import torch

    from pagedcli.__main__ import run

    torch.set_num_threads(1)
    os.chdir(folder)
    os.dup2(os.open("stderr.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    if mode.input_name == "-":
        cat = subprocess.Popen(["cat", "in.jsonl"], stdout=subprocess.PIPE, text=True)
        assert cat.stdout is not None
        sys.stdin = cat.stdout
    flags = f"{_ALWAYS} {mode.flags}".split()
    sys.argv = ["pagedcli", "generate", mode.input_name, "-o", mode.output_name, *flags, *more]
    run()


def size_of(path: Path) -> int:
    """Bytes; 0 for a file that is not there."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


class Rounds:
    """The rounds of one mode, each in a folder of its own."""

    def __init__(self, mode: Mode, folder: Path, rng: random.Random) -> None:
        self.mode, self.folder, self.rng = mode, folder, rng
        self.context = multiprocessing.get_context("forkserver")
        self.count = Counter[str]()
        peace = self._new("peace")
        start_s = time.monotonic()
        journal_bytes = self._run(peace, [])
        self.seconds = time.monotonic() - start_s
        self.expected = output_of(peace / mode.output_name)
        self.journal_bytes = journal_bytes

    def _new(self, name: str) -> Path:
        folder = self.folder / f"{self.mode.name}-{name}"
        folder.mkdir(parents=True)
        write_input(self.mode, folder)
        return folder

    def _start(self, folder: Path, more: list[str]) -> multiprocessing.process.BaseProcess:
        process = self.context.Process(target=run_in_child, args=(folder, self.mode, more))
        process.start()
        return process

    def _run(self, folder: Path, more: list[str]) -> int:
        """To its end. Returns the largest size of the journal that was seen."""
        process, largest = self._start(folder, more), 0
        while process.is_alive():
            largest = max(largest, size_of(folder / f"{self.mode.output_name}.partial"))
            time.sleep(0.002)
        process.join()
        if process.exitcode != (3 if self.mode.broken_lines else 0):
            raise SystemExit(f"{folder}: exit code {process.exitcode}\n{(folder / 'stderr.txt').read_text()[-2000:]}")
        return largest

    def _kill_once(self, folder: Path, kills_left: int, more: list[str]) -> bool:
        """Start and kill. Whether the run was killed and did not end before."""
        journal = folder / f"{self.mode.output_name}.partial"
        process, before, way = self._start(folder, more), size_of(journal), self.rng.random()
        if way < 0.15:
            time.sleep(self.rng.uniform(0, self.seconds))
        else:
            left = max(0, self.journal_bytes - before)
            target = before + self.rng.uniform(0, left if way < 0.3 else 2 * left / (kills_left + 1))
            while process.is_alive() and size_of(journal) <= target:
                time.sleep(0.0005)
            time.sleep(self.rng.uniform(0, 0.02))
        process.kill()
        process.join()
        if process.exitcode != -signal.SIGKILL:
            return False
        if self.rng.random() < 0.25 and size_of(journal) > 0:
            os.truncate(journal, self.rng.randint(max(0, size_of(journal) - 4096), size_of(journal)))
        return True

    def one(self, name: str, kills_wanted: int) -> None:
        """A round: kills until so many are reached or the run is done, and a last resume."""
        folder, kills = self._new(name), 0
        resume: list[str] = []
        while kills < kills_wanted and self._kill_once(folder, kills_wanted - kills, resume):
            kills, resume = kills + 1, ["--resume"]
        if kills:
            self._run(folder, ["--resume"])
        stderr = (folder / "stderr.txt").read_text()
        reused = re.findall(r"resuming: [1-9][\d,]* rows? done", stderr)
        same = output_of(folder / self.mode.output_name) == self.expected
        self.count.update(kills=kills, reused=len(reused), files=1, equal=int(same))
        left = [path.name for path in folder.iterdir() if path.name.startswith(".") or path.suffix == ".partial"]
        if not same or left or "Traceback" in stderr or "this is a bug" in stderr:
            raise SystemExit(f"{folder}: equal {same}, left behind {left}, stderr:\n{stderr[-2000:]}")
        for trace in sorted(folder.glob("run*.jsonl")):
            check = [sys.executable, "-m", "pagedcli", "trace", str(trace), "--check"]
            subprocess.run(check, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            self.count["traces"] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=[mode.name for mode in MODES], default=None)
    arguments = parser.parse_args()
    imported = ["pagedcli.llm", "pagedcli.cli.session", "transformers"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(imported)
    total = Counter[str]()
    for mode in MODES:
        if arguments.only and mode.name not in arguments.only:
            continue
        rounds = Rounds(mode, arguments.folder, random.Random(f"{arguments.seed} {mode.name}"))
        for number in range(10 * arguments.kills):
            if rounds.count["kills"] < arguments.kills:
                rounds.one(str(number), arguments.kills - rounds.count["kills"])
        print(
            f"{mode.name:16} {said(rounds.count)}; {mode.num_lines} lines, {rounds.seconds:.1f} s in peace", flush=True
        )
        if rounds.count["kills"] < arguments.kills:
            raise SystemExit(f"{mode.name}: the runs were over before they could be killed")
        total += rounds.count
    print(said(total))


def said(count: Counter[str]) -> str:
    """The counts in words."""
    text = "{kills} kills, {reused} resumes reused rows, {equal} of {files} files equal".format_map(count)
    return f"{text}, {count['traces']} traces right" if count["traces"] else text


if __name__ == "__main__":
    main()
