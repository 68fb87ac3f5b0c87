"""Softmax attention, and latent attention, as data. Free of torch; blocks.py computes them."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from pagedcli.attention.layer import AttentionLayer, Heads
from pagedcli.models.mixers.recurrent import StateTensor
from pagedcli.models.rope import RopeSpec
from pagedcli.models.tensors import Parameter, Tensors, exact


@dataclass(frozen=True, slots=True)
class OutputGate:
    """Shares that the result of attention is multiplied by."""

    # their projection in the checkpoint; None: q_proj lists them after the query of each head
    module: str | None = None
    per_head: bool = False  # one for each head instead of one for each element
    softplus: bool = False  # they are softplus of its results instead of their sigmoid


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Attention over K and V of the tokens before, its own or an earlier layer's."""

    name: ClassVar[str] = "attention"
    attends: ClassVar[bool] = True
    state: ClassVar[tuple[StateTensor, ...]] = ()
    inner: ClassVar[int] = 0
    num_heads: int  # H, query heads
    num_kv_heads: int  # G, key/value heads; divides H
    head_dim: int  # D; need not be hidden_size / num_heads
    rope: RopeSpec | None = None  # None: no rotary embedding, or the fallback's own
    window: int | None = None  # tokens a query sees, itself included; None: all before it
    source: int | None = None  # number, among the layers that attend, of an earlier one with the K and V; None: its own
    scale: float | None = None  # factor of scores; None: 1/sqrt(D)
    soft_cap: float | None = None  # scores become soft_cap * tanh(score / soft_cap)
    sinks: bool = False  # each query head has a learned logit that joins its softmax, see AttentionBackend.attend
    output_gate: OutputGate | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    out_factor: float = 1.0  # factor of the result; o_proj is multiplied by it when it is read
    # RMSNorm of each head of q and k, by weights or none, or of all heads together
    qk_norm: Literal["none", "heads", "unweighted", "all"] = "none"
    norms_last: bool = False  # these norms come after the rotary embedding
    keys_as_values: bool = False  # no v_proj: K, before it is normed and rotated, is V
    value_norm: bool = False  # each head of V is normed, by no weights

    @property
    def heads(self) -> Heads:
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim)

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that the rotary embedding sees."""
        return self.head_dim

    @property
    def keeps(self) -> bool:
        """Whether the layer has K and V of its own."""
        return self.source is None

    @property
    def qkv_size(self) -> int:
        """Elements of q, its gates, k and v of a token, made or read."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim + self.num_gates

    @property
    def num_gates(self) -> int:
        """Gates of a token's result."""
        if self.output_gate is None:
            return 0
        return self.num_heads if self.output_gate.per_head else self.num_heads * self.head_dim

    @property
    def shape(self) -> "Attention":
        """What decides the shapes of its weights: equal for layers with equal ones."""
        return replace(self, rope=None, window=None, source=None if self.keeps else 0)

    def layer(self, *, names_heads: bool) -> AttentionLayer:
        """What it asks of the attention backend."""
        return AttentionLayer(
            scale=self.scale or self.head_dim**-0.5,
            window=self.window,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
            heads=self.heads if names_heads else None,
            source=self.source,
        )

    def split(self, num_ranks: int) -> "Attention":
        """One rank's part: whole heads; ranks share key/value heads if there are fewer."""
        num_kv_heads = max(1, self.num_kv_heads // num_ranks)
        return replace(self, num_heads=self.num_heads // num_ranks, num_kv_heads=num_kv_heads)

    def unsplit_reason(self, tensors: "tuple[str, ...]") -> str | None:
        """Why it is not split over ranks, in a few words. `tensors`: names of q, k and v in the checkpoint."""
        if len(tensors) == 1:
            return "stacks its projections"
        return "norms all heads of q and k together" if self.qk_norm == "all" else None

    def parameters(self, make: Tensors, key: str, layer: str) -> dict[str, Parameter]:
        """Its tensors. `key`: of the layer here, `layer`: in the checkpoint."""
        names, name = make.names, f"{layer}.{make.names.attention}"
        q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        gate = None if self.output_gate is None else self.output_gate.module
        gated_rows = q_rows + (self.num_gates if gate is None else 0)
        if len(names.qkv) == 1:
            rows = {names.qkv[0]: gated_rows + 2 * kv_rows}
        else:
            num_used = 1 if not self.keeps else 2 if self.keys_as_values else 3
            rows = dict(zip(names.qkv[:num_used], (gated_rows, kv_rows, kv_rows), strict=False))
        if gate is not None:
            rows[gate] = self.num_gates
        rows = {f"{name}.{part}": count for part, count in rows.items()}
        found = make.linear(f"{key}.qkv", rows, make.width, bias=self.qkv_bias)
        out = {f"{name}.{names.attention_out}": make.width}
        factors = ((make.width, self.out_factor),)
        found |= make.linear(f"{key}.out", out, q_rows, bias=self.out_bias, factors=factors)
        if self.sinks:
            found[f"{key}.sinks"] = exact({f"{name}.sinks": (self.num_heads,)})
        if self.qk_norm == "heads":
            norms = names.head_norms if self.keeps else names.head_norms[:1]
            found[f"{key}.qk_norm"] = make.norm({f"{name}.{norm}": self.head_dim for norm in norms})
        if self.qk_norm == "all":
            found[f"{key}.q_norm"] = make.norm({f"{name}.q_norm": q_rows})
            found[f"{key}.k_norm"] = make.norm({f"{name}.k_norm": kv_rows})
        return found

    def unread(self, make: Tensors, layer: str) -> set[str]:
        """Tensors of a checkpoint that may be there and are not needed: K and V of a layer that reads another's."""
        if self.keeps:
            return set()
        name = f"{layer}.{make.names.attention}"
        found = {f"{name}.k_norm.weight", f"{name}.v_norm.weight"}
        for module in (f"{name}.k_proj", f"{name}.v_proj"):
            found |= {f"{module}.{stored.suffix}" for stored in make.formats.of(module).stored}
        return found


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
