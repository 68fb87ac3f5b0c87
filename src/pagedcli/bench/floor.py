"""The shortest time that a machine's memory and arithmetic allow for a workload. Pure arithmetic, free of torch.

Per step, for linear layers and for attention each the larger of bytes over bandwidth and operations over the rate:
every linear weight read once per step, each distinct byte of K and V once, all prompts computed in one packed step. Of
a mixture of experts, those that the step's tokens go to are read, as many as a router without preferences would pick.
"""

from dataclasses import dataclass

from pagedcli.bench.workloads import Workload
from pagedcli.core.prefixes import num_equal
from pagedcli.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Peak rates of the machine on the threads in use."""

    read_bytes_per_s: float
    flop_per_s: float  # multiply-adds in registers, two operations each, in the compute dtype


@dataclass(frozen=True, slots=True)
class Floor:
    """Shortest times, in seconds."""

    prefill_s: float
    decode_s: float

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


def workload_floor(
    spec: ModelSpec,
    workload: Workload,
    limits: MachineLimits,
    *,
    itemsize: float = 2,
    head_itemsize: float | None = None,
    kv_itemsize: float = 2,
) -> Floor:
    """The floor of a workload whose requests all start at once. Units: itemsize in bytes per weight,
    head_itemsize of the output layer if it differs."""
    head = spec.vocab_size * spec.hidden_size

    def linear(tokens: int, sampled: int) -> float:
        flops = 2 * (layer_weights(spec, 1) * tokens + head * sampled)
        num_bytes = layer_weights(spec, tokens) * itemsize
        num_bytes += head * (itemsize if head_itemsize is None else head_itemsize)
        return max(num_bytes / limits.read_bytes_per_s, flops / limits.flop_per_s)

    def attention(distinct_tokens: int, seen_pairs: int) -> float:
        num_bytes = 2 * distinct_tokens * spec.num_kv_heads * spec.head_dim * spec.num_layers * kv_itemsize
        flops = 4 * seen_pairs * spec.num_heads * spec.head_dim * spec.num_layers
        return max(num_bytes / limits.read_bytes_per_s, flops / limits.flop_per_s)

    shared = _shared_prefix(workload.prompts) if workload.prefix_caching else 0
    own = [len(prompt) - shared for prompt in workload.prompts]
    pairs = shared * (shared + 1) // 2 + sum(n * shared + n * (n + 1) // 2 for n in own)
    computed = shared + sum(own)
    prefill_s = linear(computed, len(own)) + attention(computed, pairs)
    decode_s = 0.0
    for step in range(1, max(workload.output_lens)):
        contexts = [n + step for n, out in zip(own, workload.output_lens, strict=True) if out > step]
        decode_s += linear(len(contexts), len(contexts))
        decode_s += attention(shared + sum(contexts), sum(contexts) + shared * len(contexts))
    return Floor(prefill_s, decode_s)


def layer_weights(spec: ModelSpec, num_tokens: int) -> float:
    """Weights of all layers that a step of num_tokens reads; a single token is multiplied by as many."""
    heads = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim  # q, k, v and the output projection
    experts, width = spec.experts, spec.hidden_size
    if experts is None:
        return spec.num_layers * width * (heads + 3 * spec.intermediate_size)
    inner = touched_experts(experts.num_experts, experts.num_per_token, num_tokens) * experts.intermediate_size
    sparse = experts.num_experts + 3 * (inner + (experts.shared_intermediate_size or 0))  # with the router
    num_dense = len(experts.dense_layers)
    mlps = num_dense * 3 * spec.intermediate_size + (spec.num_layers - num_dense) * sparse
    return width * (spec.num_layers * heads + mlps)


def touched_experts(num_experts: int, num_per_token: int, num_tokens: int) -> float:
    """Expected number of different experts that tokens go to if each picks its own at random."""
    return float(num_experts * (1 - (1 - num_per_token / num_experts) ** num_tokens))


def _shared_prefix(prompts: list[list[int]]) -> int:
    """Leading tokens that all prompts have in common; 0 for a single one."""
    if len(prompts) < 2:
        return 0
    return num_equal(min(prompts), max(prompts))
