"""Small paged batches with an exact answer, for every attention backend's tests.

Everything a backend must not read is poison: unowned cache slots are NaN (with a scale of NaN in an int8 cache), unused
table entries a huge block id.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pagedcli.attention.base import AttentionBackend, PagedBatch
from pagedcli.attention.layer import AttentionLayer

TOLERANCE = {torch.float32: 5e-6, torch.float16: 2.5e-3, torch.bfloat16: 2e-2}  # twice what rounding costs
# over what an int8 cache holds: q and the softmax weights have 16 bits, and ties of K may be rounded otherwise
INT8_TOLERANCE = TOLERANCE | {torch.float32: 2e-3, torch.float16: 5e-3}
GARBAGE_BLOCK = 2**31 - 1


@dataclass
class Case:
    """Sequences given as (tokens in the cache after the step, new tokens of the step)."""

    lengths: list[tuple[int, int]]
    block_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: str = "cpu"
    seed: int = 0
    kv_dtype: torch.dtype | None = None  # of the cache; None: dtype
    num_others: int = 0  # layers whose K and V are in each block, too, half of them before this one's
    # sequence: (an earlier one, how many leading tokens and their blocks it has from there)
    shared: dict[int, tuple[int, int]] = field(default_factory=dict)
    value_dim: int | None = None  # see AttentionLayer

    def __post_init__(self) -> None:
        total = sum(n for n, _ in self.lengths)
        generator = torch.Generator().manual_seed(self.seed)
        columns = self.num_heads + 2 * self.num_kv_heads
        fused = torch.randn(total, columns * self.head_dim, generator=generator).to(self.device, self.dtype)
        q, k, v = fused.split([n * self.head_dim for n in (self.num_heads, self.num_kv_heads, self.num_kv_heads)], 1)
        self.q, self.k, self.v = (x.unflatten(1, (-1, self.head_dim)) for x in (q, k, v))  # strided rows of all tokens
        self.layer = AttentionLayer(scale=self.head_dim**-0.5, value_dim=self.value_dim)
        if self.value_dim is not None:
            self.v = self.k
        self.all_sinks = torch.linspace(-4, 6, self.num_heads).to(self.device)
        self.share()

    def share(self) -> None:
        """Give sequences the leading tokens that they have from earlier ones."""
        for b, (earlier, count) in self.shared.items():
            for x in (self.k, self.v):
                self.of_sequence(x, b)[:count] = self.of_sequence(x, earlier)[:count]

    @property
    def sinks(self) -> Tensor | None:
        return self.all_sinks if self.layer.sinks else None

    def of_sequence(self, x: Tensor, b: int) -> Tensor:
        start = sum(n for n, _ in self.lengths[:b])
        return x[start : start + self.lengths[b][0]]

    def expected(self) -> Tensor:
        """[T, H, D] float64, from q, k and v themselves: no cache is involved."""
        results = []
        for b, (total, new) in enumerate(self.lengths):
            q, k, v = (self.of_sequence(x, b).double().cpu() for x in (self.q, self.k, self.v))
            k, v = (x.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q[total - new :], k) * self.layer.scale
            if self.layer.soft_cap is not None:
                scores = (scores / self.layer.soft_cap).tanh() * self.layer.soft_cap
            age = torch.arange(total - new, total)[:, None] - torch.arange(total)
            seen = (age >= 0) & (age < (self.layer.window or total))
            scores = scores.masked_fill(~seen, float("-inf"))
            if self.sinks is not None:
                sinks = self.sinks.double().cpu()[:, None, None].expand(-1, new, 1)
                scores = torch.cat((scores, sinks), dim=-1)
            weights = scores.softmax(-1)[:, :, :total]
            v = v[..., : self.value_dim]
            results.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(results)


# Of 32 sequences most begin with the same 512 tokens, some go on together, one begins alone.
SHARED_LENGTHS = [(1100, 1), (600, 1), (300, 1), (1080, 3), (1024, 1), (769, 1), *[(530 + i, 1) for i in range(26)]]


def shared_blocks(block_size: int) -> dict[int, tuple[int, int]]:
    """Case.shared for SHARED_LENGTHS."""
    tokens = {1: (0, 512), 3: (0, 1024), 4: (3, 1008), 5: (0, 768)} | {b: (b % 2, 512) for b in range(6, 32)}
    return {b: (earlier, count // block_size * block_size) for b, (earlier, count) in tokens.items()}


def check_shared_rows(attend: Callable[..., Tensor], crowd: Tensor) -> None:
    """On any number of threads, which decides how the work is cut, SHARED_LENGTHS give the bits of the crowd, and so
    does one sequence of each kind alone."""
    rows_of = {0: slice(0, 1), 2: slice(2, 3), 3: slice(3, 6), 4: slice(6, 7), 5: slice(7, 8), 31: slice(33, 34)}
    num_threads = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(attend(), crowd), f"{threads} threads"
            for b, rows in rows_of.items():
                assert torch.equal(attend(only=[b]), crowd[rows]), f"sequence {b} alone, {threads} threads"
    finally:
        torch.set_num_threads(num_threads)


def whole_steps(x: Tensor, seed: int = 0) -> Tensor:
    """x [tokens, G, D] nearly, in steps that an int8 cache holds exactly: a power of 2 per head, up to 127 times."""
    generator = torch.Generator().manual_seed(seed)
    step = 2.0 ** -torch.randint(4, 7, x.shape[:2], generator=generator)[..., None]
    largest = torch.randint(0, x.shape[2], x.shape[:2], generator=generator)[..., None]
    return ((x.float() / step).round().clamp(-127, 127).scatter(2, largest, 127.0) * step).to(x.dtype)


def mixed(x: Tensor, size: int) -> Tensor:
    """x [tokens, G, D] in float32, each `size` neighbours times the Hadamard matrix of that size."""
    result, half = x.float().unflatten(-1, (-1, size)), 1
    while half < size:
        a, b = result.unflatten(-1, (-1, 2, half)).unbind(-2)
        result, half = torch.stack((a + b, a - b), -2).flatten(-3), 2 * half
    return result.flatten(-2)


def held(x: Tensor, *, in_half: bool = False) -> Tensor:
    """What an int8 cache holds of V [tokens, G, D], float64: whole steps, a 127th of the largest; of 16 bits if so."""
    largest = x.float().abs().amax(-1, keepdim=True)
    step, inverse = largest / 127, 127 / largest
    if in_half:
        step = ((step.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
        inverse = 1 / step
    return (x.float() * torch.where(largest > 0, inverse, 0.0)).round().double() * step


def held_key(x: Tensor) -> Tensor:
    """What an int8 cache holds of K, float64: mixed, and where D is a multiple of 64 in two parts."""
    size = x.shape[-1]
    if size % 64:
        together = size & -size
        return mixed(held(mixed(x, together)), together).double() / together
    together = size // 4 & -(size // 4)
    order = torch.arange(size).unflatten(0, (2, 8, -1))  # the last quarter of each half is the second part
    order = torch.cat((order[:, :6].flatten(), order[:, 6:].flatten()))
    parts = mixed(x[..., order], together).split((size // 4 * 3, size // 4), -1)
    whole = torch.cat([held(part, in_half=True) for part in parts], -1)
    return (mixed(whole, together).double() / together)[..., order.argsort()]


def fill_cache(
    backend: AttentionBackend, case: Case, only: list[int] | None = None
) -> tuple[Tensor, Tensor, PagedBatch]:
    """A cache and batch for the case (or for some of its sequences), in shuffled blocks. The cached tokens are written
    first, then the new ones of the step through batch.slots, where every third is already there and has slot -1."""
    members = list(range(len(case.lengths))) if only is None else only
    lengths = [case.lengths[b] for b in members]
    size = case.block_size
    needed = [-(-total // size) for total, _ in lengths]
    num_blocks = sum(needed) + 3
    shape = backend.kv_shape(num_blocks, size, case.num_kv_heads, case.head_dim)
    dtype = case.kv_dtype or case.dtype
    poison = -1 if dtype == torch.int8 else float("nan")  # bytes 0xff are NaN as a float32
    layers = shape[0], case.num_others + 1, *shape[1:]
    k_cache, v_cache = (
        torch.full(layers, poison, dtype=dtype, device=case.device)[:, case.num_others // 2] for _ in range(2)
    )
    v_cache = v_cache if case.value_dim is None else k_cache
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(case.seed + 1 + len(members))).tolist()
    table = torch.full((len(members), max(needed) + 2), GARBAGE_BLOCK, dtype=torch.int32)
    early: list[int] = []
    late: list[int] = []
    for row, (total, new) in enumerate(lengths):
        earlier, count = case.shared.get(members[row], (0, 0)) if only is None else (0, 0)
        blocks = table[earlier, : count // size].tolist()
        blocks += [order.pop() for _ in range(needed[row] - len(blocks))]
        table[row, : needed[row]] = torch.tensor(blocks)
        slots = [blocks[p // size] * size + p % size for p in range(total)]
        there = [p < total - new or p % 3 == 2 for p in range(total)]
        early += [slot if is_there else -1 for slot, is_there in zip(slots, there, strict=True)]
        late += [-1 if is_there else slot for slot, is_there in zip(slots, there, strict=True)][total - new :]
    k, v = (torch.cat([case.of_sequence(x, b) for b in members]) for x in (case.k, case.v))
    if only is None:
        k, v = case.k, case.v
    backend.write(k, v, (k_cache, v_cache), torch.tensor(early, dtype=torch.int32, device=case.device), case.layer)
    new_rows = new_token_rows(lengths)
    new_k, new_v = (x[new_rows] for x in (k, v))
    window = case.layer.window
    if window is not None:
        for row, (total, new) in enumerate(lengths):
            table[row, : max(0, total - new + 1 - window) // size] = GARBAGE_BLOCK
    batch = replace(make_batch(lengths, table, late, case.device), window=window)
    backend.prepare(batch)
    backend.write(new_k, new_v, (k_cache, v_cache), batch.slots, case.layer)
    return k_cache, v_cache, batch


def new_token_rows(lengths: list[tuple[int, int]]) -> list[int]:
    """Rows of the new tokens among all tokens."""
    rows, start = [], 0
    for total, new in lengths:
        rows += range(start + total - new, start + total)
        start += total
    return rows


def make_batch(lengths: list[tuple[int, int]], table: Tensor, slots: list[int], device: str) -> PagedBatch:
    cu_q = [0]
    for _, new in lengths:
        cu_q.append(cu_q[-1] + new)
    totals = [total for total, _ in lengths]

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return PagedBatch(
        cu_q=ints(cu_q),
        num_tokens=ints(totals),
        block_table=table.to(device),
        slots=ints(slots),
        max_new=max(new for _, new in lengths),
        max_total=max(totals),
        cu_q_host=cu_q,
        num_tokens_host=totals,
    )


def run(backend: AttentionBackend, case: Case, only: list[int] | None = None) -> Tensor:
    """[T, H, D] of the new tokens, all sequences or some of them."""
    k_cache, v_cache, batch = fill_cache(backend, case, only)
    members = range(len(case.lengths)) if only is None else only
    new = [case.of_sequence(case.q, b)[case.lengths[b][0] - case.lengths[b][1] :] for b in members]
    if len(new) == 1 or all(total == n for total, n in case.lengths):
        q = new[0] if len(new) == 1 else case.q  # strided rows, as a fused projection gives them
    else:
        q = torch.cat(new)
    return backend.attend(q, (k_cache, v_cache), batch, case.layer, case.sinks)


def worst_error(result: Tensor, expected: Tensor) -> float:
    """Largest absolute difference; NaN anywhere counts as infinite."""
    difference = (result.double().cpu() - expected).abs()
    return float(difference.nan_to_num(nan=float("inf")).max())
