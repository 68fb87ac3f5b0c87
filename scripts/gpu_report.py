"""One page of what gpu_check.py found: python scripts/gpu_report.py DIR [--write]

It answers: does it run, is it right, how fast, which kernel is far from the roof. --write puts it into
docs/lab/performance.md, under its own heading; gpu_check.py writes it to DIR/summary.md.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

Stage = dict[str, Any]
DOC = Path(__file__).parents[1] / "docs" / "lab" / "performance.md"
HEADING = "## On a GPU"
FLOOR = 35_400  # output tokens per second of nano-vllm's workload that an H200's bandwidth and arithmetic allow
LEAST_SHARE = 0.7  # of the roof: what is below is named
_CORRECT = (
    *("smoke", "kernels", "backends", "graphs", "requests", "families", "hybrids", "windows", "quantized", "fp8"),
    *("invariance", "parallel", "sanitizer"),
)


def page(results: list[Stage]) -> str:
    """The page, in Markdown."""
    by_name = {result["stage"]: result for result in results}
    return "\n".join(["", *_runs(results, by_name), "", *_is_right(by_name), "", *_speed(by_name), ""])


def _runs(results: list[Stage], by_name: dict[str, Stage]) -> list[str]:
    facts = {row["fact"]: row["value"] for row in _rows(by_name, "environment")}
    names = ("device", "memory GiB", "torch", "CUDA of torch", "triton", "python", "date")
    where = ", ".join(f"{name} {facts[name]}" for name in names if name in facts) or "an unknown machine"
    failed = [result["stage"] for result in results if not result["ok"]]
    passed = f"{len(results) - len(failed)} of {len(results)} stages passed; {_list(failed)} failed."
    return [f"Measured by `scripts/gpu_check.py`: {where}.", f"**Does it run?** {passed}"]


def _is_right(by_name: dict[str, Stage]) -> list[str]:
    checked = [by_name[name] for name in _CORRECT if name in by_name]
    wrong = [result for result in checked if not result["ok"]]
    lines = [f"**Is it right?** {len(checked) - len(wrong)} of {len(checked)} stages of comparisons passed."]
    for result in wrong:
        reason = result["summary"] or result.get("problem", "").strip().rpartition("\n")[2]
        lines.append(f"- `{result['stage']}`: {reason}")
        for row in result["rows"]:
            told = [str(row[name]) for name in ("problem", "first difference") if row.get(name)]
            if told:
                lines.append(f"  - {next(iter(row.values()))}: {'; '.join(told)}")
    return lines


def _speed(by_name: dict[str, Stage]) -> list[str]:
    lines = []
    if passes := _rows(by_name, "workload"):
        best = max(passes, key=lambda row: row["output tok/s"])["output tok/s"]
        share = f"{best / FLOOR:.0%} of the {FLOOR:,} that an H200 allows at best"
        lines.append(f"**How fast?** nano-vllm's 256 requests: {best:,} output tokens per second, {share}.")
    if steps := _rows(by_name, "sampling"):
        lines.append("A step of a full batch, times greedy's: " + ", ".join(_times(row) for row in steps[1:]) + ".")
    rates = [row for row in _rows(by_name, "attention") if row["share"] < LEAST_SHARE]
    far = [f"{row['kind']} of {row['sequences']} x {row['tokens']:,} {row['share']:.0%}" for row in rates]
    lines.append(f"**Which kernel is far from its roof?** {_list(far)}.")
    for stage in ("attention", "steps", "sampling", "products", "shapes", "tiles", "profiler"):
        lines += _table(stage, _rows(by_name, stage))
    return lines


def _times(row: Stage) -> str:
    return f"{row['sampling']} {row['times greedy']}"


def _rows(by_name: dict[str, Stage], name: str) -> list[Stage]:
    rows: list[Stage] = by_name[name]["rows"] if name in by_name else []
    return rows


def _list(names: list[str]) -> str:
    return ", ".join(names) or "none"


def _table(name: str, rows: list[Stage]) -> list[str]:
    if not rows:
        return []
    keys = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["", f"| {name}: {' | '.join(keys)} |", "|" + "---|" * len(keys)]
    return lines + [f"| {' | '.join(str(row.get(key, '')) for key in keys)} |" for row in rows]


def with_page(document: str, text: str) -> str:
    """The document with the page under its heading, in place of what is there."""
    before, found, after = document.partition(f"{HEADING}\n")
    if not found:
        raise SystemExit(f"gpu_report: the document has no heading {HEADING!r}")
    _, heading, rest = after.partition("\n## ")
    return f"{before}{HEADING}\n{text}{heading}{rest}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="what gpu_check.py wrote")
    parser.add_argument("--write", action="store_true", help="into docs/lab/performance.md")
    args = parser.parse_args()
    results: list[Stage] = json.loads((args.folder / "results.json").read_text(encoding="utf-8"))
    text = page(results)
    sys.stdout.write(text)
    if args.write:
        if any(result["dry_run"] for result in results):
            parser.error("figures of a dry run mean nothing")
        DOC.write_text(with_page(DOC.read_text(encoding="utf-8"), text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
