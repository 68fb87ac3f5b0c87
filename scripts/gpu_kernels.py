"""The stages of gpu_check.py that check and time single kernels, on fresh random inputs."""

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

import torch
from gpu_common import Result, Row, Rows, Scale, best_seconds, problem_of


def backends(scale: Scale, rows: Rows) -> Result:
    """Every attention backend against float64, inputs fresh, unowned slots NaN."""
    return judgement(attention_errors(scale), rows)


def kernels(scale: Scale, rows: Rows) -> Result:
    """Every fused kernel against float64, inputs fresh."""
    found = itertools.chain(layer_errors(scale), product_errors(scale), sampling_errors(scale))
    return judgement(found, rows)


def judgement(found: Iterable[Row], rows: Rows) -> Result:
    """Keeps only comparisons out of tolerance, and refusals."""
    for row in found:
        rows.append(row)
    checked = [row for row in rows if "error" in row]
    failed = [row for row in checked if not row["error"] <= row["allowed"]]
    rows[:] = failed + [row for row in rows if "refused" in row]
    return bool(checked) and not failed, f"{len(checked)} comparisons, {len(failed)} out of tolerance"


def attention_errors(scale: Scale) -> Iterator[Row]:
    from attention_cases import TOLERANCE, Case, run, worst_error

    from pagedcli.attention.layer import AttentionLayer
    from pagedcli.attention.select import REGISTRY, select_backend
    from pagedcli.errors import BackendError

    shapes = [(16, 8, 128), (8, 8, 64), (14, 2, 64), (8, 1, 256), (6, 2, 96), (32, 2, 128)]
    # every kernel is compiled anew: all shapes in the first dtype, the first two in the others and at larger blocks
    cases: list[tuple[tuple[int, int, int], int, torch.dtype, Row]]
    cases = [(shape, scale.block_sizes[0], scale.dtypes[0], {}) for shape in shapes]
    cases += [(shape, scale.block_sizes[0], dtype, {}) for shape in shapes[:2] for dtype in scale.dtypes[1:]]
    cases += [(shapes[0], block_size, scale.dtypes[0], {}) for block_size in scale.block_sizes[1:]]
    cases += [(shape, scale.block_sizes[0], scale.dtypes[0], {"window": 100}) for shape in (shapes[0], shapes[3])]
    cases += [(shapes[3], scale.block_sizes[0], scale.dtypes[0], {"window": 300, "soft_cap": 0.5})]
    if not scale.on_gpu:
        cases = [((4, 2, 16), 16, torch.float32, {}), ((4, 2, 16), 16, torch.float32, {"window": 5, "soft_cap": 0.5})]
    lengths = [(1, 1), (17, 17), (300, 1), (256, 1), (257, 1), (700, 130), (512, 512), (33, 5)]
    mixtures = [lengths, [(n, 1) for n, _ in lengths]] if scale.on_gpu else [[(1, 1), (20, 3)], [(18, 1)]]
    names = [entry.name for entry in REGISTRY if scale.on_gpu or entry.name in ("triton", "reference")]
    for name, (shape, block_size, dtype, extras) in scale.mine(itertools.product(names, cases)):
        num_heads, num_kv_heads, head_dim = shape
        where = {"kernel": f"attention {name}", "shape": str(shape), "block": block_size, "dtype": str(dtype)[6:]}
        where |= {"layer": str(extras)} if extras else {}
        layer = AttentionLayer(scale=head_dim**-0.5, **extras)
        try:
            backend = select_backend(
                name, device=torch.device(scale.device), dtype=dtype, block_size=block_size,
                num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, layers=[layer],
            ).backend  # fmt: skip
        except BackendError as error:
            yield {**where, "refused": error.message}
            continue
        for mixture in mixtures:
            seed = random.SystemRandom().randrange(2**31)
            case = Case(mixture, block_size, *shape, dtype, device=scale.device, seed=seed)
            case.layer = layer
            row = {**where, "seed": seed, "allowed": 4 * TOLERANCE[dtype]}
            try:
                yield {**row, "error": worst_error(run(backend, case), case.expected())}
            except Exception as error:  # The other backends are still to be checked.
                yield {**row, "error": float("inf"), "problem": problem_of(error)}


def compared(kernel: str, dtype: torch.dtype, error: float, allowed: float) -> Row:
    return {"kernel": kernel, "dtype": str(dtype).removeprefix("torch."), "error": error, "allowed": allowed}


def layer_errors(scale: Scale) -> Iterator[Row]:
    from pagedcli.layers import triton_layers

    width, heads, kv_heads, dim, tokens = (1024, 16, 8, 128, 77) if scale.on_gpu else (48, 2, 1, 16, 3)
    for dtype in scale.mine(scale.dtypes):
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
        yield row("silu_and_mul", triton_layers.activate_and_mul(gate_up, "silu"), gate / (1 + (-gate).exp()) * up)

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


def gated_experts(scale: Scale, dtype: torch.dtype) -> tuple[Any, list[torch.Tensor], list[torch.Tensor], int]:
    """Grouped experts of Qwen3-30B-A3B's sizes, their weights, and how many a token takes."""
    from pagedcli.layers.basic import Routing
    from pagedcli.layers.triton_experts import GroupedExperts

    num_experts, num_picked, width, inner = (128, 8, 2048, 768) if scale.on_gpu else (4, 2, 32, 16)

    def weights(rows: int, columns: int) -> list[torch.Tensor]:
        return [(torch.randn(rows, columns, device=scale.device) / columns**0.5).to(dtype) for _ in range(num_experts)]

    gate_up, down = weights(2 * inner, width), weights(width, inner)
    routing = Routing(num_picked, renormalize=True)
    return GroupedExperts(gate_up.copy(), down.copy(), routing, activation="silu"), gate_up, down, num_picked


PACKED = (("4 bits", 128), ("4 bits", 32), ("8 bits", 256), ("FP8", 128), ("FP8", 4096))  # inputs of a group


def packed_weight(scale: Scale, form: str, group_size: int, sizes: tuple[int, int], *, seed: int = 0) -> Any:
    """Random weights of "4 bits", "8 bits" or "FP8"."""
    from quantized_zoo import random_float8, random_weight

    group_size = min(group_size, sizes[1])
    weight: Any = (
        random_float8(*sizes, group_size, seed=seed)
        if form == "FP8"
        else random_weight(*sizes, bits=int(form[0]), group_size=group_size, seed=seed)
    )
    parts = {each.name: getattr(weight, each.name) for each in fields(weight)}
    return replace(weight, **{name: part.to(scale.device) for name, part in parts.items() if torch.is_tensor(part)})


def packed_linear(scale: Scale, form: str, group_size: int, sizes: tuple[int, int]) -> tuple[Any, Any]:
    """A linear layer of packed weights, and its dequantized weight in float32."""
    from pagedcli.layers.triton_products import TritonLinear

    weight = packed_weight(scale, form, group_size, sizes)
    return TritonLinear(weight), weight.dequantized(torch.float32)


def product_errors(scale: Scale) -> Iterator[Row]:
    """Experts and packed weights, for one token, few and many."""
    from pagedcli.layers.basic import Routing, route

    for dtype in scale.mine(scale.dtypes[:2]):
        allowed = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
        experts, gate_up, down, num_picked = gated_experts(scale, dtype)
        for tokens in (1, 40, 700) if scale.on_gpu else (3,):
            x = torch.randn(tokens, gate_up[0].shape[1], device=scale.device).to(dtype)
            logits = torch.randn(tokens, len(down), device=scale.device).to(dtype)
            weights, chosen = route(logits, Routing(num_picked, renormalize=True))
            expected = torch.zeros_like(x, dtype=torch.float64)
            for expert in range(len(down)):
                rows, places = (chosen == expert).nonzero(as_tuple=True)
                gate, up = (x[rows].double() @ gate_up[expert].double().T).chunk(2, -1)
                result = (gate / (1 + (-gate).exp()) * up) @ down[expert].double().T
                expected.index_add_(0, rows, result * weights[rows, places, None].double())
            error = (experts(x, logits, None, None).double() - expected).abs().max()
            yield compared(f"experts, {tokens} tokens", dtype, float(error), allowed)
        for form, group_size in PACKED:
            linear, plain = packed_linear(scale, form, group_size, (512, 1024) if scale.on_gpu else (40, 64))
            plain = plain if form == "FP8" else plain.to(dtype)  # sums of FP8 numbers are scaled, not the numbers
            for tokens in (1, 40, 700) if scale.on_gpu else (3,):
                x = torch.randn(tokens, plain.shape[1], device=scale.device).to(dtype)
                exact = x.double() @ plain.double().T
                error = ((linear(x).double() - exact).abs() / (1 + exact.abs())).max()
                yield compared(f"{form} by {group_size}, {tokens} tokens", dtype, float(error), allowed)
        yield from packed_experts_errors(scale, dtype)


def packed_experts_errors(scale: Scale, dtype: torch.dtype) -> Iterator[Row]:
    """Experts of packed weights against the same experts of the dequantized weights."""
    from pagedcli.layers.basic import Routing
    from pagedcli.layers.triton_experts import GroupedExperts

    routing = Routing(2, renormalize=True)
    num_experts, width, inner = (16, 1024, 512) if scale.on_gpu else (3, 64, 32)
    for form, group_size in PACKED:
        weights = [
            [packed_weight(scale, form, group_size, sizes, seed=seed) for seed in range(num_experts)]
            for sizes in ((2 * inner, width), (width, inner))
        ]
        wide = [[weight.dequantized(dtype) for weight in each] for each in weights]
        largest = wide[0][0].float().norm(dim=1).max()  # of a row: what comes of inputs this small fits float16
        plain, packed = (GroupedExperts(*each, routing, activation="silu") for each in (wide, weights))
        x = (torch.randn(70 if scale.on_gpu else 3, width, device=scale.device) / largest).to(dtype)
        logits = torch.randn(len(x), num_experts, device=scale.device).to(dtype)
        expected, result = (each(x, logits, None, None).double() for each in (plain, packed))
        error = float((result - expected).norm() / expected.norm())
        yield compared(f"experts of {form} by {group_size}", dtype, error, 1e-5 if dtype == torch.float32 else 2e-2)


def products(scale: Scale, rows: Rows) -> Result:
    """Time of packed weights and of experts next to a plain product, in the first dtype."""
    sizes = (4096, 4096) if scale.on_gpu else (40, 64)
    dtype = scale.dtypes[0]
    linear, plain = packed_linear(scale, "4 bits", 128 if scale.on_gpu else 32, sizes)
    float8, _ = packed_linear(scale, "FP8", 128 if scale.on_gpu else 32, sizes)
    plain = plain.to(dtype)
    experts, gate_up, down, num_picked = gated_experts(scale, dtype)
    for tokens in (1, 16, 64, 256, 2048) if scale.on_gpu else (3,):
        x = torch.randn(tokens, plain.shape[1], device=scale.device).to(dtype)
        layers = (linear, float8, lambda x: x @ plain.T)
        packed_s, float8_s, plain_s = (best_seconds(lambda f=f, x=x: f(x), scale) for f in layers)
        x = torch.randn(tokens, gate_up[0].shape[1], device=scale.device).to(dtype)
        logits = torch.randn(tokens, len(down), device=scale.device).to(dtype)
        experts_s = best_seconds(lambda x=x, logits=logits: experts(x, logits, None, None), scale)
        used = min(len(down), tokens * num_picked) * (gate_up[0].nbytes + down[0].nbytes)
        rows.append({
            "tokens": tokens, "plain us": round(plain_s * 1e6, 1), "4 bits us": round(packed_s * 1e6, 1),
            "FP8 us": round(float8_s * 1e6, 1),
            "experts us": round(experts_s * 1e6, 1), "experts GB/s at least": round(used / experts_s / 1e9),
        })  # fmt: skip
    return True, f"4 bits take {rows[0]['4 bits us'] / rows[0]['plain us']:.2f} of a plain product for one token"


def fp8_products(scale: Scale, rows: Rows) -> Result:
    """gpu_kernels fp8: a product of FP8 weights whose inputs are rounded, too, next to the present one and to one in
    the first dtype. The last line says which to choose."""
    from pagedcli.layers.triton_products import RoundingLinear

    if scale.on_gpu and torch.cuda.get_device_capability() < (8, 9):
        return True, "not here: no tensor cores for FP8"
    sizes, dtype = ((4096, 4096) if scale.on_gpu else (48, 64)), scale.dtypes[0]
    present, plain = packed_linear(scale, "FP8", sizes[1], sizes)
    if not scale.on_gpu:  # a CPU keeps the bits of FP8 numbers
        weight = present._weight
        numbers, scales = weight.numbers.view(torch.float8_e4m3fn), weight.scales / 256
        present._weight = replace(weight, numbers=numbers, scales=scales)
    rounding, wide = RoundingLinear(present), plain.to(dtype)
    ok, faster = RoundingLinear.serves(present), []
    for tokens in (16, 64, 256, 512, 2048) if scale.on_gpu else (16,):
        x = torch.randn(tokens, sizes[1], device=scale.device).to(dtype)
        exact = x.double() @ plain.double().T
        error = float((rounding(x).double() - exact).norm() / exact.norm())
        layers = {
            "plain us": lambda x=x: x @ wide.T,
            "present us": lambda x=x: present(x),
            "fp8 us": lambda x=x: rounding(x),
        }
        times = {name: round(best_seconds(layer, scale) * 1e6, 1) for name, layer in layers.items()}
        rows.append({"tokens": tokens, "error": round(error, 4), **times})
        ok = ok and error < (0.05 if scale.on_gpu else 0.1)
        faster += [str(tokens)] if times["fp8 us"] < min(times["plain us"], times["present us"]) else []
    of_256 = next((row for row in rows if row["tokens"] == 256), rows[-1])
    times = (
        f"{of_256['plain us'] / of_256['fp8 us']:.2f} times as fast as {str(dtype)[6:]} for {of_256['tokens']} tokens"
    )
    return ok, f"{times} (goal 1.4); choose gpu_kernels fp8 for {', '.join(faster) or 'no number of'} tokens"


def sampling_errors(scale: Scale) -> Iterator[Row]:
    """The error of a choice is how far its uniform number lies outside the token's share of the cumulative mass."""
    from pagedcli.layers import triton_sampling

    rows, vocab = (64, 151936) if scale.on_gpu else (4, 5000)
    for dtype in scale.mine(scale.dtypes):
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
