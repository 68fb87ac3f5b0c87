"""Check and measure everything on one GPU, in under 9 minutes: python scripts/gpu_check.py [--out DIR] [STAGE ...]

Needs what the package needs and nothing else: the model is made on the spot, with random weights. Each stage runs in a
process of its own under a time limit and leaves a JSON file in DIR; a table comes last. Exit code 0: all stages passed,
1: not all, 2: there is no CUDA GPU here. `--dry-run-cpu` runs every stage's logic at tiny size on a CPU, the Triton
kernels through triton's interpreter; its figures mean nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STAGES = Path(__file__).with_name("gpu_stages.py")
# seconds each stage may take; together under 9 minutes
LIMITS = {
    "environment": 20,
    "ceilings": 25,
    "kernels": 120,
    "transformers": 50,
    "graphs": 70,
    "attention": 50,
    "memory": 45,
    "workload": 150,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(LIMITS)}; default: all")
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder for the JSON files")
    parser.add_argument("--dry-run-cpu", action="store_true", help="tiny sizes on a CPU; figures mean nothing")
    args = parser.parse_args()
    unknown = set(args.stages) - LIMITS.keys()
    if unknown:
        parser.error(f"unknown stage {sorted(unknown)[0]!r}; there are {', '.join(LIMITS)}")
    if not args.dry_run_cpu and not has_cuda():
        sys.stderr.write("gpu_check: torch sees no CUDA GPU here, so nothing can be checked; figures stay open\n")
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    results = []
    for name in args.stages or LIMITS:
        sys.stderr.write(f"{name} ...\n")
        results.append(run_stage(name, args.out, dry_run=args.dry_run_cpu))
    table = render(results)
    (args.out / "table.md").write_text(table, encoding="utf-8")
    sys.stdout.write(table)
    return 0 if all(result["ok"] for result in results) else 1


def has_cuda() -> bool:
    """Asked in another process, which gives the memory of its CUDA context back."""
    program = "import torch; raise SystemExit(0 if torch.cuda.is_available() else 1)"
    return subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def run_stage(name: str, folder: Path, *, dry_run: bool) -> dict[str, Any]:
    """Run one stage; its result is also in folder/name.json, whatever became of it."""
    path = folder / f"{name}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, str(STAGES), name, str(path), *(["--dry-run-cpu"] if dry_run else [])]
    environment = {**os.environ, **({"TRITON_INTERPRET": "1"} if dry_run else {})}
    start = time.monotonic()
    problem = None
    try:
        done = subprocess.run(
            command, env=environment, timeout=LIMITS[name], capture_output=True, text=True, check=False
        )
        if done.returncode:
            problem = done.stderr.strip()[-2000:] or f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        problem = f"stopped at its limit of {LIMITS[name]} s"
    result: dict[str, Any] = {"stage": name, "ok": False, "summary": "", "rows": []}
    if path.exists():
        result |= json.loads(path.read_text(encoding="utf-8"))
    if problem is not None:
        result |= {"ok": False, "problem": problem}
    result |= {"seconds": round(time.monotonic() - start, 1), "dry_run": dry_run}
    path.write_text(json.dumps(result, indent=1), encoding="utf-8")
    return result


def render(results: list[dict[str, Any]]) -> str:
    """The table of all stages, and below it the rows of those that measure."""
    lines = ["| stage | result | seconds | what |", "|---|---|---|---|"]
    for result in results:
        verdict = "passed" if result["ok"] else "FAILED"
        what = result["summary"] or result.get("problem", "").splitlines()[-1:] or ""
        text = what if isinstance(what, str) else what[0]
        lines.append(f"| {result['stage']} | {verdict} | {result['seconds']} | {text.replace('|', '/')} |")
    for result in results:
        if result["rows"]:
            keys = list(dict.fromkeys(key for row in result["rows"] for key in row))
            lines += ["", f"{result['stage']}:", "", f"| {' | '.join(keys)} |", "|" + "---|" * len(keys)]
            lines += [f"| {' | '.join(str(row.get(key, '')) for key in keys)} |" for row in result["rows"]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
