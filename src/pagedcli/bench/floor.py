"""The shortest time that a machine's memory and arithmetic allow for a workload. Pure arithmetic, free of torch.

Per step, for linear layers and for attention each the larger of bytes over bandwidth and operations over the rate:
every linear weight read once per step, each distinct byte of K and V once, all prompts computed in one packed step. Of
a mixture of experts, those that the step's tokens go to are read, as many as a router without preferences would pick.
"""

from dataclasses import dataclass

from pagedcli.bench.workloads import Workload
from pagedcli.core.prefixes import num_equal
from pagedcli.models.footprint import Footprint
from pagedcli.models.spec import ModelSpec
from pagedcli.planning.cards import Roofline


@dataclass(frozen=True, slots=True)
class Floor:
    """Shortest times, in seconds."""

    prefill_s: float
    decode_s: float

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


def workload_floor(
    spec: ModelSpec, weights: Footprint, workload: Workload, roofline: Roofline, *, kv_itemsize: float = 2
) -> Floor:
    """The floor of a workload whose requests all start at once."""

    def linear(tokens: int, sampled: int) -> float:
        flops = 2 * (weights.active_parameters * tokens + weights.head.parameters * sampled)
        return roofline.seconds(weights.active_bytes(tokens) + weights.head.num_bytes, flops)

    def attention(distinct_tokens: int, seen_pairs: int) -> float:
        num_bytes = 2 * distinct_tokens * spec.num_kv_heads * spec.head_dim * spec.num_layers * kv_itemsize
        return roofline.seconds(num_bytes, 4 * seen_pairs * spec.num_heads * spec.head_dim * spec.num_layers)

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


def _shared_prefix(prompts: list[list[int]]) -> int:
    """Leading tokens that all prompts have in common; 0 for a single one."""
    if len(prompts) < 2:
        return 0
    return num_equal(min(prompts), max(prompts))
