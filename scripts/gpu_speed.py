"""The stages of gpu_check.py that time whole engines on the kinds of work that leave the plain path, and the start and
the end of tensor parallelism."""

import multiprocessing
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu_common import Result, Row, Rows, Scale, free_memory, generate, make_engine, synchronize

SAMPLING: dict[str, Row] = {
    "greedy": {"temperature": 0},
    "temperature 0.6": {"temperature": 0.6},
    "top-p 0.95": {"temperature": 0.6, "top_p": 0.95},
    "top-k 20, top-p 0.95": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "min-p 0.1": {"temperature": 0.6, "min_p": 0.1},
    "repetition penalty 1.1": {"temperature": 0.6, "repetition_penalty": 1.1},
    "all of them": {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1, "presence_penalty": 0.5},
}
GEMMA3_1B: Row = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152,
    "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "query_pre_attn_scalar": 256, "sliding_window": 512,
    "sliding_window_pattern": 6, "tie_word_embeddings": True, "attention_bias": False, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_30B_A3B: Row = {  # a quarter of its 48 layers, which are all alike
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_hidden_layers": 12,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": False,
    "attention_bias": False, "torch_dtype": "bfloat16",
}  # fmt: skip
TINY_EXPERTS: Row = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}


def timed(engine: Any, scale: Scale, prompts: list[list[int]], params: list[Any]) -> tuple[float, Row]:
    """Seconds of a run, and its figures."""
    steps, ahead = engine.stats.num_steps, engine.num_steps_ahead
    synchronize(scale)
    start = time.perf_counter()
    tokens = generate(engine, prompts, params)
    seconds = time.perf_counter() - start
    steps = engine.stats.num_steps - steps
    return seconds, {
        "s": round(seconds, 3),
        "output tok/s": round(sum(map(len, tokens)) / seconds),
        "steps": steps,
        "ms per step": round(seconds / steps * 1e3, 3),
        "ahead": engine.num_steps_ahead - ahead,
    }


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
            for turn in range(2):  # the first compiles
                for number, prompt in enumerate(random_prompts(scale, num_seqs, length, seed=turn)):
                    engine.add_request(str(number), prompt, params)
                before = engine.stats.num_prompt_tokens
                while engine.stats.num_prompt_tokens - before < num_seqs * length:
                    engine.step()
                spent, seconds, count = _profiled(engine, scale, (num_new - 4) // 2 if scale.on_gpu else 1)
                while engine.has_unfinished_requests():
                    engine.step()
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


def sampling(scale: Scale, rows: Rows) -> Result:
    """A full batch, all rows with the same kind of sampling: the time of a step against greedy's."""
    from pagedcli.sampling_params import SamplingParams

    length, num_new = (64, 128) if scale.on_gpu else (5, 3)
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(scale, Path(folder))
        for seed in (98, 99):  # a GPU that was idle is slow at first
            full = [SamplingParams(max_tokens=num_new, ignore_eos=True)] * scale.batch
            generate(engine, random_prompts(scale, scale.batch, length, seed=seed), full)
        for number, (kind, options) in enumerate(SAMPLING.items()):
            params = [
                SamplingParams(max_tokens=num_new, seed=i, ignore_eos=True, **options) for i in range(scale.batch)
            ]
            for turn in range(2):  # the first compiles
                prompts = random_prompts(scale, scale.batch, length, seed=2 * number + turn)
                _, figures = timed(engine, scale, prompts, params)
            times = round(figures["ms per step"] / rows[0]["ms per step"], 2) if rows else 1.0
            rows.append({"sampling": kind, "sequences": scale.batch, **figures, "times greedy": times})
    slowest = max(rows, key=lambda row: row["times greedy"])
    return True, f"slowest: {slowest['sampling']}, {slowest['times greedy']} times greedy's step"


def mixed(scale: Scale, rows: Rows) -> Result:
    """More rows than sequences in a batch, so that new prompts join the decoding of others, at several limits of tokens
    per step, the default among them."""
    from pagedcli.sampling_params import SamplingParams

    count, (low, high) = (1000, (32, 512)) if scale.on_gpu else (8, (2, 6))
    rng = random.Random(0)
    prompts = [random_prompts(scale, 1, rng.randint(low, high), seed=i)[0] for i in range(count)]
    params = [
        SamplingParams(temperature=0.6, seed=i, max_tokens=rng.randint(low, high), ignore_eos=True)
        for i in range(count)
    ]
    for limit in (None, 2048, 8192, 16384) if scale.on_gpu else (None, 32):
        with tempfile.TemporaryDirectory() as folder:
            engine = make_engine(scale, Path(folder), max_num_batched_tokens=limit, enable_prefix_caching=False)
            warm_up = [SamplingParams(max_tokens=4, ignore_eos=True)] * 2
            generate(engine, random_prompts(scale, 2, high, seed=7), warm_up)
            _, figures = timed(engine, scale, prompts, params)
        named = f"{engine.limits.max_num_batched_tokens:,}{' (default)' if limit is None else ''}"
        rows.append({"tokens per step": named, "rows": count, "sequences": engine.limits.max_num_seqs, **figures})
        del engine
        free_memory(scale)
    best = max(rows, key=lambda row: row["output tok/s"])
    return True, f"{rows[0]['output tok/s']:,} output tok/s by default; best {best['tokens per step']} tokens per step"


def shapes(scale: Scale, rows: Rows) -> Result:
    """Decode steps of the shapes of Gemma-3-1B and Qwen3-30B-A3B, with random weights."""
    from pagedcli.sampling_params import SamplingParams

    models = {"Gemma-3-1B": GEMMA3_1B, "Qwen3-30B-A3B, 12 layers": QWEN3_30B_A3B}
    length, num_new = (256, 64) if scale.on_gpu else (5, 2)
    for name, config in models.items():
        if not scale.on_gpu:
            experts = TINY_EXPERTS if "num_experts" in config else {}
            own = ("architectures", "model_type", "tie_word_embeddings")
            config = {**config, **{k: v for k, v in scale.model.items() if k not in own}, **experts}
        with tempfile.TemporaryDirectory() as folder:
            engine = make_engine(scale, Path(folder), model=config, enable_prefix_caching=False)
            params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
            for num_seqs in (1, 16, 64, 256) if scale.on_gpu else (1, 2):
                prompts = random_prompts(scale, num_seqs, length, seed=num_seqs)
                for _ in range(2):  # the first compiles
                    _, figures = timed(engine, scale, prompts, [params] * num_seqs)
                graphs = len(engine.plan.graph_sizes)
                rows.append({"model": name, "sequences": num_seqs, **figures, "graphs": graphs})
        del engine
        free_memory(scale)
    alone = {row["model"]: row["ms per step"] for row in rows if row["sequences"] == 1}
    return True, "ms per step of one sequence: " + ", ".join(f"{name} {ms}" for name, ms in alone.items())


# ---------------------------------------------------------------------- two GPUs


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
