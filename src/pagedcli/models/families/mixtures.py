"""Families with experts and attention in every layer. Free of torch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pagedcli.errors import ModelError
from pagedcli.models.checkpoint_files import Size
from pagedcli.models.families.dense import (
    BIASED_NORMS,
    FLOAT_NORMS,
    Cohere2,
    Exaone4,
    Granite,
    GraniteSwa,
    HunYuanDenseV1,
    ListedWindows,
)
from pagedcli.models.family import (
    ATTENTION_BIAS,
    UNBIASED,
    Alternating,
    Biases,
    Llama,
    Mixture,
    RotatesByWindow,
    Windowed,
)
from pagedcli.models.mixers.attention import Attention, OutputGate
from pagedcli.models.mlps import ExpertNames, Experts, Mlp
from pagedcli.models.rope import RopeSpec
from pagedcli.models.tensors import NormStyle, TensorNames


class QwenMixture(Mixture):
    """Some layers have an ordinary MLP."""

    shared_expert_intermediate_size: Size | None = None
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    mlp_layer_types: list[str] | None = None

    shared_size = "shared_expert_intermediate_size"

    def is_dense(self, i: int) -> bool:
        named = i in (self.mlp_only_layers or ())
        if self.mlp_layer_types is not None:
            named = self.mlp_layer_types[i : i + 1] == ["dense"]
        return named or bool((i + 1) % max(1, self.decoder_sparse_step))


class Qwen3Moe(Windowed, QwenMixture):
    use_sliding_window: bool = False

    windows = "every layer, if switched on"
    biases = ATTENTION_BIAS
    qk_norm = "heads"

    def slides(self) -> list[bool]:
        return [self.use_sliding_window] * self.num_hidden_layers


class Qwen3VlMoe(QwenMixture):
    norm_topk_prob = True

    biases = ATTENTION_BIAS
    qk_norm = "heads"


class Qwen2Moe(ListedWindows, QwenMixture):
    qkv_bias: bool = True

    biases = ("qkv_bias", False, False)


class Mellum(RotatesByWindow, QwenMixture):
    rope_theta = 5e5
    sliding_window_pattern = 1

    biases = ATTENTION_BIAS
    local_theta = 1e4
    qk_norm = "heads"
    names = TensorNames(skipped=("mtp.",))


class Laguna(RotatesByWindow, QwenMixture):
    """Layers differ in their query heads, and the softplus of a projection gates the results of heads."""

    sliding_window_pattern = 1
    norm_topk_prob = True
    num_attention_heads_per_layer: list[int] | None = None
    gating: bool | str = True  # one gate for each head; "per-element": for each of its elements
    moe_routed_scaling_factor: float = 1.0

    unsupported = Llama.unsupported | dict.fromkeys(
        ("attention_bias", "moe_apply_router_weight_on_input", "moe_router_logit_softcapping"), ()
    )
    partial_rope = True
    biases = UNBIASED
    qk_norm = "heads"
    expert_names = ExpertNames(router_bias="experts.e_score_correction_bias")

    @property
    def all_heads(self) -> list[int]:
        """Query heads of each layer."""
        return self.num_attention_heads_per_layer or [self.num_attention_heads] * self.num_hidden_layers

    def check(self) -> None:
        super().check()
        heads, groups = self.all_heads, self.num_kv_heads
        if len(heads) != self.num_hidden_layers or any(each < 1 or each % groups for each in heads):
            raise ModelError(
                f"num_attention_heads_per_layer is {heads}, not a multiple of num_key_value_heads {groups} for each of"
                f" {self.num_hidden_layers} layers"
            )

    def attention(self, i: int) -> Attention:
        gate = OutputGate(module="g_proj", per_head=self.gating in (True, "per-head"), softplus=True)
        return replace(super().attention(i), num_heads=self.all_heads[i], output_gate=gate)

    def is_dense(self, i: int) -> bool:
        return i == 0 if self.mlp_layer_types is None else super().is_dense(i)

    def experts(self) -> Experts:
        scale = self.moe_routed_scaling_factor
        return replace(super().experts(), gates_shared=False, sigmoid=True, has_router_bias=True, scale=scale)


class Mixtral(Windowed, Mixture):
    norm_topk_prob = True

    biases = UNBIASED
    expert_names = ExpertNames(block="block_sparse_moe", projections=("w1", "w3", "w2"))


class PhiMoe(Mixtral):
    """Phi-3.5-MoE, whose two experts of a token are each weighted among those that are nearly as good."""

    norm_topk_prob = False
    router_jitter_noise: float = 0.01

    biases = ATTENTION_BIAS
    norm_style = BIASED_NORMS

    def check(self) -> None:
        super().check()
        if self.num_experts_per_tok != 2:
            raise ModelError(f"num_experts_per_tok is {self.num_experts_per_tok}, but the router picks 2")

    def experts(self) -> Experts:
        return replace(super().experts(), nearness=2 * self.router_jitter_noise)


class Olmoe(Mixture):
    biases = ATTENTION_BIAS
    qk_norm = "all"


class GptOss(Alternating, Mixture):
    norm_topk_prob = True
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    own_activation = "clamped_silu"
    biases = ATTENTION_BIAS
    norm_style = FLOAT_NORMS
    sinks = True
    expert_names = ExpertNames(router="router")

    def check(self) -> None:
        super().check()
        if (self.swiglu_alpha, self.swiglu_limit) != (1.702, 7.0):
            found = f"swiglu_alpha {self.swiglu_alpha} with swiglu_limit {self.swiglu_limit}"
            raise ModelError(f"{found} is not supported (only 1.702 with 7.0)")

    def experts(self) -> Experts:
        experts = super().experts()
        return replace(experts, each=replace(experts.each, bias=True), has_biases=True, alternating=True)


class GraniteMoe(Granite, Mixture):
    shared_intermediate_size: int = 0

    biases = ATTENTION_BIAS
    expert_names = ExpertNames(
        block="block_sparse_moe",
        router="router.layer",
        shared="shared_mlp",
        shared_projections=("input_linear", "output_linear"),
    )
    routing = {"renormalize": True, "gates_shared": False}  # the softmax is over the picked experts alone
    shared_size = "shared_intermediate_size"


class GraniteMoeSwa(GraniteSwa, GraniteMoe):
    expert_names = replace(GraniteMoe.expert_names, router="router")


class AlwaysMixture(Mixture):
    """Experts of which some serve every token: those are together one of their summed width."""

    n_shared_experts: int | None = 0

    routing = {"has_router_bias": True, "gates_shared": False}

    @property
    def shared_width(self) -> int:
        return (self.n_shared_experts or 0) * (self.moe_intermediate_size or self.intermediate_size)


class DenseFirst(AlwaysMixture):
    """The first layers have ordinary MLPs, or those that config.json lists."""

    num_dense_layers: int = 0
    mlp_layer_types: list[str] | None = None

    def is_dense(self, i: int) -> bool:
        kinds = self.mlp_layer_types
        return i < self.num_dense_layers if kinds is None else kinds[i : i + 1] == ["dense"]


class Cohere2Moe(Cohere2, DenseFirst):
    """North. Its norms are by mean square or also by mean, as config.json has an epsilon of the former or not."""

    rms_norm_eps: float | None = None  # type: ignore[assignment]  # an epsilon of another kind of norm
    layer_norm_eps: float = 1e-5
    expert_selection_fn: str = "softmax"
    shared_expert_combination_strategy: str = "average"
    prefix_dense_intermediate_size: Size | None = None
    prefix_dense_sliding_window_pattern: int = 1

    unsupported = Cohere2.unsupported | {
        "expert_selection_fn": ("softmax", "sigmoid"),
        "shared_expert_combination_strategy": ("average", "sum"),
    }
    renamed = {"num_shared_experts": "n_shared_experts", "first_k_dense_replace": "num_dense_layers"}
    expert_names = ExpertNames(shared="mlp.shared_experts")

    @property
    def norm(self) -> NormStyle:
        if self.rms_norm_eps is None:
            return replace(self.norm_style, eps=self.layer_norm_eps)
        return NormStyle(eps=self.rms_norm_eps)

    def slides(self) -> list[bool]:
        if self.layer_types is not None:
            return super().slides()
        first = max(0, self.num_dense_layers)
        places = [(i, self.prefix_dense_sliding_window_pattern) for i in range(first)]
        places += [(i, int(self.sliding_window_pattern or 1)) for i in range(self.num_hidden_layers - first)]
        return [bool((i + 1) % max(1, pattern)) for i, pattern in places]

    def ropes(self) -> Sequence[RopeSpec | None]:
        """The first layers have one without a window, too."""
        rope, always = self.rope(), self.prefix_dense_sliding_window_pattern == 1
        return [rope if each or (always and self.is_dense(i)) else None for i, each in enumerate(self.slides())]

    def mlp(self, i: int) -> Mlp | Experts | None:
        if not self.is_dense(i):
            return self.experts()
        return Mlp(width=self.prefix_dense_intermediate_size or self.intermediate_size, activation=self.activation)

    def experts(self) -> Experts:
        found = super().experts()
        scores: dict[str, Any] = {"sigmoid": self.expert_selection_fn == "sigmoid", "has_router_bias": False}
        scores["renormalize"] = self.norm_topk_prob or not scores["sigmoid"]
        if found.shared is None or self.shared_expert_combination_strategy == "sum":
            return replace(found, **scores)
        return replace(found, scale=0.5, shared=replace(found.shared, factors=(1.0, 0.5)), **scores)


def expert_groups(
    experts: Experts, num_groups: int | None, num_kept: int | None, *, num_best: int
) -> tuple[int, int, int] | None:
    """Experts.groups. Raises: ModelError for numbers that do not go together."""
    if num_groups is None or num_groups == 1:
        return None
    kept, num_experts, num_picked = num_kept or 0, experts.num_experts, experts.num_per_token
    fits = 1 < num_groups <= _MOST_GROUPS and not num_experts % num_groups and num_experts // num_groups >= num_best
    if not fits or not 1 <= kept <= num_groups or kept * (num_experts // num_groups) < num_picked:
        raise ModelError(
            f"n_group is {num_groups} and topk_group {num_kept}, which do not fit {num_experts} experts and"
            f" num_experts_per_tok {num_picked}"
        )
    return num_groups, kept, num_best


_MOST_GROUPS = 64


class DeepseekMixture(DenseFirst):
    """The experts of DeepSeek-V3."""

    norm_topk_prob = True
    num_dense_layers = 1
    routed_scaling_factor: float = 1.0
    use_qk_norm: bool = False
    n_group: int | None = 1
    topk_group: int | None = 1

    renamed = Mixture.renamed | {"n_routed_experts": "num_experts", "first_k_dense_replace": "num_dense_layers"}
    biases: ClassVar[Biases] = ("attention_bias", False, False)
    expert_names = ExpertNames(router_bias="gate.e_score_correction_bias", shared="mlp.shared_experts")

    @property
    def tensor_names(self) -> TensorNames:
        """Layers after the last one only predict further tokens, if such tensors have no names of their own."""
        last = f"model.layers.{self.num_hidden_layers}."
        return self.names if self.names.skipped else replace(self.names, skipped=(last,))

    def attention(self, i: int) -> Attention:
        return replace(super().attention(i), qk_norm="heads" if self.use_qk_norm else "none")

    def experts(self) -> Experts:
        found = super().experts()
        groups = expert_groups(found, self.n_group, self.topk_group, num_best=2)
        return replace(found, sigmoid=True, least_sum=1e-20, scale=self.routed_scaling_factor, groups=groups)


class Glm4Moe(DeepseekMixture):
    """GLM-4.5."""

    partial_rope = True


class SolarOpen(DeepseekMixture):
    intermediate_size = 1280  # no layer has an ordinary MLP
    num_dense_layers = 0


class ExaoneMoe(Exaone4, DeepseekMixture):
    use_qk_norm = True

    renamed = DeepseekMixture.renamed | {"num_shared_experts": "n_shared_experts"}
    norm_places = "before"
    names = TensorNames(skipped=("mtp.",))
    expert_names = replace(DeepseekMixture.expert_names, router_bias="e_score_correction_bias")


class HyV3(DeepseekMixture):
    use_qk_norm = True

    renamed = Mixture.renamed | {
        "num_shared_experts": "n_shared_experts",
        "router_scaling_factor": "routed_scaling_factor",
    }
    biases = ATTENTION_BIAS
    expert_names = ExpertNames(router="router.gate", shared="mlp.shared_mlp")
    transformers_only = ("mlp_bias",)  # experts for every token may have biases, too


class MiniMaxM2(Mixture):
    norm_topk_prob = True
    rotary_dim: Size | None = None

    biases = UNBIASED
    partial_rope = True
    qk_norm = "all"
    expert_names = replace(Mixtral.expert_names, router_bias="e_score_correction_bias")
    routing = {"sigmoid": True, "has_router_bias": True}

    def __post_init__(self) -> None:
        if self.rotary_dim is not None and self.partial_rotary_factor is None:
            self.partial_rotary_factor = self.rotary_dim / self.head_size


class HunYuanMoeV1(HunYuanDenseV1, Mixture):
    num_experts_per_tok: int | list[int] | None  # type: ignore[assignment]  # of each layer, if it is a list
    norm_topk_prob = True

    renamed = {"moe_topk": "num_experts_per_tok", "moe_intermediate_size": "not read, as in transformers"}
    expert_names = ExpertNames(router="gate.wg", shared="mlp.shared_mlp")
    routing = {"gates_shared": False}
    shared_size = "intermediate_size"

    def __post_init__(self) -> None:
        picked = self.num_experts_per_tok
        if isinstance(picked, list) and len(set(picked)) == 1:
            self.num_experts_per_tok = picked[0]

    def check(self) -> None:
        if isinstance(self.num_experts_per_tok, list):
            raise ModelError("moe_topk differs between layers, which is not supported")
        super().check()


class Ernie4_5Moe(AlwaysMixture):
    moe_layer_start_index: int = 1
    moe_layer_end_index: int = -1  # the last layer
    moe_layer_interval: int = 1

    renamed = Mixture.renamed | {
        "moe_num_experts": "num_experts",
        "moe_k": "num_experts_per_tok",
        "moe_num_shared_experts": "n_shared_experts",
    }
    biases = UNBIASED
    interleaved = True
    names = TensorNames(skipped=("model.mtp",))
    expert_names = ExpertNames(router_bias="moe_statics.e_score_correction_bias", shared="mlp.shared_experts")
    routing = AlwaysMixture.routing | {"renormalize": True}
    transformers_only = ("use_bias",)  # its output layer has a bias, too

    def is_dense(self, i: int) -> bool:
        last = self.moe_layer_end_index if self.moe_layer_end_index >= 0 else self.num_hidden_layers - 1
        is_within = max(0, self.moe_layer_start_index) <= i <= last
        return not is_within or bool((i + 1) % max(1, self.moe_layer_interval))
