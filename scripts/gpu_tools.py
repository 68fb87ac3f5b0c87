"""The stages of gpu_check.py that need a tool of CUDA's toolkit or choose among tiles: sanitizer, profiler, tiles; and
where a model's results on a GPU first leave those of a CPU."""

import csv
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_common import Result, Row, Rows, Scale, best_seconds, generate, problem_of

STAGES = Path(__file__).with_name("gpu_stages.py")
METRICS = {
    "dram %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "warps %": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "tensor %": "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
}
_KERNELS = "decode_kernel|combine_kernel|prefill_kernel|experts_kernel|linear_kernel|smallest_kept_kernel"


def sanitizer(scale: Scale, rows: Rows) -> Result:
    """Kernels under compute-sanitizer: accesses out of bounds, and races in shared memory."""
    tool = shutil.which("compute-sanitizer")
    if not scale.on_gpu or tool is None:
        return True, "not here: compute-sanitizer is not installed, or there is no GPU"
    for check in ("memcheck", "racecheck"):
        with tempfile.TemporaryDirectory() as folder:
            command = [tool, "--tool", check, "--error-exitcode", "7", sys.executable, str(STAGES), "kernels"]
            command += [str(Path(folder) / "result"), "--part", "0/8"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        errors = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line or "Error:" in line]
        rows.append({"tool": check, "code": done.returncode, "said": (errors or ["nothing"])[-1].strip("= ")})
    return all(row["code"] == 0 for row in rows), ", ".join(f"{row['tool']}: {row['said']}" for row in rows)


def profiler(scale: Scale, rows: Rows) -> Result:
    """What ncu says of the kernels that decide: bandwidth, warps and registers."""
    tool = shutil.which("ncu")
    if not scale.on_gpu or tool is None:
        return True, "not here: ncu is not installed, or there is no GPU"
    for stage in ("attention", "products", "kernels"):
        with tempfile.TemporaryDirectory() as folder:
            command = [tool, "--csv", "--metrics", ",".join(METRICS.values()), "--kernel-name", f"regex:{_KERNELS}"]
            command += ["--launch-count", "20", sys.executable, str(STAGES), stage, str(Path(folder) / "result")]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        for row in profiled(done.stdout):
            rows.append({"stage": stage, **row})
    return bool(rows), f"{len(rows)} launches" if rows else "ncu measured nothing: it may need permission"


def profiled(output: str) -> list[Row]:
    """The launches in ncu's CSV, one row each; it prints a line per launch and metric."""
    lines = output.splitlines()
    start = next((place for place, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    names, launches = {value: name for name, value in METRICS.items()}, dict[str, Row]()
    for line in csv.DictReader(lines[start:]):
        row = launches.setdefault(line["ID"], {"kernel": line["Kernel Name"].partition("(")[0]})
        if line["Metric Name"] in names:
            row[names[line["Metric Name"]]] = line["Metric Value"]
    return list(launches.values())


def tiles(scale: Scale, rows: Rows) -> Result:
    """Attention of prompts with heads of 128 by each tiling that compiles for sm_90 without spills, the one in use
    first."""
    from attention_cases import make_batch

    from pagedcli.attention.base import AttentionSpec
    from pagedcli.attention.layer import AttentionLayer
    from pagedcli.attention.triton_paged import TileConfig, TritonAttention

    heads, total, dtype = ((16, 8, 128), 8192, scale.dtypes[0]) if scale.on_gpu else ((2, 1, 16), 20, torch.float32)
    shape = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": heads[2]}
    spec = AttentionSpec(torch.device(scale.device), dtype, block_size=16, **shape)
    width = -(-total // 16)
    flops = 4 * heads[0] * heads[2] * (total * (total + 1) // 2)
    configs = ((128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 2))
    for config in scale.mine(configs):
        backend = TritonAttention(spec)
        backend._prefill, backend._prefill_rows = TileConfig(*config), config[0]
        shape_of_cache = backend.kv_shape(width, 16, heads[1], heads[2])
        kv = tuple(torch.randn(shape_of_cache, device=scale.device).to(dtype) for _ in "kv")
        batch = make_batch([(total, total)], torch.arange(width)[None].int(), [-1] * total, scale.device)
        q = torch.randn(total, heads[0], heads[2], device=scale.device).to(dtype)
        backend.prepare(batch)
        row: Row = {"rows": config[0], "keys": config[1], "warps": config[2], "stages": config[3]}
        try:
            call = partial(backend.attend, q, kv, batch, AttentionLayer(scale=0.1))
            seconds = best_seconds(call, scale)
            row |= {"us": round(seconds * 1e6, 1), "TFLOP/s": round(flops / seconds / 1e12, 1)}
        except Exception as error:  # The other tilings are still to be timed.
            row["problem"] = problem_of(error)
        rows.append(row)
    timed = [row for row in rows if "us" in row]
    best = min(timed, key=lambda row: row["us"], default=None)
    told = None if best is None else ", ".join(f"{best[name]} {name}" for name in ("rows", "keys", "warps", "stages"))
    return best is not None, f"fastest: {told}"


def first_difference(right: Any, judged: Any, prompt: list[int]) -> str:
    """The first part of a model whose result for a prompt differs between two engines of it. Both are eager, without a
    prefix cache."""
    found = [_results(engine, prompt) for engine in (right, judged)]
    for number, ((name, expected), (_, result)) in enumerate(zip(*found, strict=True)):
        error = float((result - expected).norm() / (expected.norm() + 1e-30))
        if not error < 1e-3:
            return f"branch {number}, {name} {list(expected.shape)}: relative error {error:.0e}"
    return "no branch: the last norm, the output layer or sampling"


def _results(engine: Any, prompt: list[int]) -> list[tuple[str, torch.Tensor]]:
    """What each branch of the model adds to the residual stream, on the host."""
    from pagedcli.sampling_params import SamplingParams

    found: list[tuple[str, torch.Tensor]] = []

    def watched(branch: Any) -> Any:
        def call(hidden: Any, residual: Any, step: Any) -> Any:
            result = branch(hidden, residual, step)
            found.append((type(branch.body).__name__, result.double().cpu()))
            return result

        return call

    model = engine.model
    whole = model._branches, model._late_branches
    model._branches, model._late_branches = ([watched(branch) for branch in part] for part in whole)
    try:
        generate(engine, [prompt], [SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)])
    finally:
        model._branches, model._late_branches = whole
    return found
