"""Multi-head latent attention as data. Free of torch; latent_blocks.py computes it."""

from dataclasses import dataclass, replace
from typing import ClassVar

from pagedcli.attention.layer import AttentionLayer
from pagedcli.models.mixers.attention import Attention
from pagedcli.models.tensors import Parameter, Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention(Attention):
    """Attention whose K and V are products of one latent per token. Instead, queries are multiplied by the matrix of K,
    and sums of latents by that of V. So attention sees one key/value head, which all query heads share: K is the latent
    with a rotary key after it, V the latent. Only K is kept.

    Source: DeepSeek-V2, 2024, section 2.1, with the matrices absorbed for every token.
    """

    name: ClassVar[str] = "latent attention"
    rank: int  # numbers of a latent; head_dim is their number and rope_dim
    rope_dim: int  # numbers of the rotary key that all heads share, and of a query's rotary part
    nope_dim: int  # size of a query before it is absorbed, without its rotary part
    value_dim: int  # size of a head's result
    ups_apart: bool = False  # K's and V's matrices are tensors of their own, by heads, as in llama.cpp's files
    query_rank: int | None  # queries are products of a normed vector of so many numbers; None: of the residual

    @property
    def rotary_dim(self) -> int:
        return self.rope_dim

    @property
    def query_size(self) -> int:
        """Elements of a token's queries before they are absorbed."""
        return self.num_heads * (self.nope_dim + self.rope_dim)

    @property
    def qkv_size(self) -> int:
        """Elements of a token between its residual and its result: projected, queries, absorbed, attended."""
        projected = (self.query_rank or self.query_size) + self.head_dim
        queries = 0 if self.query_rank is None else self.query_size
        return projected + queries + self.num_heads * (self.head_dim + self.rank)

    def layer(self, *, names_heads: bool) -> AttentionLayer:
        return replace(Attention.layer(self, names_heads=names_heads), value_dim=self.rank)

    def split(self, num_ranks: int) -> "LatentAttention":
        """One rank's part: whole heads, and the latents of all tokens."""
        return replace(self, num_heads=self.num_heads // num_ranks)

    def parameters(self, make: Tensors, key: str, layer: str) -> dict[str, Parameter]:
        names, name = make.names, f"{layer}.{make.names.attention}"
        query = {"q_proj": self.query_size} if self.query_rank is None else {"q_a_proj": self.query_rank}
        rows = {f"{name}.{part}": n for part, n in {**query, "kv_a_proj_with_mqa": self.head_dim}.items()}
        found = make.linear(f"{key}.latents", rows, make.width, bias=self.qkv_bias)
        if self.query_rank is not None:
            found[f"{key}.query_norm"] = make.norm({f"{name}.q_a_layernorm": self.query_rank})
            found |= make.linear(f"{key}.queries", {f"{name}.q_b_proj": self.query_size}, self.query_rank)
        found[f"{key}.latent_norm"] = make.norm({f"{name}.kv_a_layernorm": self.rank})
        up, num_up = f"{name}.kv_b_proj", self.num_heads * (self.nope_dim + self.value_dim)
        if self.ups_apart:
            key_up, value_up = (self.num_heads, self.rank, self.nope_dim), (self.num_heads, self.value_dim, self.rank)
            found[f"{key}.key_up.weight"] = Parameter({f"{name}.k_b_proj.weight": key_up})
            found[f"{key}.value_up.weight"] = Parameter({f"{name}.v_b_proj.weight": value_up})
        elif make.formats.of(up).stacks:  # never rounded: K's part is multiplied from its other side
            found[f"{key}.latents_up.weight"] = Parameter({f"{up}.weight": (num_up, self.rank)})
        else:
            found |= make.linear(f"{key}.latents_up", {up: num_up}, self.rank)
        out = {f"{name}.{names.attention_out}": make.width}
        return found | make.linear(f"{key}.out", out, self.num_heads * self.value_dim, bias=self.out_bias)

    def unread(self, make: Tensors, layer: str) -> set[str]:
        """A file may have both forms of K's and V's matrices."""
        return {f"{layer}.{make.names.attention}.kv_b_proj.weight"} if self.ups_apart else set()
