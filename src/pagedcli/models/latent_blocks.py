"""Multi-head latent attention in torch: the callable of a layer, which attends over latents as if they were K and V."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pagedcli.layers.basic import rms_norm, rotate
from pagedcli.models.blocks import Step
from pagedcli.models.mixers.latent_attention import LatentAttention as LatentAttentionMixer

if TYPE_CHECKING:
    from pagedcli.models.decoder import Builder

NORM_EPS = 1e-6  # norms of latents and query vectors; config.json's is for the others


@dataclass(slots=True)
class HeadLinear:
    """A linear layer for each head."""

    heads: list[Callable[[Tensor], Tensor]]  # I -> O

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: x [T, H, I] -> [T, H, O]."""
        return torch.stack([linear(x[:, h].contiguous()) for h, linear in enumerate(self.heads)], dim=1)


class LatentAttention:
    """Projections, latents, cache, attention and projection of one layer. See models.mixers.latent_attention."""

    def __init__(self, parts: "Builder", mixer: LatentAttentionMixer, place: int, key: str) -> None:
        """`place`: of the layer among those that attend."""
        self.index, self.backend, self.mixer, rope = place, parts.backend_of(place), mixer, mixer.rope
        self.projected = parts.linear(f"{key}.latents")  # E -> queries or what they are made of, latent, rotary key
        self.query_norm = parts.norm(f"{key}.query_norm")
        # None: `projected` has them
        self.queries = None if mixer.query_rank is None else parts.linear(f"{key}.queries")
        latent_norm = parts.norm(f"{key}.latent_norm")
        assert latent_norm is not None, "every such layer norms its latents"
        self.latent_norm = latent_norm
        self.table = None if rope is None else parts.table(rope, mixer.rope_dim)  # [P, R] of rope_table
        # [T, H, nope_dim] -> [T, H, rank], and [A, H, rank] -> [A, H, value_dim]
        self.key_up, self.value_up = map(parts.head_linear, parts.latents_up(mixer, key))
        self.out = parts.summed_linear(f"{key}.out")

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """Shapes: x [T, E] -> [A, E] of the tokens that attend, see LayerStep. Changes: the layer's cache."""
        mixer, layer, projected = self.mixer, step.layers[self.index], self.projected(x)
        given, latent = projected.tensor_split([projected.shape[1] - mixer.head_dim], dim=1)
        if self.queries is not None and self.query_norm is not None:
            given = self.queries(rms_norm(given, self.query_norm, NORM_EPS))
        latent, key = latent.tensor_split([mixer.rank], dim=1)
        key = self._rotated(key[:, None], step)
        kept = torch.cat((rms_norm(latent, self.latent_norm, NORM_EPS)[:, None], key), dim=-1)
        layer.write(self.backend, kept, kept)
        heads = given.view(len(given), mixer.num_heads, -1)
        nope, rope = heads.tensor_split([mixer.nope_dim], dim=2)
        absorbed = torch.cat((self.key_up(nope), self._rotated(rope, step)), dim=-1)
        out = layer.attend(self.backend, absorbed)
        return self.out(self.value_up(out).flatten(1)) if out.shape[0] else x[:0]

    def _rotated(self, x: Tensor, step: Step) -> Tensor:
        """Shapes: x [T, heads, R], whose first elements come first in the result, as in layers.basic.split_heads."""
        rope = self.mixer.rope
        if self.table is None:
            return x
        if rope is not None and rope.interleaved:
            x = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
        return rotate(x, *step.angles_of(self.table))
