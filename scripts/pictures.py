"""Renews the pictures in docs/pictures: python scripts/pictures.py [folder]

Records a run of the built-in model on a pool that is too small for it, opens the application on the trace at a step
with hits, waiting and preempted requests, and exports its screen. Where Chromium is installed, it also photographs the
top of the report. The pictures of docs/look-inside.md are drawn by the commands that it names.
"""

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from pagedcli.app.pool_app import PoolApp
from pagedcli.app.pool_players import ReplayPlayer
from pagedcli.cli.cures import told_of_recording
from pagedcli.show.report import render_report
from pagedcli.trace.files import TraceReader
from pagedcli.views.moment import Replay

ROOT = Path(__file__).resolve().parents[1]
PICTURES = {  # name: size, keys
    "app-80x24.svg": ((80, 24), ("3", "6", "enter", "down", "down")),
    "app-120x40.svg": ((120, 40), ("3", "6", "enter", "down", "down")),
    "app-200x60.svg": ((200, 60), ("3", "6", "enter", "down", "down")),
    "app-story.svg": ((100, 30), ("9", "0", "enter", "s", "s", "enter")),
}


DRAWN = {  # name: command and arguments
    "pool.svg": ("trace", "--step", "9"),
    "life.svg": ("trace", "--of", "request", "--follow", "story-2.3"),
    "tree.svg": ("trace", "--of", "prefixes"),
    "waste.svg": ("trace", "--step", "60", "--of", "waste"),
    "hits.svg": ("simulate", "--pool", "15,20,30,40,60", "--policy", "lru,next-use"),
}


def prompts() -> list[dict[str, object]]:
    """Look-ups that share a prefix, and stories that grow."""
    lines = (ROOT / "examples" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    stories = [row for row in rows if str(row["id"]).startswith("story")]
    codes = [row for row in rows if str(row["id"]).startswith("code")]
    grown = [
        {**row, "id": f"{row['id']}.{i}", "max_tokens": 100 + 20 * i, "seed": i, "temperature": 0.8}
        for i in range(6)
        for row in stories
    ]
    asked = [{**row, "id": f"{row['id']}.{i}"} for i in range(3) for row in codes]
    return [row for pair in zip(grown, asked, strict=True) for row in pair]


def record(folder: Path) -> Path:
    """The trace of the run."""
    source, trace = folder / "prompts.jsonl", folder / "run.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in prompts()), encoding="utf-8")
    limits = ["--num-kvcache-blocks", "40", "--max-num-seqs", "12", "--max-num-batched-tokens", "128"]
    command = [sys.executable, "-m", "pagedcli", "generate", str(source), "-o", str(folder / "out.jsonl")]
    subprocess.run([*command, "--record", str(trace), *limits], check=True)
    return trace


async def picture(trace: Path, size: tuple[int, int], keys: tuple[str, ...]) -> str:
    """The screen after some keys, as SVG."""
    app = PoolApp(ReplayPlayer(Replay(TraceReader(trace))), "pagedcli trace run.jsonl")
    async with app.run_test(size=size) as pilot:
        await pilot.press(*keys)
        await pilot.pause(0.3)
        return app.export_screenshot(title="pagedcli trace run.jsonl", simplify=True)


def draw(trace: Path, target: Path, command: str, *arguments: str) -> None:
    """A picture of the run, as a user draws it."""
    command_line = [sys.executable, "-m", "pagedcli", command, str(trace), *arguments, "--picture", str(target)]
    subprocess.run([*command_line, "--overwrite"], check=True, stdout=subprocess.DEVNULL)


def report_picture(trace: Path, target: Path) -> None:
    """The top of the report at the step with the most blocks in use, as PNG."""
    page = trace.with_suffix(".html")
    page.write_bytes(render_report(TraceReader(trace), what_to_change=lambda _: told_of_recording(trace)))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    window = [f"--user-data-dir={trace.parent / 'profile'}", "--window-size=1220,840", f"--screenshot={target}"]
    subprocess.run(["chromium", *options, *window, page.as_uri()], check=True, capture_output=True)


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "pictures"
    with tempfile.TemporaryDirectory() as folder:
        trace = record(Path(folder))
        for name, (size, keys) in PICTURES.items():
            svg = asyncio.run(picture(trace, size, keys))
            (target / name).write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n", encoding="utf-8")
            print(target / name)
        for name, (command, *arguments) in DRAWN.items():
            draw(trace, target / name, command, *arguments)
        if shutil.which("chromium"):
            report_picture(trace, target / "report.png")
            print(target / "report.png")


if __name__ == "__main__":
    main()
