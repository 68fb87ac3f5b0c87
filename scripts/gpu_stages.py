"""The stages of gpu_check.py: python scripts/gpu_stages.py STAGE RESULT.json [--dry-run-cpu]

Each stage returns (ok, one line, rows). Checks use fresh random inputs and poison what must not be read.
"""

import itertools
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# the checkout itself, installed or not
sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("src", "tests")]

Row = dict[str, Any]
Result = tuple[bool, str, list[Row]]
QWEN3_06B: Row = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True, slots=True)
class Scale:
    """How large everything is: real on a GPU, tiny in a dry run on a CPU."""

    device: str
    dtypes: tuple[torch.dtype, ...]
    copy_bytes: int
    gemm_size: int
    model: Row
    decode_shapes: tuple[tuple[int, int], ...]  # (sequences, tokens of context)
    prefill_tokens: tuple[int, ...]
    block_sizes: tuple[int, ...]
    num_prompts: int  # of the workload
    lengths: tuple[int, int]  # of the workload's prompts and outputs
    engine: Row  # limits of the workload's engine

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"


GPU = Scale(
    device="cuda",
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    copy_bytes=2**31,
    gemm_size=8192,
    model=QWEN3_06B,
    decode_shapes=((1, 4096), (16, 4096), (64, 1024), (256, 600), (256, 2048)),
    prefill_tokens=(512, 2048, 8192),
    block_sizes=(16, 256),
    num_prompts=256,
    lengths=(100, 1024),
    engine={"max_model_len": 4096, "max_num_seqs": 256, "max_num_batched_tokens": 16384},
)
TINY = Scale(
    device="cpu",
    dtypes=(torch.float32,),
    copy_bytes=2**22,
    gemm_size=128,
    model={
        **QWEN3_06B, "vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
        "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
    },
    decode_shapes=((2, 40),),
    prefill_tokens=(20,),
    block_sizes=(16,),
    num_prompts=3,
    lengths=(4, 9),
    engine={"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 16},
)  # fmt: skip


# ---------------------------------------------------------------------- timing


def synchronize(scale: Scale) -> None:
    if scale.on_gpu:
        torch.cuda.synchronize()


def best_seconds(call: Callable[[], Any], scale: Scale, *, repeats: int = 20) -> float:
    """The best of several calls, each with a cold L2 cache."""
    call()
    flush = torch.empty(2**28 if scale.on_gpu else 1, dtype=torch.uint8, device=scale.device)
    best = float("inf")
    for _ in range(repeats if scale.on_gpu else 2):
        flush.zero_()
        if scale.on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            best = min(best, start.elapsed_time(end) / 1e3)
        else:
            begin = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - begin)
    return best


def copy_bandwidth(scale: Scale) -> float:
    """10^9 bytes per second, read and written."""
    source = torch.empty(scale.copy_bytes, dtype=torch.uint8, device=scale.device)
    target = torch.empty_like(source)
    return 2 * scale.copy_bytes / best_seconds(lambda: target.copy_(source), scale) / 1e9


def gemm_rate(scale: Scale) -> float:
    """10^12 FLOP per second of a large square product in the first dtype."""
    size = scale.gemm_size
    a, b = (torch.randn(size, size, device=scale.device).to(scale.dtypes[0]) for _ in range(2))
    return 2 * size**3 / best_seconds(lambda: a @ b, scale) / 1e12


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


def kernels(scale: Scale) -> Result:
    """Every attention backend and every fused kernel against float64, inputs fresh, unowned slots NaN."""
    rows = [*attention_errors(scale), *layer_errors(scale), *sampling_errors(scale)]
    checked = [row for row in rows if "error" in row]
    failed = [row for row in checked if not row["error"] <= row["allowed"]]
    summary = f"{len(checked)} comparisons, {len(failed)} out of tolerance"
    return bool(checked) and not failed, summary, failed + [row for row in rows if "refused" in row]


def attention_errors(scale: Scale) -> Iterator[Row]:
    from attention_cases import TOLERANCE, Case, run, worst_error

    from pagedcli.attention.select import REGISTRY, select_backend
    from pagedcli.errors import BackendError

    shapes = [(16, 8, 128), (8, 8, 64), (14, 2, 64), (8, 1, 256), (6, 2, 96), (32, 2, 128)]
    # every kernel is compiled anew: all shapes in the first dtype, the first two in the others and at larger blocks
    cases = [(shape, scale.block_sizes[0], scale.dtypes[0]) for shape in shapes]
    cases += [(shape, scale.block_sizes[0], dtype) for shape in shapes[:2] for dtype in scale.dtypes[1:]]
    cases += [(shapes[0], block_size, scale.dtypes[0]) for block_size in scale.block_sizes[1:]]
    cases = cases if scale.on_gpu else [((4, 2, 16), 16, torch.float32)]
    lengths = [(1, 1), (17, 17), (300, 1), (256, 1), (257, 1), (700, 130), (512, 512), (33, 5)]
    mixtures = [lengths, [(n, 1) for n, _ in lengths]] if scale.on_gpu else [[(1, 1), (20, 3)], [(18, 1)]]
    backends = [entry.name for entry in REGISTRY if scale.on_gpu or entry.name in ("triton", "reference")]
    for name, (shape, block_size, dtype) in itertools.product(backends, cases):
        num_heads, num_kv_heads, head_dim = shape
        where = {"kernel": f"attention {name}", "shape": str(shape), "block": block_size, "dtype": str(dtype)[6:]}
        try:
            backend = select_backend(
                name, device=torch.device(scale.device), dtype=dtype, block_size=block_size,
                num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
            ).backend  # fmt: skip
        except BackendError as error:
            yield {**where, "refused": error.message}
            continue
        for mixture in mixtures:
            seed = random.SystemRandom().randrange(2**31)
            case = Case(mixture, block_size, *shape, dtype, device=scale.device, seed=seed)
            row = {**where, "seed": seed, "allowed": 4 * TOLERANCE[dtype]}
            try:
                yield {**row, "error": worst_error(run(backend, case), case.expected())}
            except Exception as error:  # of one backend, whatever it is: the others are still to be checked
                yield {**row, "error": float("inf"), "problem": str(error).partition("\n")[0]}


def compared(kernel: str, dtype: torch.dtype, error: float, allowed: float) -> Row:
    return {"kernel": kernel, "dtype": str(dtype).removeprefix("torch."), "error": error, "allowed": allowed}


def layer_errors(scale: Scale) -> Iterator[Row]:
    from pagedcli.layers import triton_layers

    width, heads, kv_heads, dim, tokens = (1024, 16, 8, 128, 77) if scale.on_gpu else (48, 2, 1, 16, 3)
    for dtype in scale.dtypes:
        allowed = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}[dtype]

        def noise(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(*shape, device=scale.device).to(dtype)

        def row(kernel: str, result: torch.Tensor, expected: torch.Tensor, *, allowed: float = allowed) -> Row:
            difference = (result.double() - expected).abs() / (1 + expected.abs())
            return compared(kernel, result.dtype, float(difference.nan_to_num(1e9).max()), allowed)

        x, residual, weight = noise(tokens, width), noise(tokens, width), noise(width)
        total = (x.double() + residual.double()).to(dtype).double()
        expected = total / (total.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
        yield row("add_rms_norm", triton_layers.add_rms_norm(x, residual, weight, 1e-6), expected)
        gate_up = noise(tokens, 2 * width)
        gate, up = gate_up.double().chunk(2, -1)
        yield row("silu_and_mul", triton_layers.silu_and_mul(gate_up), gate / (1 + (-gate).exp()) * up)

        qkv, norm = noise(tokens, (heads + 2 * kv_heads) * dim), noise(heads + kv_heads, dim)
        angles = torch.rand(500, dim // 2, device=scale.device) * 6
        table = torch.cat((angles.cos(), angles.sin()), -1).to(dtype)
        positions = torch.randint(0, 500, (tokens,), device=scale.device)
        num_blocks = tokens // 16 + 2
        slots = torch.randperm(num_blocks * 16, device=scale.device)[:tokens].to(torch.int32)
        slots[1] = -1
        shape = (num_blocks, kv_heads, 16, dim)
        caches = [torch.full(shape, float("nan"), dtype=dtype, device=scale.device) for _ in "kv"]
        q = triton_layers.rotate_and_store(
            qkv, heads, kv_heads, norm=(norm, 1e-6), table=table, positions=positions, slots=slots,
            k_cache=caches[0], v_cache=caches[1],
        )  # fmt: skip
        split = qkv.double().view(tokens, -1, dim)
        qk = split[:, : heads + kv_heads]
        qk = qk / (qk.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.double()
        cos, sin = table.double()[positions][:, None].chunk(2, -1)
        first, second = qk.chunk(2, -1)
        qk = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        yield row("rotate q", q, qk[:, :heads])
        written = slots >= 0
        by_slot = [cache.transpose(1, 2).flatten(0, 1) for cache in caches]
        places = slots[written].long()
        yield row("store k", by_slot[0][places], qk[written][:, heads:])
        yield row("store v", by_slot[1][places], split[written][:, heads + kv_heads :])
        untouched = torch.ones(num_blocks * 16, dtype=torch.bool, device=scale.device).index_fill_(0, places, False)
        clean = bool(by_slot[0][untouched].isnan().all() and by_slot[1][untouched].isnan().all())
        yield compared("store writes nothing else", dtype, float(not clean), 0.0)


def sampling_errors(scale: Scale) -> Iterator[Row]:
    """The error of a choice is how far its uniform number lies outside the token's share of the cumulative mass."""
    from pagedcli.layers import triton_sampling

    rows, vocab = (64, 151936) if scale.on_gpu else (4, 5000)
    for dtype in scale.dtypes:
        logits = (torch.randn(rows, vocab, device=scale.device) * 3).to(dtype)
        temperature = torch.rand(rows, device=scale.device) + 0.3
        temperature[::2] = 0
        uniform = torch.rand(rows, device=scale.device)
        tokens = triton_sampling.choose_tokens(logits, temperature, uniform)
        greedy = temperature == 0
        right = bool((logits.gather(1, tokens[:, None])[:, 0] == logits.max(-1).values)[greedy].all())
        yield compared("greedy", dtype, float(not right), 0.0)
        drawn, chosen = ~greedy, tokens[~greedy][:, None]
        probs = (logits[drawn].double() / temperature[drawn].double()[:, None]).softmax(-1)
        end = probs.cumsum(-1).gather(1, chosen)[:, 0]
        begin = end - probs.gather(1, chosen)[:, 0]
        outside = torch.maximum(begin - uniform[drawn], uniform[drawn] - end).clamp(min=0)
        yield compared("draw", dtype, float(outside.max()), 1e-5)


def make_model(folder: Path, config: Row) -> Path:
    """A model folder without weights, for `load_format: dummy`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def make_engine(scale: Scale, folder: Path, **options: Any) -> Any:
    from pagedcli.config import EngineConfig
    from pagedcli.engine.llm_engine import LLMEngine

    path = make_model(folder, scale.model)
    config = {"model": str(path), "load_format": "dummy", "device": scale.device, **scale.engine}
    return LLMEngine(EngineConfig(**{**config, **options}))


def generate(engine: Any, prompts: list[list[int]], params: list[Any]) -> list[list[int]]:
    """Output tokens by prompt."""
    for number, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(number), prompt, each)
    outputs: dict[str, list[int]] = {}
    while len(outputs) < len(prompts):
        for output in engine.step():
            outputs[output.request_id] = output.samples[0].token_ids
    return [outputs[str(number)] for number in range(len(prompts))]


def nano_workload(scale: Scale) -> tuple[list[list[int]], list[Any]]:
    """nano-vllm's bench.py: seed(0), the prompts first, then the lengths of the outputs."""
    from pagedcli.sampling_params import SamplingParams

    random.seed(0)
    low, high = scale.lengths
    top_id = min(10000, scale.model["vocab_size"] - 1)
    prompts = [[random.randint(0, top_id) for _ in range(random.randint(low, high))] for _ in range(scale.num_prompts)]
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=random.randint(low, high))
        for _ in range(scale.num_prompts)
    ]
    return prompts, params


def transformers(scale: Scale) -> Result:
    """Tokens of the engine and of transformers, float32 and greedy, for a small random model."""
    from pagedcli.config import EngineConfig
    from pagedcli.engine.llm_engine import LLMEngine
    from pagedcli.sampling_params import SamplingParams

    families = ("qwen3", "llama") if scale.on_gpu else ("qwen3",)
    num_prompts, num_new = (16, 64) if scale.on_gpu else (2, 6)
    rows: list[Row] = []
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            path, prompts = Path(folder), ragged_prompts(num_prompts)
            expected = transformers_tokens(family, path, prompts, num_new)
            config = EngineConfig(
                model=str(path), dtype="float32", device=scale.device, max_num_seqs=8,
                num_gpu_blocks_override=40, chunked_prefill_size=7,
            )  # fmt: skip
            engine = LLMEngine(config)
            params = [SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)] * num_prompts
            tokens = generate(engine, prompts, params)
        equal = sum(a == b for a, b in zip(tokens, expected, strict=True))
        rows.append({"family": family, "backend": engine.plan.backend, "prompts": num_prompts, "equal": equal})
    equal = [row["family"] for row in rows if row["equal"] == num_prompts]
    return len(equal) == len(families), f"tokens equal to transformers: {', '.join(equal)}", rows


def ragged_prompts(count: int) -> list[list[int]]:
    """Prompts of 1 to 60 tokens; half of them share a prefix of 24."""
    rng = random.Random(0)
    shared = [rng.randrange(3, 320) for _ in range(24)]
    prompts = [[rng.randrange(3, 320) for _ in range(rng.randint(1, 36))] for _ in range(count)]
    return [shared + prompt if i % 2 else prompt for i, prompt in enumerate(prompts)]


def transformers_tokens(family: str, path: Path, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    """Write a small random model to `path`; its greedy tokens by transformers on the CPU, each prompt alone."""
    import transformers as hf

    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
    config = hf.AutoConfig.for_model(family, **sizes, **heads, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # wide enough that the likeliest token stands out; no norm stays 1
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1))
    model.save_pretrained(path)
    model.generation_config.eos_token_id = None
    options = {"do_sample": False, "max_new_tokens": num_new, "pad_token_id": 0}
    return [model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in prompts]


def graphs(scale: Scale) -> Result:
    """Graphs and one step ahead against the plain loop, in float32, where other batch shapes hardly change a choice."""
    import msgspec

    prompts, params = nano_workload(scale)
    count = 24 if scale.on_gpu else 3
    prompts = [prompt[:60] for prompt in prompts[:count]]
    params = [
        msgspec.structs.replace(each, max_tokens=min(each.max_tokens or 1, 40), seed=seed)
        for seed, each in enumerate(params[:count])
    ]
    params[::2] = [msgspec.structs.replace(each, temperature=0.0) for each in params[::2]]
    variants = {
        "plain": {"enforce_eager": True, "async_scheduling": False},
        "ahead": {"enforce_eager": True, "async_scheduling": True},
        "graphs": {"enforce_eager": False, "async_scheduling": False},
        "graphs, ahead": {"enforce_eager": False, "async_scheduling": True},
    }
    tokens, rows = {}, []
    limits: Row = {"dtype": "float32", "num_gpu_blocks_override": 512}
    limits |= {"max_num_seqs": 21 if scale.on_gpu else 3, "max_model_len": 256 if scale.on_gpu else 64}
    with tempfile.TemporaryDirectory() as folder:
        for name, options in variants.items():
            engine = make_engine(scale, Path(folder), **limits, **options)
            if not scale.on_gpu and not options["enforce_eager"]:
                engine.runner.make_graphs(capture=False)
            tokens[name] = generate(engine, prompts, params)
            equal = sum(a == b for a, b in zip(tokens[name], tokens["plain"], strict=True))
            sizes = len(engine.runner.graphs.sizes) if engine.runner.graphs is not None else 0
            ahead = engine.stats.num_steps_ahead
            rows.append({"loop": name, "graphs": sizes, "equal": equal, "of": count, "ahead": ahead})
            del engine
    # one step ahead an ended sequence is noticed later, so batches differ there, too
    ok = all(row["equal"] >= 0.95 * count for row in rows)
    return ok, f"sequences equal to the plain loop: {', '.join(str(row['equal']) for row in rows)} of {count}", rows


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
    from dataclasses import fields

    from pagedcli.kvcache.budget import ModelSizes, StepShape
    from pagedcli.models.reading import read_spec

    with tempfile.TemporaryDirectory() as folder:
        # on a CPU the native decoder packs its weights, which needs some room of its own
        options = {} if scale.on_gpu else {"attention_backend": "reference"}
        engine = make_engine(scale, Path(folder), **options)
        spec = read_spec(Path(folder))
    plan, rows = engine.plan, []
    itemsize = scale.dtypes[0].itemsize
    sizes = ModelSizes(**{field.name: getattr(spec, field.name) for field in fields(ModelSizes)})
    rows.append({"term": "weights", "predicted": sizes.num_parameters * itemsize, "measured": plan.weight_bytes})
    if plan.budget is not None:
        step = StepShape.largest(plan.max_num_batched_tokens, plan.max_num_seqs, plan.max_model_len)
        expected = sizes.activation_bytes(step, itemsize)
        rows.append({"term": "activations", "predicted": expected, "measured": plan.budget.activations})
        rows.append({"term": "graphs", "predicted": "", "measured": plan.budget.graphs})
        free, total = torch.cuda.mem_get_info()
        limit = int(total * plan.budget.utilization)
        rows.append({"term": "all, after start", "predicted": limit, "measured": total - free})
    pool = plan.num_blocks * plan.block_bytes
    rows.append({"term": "KV cache", "predicted": pool, "measured": engine.runner.kv_cache.nbytes})
    prompts, params = nano_workload(scale)
    generate(engine, prompts[:32], [type(each)(max_tokens=8, ignore_eos=True) for each in params[:32]])
    if scale.on_gpu:
        free, total = torch.cuda.mem_get_info()
        rows.append({"term": "all, after a run", "predicted": limit, "measured": total - free})
    fits = all(row["measured"] <= 1.01 * row["predicted"] for row in rows if str(row["term"]).startswith("all"))
    exact = all(row["measured"] == row["predicted"] for row in rows if row["term"] in ("weights", "KV cache"))
    return (
        fits and exact,
        f"{plan.num_blocks:,} blocks of {plan.block_size}; weights and pool as predicted: {exact}",
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
                engine.stats = type(engine.stats)()
                # other tokens in each pass, so that the prefix cache of the last one does not help
                shifted = [[(token + 17 * number) % (top_id + 1) for token in prompt] for prompt in prompts]
                synchronize(scale)
                start = time.perf_counter()
                tokens = generate(engine, shifted, params)
                seconds = time.perf_counter() - start
                assert sum(map(len, tokens)) == num_output, "every request gives as many tokens as it asks for"
                stats = engine.stats
                rows.append({
                    "kernels": kernels, "one step ahead": ahead, "block": block_size, "pass": number + 1,
                    "seconds": round(seconds, 2), "output tok/s": round(num_output / seconds), "steps": stats.num_steps,
                    "launched ahead": stats.num_steps_ahead, "preemptions": stats.num_preemptions,
                })  # fmt: skip
            del engine, captured
            if scale.on_gpu:
                torch.cuda.empty_cache()
    best = max(rows, key=lambda row: row["output tok/s"])
    order = "one step ahead" if best["one step ahead"] else "in order"
    how = f"{best['kernels']}, {order}, block {best['block']}"
    return True, f"best {best['output tok/s']:,} output tok/s ({how})", rows


RUN: dict[str, Callable[[Scale], Result]] = {
    stage.__name__: stage
    for stage in (environment, ceilings, kernels, transformers, graphs, attention, memory, workload)
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
