"""Record a fixed set of runs of the command line, for a comparison byte for byte.

    python scripts/same_runs.py FOLDER [--only NAME ...] [--jobs 2]
    git diff --no-index FOLDER_A FOLDER_B

For changes that must not change any result: record before and after, and compare. It only uses the command line
(`python -m pagedcli` of the Python that runs this script), so it works across any change of the modules. The folder
gets one subfolder per run, with stdout, stderr, exit codes and all written files. What differs between two equal runs
(times, speeds, free memory) is masked: see "Masks" below. Both recordings must come from the same machine.
"""

import argparse
import base64
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
from same_runs_inputs import ROOT, write_inputs, write_models

TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Run:
    """One subfolder of a recording: commands that run in it one after the other."""

    name: str
    commands: tuple[str, ...]  # arguments of pagedcli, "< FILE" at the end gives stdin; or a step of _STEPS
    masked_keys: tuple[str, ...] = ()  # JSON keys to mask in addition
    masked_text: str = r"(?!)"  # a regular expression to mask in all files; by default nothing


# ---------------------------------------------------------------------------------------------------------------------
# Masks: everything that may differ between two recordings of the same program

# Values of these JSON keys become 0: numbers and texts, and lists and objects of these.
MASKED_KEYS = (
    # rows with --output-metrics, --summary-json, bench, simulate
    "queued_s", "ttft_s", "tpot_s", "latency_s", "last_tpot_s", "total_s", "ttft_ms", "tpot_ms", "last_tpot_ms",
    "elapsed_s", "waiting_s", "generated_tokens_per_s", "total_tokens_per_s",
    # journals and OpenAI rows: when the run began; traces: the calibration, by machine and kernels
    "created", "created_s", "local_time", "step_times",
    # doctor: speeds, duration of each check, memory of this machine
    "gflop_per_s", "seconds", "free_bytes", "total_bytes",
    # profile-memory, where it measures
    "loading_peak_bytes", "predicted_loading_peak_bytes",
    "room_bytes", "measured_bytes", "predicted_bytes", "difference", "num_blocks_left", "max_concurrency_left",
    "longest_request_left_tokens",
)  # fmt: skip
# Commands whose output depends on nothing but their input files: only versions and paths are masked.
EXACT_COMMANDS = ("replay", "explain", "simulate", "merge", "verify", "attach")
_VERSION = (re.compile(r'(pagedcli(?:_version)?"?[ :"]{1,3})\d+\.\d+\.\d+\S*?(?=[",\s)])'), r"\1VERSION")
# Durations and speeds in texts for people, and what is computed from durations.
_TEXT_MASKS = (
    (re.compile(r"\d[\d,.]* (?:s|ms|µs|min)\b"), "# TIME"),
    (re.compile(r"\d[\d,.]*(?= (?:tok/s|tokens/s|GFLOP/s|GB/s)\b)"), "#"),
    (re.compile(r"^(  waiting +# TIME over all sequences).*$", re.MULTILINE), r"\1"),
    # progress of a run of several seconds, a line now and then
    (re.compile(r"^[\d,]+/[\d,]+ rows.*, KV .*\n", re.MULTILINE), ""),
    # metrics for Prometheus
    (re.compile(r"^(pagedcli_\w*_seconds(?:\{[^}]*\})?) [\d.e+-]+$", re.MULTILINE), r"\1 0"),
)
_FROZEN_START_NS = 1_700_000_000_000_000_000
_FROZEN_STEP_NS = 1_000_000
_FROZEN_PARTS = {"schedule_ns": 100_000, "forward_ns": 600_000, "sample_ns": 200_000, "observer_ns": 0}


def masked(text: str, folder: Path, run: Run, *, exact: bool) -> str:
    """The text without what differs between equal runs."""
    text = text.replace(str(folder), "FOLDER").replace(str(ROOT), "ROOT")
    text = _VERSION[0].sub(_VERSION[1], text)
    if exact:
        return text
    names = "|".join((*MASKED_KEYS, *run.masked_keys))
    text = re.sub(rf'("(?:{names})":\s*)(?:-?\d[\d.eE+-]*|\[[^\[\]]*\]|\{{[^{{}}]*\}}|"[^"]*")', r"\g<1>0", text)
    for pattern, replacement in _TEXT_MASKS:
        text = pattern.sub(replacement, text)
    return re.sub(run.masked_text, "#", text)


def freeze_trace(path: Path) -> None:
    """Replace the times of a trace by fixed ones, so that everything computed from it can be compared exactly."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    now_ns = 0
    for record in records:
        if record["event"] == "engine_started":
            record["time_ns"] = _FROZEN_START_NS
        elif "time_ns" in record:
            now_ns += _FROZEN_STEP_NS
            record["time_ns"] = now_ns
            record.update({key: ns for key, ns in _FROZEN_PARTS.items() if key in record})
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))


def freeze_recording(path: Path) -> None:
    """The same for a recording of KV events: its header, and the times inside and outside of each message."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lines[0].update(time_s=float(_FROZEN_START_NS // 10**9), sources=["tcp://127.0.0.1:5557"])
    for number, line in enumerate(lines[1:]):
        batch = msgspec.msgpack.decode(base64.b64decode(line["frames"][-1]))
        batch[0] = float(number)
        line["t"] = float(number)
        line["frames"][-1] = base64.b64encode(msgspec.msgpack.encode(batch)).decode()
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def freeze_all(folder: Path) -> None:
    """Freeze the traces and recordings that a command has written in a run's folder."""
    for path in sorted(folder.glob("*.jsonl*")):
        with path.open("rb") as file:
            start = file.read(40)
        if start.startswith(b'{"event":"engine_started"'):
            freeze_trace(path)
        elif start.startswith(b'{"kv_events":'):
            freeze_recording(path)


# ---------------------------------------------------------------------------------------------------------------------
# The runs

IN, MODEL = "../inputs", "../models"
_INSPECT = (
    "replay run.jsonl --check",
    "replay run.jsonl --dump-kv --format json",
    "explain run.jsonl --lookups --format json",
    "explain run.jsonl -o report.html",
)
_FORMATS = ("table", "json", "csv", "md")


def traced(name: str, flags: str, *, rows: str = "shared.jsonl") -> Run:
    """A run of `trace` with its tables, and what the inspection commands make of its events."""
    return Run(f"trace_{name}", (f"trace {IN}/{rows} --dump-kv --record run.jsonl {flags}", *_INSPECT))


def generated(name: str, flags: str, *, rows: str = "prompts.jsonl", masked_keys: tuple[str, ...] = ()) -> Run:
    return Run(f"generate_{name}", (f"generate {IN}/{rows} -o out.jsonl {flags}",), masked_keys)


def each_format(command: str, formats: tuple[str, ...] = _FORMATS) -> tuple[str, ...]:
    return tuple(f"{command} --format {name}" for name in formats)


_SMALL = "--num-kvcache-blocks 24 --block-size 16 --max-num-seqs 6"
TRACES = (
    traced("plain", ""),
    traced("preemption", "--num-kvcache-blocks 26 --max-num-seqs 8"),
    traced("preempt_largest", "--num-kvcache-blocks 26 --max-num-seqs 8 --preemption-policy largest"),
    traced("no_prefix_caching", "--no-enable-prefix-caching --max-num-seqs 6"),
    traced("block_1", "--block-size 1 --num-kvcache-blocks 600 --max-num-seqs 6"),
    traced("block_64", "--block-size 64 --num-kvcache-blocks 14 --max-num-seqs 4 --record-tokens"),
    traced("chunks", "--max-num-batched-tokens 24 --chunked-prefill-size 7 --max-num-seqs 5"),
    traced("samples", "--max-num-seqs 8 --num-kvcache-blocks 60 --block-size 4", rows="samples.jsonl"),
    traced("bad_rows", "--num-kvcache-blocks 40 --no-ids", rows="bad.jsonl"),
    traced("async", f"-C {IN}/async.yaml {_SMALL}"),
    *(traced(f"eviction_{name}", f"--eviction {name} {_SMALL}") for name in ("fifo", "lfu", "prefix-lru")),
    traced("eviction_lru", f"--eviction lru {_SMALL} --reorder prefix"),
    traced("eviction_next_use", f"--eviction next-use {_SMALL} -C {IN}/read_ahead.yaml"),
    traced("windows", f"-m {MODEL}/windows --block-size 4 --num-kvcache-blocks 90 --ignore-eos",
           rows="windows.jsonl"),
    traced("all_windows", f"-m {MODEL}/all_windows --block-size 4 --chunked-prefill-size 7 --max-num-seqs 3"
           " --num-kvcache-blocks 40", rows="windows_bad.jsonl"),
    Run("trace_one_step", (
        *each_format(f"trace {IN}/prompts.jsonl --step 3 --record run.jsonl.zst --overwrite", ("table", "json")),
        "replay run.jsonl.zst --check",
    )),
)  # fmt: skip

GENERATES = (
    generated("jsonl", "--output-token-ids --logprobs 2 --summary-json summary.json --metrics run.prom --verify 3"),
    Run("generate_csv", (f"generate {IN}/samples.jsonl -o out.csv --output-token-ids",)),
    Run("generate_parquet", (
        f"generate {IN}/samples.jsonl -o out.parquet --output-token-ids",
        f"generate {IN}/columns.parquet -o columns.parquet --field question --id-field qid --max-tokens 12",
        f"generate {IN}/columns.jsonl -o keep.parquet --field question --id-field qid --keep all --max-tokens 12",
    )),
    generated("columns", "--field question --id-field qid --keep label,meta --output-field answer --max-tokens 12",
              rows="columns.jsonl"),
    Run("generate_stdin", (f"generate - --max-tokens 6 --order completion < {IN}/shared.jsonl",)),
    generated("openai", "", rows="openai_batch.jsonl", masked_keys=("digest",)),
    generated("chat", "--system-prompt 'Be brief.'", rows="chat.jsonl"),
    generated("samples", "--output-metrics --seed 5", rows="samples.jsonl", masked_keys=("digest",)),
    generated("structured", "--output-token-ids", rows="structured.jsonl"),
    generated("dump_kv", "--dump-kv --max-tokens 3 --limit 5"),
    generated("config", f"-C {IN}/run.yaml --logprobs 1 --prompt-logprobs 1 --n 2 --temperature 0.7"),
    Run("generate_errors", (
        f"generate {IN}/bad.jsonl -o out.jsonl --num-kvcache-blocks 40",
        f"generate {IN}/bad.jsonl -o out.jsonl",
        f"generate {IN}/bad.jsonl -o strict.jsonl --strict --num-kvcache-blocks 40",
        f"generate {IN}/missing.jsonl -o missing_out.jsonl",
        f"generate {IN}/prompts.jsonl -m ../models/missing -o model.jsonl",
        f"generate {IN}/prompts.jsonl --block-size 0",
        f"generate {IN}/prompts.jsonl --num-kvcache-blocks 1 -o tiny.jsonl",
        "generate --no-such-flag",
    )),
    Run("generate_resume", (
        f"generate {IN}/bad.jsonl -o out.jsonl --max-errors 2 --max-num-seqs 1 --record run.jsonl",
        "cp out.jsonl.partial journal.jsonl",
        f"generate {IN}/bad.jsonl -o out.jsonl --max-num-seqs 3 --block-size 8 --resume --record run.jsonl",
        "replay run.jsonl --check",
        "explain run.jsonl --lookups --format json",
        "explain run.jsonl -o report.html",
        f"generate {IN}/bad.jsonl -o out.jsonl --max-num-seqs 3 --resume",
        f"generate {IN}/shared.jsonl -o out.jsonl --resume",
    )),
    Run("shards_merge", (
        f"generate {IN}/shared.jsonl -o a.jsonl --shard 1/2 --max-tokens 8",
        f"generate {IN}/shared.jsonl -o b.jsonl --shard 2/2 --max-tokens 8",
        "merge a.jsonl b.jsonl -o merged.jsonl",
        "merge a.jsonl b.jsonl -o merged.jsonl",
        "merge a.jsonl -o one.jsonl",
        *each_format("verify a.jsonl merged.jsonl"),
        "verify merged.jsonl merged.jsonl",
        *each_format("verify a.jsonl b.jsonl --by-order"),
        "verify a.jsonl missing.jsonl",
    )),
    *(generated(f"attention_{name}", f"--attention-backend {name} --logprobs 2 --dtype float32 --block-size 32")
      for name in ("cpu", "sdpa", "reference")),
    generated("float16", "--dtype float16 --logprobs 2 --limit 6"),
    generated("int8", "--quantization int8 --kv-cache-dtype int8 --logprobs 2 --limit 8"),
    generated("int4", "--quantization int4 --logprobs 2 --limit 8"),
    generated("experts", f"-m {MODEL}/experts --logprobs 2 --max-tokens 12 --limit 6"),
    generated("experts_int4", f"-m {MODEL}/experts --quantization int4 --logprobs 2 --max-tokens 8 --limit 6"),
    generated("fallback", f"-m {MODEL}/fallback --logprobs 2 --max-tokens 12 --limit 6"),
    generated("windows", f"-m {MODEL}/windows --dtype float32 --logprobs 2 --block-size 8", rows="windows.jsonl"),
    generated("dummy", f"-m {MODEL}/demo --load-format dummy --seed 3 --limit 3 --max-tokens 8 --ignore-eos"),
)  # fmt: skip

_SIMULATE = f"simulate {IN}/mooncake.jsonl --pool 10%,50%,40 --policy lru,lfu,next-use"
TABLES = (
    Run("show_config", each_format(f"generate {IN}/prompts.jsonl -C {IN}/pool.yaml --n 2 --show-config",
                                   (*_FORMATS, "yaml"))),
    Run("dry_run", each_format(f"generate {IN}/shared.jsonl --dry-run", ("table", "json"))),
    Run("plan", (
        *each_format(f"plan {IN}/shared.jsonl", ("table", "json")),
        f"plan {IN}/bad.jsonl --num-kvcache-blocks 40 --format csv",
        f"plan {IN}/columns.jsonl --field question --format md",
    )),
    # where it measures, all but the pool depends on the memory that is free
    Run("profile_memory_measured", ("profile-memory --format json --num-kvcache-blocks 300",),
        ("num_tokens", "max_concurrency"), r'largest: [^"]*|--kv-cache-memory [^"]*'),
    Run("profile_memory", (
        f"profile-memory -m {MODEL}/windows --gpu h200 --target-concurrency 64 --prompts {IN}/windows.jsonl",
        *each_format(f"profile-memory -m {MODEL}/demo/config.json --memory 24GiB", ("table", "csv")),
        "profile-memory --gpu no-such-card",
    )),
    Run("doctor", ("doctor --format json",)),
    # the tables show speeds and free memory as numbers, and their columns are as wide as these
    Run("doctor_table", ("doctor",), masked_text=r" *-{2,}| *\d[\d,.]*(?: [GM]iB)?| {2,}"),
    Run("bench", (
        f"bench cache -m {MODEL}/large_vocabulary --dtype float32 --input-len 24 --output-len 6 --format json",
        "bench --preset no-such-preset",
    )),
    Run("simulate", (
        f"{_SIMULATE} --format json --picture hits.svg",
        f"simulate {IN}/mooncake.jsonl --pool 10%,50%,40 --format csv --no-schedule --warmup 0.2 --partial-blocks",
        f"{_SIMULATE} --format md --speed 2 --step-ms 20 --max-num-seqs 8",
        f"simulate {IN}/mooncake.jsonl --pool 40 --record run.jsonl",
        *_INSPECT,
        f"simulate {IN}/mooncake.jsonl --pool 2GiB --speed 1 --step-ms 5 -m {MODEL}/demo/config.json --format json",
        "simulate missing.jsonl",
    )),
    Run("simulate_prompts", (
        f"simulate {IN}/shared.jsonl --policy lru,fifo,lfu,prefix-lru,next-use --output-tokens 4-20 --format json",
        f"simulate {IN}/bad.jsonl --pool 30 --format table",
    )),
    Run("inspect", (
        f"trace {IN}/shared.jsonl --dump-kv --format json --record run.jsonl --record-tokens {_SMALL}",
        *each_format("explain run.jsonl"),
        "explain run.jsonl --request r7",
        "explain run.jsonl --request no-such-request",
        "replay run.jsonl --step 5 --follow r3",
        "replay run.jsonl --step 99999",
        "replay run.jsonl",
        "replay run.jsonl --dump-kv",
        "replay run.jsonl --export perfetto -o perfetto.json",
        "explain run.jsonl -o report.html --request r7",
        "simulate run.jsonl --format json --pool 30,60",
        "damage run.jsonl damaged.jsonl",
        "replay damaged.jsonl --check",
        "explain damaged.jsonl",
    )),
    Run("kv_recording", (
        *each_format(f"attach {IN}/kv_events.jsonl"),
        *each_format(f"explain {IN}/kv_events.jsonl", ("table", "json")),
        f"replay {IN}/kv_events.jsonl --dump-kv",
        f"replay {IN}/kv_events.jsonl --check",
        f"explain {IN}/kv_events.jsonl -o report.html",
        f"simulate {IN}/kv_events.jsonl --format json",
    )),
    Run("vllm_recording", (
        f"attach {IN}/vllm.jsonl --format json",
        f"explain {IN}/vllm.jsonl --format json",
        f"replay {IN}/vllm.jsonl --check",
        f"explain {IN}/vllm.jsonl -o report.html",
    )),
    Run("kv_published", (
        f"publish {IN}/stories.jsonl --block-size 8 --num-kvcache-blocks 160 --max-num-seqs 3 --max-tokens 300"
        " --ignore-eos",
        "attach recorded.jsonl --format json",
        "explain recorded.jsonl --format json",
        "replay recorded.jsonl --dump-kv",
        "explain recorded.jsonl -o report.html",
    )),
    Run("help", (
        "--version", "-h", "bench -h",
        *(f"{name} -h" for name in ("generate", "merge", "verify", "trace", "attach", "explain",
                                    "simulate", "plan", "profile-memory", "doctor")),
        "bench cache -h",
        "no-such-command",
    )),
)  # fmt: skip
RUNS = (*TRACES, *GENERATES, *TABLES)


# ---------------------------------------------------------------------------------------------------------------------
# Recording


def environment() -> dict[str, str]:
    """No colours, no network, a fixed width; the rest as it is."""
    fixed = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "LC_ALL": "C.UTF-8", "TZ": "UTC", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **fixed}


def command_line(arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "pagedcli", *arguments]


def run_pagedcli(folder: Path, arguments: list[str]) -> subprocess.CompletedProcess[bytes]:
    """Run a command in a folder; "< FILE" at its end gives stdin."""
    content = b""
    if "<" in arguments:
        content = (folder / arguments[-1]).read_bytes()
        arguments = arguments[:-2]
    return subprocess.run(
        command_line(arguments), cwd=folder, env=environment(), input=content, capture_output=True, timeout=TIMEOUT_S
    )


def copy(folder: Path, arguments: list[str]) -> subprocess.CompletedProcess[bytes]:
    """cp FROM TO: keep a file as it is between two commands."""
    shutil.copy(folder / arguments[0], folder / arguments[1])
    return subprocess.CompletedProcess([], 0, b"", b"")


def damage(folder: Path, arguments: list[str]) -> subprocess.CompletedProcess[bytes]:
    """damage FROM TO: a copy of a trace in which one release of blocks is missing."""
    lines = (folder / arguments[0]).read_bytes().splitlines(keepends=True)
    lost = next(number for number, line in enumerate(lines) if b'"blocks_released"' in line)
    (folder / arguments[1]).write_bytes(b"".join(lines[:lost] + lines[lost + 1 :]))
    return subprocess.CompletedProcess([], 0, b"", b"")


def free_port() -> int:
    """A port that is free, as is the next one."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return int(port)


def publish(folder: Path, arguments: list[str]) -> subprocess.CompletedProcess[bytes]:
    """publish ROWS FLAGS: generate with --kv-events, while attach records them to recorded.jsonl."""
    port = free_port()
    here, replay = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}"
    watch = ["attach", here, "--replay", replay, "--record", "recorded.jsonl", "--tokens", "--no-live"]
    watcher = subprocess.Popen(
        command_line(watch), cwd=folder, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        done = run_pagedcli(folder, ["generate", *arguments, "-o", "out.jsonl", "--kv-events", here])
        time.sleep(1)  # the last messages arrive
        watcher.send_signal(signal.SIGINT)
        watcher.wait(TIMEOUT_S)
    finally:
        watcher.kill()
    stderr = done.stderr.replace(str(port).encode(), b"PORT").replace(str(port + 1).encode(), b"PORT")
    return subprocess.CompletedProcess([], done.returncode, done.stdout, stderr)


_STEPS: dict[str, Callable[[Path, list[str]], subprocess.CompletedProcess[bytes]]] = {
    "cp": copy,
    "damage": damage,
    "publish": publish,
}


def is_text(path: Path) -> bool:
    return path.suffix not in (".parquet", ".zst", ".gz")


def parquet_as_json(path: Path) -> None:
    """FILE.json next to a Parquet file: its columns and rows, for a readable difference."""
    from pyarrow import parquet

    table = parquet.read_table(path)
    columns = [f"{field.name}: {field.type}" for field in table.schema]
    content = json.dumps({"columns": columns, "rows": table.to_pylist()}, indent=1, default=str)
    path.with_name(path.name + ".json").write_text(content)


def record_run(folder: Path, run: Run) -> float:
    """Run the commands of a run in its folder, then mask all files in it. Returns the seconds it took."""
    start_s = time.monotonic()
    here = folder / run.name
    here.mkdir()
    codes, exact_files = [], set()
    for number, command in enumerate(run.commands, 1):
        words = shlex.split(command)
        before = {path.name for path in here.iterdir()}
        step = _STEPS.get(words[0])
        done = run_pagedcli(here, words) if step is None else step(here, words[1:])
        freeze_all(here)
        name = f"{number:02}_{words[0].strip('-')}"
        (here / f"{name}.out").write_bytes(done.stdout)
        (here / f"{name}.err").write_bytes(done.stderr)
        codes.append(f"{done.returncode}  {command}\n")
        if words[0] in EXACT_COMMANDS:
            exact_files |= {path.name for path in here.iterdir()} - before
    (here / "exit_codes.txt").write_text("".join(codes))
    for path in sorted(here.iterdir()):
        if path.suffix == ".parquet":
            parquet_as_json(path)
        elif not is_text(path):
            path.unlink()  # its compressed times differ
        else:
            text = path.read_bytes().decode(errors="backslashreplace")
            path.write_text(masked(text, folder, run, exact=path.name in exact_files))
    return time.monotonic() - start_s


def chosen_runs(names: list[str], inputs: Path) -> list[Run]:
    """The runs with these names, or all; without those whose input files are absent."""
    unknown = set(names) - {run.name for run in RUNS}
    if unknown:
        sys.exit(f"no such runs: {', '.join(sorted(unknown))}; there are: {', '.join(run.name for run in RUNS)}")
    absent = [name for name in ("columns.parquet", "vllm.jsonl") if not (inputs / name).exists()]
    runs = [run for run in RUNS if not names or run.name in names]
    return [run for run in runs if not any(name in command for name in absent for command in run.commands)]


def digest_models(folder: Path) -> None:
    """models.txt: the digest of every file of the models, so that other weights do not look like other results."""
    lines = []
    for path in sorted((folder / "models").rglob("*")):
        if path.is_file():
            lines.append(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}\n")
    (folder / "models.txt").write_text("".join(lines))
    shutil.rmtree(folder / "models")


def record(folder: Path, names: list[str], jobs: int) -> None:
    """Write a recording to a new folder."""
    if folder.exists() and any(folder.iterdir()):
        sys.exit(f"{folder} is not empty; give a new folder")
    start_s = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    write_inputs(folder / "inputs")
    runs = chosen_runs(names, folder / "inputs")
    write_models(folder / "models")
    # the native kernels are built on first use: a message that later runs do not have
    run_pagedcli(folder, ["generate", "inputs/prompts.jsonl", "--limit", "1", "--max-tokens", "1"])
    with ThreadPoolExecutor(jobs) as pool:
        for run, seconds in zip(runs, pool.map(lambda run: record_run(folder, run), runs), strict=True):
            print(f"{run.name:28} {seconds:5.1f} s", flush=True)
    digest_models(folder)
    print(f"{folder}: {len(runs)} runs, {time.monotonic() - start_s:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="only these runs")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: 2)")
    chosen = parser.parse_args()
    record(chosen.folder.resolve(), chosen.only, chosen.jobs)


if __name__ == "__main__":
    main()
