"""Which batch sizes are captured as CUDA graphs, or why none is. Used by decide; runner.cuda_graphs captures them."""

import torch

from pagedcli.attention.base import AttentionBackend
from pagedcli.config import EngineConfig
from pagedcli.models.decoder import groups_experts
from pagedcli.models.spec import ModelSpec

LARGEST_BUCKET = 512  # sequences; in larger steps launch overhead is negligible


def bucket_sizes(max_num_seqs: int, largest: int = LARGEST_BUCKET) -> list[int]:
    """Batch sizes to capture, ascending: 1, 2, 4, 8, 16, then steps of at most half, and always the maximum."""
    end = min(max_num_seqs, largest)
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256) if size < end]
    return [*sizes, *range(320, end, 64), end]


def why_no_graphs(
    config: EngineConfig, spec: ModelSpec, device: torch.device, backend: type[AttentionBackend]
) -> str | None:
    """Why steps run without graphs; None if graphs are used."""
    if device.type != "cuda":
        return f"{device} has none"
    if config.enforce_eager:
        return "enforce_eager"
    if spec.is_fallback:
        return f"{spec.architecture} runs through transformers"
    if spec.experts is not None and not groups_experts(spec, backend):
        return "the host counts the tokens of each expert"
    if not backend.capabilities.graph_safe:
        return f"backend {backend.name} needs lengths on the host"
    return None
