"""Check and measure everything on a GPU: python scripts/gpu_check.py [--out DIR] [STAGE ...]

Needs what the package and its tests need: models are made on the spot, with random weights. Each stage runs in a
process of its own under a time limit; one that crashes or hangs keeps the rows it has, and costs nothing else. After
each one DIR/results.json and DIR/table.md hold all results so far. All of it takes more than the 9 minutes that
--seconds allows by default: run `correctness` and `speed` one after the other, into different folders.

Exit code 0: all stages passed, 1: not all, 2: there is no CUDA GPU here. `--dry-run-cpu` runs every stage's logic at
tiny size on a CPU, the Triton kernels through triton's interpreter; its figures mean nothing.
"""

import argparse
import json
import os
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
    "parallel": 120,
}
SPEED = {
    "ceilings": 25,
    "attention": 60,
    "products": 60,
    "memory": 60,
    "workload": 170,
    "sampling": 90,
    "mixed": 150,
    "shapes": 120,
}
LIMITS = CORRECTNESS | SPEED
GROUPS = {"correctness": CORRECTNESS, "speed": SPEED}
LEAST_SECONDS = 15  # a stage does not start with less: importing torch alone takes some


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
        results.append(run_stage(name, seconds=end - time.monotonic(), dry_run=args.dry_run_cpu))
        sys.stderr.write(f"{name}: {verdict(results[-1])} in {results[-1]['seconds']} s\n")
        (args.out / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
        (args.out / "table.md").write_text(render(results), encoding="utf-8")
    sys.stdout.write(render(results))
    return 0 if all(result["ok"] for result in results) else 1


def has_cuda() -> bool:
    """Asked in another process, which gives the memory of its CUDA context back."""
    program = "import torch; raise SystemExit(0 if torch.cuda.is_available() else 1)"
    return subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def run_stage(name: str, *, seconds: float, dry_run: bool) -> dict[str, Any]:
    """Run one stage for at most so many seconds; returns its result, whatever became of it."""
    limit = min(seconds, LIMITS[name])
    result: dict[str, Any] = {"stage": name, "ok": False, "summary": "", "rows": [], "seconds": 0.0, "dry_run": dry_run}
    if limit < min(LEAST_SECONDS, LIMITS[name]):
        return result | {"problem": "not run: no time was left"}
    environment = {**os.environ, **({"TRITON_INTERPRET": "1"} if dry_run else {})}
    start = time.monotonic()
    problem = None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.jsonl"
        command = [sys.executable, str(STAGES), name, str(path), *(["--dry-run-cpu"] if dry_run else [])]
        try:
            done = subprocess.run(command, env=environment, timeout=limit, capture_output=True, text=True, check=False)
            if done.returncode:
                problem = done.stderr.strip()[-2000:] or f"exit code {done.returncode}"
        except subprocess.TimeoutExpired as expired:
            said = (expired.stderr or b"").decode(errors="replace").strip()[-1000:]
            problem = f"{said}\nstopped at its limit of {limit:g} s"
        result |= read_rows(path)
    if problem is not None:
        result |= {"ok": False, "problem": problem}
    return result | {"seconds": round(time.monotonic() - start, 1)}


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
