"""Check and measure everything on a GPU: python scripts/gpu_check.py [--out DIR] [STAGE ...]

Needs what the package and its tests need: models are made on the spot, with random weights. Each stage runs in a
process of its own under a time limit; one that crashes or hangs keeps the rows it has, and costs nothing else. A CUDA
error makes every later call of its process fail: the stage then runs again in parts, each in a new process that waits
for every kernel. After each stage DIR/table.md and DIR/results.json hold all results so far, and DIR/STAGE.stderr.txt
what a failed one said, with all tracebacks. All of it takes more than the 9 minutes that --seconds allows by default:
run `correctness` and `speed` one after the other, into different folders.

Exit code 0: all stages passed, 1: not all, 2: there is no CUDA GPU here. `--dry-run-cpu` runs every stage's logic at
tiny size on a CPU, the Triton kernels through triton's interpreter; its figures mean nothing.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STAGES = Path(__file__).with_name("gpu_stages.py")
# The most seconds that each stage may take, in the order of what is worth most on a first run. Most take a fraction;
# a stage that finds too little of --seconds left is not run.
CORRECTNESS = {
    "environment": 30,
    "smoke": 90,
    "ahead": 200,
    "kernels": 150,
    "backends": 150,
    "graphs": 80,
    "requests": 80,
    "families": 120,
    "hybrids": 120,
    "windows": 80,
    "quantized": 60,
    "fp8": 60,
    "invariance": 60,
    "same_bits": 120,
    "parallel": 120,
}
SPEED = {
    "ceilings": 25,
    "attention": 60,
    "products": 60,
    "memory": 60,
    "workload": 170,
    "steps": 60,
    "stream": 240,
    "fp8_products": 40,
}
LIMITS = CORRECTNESS | SPEED
GROUPS = {"correctness": CORRECTNESS, "speed": SPEED}
LEAST_SECONDS = 15  # a stage does not start with less: importing torch alone takes some
NUM_PARTS = 6  # processes for the cases of a stage that had a CUDA error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = f"of {', '.join(LIMITS)}, or {' or '.join(GROUPS)}; default: all"
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=names)
    parser.add_argument("--seconds", type=float, default=540, help="for all stages together (default: 540)")
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder for the results")
    parser.add_argument("--dry-run-cpu", action="store_true", help="tiny sizes on a CPU; figures mean nothing")
    args = parser.parse_args()
    unknown = set(args.stages) - LIMITS.keys() - GROUPS.keys()
    if unknown:
        parser.error(f"unknown stage {sorted(unknown)[0]!r}; there are {', '.join((*LIMITS, *GROUPS))}")
    if not args.dry_run_cpu and not has_cuda():
        sys.stderr.write("gpu_check: torch sees no CUDA GPU here, so nothing can be checked; figures stay open\n")
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.seconds
    results: list[dict[str, Any]] = []
    for name in dict.fromkeys(stage for given in args.stages or LIMITS for stage in GROUPS.get(given, [given])):
        sys.stderr.write(f"{name} ...\n")
        results.append(run_stage(name, args.out, seconds=end - time.monotonic(), dry_run=args.dry_run_cpu))
        sys.stderr.write(f"{name}: {verdict(results[-1])} in {results[-1]['seconds']} s\n")
        (args.out / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
        (args.out / "table.md").write_text(render(results), encoding="utf-8")
    sys.stdout.write(render(results))
    return 0 if all(result["ok"] for result in results) else 1


def has_cuda() -> bool:
    """Asked in another process, which gives the memory of its CUDA context back."""
    program = "import torch; raise SystemExit(0 if torch.cuda.is_available() else 1)"
    return subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def run_stage(name: str, out: Path, *, seconds: float, dry_run: bool) -> dict[str, Any]:
    """Run one stage for at most so many seconds; returns its result, whatever became of it."""
    limit = min(seconds, LIMITS[name])
    result: dict[str, Any] = {"stage": name, "ok": False, "summary": "", "rows": [], "seconds": 0.0, "dry_run": dry_run}
    if limit < min(LEAST_SECONDS, LIMITS[name]):
        return result | {"problem": "not run: no time was left"}
    start = time.monotonic()
    log = out / f"{name}.stderr.txt"
    log.unlink(missing_ok=True)
    found = run_part(name, log, limit, dry_run=dry_run)
    if "CUDA error" in json.dumps(found):
        rows, end = found["rows"], start + seconds
        for part in range(NUM_PARTS):
            left = min(end - time.monotonic(), LIMITS[name])
            if left >= LEAST_SECONDS:
                rows += run_part(name, log, left, dry_run=dry_run, part=f"{part}/{NUM_PARTS}")["rows"]
        found = {"problem": "a CUDA error", **found, "ok": False, "rows": rows}
    result |= found
    if result["ok"]:
        log.unlink(missing_ok=True)
    return result | {"seconds": round(time.monotonic() - start, 1)}


def run_part(name: str, log: Path, limit: float, *, dry_run: bool, part: str | None = None) -> dict[str, Any]:
    """Run a stage, or a part of its cases, with its children; what it says is appended to `log`."""
    threads = 1 if dry_run or name == "ahead" else 4  # `ahead` starts up to 16 processes
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONFAULTHANDLER": "1"}
    paths = [str(STAGES.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]  # for the processes that a stage starts
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment |= {"TRITON_INTERPRET": "1"} if dry_run else {}
    environment |= {"CUDA_LAUNCH_BLOCKING": "1"} if part is not None else {}
    problem = None
    with tempfile.TemporaryDirectory() as folder, log.open("ab") as stderr:
        begin = stderr.tell()
        path = Path(folder) / "result.jsonl"
        command = [sys.executable, str(STAGES), name, str(path)]
        command += ["--part", part] if part is not None else []
        command += ["--dry-run-cpu"] if dry_run else []
        stage = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True
        )
        try:
            if code := stage.wait(timeout=limit):
                problem = f"exit code {code}"
        except subprocess.TimeoutExpired:
            problem = f"stopped at its limit of {limit:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # its children are of its process group
                os.killpg(stage.pid, signal.SIGKILL)
            stage.wait()
        found: dict[str, Any] = {"rows": []} | read_rows(path)
        said = log.read_bytes()[begin:].decode(errors="replace").strip()
    if problem is not None:
        found |= {"ok": False, "problem": f"{said[-2000:]}\n{problem}".strip()}
    return found


def read_rows(path: Path) -> dict[str, Any]:
    """What a stage has written: its verdict, or the rows before it was stopped, without a line that was cut off."""
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else ():
        if line.endswith("\n"):
            document = json.loads(line)
            if "verdict" in document:
                found: dict[str, Any] = document["verdict"]
                return found
            rows.append(document)
    return {"rows": rows}


def verdict(result: dict[str, Any]) -> str:
    return "passed" if result["ok"] else "FAILED"


def render(results: list[dict[str, Any]]) -> str:
    """The table of all stages, and below it the rows of those that measure."""
    lines = ["| stage | result | seconds | what |", "|---|---|---|---|"]
    for result in results:
        what = result["summary"] or result.get("problem", "").splitlines()[-1:] or ""
        text = what if isinstance(what, str) else what[0]
        lines.append(f"| {result['stage']} | {verdict(result)} | {result['seconds']} | {text.replace('|', '/')} |")
    for result in results:
        if result["rows"]:
            keys = list(dict.fromkeys(key for row in result["rows"] for key in row))
            lines += ["", f"{result['stage']}:", "", f"| {' | '.join(keys)} |", "|" + "---|" * len(keys)]
            lines += [f"| {' | '.join(str(row.get(key, '')) for key in keys)} |" for row in result["rows"]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
