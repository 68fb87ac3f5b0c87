"""Multi-head latent attention in torch: the callable of a layer, which attends over latents as if they were K and V."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedcli.attention.base import AttentionBackend
from pagedcli.layers.basic import rms_norm, rotate
from pagedcli.models.blocks import Step
from pagedcli.models.mixers.latent_attention import LatentAttention as LatentAttentionMixer

NORM_EPS = 1e-6  # norms of latents and query vectors; config.json's is for the others


@dataclass(slots=True)
class HeadLinear:
    """A linear layer for each head."""

    heads: list[Callable[[Tensor], Tensor]]  # I -> O

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: x [T, H, I] -> [T, H, O]."""
        return torch.stack([linear(x[:, h].contiguous()) for h, linear in enumerate(self.heads)], dim=1)


@dataclass(slots=True)
class LatentAttention:
    """Projections, latents, cache, attention and projection of one layer. See models.mixers.latent_attention."""

    index: int  # its place among the layers that attend
    backend: AttentionBackend
    mixer: LatentAttentionMixer
    projected: Callable[[Tensor], Tensor]  # E -> queries or what they are made of, latent, rotary key
    query_norm: Tensor | None
    queries: Callable[[Tensor], Tensor] | None  # None: `projected` has them
    latent_norm: Tensor
    table: Tensor | None  # [P, R] of rope_table; None: nothing is rotated
    key_up: Callable[[Tensor], Tensor]  # [T, H, nope_dim] -> [T, H, rank]
    value_up: Callable[[Tensor], Tensor]  # [A, H, rank] -> [A, H, value_dim]
    out: Callable[[Tensor], Tensor]

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
        return self.out(self.value_up(out).flatten(1)) if out.shape[0] else out

    def _rotated(self, x: Tensor, step: Step) -> Tensor:
        """Shapes: x [T, heads, R], whose first elements come first in the result, as in layers.basic.split_heads."""
        rope = self.mixer.rope
        if self.table is None:
            return x
        if rope is not None and rope.interleaved:
            x = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
        return rotate(x, *step.angles_of(self.table))
