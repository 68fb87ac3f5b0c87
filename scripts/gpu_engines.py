"""The stages of gpu_check.py that run whole engines: their tokens against a CPU's and against each other, in float32,
where other batch shapes hardly change a choice. The tests hold the CPU's tokens to those of transformers.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu_common import (
    Result,
    Row,
    Rows,
    Scale,
    free_memory,
    generate,
    make_engine,
    nano_workload,
    problem_of,
    ragged_prompts,
)

WINDOWS: Row = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, Row] = {
    "qwen3": {},
    "llama": {},
    "gemma2": WINDOWS,
    "gemma3": WINDOWS,
    "olmo2": {},
    "granite": {},
    "qwen3-moe": {},
    "qwen2-moe": {},
    "mixtral": {},
    "gpt_oss": WINDOWS,
    "gemma4-e2b": {"sliding_window": 20},
    "gemma4-26b": {"sliding_window": 20},
    "gemma4-31b": {"sliding_window": 20},
}
HYBRIDS: dict[str, Row] = {
    "qwen3_5": {},
    "qwen3_next": {},
    "kimi_linear": {},
    "lfm2": {},
    "bamba": {},
    "granite-hybrid": {},
}
QUANTIZED = ("gptq", "gptq-act-order", "gptq-8bit", "awq", "pack-int4", "int8", "fp8-block", "mxfp4")
# how a step can be run: kernels one by one or in graphs, each step after or before the last one is read
LOOPS = {
    "plain": {"enforce_eager": True, "async_scheduling": False},
    "ahead": {"enforce_eager": True, "async_scheduling": True},
    "graphs": {"enforce_eager": False, "async_scheduling": False},
    "graphs, ahead": {"enforce_eager": False, "async_scheduling": True},
}


def engine_of(path: Path, device: str, **options: Any) -> Any:
    """An engine in float32; with device "cpu" without the native kernels, by which a CPU judges the GPU."""
    from pagedcli.config import EngineConfig
    from pagedcli.runner.llm_engine import LLMEngine

    backend = {"attention_backend": "reference"} if device == "cpu" else {}
    config = {"dtype": "float32", "max_num_seqs": 8, "num_kvcache_blocks": 200, **backend, **options}
    return LLMEngine(EngineConfig(model=str(path), device=device, **config))


def judged(scale: Scale, path: Path, **options: Any) -> Any:
    """The engine that is checked: on the GPU, or in a dry run with the Triton kernels on a CPU."""
    if scale.on_gpu:
        return engine_of(path, scale.device, **options)
    engine = engine_of(path, "cpu", **{"attention_backend": "triton", **options, "kv_cache_dtype": "auto"})
    if not options.get("enforce_eager"):
        engine.runner.make_graphs(capture=False)
    return engine


def num_equal(a: list[Any], b: list[Any]) -> int:
    return sum(x == y for x, y in zip(a, b, strict=True))


def smoke(scale: Scale, rows: Rows) -> Result:
    """Whether the headline's model runs, with the same tokens in graphs and without, and how long a step takes."""
    from pagedcli.sampling_params import SamplingParams

    num_prompts, num_new = (8, 32) if scale.on_gpu else (2, 3)
    prompts = [[5 + (7 * i + row) % 300 for i in range(20 + row)] for row in range(num_prompts)]
    params = [SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)] * num_prompts
    limits: Row = {"dtype": "float32", "num_kvcache_blocks": 64, "max_num_seqs": num_prompts, "max_model_len": 64}
    ways = {"graphs": LOOPS["graphs, ahead"], "eager": LOOPS["plain"]}
    ways["sdpa"] = {**LOOPS["plain"], "attention_backend": "sdpa"}
    first: list[list[int]] | None = None
    with tempfile.TemporaryDirectory() as folder:
        for way, options in ways.items():
            row: Row = {"way": way, "of": num_prompts}
            try:
                engine = make_engine(scale, Path(folder), **limits, **options)
                generate(engine, [prompt[::-1] for prompt in prompts], params)
                steps, start = engine.stats.num_steps, time.perf_counter()
                tokens = generate(engine, prompts, params)
                row["ms per step"] = round(1e3 * (time.perf_counter() - start) / (engine.stats.num_steps - steps), 2)
                first = first or tokens
                row["equal"] = num_equal(tokens, first)
            except Exception as error:  # The other ways are still to be checked.
                row |= {"equal": 0, "problem": problem_of(error)}
            rows.append(row)
            engine = None
            free_memory(scale)
    equal = [row["way"] for row in rows if row["equal"] >= 0.9 * num_prompts]
    return len(equal) == len(ways), f"same tokens: {', '.join(equal) or 'none'}"


def families(scale: Scale, rows: Rows) -> Result:
    """Greedy tokens of every family on the GPU and on a CPU, for small random models."""
    return check_families(scale, rows, FAMILIES if scale.on_gpu else {"qwen3": {}})


def hybrids(scale: Scale, rows: Rows) -> Result:
    """The same of families with recurrent state, twice, the second time from snapshots. A dry run leaves their
    kernels out: the interpreter runs them in the tests of layers."""
    return check_families(scale, rows, HYBRIDS if scale.on_gpu else {"lfm2": {}}, checkpoints="end", repeats=2)


def check_families(scale: Scale, rows: Rows, chosen: dict[str, Row], repeats: int = 1, **options: Any) -> Result:
    """Tokens of all families and of a CPU."""
    from model_zoo import tiny_model

    from pagedcli.sampling_params import SamplingParams

    names = scale.mine(chosen)
    num_prompts, num_new = (16, 32) if scale.on_gpu else (2, 3)
    prompts = ragged_prompts(num_prompts)
    params = [SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)] * num_prompts
    for family in names:
        row: Row = {"family": family, "prompts": num_prompts}
        with tempfile.TemporaryDirectory() as folder:
            try:
                path = tiny_model(family, Path(folder) / "model", **chosen[family])
                expected = generate(engine_of(path, "cpu"), prompts, params)
                engine = judged(scale, path, chunked_prefill_size=7, **options)
                equal = [num_equal(generate(engine, prompts, params), expected) for _ in range(repeats)]
                row |= {"equal": min(equal), "cached": engine.stats.num_cached_tokens}
                row |= {"graphs": len(engine.plan.graph_sizes)}
                if min(equal) < num_prompts:
                    plain = {"enforce_eager": True, "enable_prefix_caching": False}
                    engines = engine_of(path, "cpu", **plain), judged(scale, path, **plain)
                    row |= {"first difference": first_difference(*engines, prompts[1])}
            except Exception as error:  # The other families are still to be checked.
                row |= {"equal": 0, "problem": problem_of(error)}
        rows.append(row)
    equal = [row["family"] for row in rows if row["equal"] >= 0.95 * num_prompts]
    return len(equal) == len(names), f"tokens equal to a CPU's: {', '.join(equal)}"


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


def requests(scale: Scale, rows: Rows) -> Result:
    """Every kind of request in every loop: tokens of the GPU and of a CPU. One prompt has a token of NaN, which must
    end its own request alone."""
    from model_zoo import tiny_model
    from safetensors.torch import load_file, save_file

    from pagedcli.sampling_params import SamplingParams

    kinds: Row = {
        "greedy": {"temperature": 0},
        "sampled": {"temperature": 0.9},
        "top-k, top-p": {"temperature": 1.1, "top_k": 7, "top_p": 0.9},
        "penalties": {"temperature": 0, "repetition_penalty": 1.3, "logit_bias": {7: 2.0}, "presence_penalty": 0.5},
        "n = 3": {"temperature": 0.8, "n": 3, "min_p": 0.1, "logprobs": 2},
        "beams": {"temperature": 0, "beam_width": 3},
        "prompt logprobs": {"temperature": 0, "prompt_logprobs": 2},
        "NaN": {"temperature": 0.8, "top_p": 0.9},
    }
    num_new = 12 if scale.on_gpu else 2
    prompts = [prompt[-20:] for prompt in ragged_prompts(len(kinds))]
    prompts = [[token if token != 7 else 8 for token in prompt] for prompt in prompts]
    prompts[-1] = [5, 7, 8]
    params = [
        SamplingParams(max_tokens=num_new, seed=i, ignore_eos=True, **kind) for i, kind in enumerate(kinds.values())
    ]
    expected = None
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_model("qwen3", Path(folder) / "model", num_hidden_layers=1)
        weights = load_file(path / "model.safetensors")
        weights["model.embed_tokens.weight"][7] = float("nan")
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        for loop, options in {"CPU": {}, **LOOPS}.items():
            # a prompt's last piece of one token is served by a graph, also where several samples start with it
            options = {**options, "chunked_prefill_size": 9, "max_num_seqs": 16}
            engine = engine_of(path, "cpu", **options) if loop == "CPU" else judged(scale, path, **options)
            found = results_of(engine, prompts, params)
            expected = expected or found
            equal = {kind: a == b for kind, a, b in zip(kinds, found, expected, strict=True)}
            rows.append({"loop": loop, **equal, "ahead": engine.num_steps_ahead})
    assert expected is not None, "the CPU comes first"
    ok = all(row[kind] for row in rows for kind in kinds) and expected[-1] == ["invalid_logits"]
    wrong = sorted({kind for row in rows for kind in kinds if not row[kind]})
    return ok, f"kinds of requests that differ from a CPU's: {', '.join(wrong) or 'none'}"


def results_of(engine: Any, prompts: list[list[int]], params: list[Any]) -> list[list[Any]]:
    """For each prompt the tokens of all samples, or the code of its error."""
    for number, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(number), prompt, each)
    found: dict[str, list[Any]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens = [sample.token_ids for sample in output.samples]
            found[output.request_id] = tokens if output.error is None else [output.error.code]
    return [found[str(number)] for number in range(len(prompts))]


def windows(scale: Scale, rows: Rows) -> Result:
    """Two groups of layers, one with a window, over sequences of several splits: every loop against a CPU."""
    from model_zoo import tiny_model

    from pagedcli.sampling_params import SamplingParams

    num_new, lengths = (40, (300, 520, 30, 250)) if scale.on_gpu else (2, (30, 18))
    prompts = [[3 + (7 * i + length) % 300 for i in range(length)] for length in lengths]
    params = [SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)] * len(lengths)
    with tempfile.TemporaryDirectory() as folder:
        sizes = {**WINDOWS, "sliding_window": 100 if scale.on_gpu else 20, "max_position_embeddings": 1024}
        path = tiny_model("gemma3", Path(folder) / "model", **sizes)
        expected = generate(engine_of(path, "cpu"), prompts, params)
        for loop, options in LOOPS.items():
            equal = num_equal(generate(judged(scale, path, **options), prompts, params), expected)
            rows.append({"loop": loop, "equal": equal, "of": len(prompts)})
    ok = all(row["equal"] == row["of"] for row in rows)
    return ok, f"sequences equal to a CPU's: {', '.join(str(row['equal']) for row in rows)} of {len(prompts)}"


def quantized(scale: Scale, rows: Rows) -> Result:
    """Packed checkpoints against their dequantized twins."""
    from model_zoo import tiny_model
    from quantized_zoo import FORMATS, mxfp4_twins, quantized_twins

    from pagedcli.sampling_params import SamplingParams

    names = scale.mine(QUANTIZED if scale.on_gpu else QUANTIZED[:1])
    num_prompts, num_new = (8, 16) if scale.on_gpu else (2, 2)
    prompts = ragged_prompts(num_prompts)
    params = [SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)] * num_prompts
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            row: Row = {"format": name, "prompts": num_prompts}
            try:
                if name == "mxfp4":
                    plain, packed = mxfp4_twins(Path(folder))
                else:
                    source = tiny_model("qwen3", Path(folder) / "model", intermediate_size=128, num_hidden_layers=1)
                    packed, plain = quantized_twins(source, Path(folder), *FORMATS[name])
                expected = generate(engine_of(plain, "cpu"), prompts, params)
                engine = judged(scale, packed)
                row |= {
                    "equal": num_equal(generate(engine, prompts, params), expected),
                    "weights": engine.plan.weight_bytes,
                }
            except Exception as error:  # The other formats are still to be checked.
                row |= {"equal": 0, "problem": problem_of(error)}
            rows.append(row)
    equal = [row["format"] for row in rows if row["equal"] >= 0.95 * num_prompts]
    return len(equal) == len(names), f"tokens equal to the dequantized weights': {', '.join(equal)}"


def fp8(scale: Scale, rows: Rows) -> Result:
    """An fp8 cache with graphs and without: the same tokens, half the bytes, and how many tokens rounding changes."""
    from model_zoo import tiny_model

    from pagedcli.errors import ConfigError
    from pagedcli.sampling_params import SamplingParams

    num_prompts, num_new = (8, 24) if scale.on_gpu else (2, 2)
    prompts = ragged_prompts(num_prompts)
    params = [SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)] * num_prompts
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_model("gemma3", Path(folder) / "model", **WINDOWS)
        tokens = {}
        for cache, loop in (("auto", "plain"), ("fp8", "plain"), ("fp8", "graphs, ahead")):
            try:
                engine = judged(
                    scale, path, kv_cache_dtype=cache, dtype="bfloat16" if scale.on_gpu else "float32", **LOOPS[loop]
                )
            except ConfigError as error:  # GPUs before 8.9
                return True, f"not here: {error.message}"
            tokens[cache, loop] = generate(engine, prompts, params)
            rows.append({
                "cache": cache, "loop": loop, "scales": str(engine.plan.kv_scales),
                "block bytes": engine.plan.block_bytes,
                "equal to the first": num_equal(tokens[cache, loop], tokens["auto", "plain"]),
            })  # fmt: skip
    equal = num_equal(tokens["fp8", "plain"], tokens["fp8", "graphs, ahead"])
    # in bfloat16 another batch size may round a product differently
    return equal >= 0.7 * num_prompts, f"{equal} of {num_prompts} sequences equal with graphs and without"


# how the same rows can be run: in a crowd of other sizes, in pieces, preempted, and from the prefix cache
COMPANIES: dict[str, Row] = {
    "chunks of 100": {"chunked_prefill_size": 100},
    "few at a time": {"max_num_seqs": 5},
    "eager": {"enforce_eager": True},
    "preempted": {"num_kvcache_blocks": 1000},
}


def same_bits(scale: Scale, rows: Rows) -> Result:
    """gpu_kernels invariant: tokens and log-probabilities of rows alone, in other companies and from the prefix cache
    are the same bits; and its output tokens per second next to those of auto."""
    from pagedcli.sampling_params import SamplingParams

    prompts, params = nano_workload(scale)
    few, num_new = (200, 24) if scale.on_gpu else (3, 2)
    scored = [SamplingParams(temperature=0, max_tokens=num_new, logprobs=1, ignore_eos=True)] * few
    kernels: Row = {"gpu_kernels": "invariant"} if scale.on_gpu else {}
    companies = COMPANIES if scale.on_gpu else {"few at a time": {"max_num_seqs": 2}}
    expected: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        for company, options in {"together": {}, **companies, "auto": {"gpu_kernels": "auto"}}.items():
            engine = make_engine(scale, Path(folder), **{**kernels, **options})
            found = _bits_of(engine, prompts[:few], scored)
            expected = expected or found
            row: Row = {"company": company, "equal": num_equal(found, expected), "of": few}
            if company == "together":
                row["warm"] = num_equal(_bits_of(engine, prompts[:few], scored), expected)
                alone = [_bits_of(engine, prompts[i : i + 1], scored[:1])[0] for i in range(min(few, 8))]
                row["alone"] = f"{num_equal(alone, expected[: len(alone)])} of {len(alone)}"
            if company in ("together", "auto"):
                start, total = time.perf_counter(), sum(each.max_tokens or 0 for each in params)
                generate(engine, [prompt[::-1] for prompt in prompts], params)
                row["output tok/s"] = round(total / (time.perf_counter() - start))
            row["preemptions"] = engine.stats.num_preemptions
            rows.append(row)
            engine = None
            free_memory(scale)
    first, last = rows[0], rows[-1]
    ok = all(row["equal"] == few for row in rows[:-1]) and first["warm"] == few
    ok = ok and first["alone"].split(" of ")[0] == first["alone"].split(" of ")[1]
    price = 1 - first["output tok/s"] / last["output tok/s"]
    choice = "promise equal bits for gpu_kernels invariant" if ok else "promise nothing"
    return ok, f"same bits in every company: {ok}, for {price:.0%} of the tokens per second: {choice}"


def _bits_of(engine: Any, prompts: list[list[int]], params: list[Any]) -> list[Any]:
    """Tokens and log-probabilities of each prompt's sample."""
    for number, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(number), prompt, each)
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            sample = output.samples[0]
            found[output.request_id] = sample.token_ids, repr(sample.logprobs)
    return [found[str(number)] for number in range(len(prompts))]


def check_stream(scale: Scale, rows: Rows) -> Result:
    """Fused kernels: products against float64 and the same bits in any company; tokens of a model against a CPU's."""
    from model_zoo import tiny_model

    from pagedcli.layers.triton_products import KernelWeight
    from pagedcli.layers.triton_stream import ROWS, Product, Scratch
    from pagedcli.sampling_params import SamplingParams

    device, ok = torch.device(scale.device), True
    dtype, scratch = scale.dtypes[0], Scratch(device)
    sizes = [(1024, 3072), (4096, 4096), (896, 4864), (5120, 1536)] if scale.on_gpu else [(34, 300)]
    for num_out, num_in in sizes:
        weight = (torch.randn(num_out, num_in, device=device) / num_in**0.5).to(dtype)
        x, residual = (torch.randn(ROWS, size, device=device).to(dtype) for size in (num_in, num_out))
        norm = torch.rand(num_in, device=device).to(dtype) + 0.5, 1e-6
        add = Product(
            KernelWeight("floats", num_out, num_in, num_in, weight), None, scratch=scratch, finish="add", norm=norm
        )
        normed = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm[0].double()
        exact = residual.double() + normed @ weight.double().T
        whole = add(x, residual.clone())
        error = float(((whole.double() - exact).abs() / (1 + exact.abs())).max())
        counts = (1, 2, 3, 8) if scale.on_gpu else (1,)
        repeats = 50 if scale.on_gpu else 1  # the order in which programs come differs
        same = all(torch.equal(add(x[:n], residual[:n].clone()), whole[:n]) for n in counts for _ in range(repeats))
        ok = ok and same and error < (1e-4 if dtype == torch.float32 else 2e-2)
        rows.append({"product": f"{num_out} x {num_in}", "error": error, "same bits": same})
    num_prompts, num_new = (12, 24) if scale.on_gpu else (2, 3)
    prompts = ragged_prompts(num_prompts)
    params = [SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)] * num_prompts
    for family in scale.mine(("qwen3", "llama", "qwen2") if scale.on_gpu else ("qwen3",)):
        with tempfile.TemporaryDirectory() as folder:
            path = tiny_model(family, Path(folder) / "model")
            expected = generate(engine_of(path, "cpu"), prompts, params)
            for loop in ("plain", "graphs, ahead") if scale.on_gpu else ("plain",):
                engine = judged(scale, path, gpu_kernels="fused", **LOOPS[loop])
                equal = num_equal(generate(engine, prompts, params), expected)
                rows.append({"family": family, "loop": loop, "equal": equal, "of": num_prompts})
                ok = ok and equal >= 0.95 * num_prompts
    return ok, f"fused kernels are {'right' if ok else 'WRONG'}"


def graphs(scale: Scale, rows: Rows) -> Result:
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
    tokens = {}
    limits: Row = {"dtype": "float32", "num_kvcache_blocks": 512}
    limits |= {"max_num_seqs": 21 if scale.on_gpu else 3, "max_model_len": 256 if scale.on_gpu else 64}
    with tempfile.TemporaryDirectory() as folder:
        for name, options in LOOPS.items():
            engine = make_engine(scale, Path(folder), **limits, **options)
            if not scale.on_gpu and not options["enforce_eager"]:
                engine.runner.make_graphs(capture=False)
            tokens[name] = generate(engine, prompts, params)
            equal = sum(a == b for a, b in zip(tokens[name], tokens["plain"], strict=True))
            sizes = len(engine.runner.graphs.sizes) if engine.runner.graphs is not None else 0
            ahead = engine.num_steps_ahead
            rows.append({"loop": name, "graphs": sizes, "equal": equal, "of": count, "ahead": ahead})
            del engine
            free_memory(scale)
    # one step ahead an ended sequence is noticed later, so batches differ there, too
    ok = all(row["equal"] >= 0.95 * count for row in rows)
    return ok, f"sequences equal to the plain loop: {', '.join(str(row['equal']) for row in rows)} of {count}"


def invariance(scale: Scale, rows: Rows) -> Result:
    """The same sequence alone and in a crowd: attention and sampler must give the same bits. Tokens of a whole engine
    are counted only, as products of matrices of other sizes may be rounded differently."""
    from attention_cases import Case, run

    from pagedcli.attention.select import select_backend
    from pagedcli.layers.sampling import choose_tokens

    crowd = [(700, 1), (300, 1), (33, 33), (513, 130)] if scale.on_gpu else [(20, 1), (18, 3)]
    shape, size, dtype = ((16, 8, 128) if scale.on_gpu else (4, 2, 16)), scale.block_sizes[0], scale.dtypes[0]
    device = torch.device(scale.device)
    names: Row = {"num_heads": shape[0], "num_kv_heads": shape[1], "head_dim": shape[2]}
    backend = select_backend("triton", device=device, dtype=dtype, block_size=size, **names).backend
    full = Case(crowd, size, *shape, dtype, device=scale.device, seed=1)
    in_crowd = run(backend, full).split([new for _, new in crowd])
    for number, lengths in enumerate(crowd):
        alone = Case([lengths], size, *shape, dtype, device=scale.device)
        for each, whole in ((alone.q, full.q), (alone.k, full.k), (alone.v, full.v)):
            each.copy_(full.of_sequence(whole, number))
        same = bool(torch.equal(run(backend, alone), in_crowd[number]))
        rows.append({"what": f"attention, {lengths[0]} tokens, {lengths[1]} new", "same": same})
    count, vocab = (256, 151936) if scale.on_gpu else (3, 500)
    logits = torch.randn(count, vocab, device=device).to(dtype)
    temperature, uniform = torch.ones(count, device=device), torch.rand(count, device=device)
    tokens = choose_tokens(logits, temperature, uniform, num_drawn=count)
    alone_tokens = [
        choose_tokens(logits[i : i + 1], temperature[i : i + 1], uniform[i : i + 1], num_drawn=1) for i in (0, 2)
    ]
    rows.append({"what": "sampler", "same": [int(each) for each in alone_tokens] == tokens[[0, 2]].tolist()})
    prompts, params = nano_workload(scale)
    few = 8 if scale.on_gpu else 2
    params = [type(each)(temperature=0, max_tokens=16 if scale.on_gpu else 2, ignore_eos=True) for each in params]
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(scale, Path(folder), enable_prefix_caching=False)
        together = generate(engine, prompts, params)[:few]
        alone_rows = [generate(engine, prompts[i : i + 1], params[:1])[0] for i in range(few)]
    rows.append({"what": "tokens of an engine", "equal": num_equal(together, alone_rows), "of": few})
    ok = all(row["same"] for row in rows if "same" in row)
    return ok, f"attention and sampler give the same bits: {ok}; tokens equal: {rows[-1]['equal']} of {few}"
