"""Families with multi-head latent attention. Free of torch."""

import math
from dataclasses import replace
from typing import Any, ClassVar

from pagedcli.errors import ModelError
from pagedcli.models.checkpoint_files import Factor, Size
from pagedcli.models.families.mixtures import DeepseekMixture, DenseFirst, expert_groups
from pagedcli.models.family import ATTENTION_BIAS, Biases, Llama
from pagedcli.models.mixers.attention import LatentAttention
from pagedcli.models.mlps import Experts
from pagedcli.models.rope import RopeSpec
from pagedcli.models.spec import Scales


class Latents(Llama):
    """Every layer attends over latents."""

    kv_lora_rank: Size = 512
    q_lora_rank: Size | None = 1536
    qk_nope_head_dim: Size = 128
    qk_rope_head_dim: Size = 64
    v_head_dim: Size | None = 128  # None: hidden_size / num_attention_heads
    rope_interleave: bool | None = True

    biases: ClassVar[Biases] = ATTENTION_BIAS

    @property
    def num_kv_heads(self) -> int:
        return 1

    @property
    def head_size(self) -> int:
        return self.qk_rope_head_dim

    def rope(self) -> RopeSpec:
        return replace(super().rope(), interleaved=bool(self.rope_interleave))

    def check(self) -> None:
        super().check()
        if self.attention_bias and self.q_lora_rank is None:
            raise ModelError("attention_bias is true and q_lora_rank null, which is not supported together")
        for name in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim"):
            if (value := getattr(self, name)) is not None and value % 2:
                raise ModelError(f"{name} is {value}, and odd sizes of latent attention are not supported")

    def attention(self, i: int) -> LatentAttention:
        plain = super().attention(i)
        return LatentAttention(
            num_heads=plain.num_heads,
            num_kv_heads=plain.num_kv_heads,
            head_dim=self.kv_lora_rank + self.qk_rope_head_dim,
            qkv_bias=plain.qkv_bias,
            out_bias=plain.out_bias,
            scale=self._stretch**2 * (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5,
            rank=self.kv_lora_rank,
            rope_dim=self.qk_rope_head_dim,
            nope_dim=self.qk_nope_head_dim,
            value_dim=self.v_head_dim or self.hidden_size // self.num_attention_heads,
            query_rank=self.q_lora_rank,
        )

    @property
    def _stretch(self) -> float:
        """Factor of queries and keys in a context that was extended. Source: YaRN, as DeepSeek-V2 has it."""
        said: dict[str, Any] = self.rope_parameters or self.rope_scaling or {}
        weight, factor = said.get("mscale_all_dim") or 0, said.get("factor") or 1
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


class MiniCpm3(Latents):
    rope_interleave = False
    scale_emb: Factor = 12
    scale_depth: Factor | None = 1.4
    dim_model_base: Size | None = 256

    biases = Llama.biases

    @property
    def scales(self) -> Scales:
        layers = self.num_hidden_layers
        return Scales(
            embedding=self.scale_emb,
            residual=1.0 if self.scale_depth is None else self.scale_depth / math.sqrt(layers),
            logits_divisor=self.hidden_size / (self.dim_model_base or self.hidden_size),
        )


class DeepseekV3(Latents, DeepseekMixture):
    """Latent attention, and the mixtures of experts that are named after it."""


class DeepseekV2(Latents, DenseFirst):
    routed_scaling_factor: float = 1.0
    topk_method: str | None = "greedy"
    n_group: int | None = None
    topk_group: int | None = None

    unsupported = Latents.unsupported | {
        "moe_layer_freq": (1,),
        "norm_topk_prob": (False,),
        "topk_method": ("greedy", "group_limited_greedy"),
    }
    transformers_only = ("mlp_bias",)  # MLPs, and experts for every token, may have biases
    renamed = DeepseekMixture.renamed
    expert_names = DeepseekMixture.expert_names

    def experts(self) -> Experts:
        experts = super().experts()
        groups = None
        if self.topk_method == "group_limited_greedy":
            groups = expert_groups(experts, self.n_group, self.topk_group, num_best=1)
        return replace(experts, has_router_bias=False, scale=self.routed_scaling_factor, groups=groups)
