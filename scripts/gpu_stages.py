"""The stages of gpu_check.py: python scripts/gpu_stages.py STAGE RESULT.json [--dry-run-cpu]

Each stage returns (ok, one line, rows). Those of single kernels and of whole engines are in files of their own.
"""

import itertools
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_engines
import gpu_kernels
import torch
from gpu_common import (
    GPU,
    TINY,
    Result,
    Row,
    Scale,
    best_seconds,
    copy_bandwidth,
    gemm_rate,
    generate,
    make_engine,
    nano_workload,
    synchronize,
)

# ---------------------------------------------------------------------- stages


def environment(scale: Scale) -> Result:
    """What this machine is and which backends run on it."""
    import triton

    from pagedcli.attention.base import AttentionSpec
    from pagedcli.attention.select import available_backends

    name = torch.cuda.get_device_name() if scale.on_gpu else platform.processor() or "CPU"
    rows: list[Row] = [
        {"fact": "device", "value": name},
        {"fact": "torch", "value": torch.__version__},
        {"fact": "triton", "value": triton.__version__},
        {"fact": "python", "value": platform.python_version()},
        {"fact": "date", "value": time.strftime("%Y-%m-%d")},
    ]
    if scale.on_gpu:
        properties = torch.cuda.get_device_properties(0)
        rows.append({"fact": "compute capability", "value": f"{properties.major}.{properties.minor}"})
        rows.append({"fact": "multiprocessors", "value": properties.multi_processor_count})
        rows.append({"fact": "memory GiB", "value": round(properties.total_memory / 2**30, 1)})
        rows.append({"fact": "CUDA of torch", "value": torch.version.cuda})
    shape = {"block_size": 16, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128}
    device = torch.device(scale.device)
    for backend, reason in available_backends(AttentionSpec(device, scale.dtypes[0], **shape)):
        rows.append({"fact": f"backend {backend}", "value": "runs" if reason is None else reason})
    return True, f"{name}, torch {torch.__version__}, triton {triton.__version__}", rows


def ceilings(scale: Scale) -> Result:
    """What memory and arithmetic can do at best."""
    copy, gemm = copy_bandwidth(scale), gemm_rate(scale)
    rows = [
        {"ceiling": "copy", "value": round(copy, 1), "unit": "GB/s"},
        {"ceiling": f"GEMM {scale.gemm_size}", "value": round(gemm, 2), "unit": "TFLOP/s"},
    ]
    return True, f"copy {copy:,.0f} GB/s, GEMM {gemm:,.1f} TFLOP/s", rows


def attention(scale: Scale) -> Result:
    """Decode and prefill attention over shapes and block sizes, as shares of the ceilings."""
    from attention_cases import make_batch

    from pagedcli.attention.layer import AttentionLayer
    from pagedcli.attention.select import select_backend

    copy, gemm = copy_bandwidth(scale), gemm_rate(scale)
    heads = (16, 8, 128) if scale.on_gpu else (2, 1, 16)
    dtype, rows = scale.dtypes[0], []
    shapes = [(b, n, 1) for b, n in scale.decode_shapes] + [(1, n, n) for n in scale.prefill_tokens]
    for (num_seqs, total, new), size in itertools.product(shapes, scale.block_sizes):
        backend = select_backend(
            "auto" if scale.on_gpu else "triton", device=torch.device(scale.device), dtype=dtype, block_size=size,
            num_heads=heads[0], num_kv_heads=heads[1], head_dim=heads[2],
        ).backend  # fmt: skip
        width = -(-total // size)
        shape = backend.kv_shape(num_seqs * width, size, heads[1], heads[2])
        k_cache, v_cache = (torch.randn(shape, device=scale.device).to(dtype) for _ in range(2))
        table = torch.randperm(num_seqs * width).view(num_seqs, width).to(torch.int32)
        slots = [-1] * (num_seqs * new)
        batch = make_batch([(total, new)] * num_seqs, table, slots, scale.device)
        backend.prepare(batch)
        q = torch.randn(num_seqs * new, heads[0], heads[2], device=scale.device).to(dtype)
        seconds = best_seconds(
            lambda q=q, k=k_cache, v=v_cache, b=batch, s=backend: s.attend(q, k, v, b, AttentionLayer(scale=0.1)), scale
        )
        kv_bytes = 2 * num_seqs * total * heads[1] * heads[2] * dtype.itemsize
        flops = 4 * num_seqs * heads[0] * heads[2] * (new * (2 * total - new + 1) // 2)
        rate, share = (kv_bytes / seconds / 1e9, kv_bytes / seconds / 1e9 / copy)
        if new > 1:
            rate, share = flops / seconds / 1e12, flops / seconds / 1e12 / gemm
        kind = "decode" if new == 1 else "prefill"
        unit = "GB/s" if new == 1 else "TFLOP/s"
        rows.append({
            "kind": kind, "sequences": num_seqs, "tokens": total, "block": size, "backend": backend.name,
            "us": round(seconds * 1e6, 1), "rate": round(rate, 2), "unit": unit, "share": round(share, 3),
        })  # fmt: skip
    best: dict[int, float] = {}
    for row in rows:
        if row["kind"] == "decode":
            best[row["block"]] = max(best.get(row["block"], 0.0), row["share"])
    shares = ", ".join(f"{share:.0%} at block {size}" for size, share in best.items())
    return True, f"best decode share of copy: {shares}", rows


def memory(scale: Scale) -> Result:
    """What profile-memory predicts against what the engine measured, and whether the pool was really there."""
    from pagedcli.models.footprint import footprint
    from pagedcli.models.formats import AS_STORED
    from pagedcli.models.reading import read_spec
    from pagedcli.planning.memory import activation_bytes

    with tempfile.TemporaryDirectory() as folder:
        # on a CPU the native decoder packs its weights, which needs some room of its own
        options = {"gpu_memory_utilization": 0.95} if scale.on_gpu else {"attention_backend": "reference"}
        engine = make_engine(scale, Path(folder), **options)
        spec = read_spec(Path(folder))
    plan, rows = engine.plan, []
    itemsize = scale.dtypes[0].itemsize
    predicted = footprint(spec, AS_STORED, "triton" if scale.on_gpu else "torch", itemsize).num_bytes
    rows.append({"term": "weights", "predicted": predicted, "measured": plan.weight_bytes})
    if plan.memory is not None:
        expected = activation_bytes(spec, plan.limits.largest_step, itemsize)
        rows.append({"term": "activations", "predicted": expected, "measured": plan.memory.activations})
        rows.append({"term": "graphs", "predicted": "", "measured": plan.memory.graphs})
        free, total = torch.cuda.mem_get_info()
        limit = plan.memory.total - plan.memory.reserve
        rows.append({"term": "all, after start", "predicted": limit, "measured": total - free})
    pool = plan.num_blocks * plan.block_bytes
    rows.append({"term": "KV cache", "predicted": pool, "measured": engine.runner.kv_cache.nbytes})
    prompts, params = nano_workload(scale)
    # all at once, with top-p, which sorts the vocabulary for every row
    generate(engine, prompts, [type(each)(max_tokens=8, ignore_eos=True, top_p=0.95) for each in params])
    if scale.on_gpu:
        free, total = torch.cuda.mem_get_info()
        rows.append({"term": "all, after a run", "predicted": limit, "measured": total - free})
    fits = all(row["measured"] <= 1.01 * row["predicted"] for row in rows if str(row["term"]).startswith("all"))
    exact = all(row["measured"] == row["predicted"] for row in rows if row["term"] in ("weights", "KV cache"))
    return (
        fits and exact,
        f"{plan.num_blocks:,} blocks of {plan.limits.block_size}; weights and pool as predicted: {exact}",
        rows,
    )


def workload(scale: Scale) -> Result:
    """nano-vllm's workload: output tokens per second, load and warm-up outside the clock."""
    prompts, params = nano_workload(scale)
    top_id = min(10000, scale.model["vocab_size"] - 1)
    num_output = sum(each.max_tokens or 0 for each in params)
    loops = [("graphs", True), ("graphs", True), ("graphs", False), ("eager", True), ("eager", False)]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for block_size in reversed(scale.block_sizes):
            engine = make_engine(scale, Path(folder), block_size=block_size)
            warm_up = [prompt[::-1] for prompt in prompts[:2]]  # tokens that no pass repeats
            generate(engine, warm_up, [type(each)(max_tokens=4, ignore_eos=True) for each in params[:2]])
            captured = engine.runner.graphs
            for number, (kernels, ahead) in enumerate(loops if block_size == scale.block_sizes[-1] else loops[:2]):
                engine.runner.graphs = captured if kernels == "graphs" else None
                engine.runs_ahead = ahead
                before = _counts(engine)
                # other tokens in each pass, so that the prefix cache of the last one does not help
                shifted = [[(token + 17 * number) % (top_id + 1) for token in prompt] for prompt in prompts]
                synchronize(scale)
                start = time.perf_counter()
                tokens = generate(engine, shifted, params)
                seconds = time.perf_counter() - start
                assert sum(map(len, tokens)) == num_output, "every request gives as many tokens as it asks for"
                steps, launched, preemptions = (new - old for new, old in zip(_counts(engine), before, strict=True))
                rows.append({
                    "kernels": kernels, "one step ahead": ahead, "block": block_size, "pass": number + 1,
                    "seconds": round(seconds, 2), "output tok/s": round(num_output / seconds), "steps": steps,
                    "launched ahead": launched, "preemptions": preemptions,
                })  # fmt: skip
            del engine, captured
            if scale.on_gpu:
                torch.cuda.empty_cache()
    best = max(rows, key=lambda row: row["output tok/s"])
    order = "one step ahead" if best["one step ahead"] else "in order"
    how = f"{best['kernels']}, {order}, block {best['block']}"
    return True, f"best {best['output tok/s']:,} output tok/s ({how})", rows


def _counts(engine: Any) -> tuple[int, int, int]:
    """Steps so far, those launched ahead, and preemptions."""
    return engine.stats.num_steps, engine.num_steps_ahead, engine.stats.num_preemptions


RUN: dict[str, Callable[[Scale], Result]] = {
    stage.__name__: stage
    for stage in (
        *(environment, ceilings, attention, memory, workload),
        *(gpu_kernels.kernels, gpu_kernels.backends, gpu_kernels.products),
        *(gpu_engines.graphs, gpu_engines.requests, gpu_engines.families, gpu_engines.windows),
        *(gpu_engines.quantized, gpu_engines.fp8),
    )
}


def main() -> None:
    name, path = sys.argv[1:3]
    scale = TINY if "--dry-run-cpu" in sys.argv[3:] else GPU
    if not scale.on_gpu:
        assert os.environ.get("TRITON_INTERPRET") == "1", (
            "gpu_check.py sets it: there is nothing else to run kernels on"
        )
        torch.set_num_threads(1)
    ok, summary, rows = RUN[name](scale)
    result = {"stage": name, "ok": ok, "summary": summary, "rows": rows}
    Path(path).write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
