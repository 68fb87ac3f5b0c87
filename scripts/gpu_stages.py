"""The stages of gpu_check.py: python scripts/gpu_stages.py STAGE RESULT.jsonl [--part I/N] [--dry-run-cpu]

Each stage appends its rows as it goes and returns (ok, one line). Those of single kernels and those that compare the
tokens of whole engines are in files of their own.
"""

import argparse
import itertools
import multiprocessing
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
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
    Rows,
    Scale,
    best_seconds,
    copy_bandwidth,
    free_memory,
    gemm_rate,
    generate,
    make_engine,
    nano_workload,
    synchronize,
)

# ---------------------------------------------------------------------- stages


def environment(scale: Scale, rows: Rows) -> Result:
    """What this machine is and which backends run on it."""
    import triton

    from pagedcli.attention.base import AttentionSpec
    from pagedcli.attention.select import available_backends

    name = torch.cuda.get_device_name() if scale.on_gpu else platform.processor() or "CPU"
    facts: Row = {
        "device": name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    if scale.on_gpu:
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "GPUs": torch.cuda.device_count(),
            "compute capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory GiB": round(properties.total_memory / 2**30, 1),
            "CUDA of torch": torch.version.cuda,
        }
    shape = {"block_size": 16, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128}
    device = torch.device(scale.device)
    for backend, reason in available_backends(AttentionSpec(device, scale.dtypes[0], **shape)):
        facts[f"backend {backend}"] = "runs" if reason is None else reason
    for fact, value in facts.items():
        rows.append({"fact": fact, "value": value})
    return True, f"{name}, torch {torch.__version__}, triton {triton.__version__}"


def ahead(scale: Scale, rows: Rows) -> Result:
    """Compile the kernels of the next stages in parallel, into triton's cache: parts of these stages run at the same
    time, and their results do not count."""
    count = min(8, os.cpu_count() or 1) if scale.on_gpu else 1
    flags = [] if scale.on_gpu else ["--dry-run-cpu"]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        on_gpu = (("kernels", "backends"), ("families", "quantized"), ("hybrids",))
        for names in on_gpu if scale.on_gpu else (("backends",),):
            processes = {}
            for name, part in itertools.product(names, range(count)):
                out = Path(folder) / f"{name}-{part}"
                command = [sys.executable, __file__, name, str(out), "--part", f"{part}/{count}", *flags]
                processes[name, part] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for (name, part), process in processes.items():
                code = process.wait()
                rows.append({"stage": name, "part": part, "code": code, "s": round(time.perf_counter() - start, 1)})
    return True, f"compiled in {rows[-1]['s']} s by {count} processes at a time"


def ceilings(scale: Scale, rows: Rows) -> Result:
    """What memory and arithmetic can do at best."""
    copy, gemm = copy_bandwidth(scale), gemm_rate(scale)
    rows.append({"ceiling": "copy", "value": round(copy, 1), "unit": "GB/s"})
    rows.append({"ceiling": f"GEMM {scale.gemm_size}", "value": round(gemm, 2), "unit": "TFLOP/s"})
    return True, f"copy {copy:,.0f} GB/s, GEMM {gemm:,.1f} TFLOP/s"


def attention(scale: Scale, rows: Rows) -> Result:
    """Decode and prefill attention over shapes and block sizes, as shares of the ceilings."""
    from attention_cases import make_batch

    from pagedcli.attention.layer import AttentionLayer
    from pagedcli.attention.select import select_backend

    copy, gemm = copy_bandwidth(scale), gemm_rate(scale)
    heads = (16, 8, 128) if scale.on_gpu else (2, 1, 16)
    dtype = scale.dtypes[0]
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
            lambda q=q, k=k_cache, v=v_cache, b=batch, s=backend: s.attend(q, (k, v), b, AttentionLayer(scale=0.1)),
            scale,
            graphed=backend.capabilities.graph_safe,
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
    return True, f"best decode share of copy: {shares}"


def memory(scale: Scale, rows: Rows) -> Result:
    """What profile-memory predicts against what the engine measured, and whether the pool was really there."""
    from pagedcli.models.footprint import footprint
    from pagedcli.models.formats import AS_STORED
    from pagedcli.models.reading import read_spec
    from pagedcli.planning.decision import activation_bytes

    with tempfile.TemporaryDirectory() as folder:
        # on a CPU the native decoder packs its weights, which needs some room of its own
        options = {"gpu_memory_utilization": 0.95} if scale.on_gpu else {"attention_backend": "reference"}
        engine = make_engine(scale, Path(folder), **options)
        spec = read_spec(Path(folder))
    plan = engine.plan
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
    )


def workload(scale: Scale, rows: Rows) -> Result:
    """nano-vllm's workload: output tokens per second, load and warm-up outside the clock."""
    prompts, params = nano_workload(scale)
    top_id = min(10000, scale.model["vocab_size"] - 1)
    num_output = sum(each.max_tokens or 0 for each in params)
    loops = [("graphs", True), ("graphs", True), ("graphs", False), ("eager", True), ("eager", False)]
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
            free_memory(scale)
    best = max(rows, key=lambda row: row["output tok/s"])
    order = "one step ahead" if best["one step ahead"] else "in order"
    how = f"{best['kernels']}, {order}, block {best['block']}"
    return True, f"best {best['output tok/s']:,} output tok/s ({how})"


def _counts(engine: Any) -> tuple[int, int, int]:
    """Steps so far, those launched ahead, and preemptions."""
    return engine.stats.num_steps, engine.num_steps_ahead, engine.stats.num_preemptions


def random_prompts(scale: Scale, count: int, length: int, *, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    top_id = min(10000, scale.model["vocab_size"] - 1)
    return [[rng.randint(3, top_id) for _ in range(length)] for _ in range(count)]


def steps(scale: Scale, rows: Rows) -> Result:
    """What a decode step of the scale's model takes, and its kernels: the longest ones, and all of them together."""
    from pagedcli.sampling_params import SamplingParams

    length, num_new = (600, 48) if scale.on_gpu else (5, 4)
    params = SamplingParams(temperature=0.6, max_tokens=num_new, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(scale, Path(folder), enable_prefix_caching=False)
        for num_seqs in (1, 16, 64, 256) if scale.on_gpu else (1, 2):
            spent, seconds, count = _decode_steps(engine, scale, num_seqs, length, params)
            kernels = sorted(spent.items(), key=lambda item: -item[1][0])
            rows.append({
                "sequences": num_seqs, "ms per step": round(seconds / count * 1e3, 3),
                "kernels ms": round(sum(us for us, _ in spent.values()) / count / 1e3, 3),
                "kernels": round(sum(number for _, number in spent.values()) / count),
                "longest, us per step": ", ".join(
                    f"{name} {us / count:.0f} ({number / count:.0f}x)" for name, (us, number) in kernels[:9]
                ),
            })  # fmt: skip
    return True, "ms per step: " + ", ".join(f"{row['sequences']} sequences {row['ms per step']}" for row in rows)


def _decode_steps(
    engine: Any, scale: Scale, num_seqs: int, length: int, params: Any
) -> tuple[dict[str, tuple[float, int]], float, int]:
    """_profiled of steps of so many sequences, after prompts of `length` tokens."""
    for turn in range(2):  # the first compiles
        for number, prompt in enumerate(random_prompts(scale, num_seqs, length, seed=turn)):
            engine.add_request(str(number), prompt, params)
        before = engine.stats.num_prompt_tokens
        while engine.stats.num_prompt_tokens - before < num_seqs * length:
            engine.step()
        found = _profiled(engine, scale, (params.max_tokens - 4) // 2 if scale.on_gpu else 1)
        while engine.has_unfinished_requests():
            engine.step()
    return found


QWEN3_8B: Row = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "tie_word_embeddings": False,
}  # fmt: skip
# what `fused` may be: programs per multiprocessor, and whether a kernel starts while the one before still runs
STREAMS = [(2, True), (2, False), (1, True), (4, True)]


def stream(scale: Scale, rows: Rows) -> Result:
    """Decode steps of up to 16 rows with fused kernels: tokens and bits first, then their time in each setting next to
    that of the present kernels. The last line says which to choose."""
    from pagedcli.attention import triton_paged
    from pagedcli.layers import triton_stream
    from pagedcli.sampling_params import SamplingParams

    right, summary = gpu_engines.check_stream(scale, rows)
    models = {"0.6B": scale.model} | ({"8B": {**scale.model, **QWEN3_8B}} if scale.on_gpu else {})
    length, num_new = (600, 48) if scale.on_gpu else (5, 4)
    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
    settings: list[tuple[int, bool] | None] = [None, *(STREAMS if scale.on_gpu else STREAMS[:1])]
    starts_early, programs_before = triton_stream.starts_early, triton_stream.PROGRAMS_PER_PROCESSOR
    choices = []
    for name, model in models.items():
        totals: dict[str, float] = {}
        for setting in settings:
            how = "auto" if setting is None else f"{setting[0]} programs{', early' if setting[1] else ''}"
            if setting is not None:
                triton_stream.PROGRAMS_PER_PROCESSOR = setting[0]
                for module in (triton_stream, triton_paged):
                    module.starts_early = starts_early if setting[1] else lambda _: False
            options: Row = {"num_kvcache_blocks": 1200, "max_num_seqs": 16} if scale.on_gpu else {}
            kernels = "auto" if setting is None else "fused"
            try:
                with tempfile.TemporaryDirectory() as folder:
                    engine = make_engine(
                        scale, Path(folder), model=model, gpu_kernels=kernels, enable_prefix_caching=False, **options
                    )
                for num_seqs in (1, 8, 16) if scale.on_gpu else (1,):
                    spent, seconds, count = _decode_steps(engine, scale, num_seqs, length, params)
                    gbytes = engine.plan.weight_bytes / 1e9
                    rows.append({
                        "model": name, "kernels": how, "sequences": num_seqs,
                        "ms per step": round(seconds / count * 1e3, 3),
                        "kernels ms": round(sum(us for us, _ in spent.values()) / count / 1e3, 3),
                        "launches": round(sum(number for _, number in spent.values()) / count),
                        "GB/s of weights": round(gbytes * count / seconds),
                    })  # fmt: skip
                    totals[how] = totals.get(how, 0.0) + seconds / count
            except Exception as error:  # The other settings are still to be measured.
                rows.append({"model": name, "kernels": how, "problem": gpu_engines.problem_of(error)})
                right = False
            engine = None
            free_memory(scale)
        triton_stream.starts_early = triton_paged.starts_early = starts_early
        triton_stream.PROGRAMS_PER_PROCESSOR = programs_before
        if totals:
            best = min(totals, key=totals.__getitem__)
            choices.append(
                f"{name}: choose {best} ({totals.get('auto', 0.0) / totals[best]:.2f} times as fast as auto)"
            )
    return right, f"{summary}; {'; '.join(choices)}"


def _profiled(engine: Any, scale: Scale, count: int) -> tuple[dict[str, tuple[float, int]], float, int]:
    """Microseconds and launches of each kernel in so many steps, and the seconds of as many that nobody watched."""
    from torch.profiler import ProfilerActivity, profile

    synchronize(scale)
    start = time.perf_counter()
    for _ in range(count):
        engine.step()
    synchronize(scale)
    seconds = time.perf_counter() - start
    activity = ProfilerActivity.CUDA if scale.on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as watched:
        for _ in range(count):
            engine.step()
        synchronize(scale)
    spent = {
        each.key[:60]: (each.self_device_time_total if scale.on_gpu else each.self_cpu_time_total, each.count)
        for each in watched.key_averages()
    }
    return {name: cost for name, cost in spent.items() if cost[0] > 0}, seconds, count


def parallel(scale: Scale, rows: Rows) -> Result:
    """Two ranks: start, ten steps and end; then again with a worker that is killed. Each in a process of its own, whose
    exit is in the time."""
    if scale.on_gpu and torch.cuda.device_count() < 2:
        return True, "not here: one GPU"
    context, ok = multiprocessing.get_context("spawn"), True
    for kind, limit_s in (("closed", 2.0), ("worker killed", 10.0)):
        ours, theirs = context.Pipe()
        process = context.Process(target=_two_ranks, args=(scale, kind, theirs))
        start = time.perf_counter()
        process.start()
        theirs.close()
        row: Row = {"end": kind}
        try:
            row |= {"tokens": _received(ours), "start and steps s": round(time.perf_counter() - start, 2)}
            row |= {"end s": _received(ours)}
        except EOFError:
            row["problem"] = "the process ended before, or hangs"
        told = time.perf_counter()
        process.join(10)
        row |= {"exit s": round(time.perf_counter() - told, 2), "code": process.exitcode}
        if process.exitcode is None:
            process.kill()
        rows.append(row)
        ok = ok and "problem" not in row and row["code"] == 0 and row["end s"] < limit_s and row["exit s"] < 10
    return ok, f"left in {rows[0].get('end s')} s; a killed worker is reported in {rows[1].get('end s')} s"


def _received(pipe: Any) -> Any:
    if not pipe.poll(50):
        raise EOFError
    return pipe.recv()


def _two_ranks(scale: Scale, kind: str, pipe: Any) -> None:
    from pagedcli.runner.tensor_parallel import WorkerFailure
    from pagedcli.sampling_params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        model = scale.model if scale.on_gpu else {**scale.model, **heads}
        engine = make_engine(scale, Path(folder), model=model, tensor_parallel_size=2)
        for number, prompt in enumerate(random_prompts(scale, 3, 20, seed=0)):
            engine.add_request(str(number), prompt, params)
        for _ in range(10):
            engine.step()
        pipe.send(engine.stats.num_generated_tokens)
        start = time.perf_counter()
        if kind == "worker killed":
            os.kill(engine._group._ranks.workers[0].process.pid, signal.SIGKILL)
            try:
                while engine.has_unfinished_requests():
                    engine.step()
                pipe.send("no error")
                return
            except WorkerFailure:
                pass
        engine.close()
        pipe.send(round(time.perf_counter() - start, 2))


RUN: dict[str, Callable[[Scale, Rows], Result]] = {
    stage.__name__: stage
    for stage in (
        *(environment, ahead, ceilings, attention, memory, workload, steps, stream, parallel),
        *(gpu_kernels.kernels, gpu_kernels.backends, gpu_kernels.products, gpu_kernels.fp8_products),
        *(gpu_engines.smoke, gpu_engines.graphs, gpu_engines.requests, gpu_engines.families),
        *(gpu_engines.hybrids, gpu_engines.windows),
        *(gpu_engines.quantized, gpu_engines.fp8, gpu_engines.invariance, gpu_engines.same_bits),
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=RUN)
    parser.add_argument("result", type=Path, help="file for rows and verdict, one JSON line each")
    parser.add_argument("--part", default="0/1", help="run only these cases of the stage")
    parser.add_argument("--dry-run-cpu", action="store_true")
    args = parser.parse_args()
    number, count = map(int, args.part.split("/"))
    scale = replace(TINY if args.dry_run_cpu else GPU, part=(number, count))
    if not scale.on_gpu:
        assert os.environ.get("TRITON_INTERPRET") == "1", (
            "gpu_check.py sets it: there is nothing else to run kernels on"
        )
        torch.set_num_threads(1)
    rows = Rows(args.result)
    ok, summary = RUN[args.stage](scale, rows)
    rows.write({"verdict": {"ok": ok, "summary": summary, "rows": rows}})


if __name__ == "__main__":
    main()
