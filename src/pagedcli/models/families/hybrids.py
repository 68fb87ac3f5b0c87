"""Families in which some layers keep a state of fixed size. Free of torch."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from pagedcli.errors import ModelError
from pagedcli.models.checkpoint_files import Factor, Size
from pagedcli.models.families.dense import FLOAT_NORMS, OFFSET_NORMS, UNGATED, Olmo2
from pagedcli.models.families.latents import DeepseekV3
from pagedcli.models.families.mixtures import DeepseekMixture, DenseFirst, GraniteMoe, QwenMixture
from pagedcli.models.family import ATTENDS, ATTENTION_BIAS, RECURS, UNBIASED, Hybrid, Llama, Mixture, RotatesByWindow
from pagedcli.models.mixers.attention import Attention, OutputGate
from pagedcli.models.mixers.recurrent import GatedDelta, KimiDelta, Mamba2, ShortConv
from pagedcli.models.mlps import ExpertNames, Experts, Mlp
from pagedcli.models.rope import RopeSpec
from pagedcli.models.spec import LayerSpec, NormPlaces, Scales
from pagedcli.models.tensors import TensorNames

StepLimit = float | dict[str, str]  # {"__float__": "Infinity"} is transformers' infinity


class Qwen3_5(Hybrid):
    """Gated delta nets, and attention with an output gate."""

    full_attention_interval: int = 4  # one layer in each group of this size attends, where layer_types is absent
    linear_conv_kernel_dim: Size = 4
    linear_key_head_dim: Size = 128
    linear_value_head_dim: Size = 128
    linear_num_key_heads: Size = 16
    linear_num_value_heads: Size = 32

    biases = ATTENTION_BIAS
    partial_rope = True
    qk_norm = "heads"
    norm_style = OFFSET_NORMS
    names = TensorNames(skipped=("mtp.",))

    def attending(self) -> Sequence[int]:
        interval = max(1, self.full_attention_interval)
        return range(interval - 1, self.num_hidden_layers, interval)

    def attention(self, i: int) -> Attention:
        return replace(super().attention(i), output_gate=OutputGate())

    def recurrent(self) -> GatedDelta:
        return GatedDelta(
            num_key_heads=self.linear_num_key_heads,
            num_heads=self.linear_num_value_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            kernel=self.linear_conv_kernel_dim,
        )


class Qwen3_5Moe(Qwen3_5, QwenMixture):
    intermediate_size = 512  # no layer has an ordinary MLP
    norm_topk_prob = True


class Qwen3Next(Qwen3_5, QwenMixture):
    def recurrent(self) -> GatedDelta:
        return replace(super().recurrent(), interleaved=True)


class KimiLinear(Hybrid, DeepseekV3):
    """Kimi delta attention, and latent attention without a rotary embedding. Its experts are DeepSeek-V3's."""

    linear_head_dim: Size = 128
    linear_num_heads: Size = 32
    linear_conv_kernel_dim: Size = 4
    linear_attn_config: dict[str, int | list[int]] | None = None  # published files have this instead, layers from 1 on
    mla_use_nope: bool = True

    renamed = DeepseekV3.renamed | {
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    }
    unsupported = DeepseekV3.unsupported | {"moe_layer_freq": (1,), "moe_router_activation_func": ("sigmoid",)}
    expert_names = ExpertNames(
        block="block_sparse_moe",
        projections=("w1", "w3", "w2"),
        router_bias="gate.e_score_correction_bias",
        shared="block_sparse_moe.shared_experts",
    )

    @property
    def tensor_names(self) -> TensorNames:
        return replace(super().tensor_names, recurrent="self_attn")

    def check(self) -> None:
        super().check()
        if not any(self.mixer(i).attends for i in range(self.num_hidden_layers)):
            raise ModelError("no layer attends, which is not supported")
        if not self.mla_use_nope:
            raise ModelError("mla_use_nope is false, and latents with a rotary embedding are not supported there")

    def ropes(self) -> Sequence[RopeSpec | None]:
        return [None] * self.num_hidden_layers

    def attending(self) -> Sequence[int]:
        listed = (self.linear_attn_config or {}).get("full_attn_layers")
        if isinstance(listed, list):
            return [i - 1 for i in listed]
        return range(4, self.num_hidden_layers, 4)

    def recurrent(self) -> KimiDelta:
        heads, size = self._said("num_heads", self.linear_num_heads), self._said("head_dim", self.linear_head_dim)
        kernel = self._said("short_conv_kernel_size", self.linear_conv_kernel_dim)
        return KimiDelta(num_heads=heads, num_key_heads=heads, key_dim=size, value_dim=size, kernel=kernel)

    def _said(self, name: str, own: int) -> int:
        """A number of linear_attn_config, where config.json has that."""
        number = (self.linear_attn_config or {}).get(name, own)
        if not isinstance(number, int):
            raise ModelError(f"{name} of linear_attn_config is {number!r:.40}, not a number")
        return number


class OlmoHybrid(Hybrid, Olmo2):
    """Gated delta nets between norms before, attention between norms after."""

    rope_theta = 10000.0
    linear_num_key_heads: Size | None = None
    linear_num_value_heads: Size | None = None
    linear_key_head_dim: Size | None = None
    linear_value_head_dim: Size | None = None
    linear_conv_kernel_dim: Size = 4
    linear_allow_neg_eigval: bool = True

    def attending(self) -> Sequence[int]:
        last = self.num_hidden_layers - 1
        return range(3, last + 1, 4) or [last]

    def ropes(self) -> Sequence[RopeSpec | None]:
        """None where theta is null, as in published models."""
        said = self.rope_parameters if isinstance(self.rope_parameters, dict) else {}
        has_none = said.get("rope_theta", self.rope_theta) is None
        return [None] * self.num_hidden_layers if has_none else super().ropes()

    def recurrent(self) -> GatedDelta:
        heads = self.linear_num_key_heads or self.num_attention_heads
        key_dim = self.linear_key_head_dim or int(0.75 * self.hidden_size / heads)
        return GatedDelta(
            num_key_heads=heads,
            num_heads=self.linear_num_value_heads or self.num_attention_heads,
            key_dim=key_dim,
            value_dim=self.linear_value_head_dim or 2 * key_dim,
            kernel=self.linear_conv_kernel_dim,
            apart=True,
            correction=2.0 if self.linear_allow_neg_eigval else 1.0,
            eps=1e-5,
        )

    def layers(self) -> tuple[LayerSpec, ...]:
        layers = super().layers()
        return tuple(layer if layer.mixer.attends else replace(layer, norms="before") for layer in layers)


class Lfm2(Hybrid):
    """Short convolutions."""

    conv_L_cache: Size = 3
    conv_bias: bool = False
    full_attn_idxs: list[int] | None = None
    block_auto_adjust_ff_dim: bool = True
    block_ffn_dim_multiplier: float | None = 1.0
    block_multiple_of: Size = 256

    renamed = {"norm_eps": "rms_norm_eps", "block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"}
    biases = UNBIASED
    qk_norm = "heads"
    names = TensorNames(
        final_norm="embedding_norm",
        branch_norms=("operator_norm", "ffn_norm"),
        attention_out="out_proj",
        head_norms=("q_layernorm", "k_layernorm"),
        recurrent="conv",
        mlp="feed_forward",
        projections=("w1", "w3", "w2"),
    )

    @property
    def mlp_width(self) -> int:
        """As in the first Llama: 2/3 of it, times a factor, rounded up to a multiple."""
        if not self.block_auto_adjust_ff_dim:
            return self.intermediate_size
        width = int((self.block_ffn_dim_multiplier or 1.0) * int(2 * self.intermediate_size / 3))
        return -(-width // self.block_multiple_of) * self.block_multiple_of

    def attending(self) -> Sequence[int]:
        return range(self.num_hidden_layers) if self.full_attn_idxs is None else self.full_attn_idxs

    def recurrent(self) -> ShortConv:
        return ShortConv(channels=self.hidden_size, kernel=self.conv_L_cache, bias=self.conv_bias)


class Lfm2Moe(Lfm2, DenseFirst):
    block_auto_adjust_ff_dim = False  # intermediate_size is what it says
    use_expert_bias: bool = True
    routed_scaling_factor: float = 1.0

    renamed = Mixture.renamed | Lfm2.renamed
    expert_names = ExpertNames(block="feed_forward", projections=("w1", "w3", "w2"))
    routing = {"sigmoid": True, "least_sum": 1e-6}

    def experts(self) -> Experts:
        return replace(super().experts(), has_router_bias=self.use_expert_bias, scale=self.routed_scaling_factor)


class Lfm3(RotatesByWindow, Lfm2):
    """Windows in some layers that attend, and a gate for each head."""

    block_auto_adjust_ff_dim = False  # intermediate_size is what it says
    use_sandwich_norm: bool = True
    use_attention_gate: bool = True

    renamed = {"norm_eps": "rms_norm_eps"}
    known_layer_types = Lfm2.known_layer_types | {"sliding_attention"}
    biases = ATTENTION_BIAS

    @property
    def tensor_names(self) -> TensorNames:
        norms = ("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm")
        used = norms if self.use_sandwich_norm else norms[::2]
        return replace(self.names, branch_norms=used, attention_out="o_proj", head_norms=("q_norm", "k_norm"))

    def check(self) -> None:
        super().check()
        if self.attention_bias and self.use_attention_gate:
            raise ModelError("attention_bias and use_attention_gate are true, which is not supported together")

    def attending(self) -> Sequence[int]:
        return range(2, self.num_hidden_layers, 2)

    def slides(self) -> list[bool]:
        kinds = self.layer_types
        return [i % 4 == 0 if kinds is None else kinds[i] == "sliding_attention" for i in range(self.num_hidden_layers)]

    def attention(self, i: int) -> Attention:
        gate = OutputGate("gate_proj", per_head=True) if self.use_attention_gate else None
        return replace(super().attention(i), output_gate=gate)

    def layers(self) -> tuple[LayerSpec, ...]:
        norms: NormPlaces = "around" if self.use_sandwich_norm else "before"
        return tuple(replace(layer, norms=norms) for layer in super().layers())


class Bamba(Hybrid):
    """Mamba-2."""

    attn_layer_indices: list[int] | None = None
    mamba_n_heads: Size = 128
    mamba_d_head: Size | str = "auto"  # auto: all heads together are mamba_expand * hidden_size wide
    mamba_n_groups: Size = 1
    mamba_d_state: Size = 256
    mamba_d_conv: Size = 4
    mamba_expand: Size = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: tuple[StepLimit, StepLimit] | None = None

    partial_rope = True
    names = TensorNames(
        final_norm="final_layernorm",
        branch_norms=("input_layernorm", "pre_ff_layernorm"),
        recurrent="mamba",
        mlp="feed_forward",
    )

    def attending(self) -> Sequence[int]:
        return self.attn_layer_indices or ()

    @property
    def step_limits(self) -> tuple[float, float]:
        limits = self.time_step_limit or (0.0, math.inf)
        low, high = (float(each["__float__"]) if isinstance(each, dict) else each for each in limits)
        return low, high

    def recurrent(self) -> Mamba2:
        heads, given = self.mamba_n_heads, self.mamba_d_head
        head_dim = given if isinstance(given, int) else self.mamba_expand * self.hidden_size // heads
        return Mamba2(
            num_heads=heads,
            num_key_heads=self.mamba_n_groups,
            key_dim=self.mamba_d_state,
            value_dim=head_dim,
            kernel=self.mamba_d_conv,
            conv_bias=self.mamba_conv_bias,
            proj_bias=self.mamba_proj_bias,
            limits=self.step_limits,
            norm_group=heads * head_dim // self.mamba_n_groups,
        )


class FalconH1(Bamba):
    """Attention and Mamba-2 of the same norm, and a factor for almost everything."""

    mamba_d_ssm: Size | None = 1024
    mamba_rms_norm: bool = False
    mamba_norm_before_gate: bool = True
    embedding_multiplier: Factor = 1.0
    lm_head_multiplier: Factor = 1.0
    key_multiplier: Factor = 1.0
    attention_in_multiplier: Factor = 1.0
    attention_out_multiplier: Factor = 1.0
    ssm_in_multiplier: Factor = 1.0
    ssm_out_multiplier: Factor = 1.0
    mlp_multipliers: tuple[Factor, Factor] | None = None
    ssm_multipliers: tuple[Factor, Factor, Factor, Factor, Factor] | None = None

    unsupported = Bamba.unsupported | dict.fromkeys(
        ("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias"), ()
    )
    known_layer_types = frozenset()
    biases = UNBIASED
    partial_rope = False

    @property
    def scales(self) -> Scales:
        return Scales(embedding=self.embedding_multiplier, logits_divisor=1 / self.lm_head_multiplier)

    def check(self) -> None:
        super().check()
        if self.mamba_rms_norm and self.mamba_norm_before_gate:
            raise ModelError("mamba_norm_before_gate is true, which is not supported")

    def mixer(self, i: int) -> Attention:
        of_scores = self.key_multiplier * self.attention_in_multiplier**2
        return replace(
            self.attention(i),
            scale=of_scores * self.head_size**-0.5,
            out_factor=self.attention_in_multiplier * self.attention_out_multiplier,
        )

    def recurrent(self) -> Mamba2:
        heads, inner = self.mamba_n_heads, self.mamba_d_ssm or self.mamba_expand * self.hidden_size
        return replace(
            super().recurrent(),
            value_dim=inner // heads,
            norm_group=inner // self.mamba_n_groups if self.mamba_rms_norm else None,
            factors=tuple(self.ssm_in_multiplier * each for each in self.ssm_multipliers or (1.0,) * 5),
            out_factor=self.ssm_out_multiplier,
        )

    def mlp(self, i: int) -> Mlp:
        factors = self.mlp_multipliers or (1.0, 1.0)
        return Mlp(width=self.mlp_width, activation=self.activation, factors=factors)

    def layers(self) -> tuple[LayerSpec, ...]:
        return tuple(replace(layer, beside=self.recurrent()) for layer in super().layers())


class RotatesIfNamed(Llama):
    """Attention has no rotary embedding if position_embedding_type does not say so."""

    position_embedding_type: str | None = None

    def ropes(self) -> Sequence[RopeSpec | None]:
        ropes = super().ropes()
        return ropes if self.position_embedding_type == "rope" else [None] * len(ropes)


class GraniteMoeHybrid(RotatesIfNamed, Bamba, GraniteMoe):
    """Its MLP is the shared expert, alone where there are no others."""

    biases = ATTENTION_BIAS
    partial_rope = False
    names = TensorNames(recurrent="mamba", mlp="shared_mlp", projections=("input_linear", "output_linear"))

    @property
    def mlp_width(self) -> int:
        return self.intermediate_size if self.num_experts else self.shared_intermediate_size

    def is_dense(self, i: int) -> bool:
        return not self.num_experts


class NemotronH(RotatesIfNamed, Bamba, DeepseekMixture):
    """Layers with one branch each: Mamba-2 or attention and an MLP after it are one layer here. Its experts are
    DeepSeek-V3's, without gates."""

    num_hidden_layers: int = 0  # the listed ones
    use_bias: bool = False
    time_step_min: float = 0.001
    hybrid_override_pattern: str | None = None
    moe_shared_expert_intermediate_size: Size = 7688

    unsupported = Bamba.unsupported | {"moe_latent_size": ()}
    renamed = {
        "n_routed_experts": "num_experts",
        "layers_block_type": "layer_types",
        "layer_norm_epsilon": "rms_norm_eps",
        "mlp_hidden_act": "hidden_act",
        "ssm_state_size": "mamba_d_state",
        "mamba_num_heads": "mamba_n_heads",
        "mamba_head_dim": "mamba_d_head",
        "n_groups": "mamba_n_groups",
        "conv_kernel": "mamba_d_conv",
        "use_conv_bias": "mamba_conv_bias",
    }
    activations = ("relu2",)
    known_layer_types = ATTENDS | RECURS | {"mlp", "moe"}
    biases = (False, False, "mlp_bias")
    norm_style = FLOAT_NORMS
    gated_mlp = False
    names = replace(
        UNGATED,
        body="backbone",
        embedding="embeddings",
        final_norm="norm_f",
        branch_norms=("norm", "norm"),
        attention="mixer",
        recurrent="mixer",
        mlp="mixer",
        skipped=("mtp.",),
    )
    expert_names = ExpertNames(
        block="mixer",
        router_bias="gate.e_score_correction_bias",
        projections=("up_proj", "down_proj"),
        shared="mixer.shared_experts",
        shared_projections=("up_proj", "down_proj"),
    )
    _LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}

    def __post_init__(self) -> None:
        if self.layer_types is None and self.hybrid_override_pattern is not None:
            self.layer_types = [self._LETTERS.get(letter, letter) for letter in self.hybrid_override_pattern]
        self.num_hidden_layers = len(self.layer_types or ())

    def check(self) -> None:
        kinds = self.layer_types
        if not kinds:
            raise ModelError("it does not list its layers", hint="download the file again")
        if any({before, after} <= _MLPS for before, after in pairwise(["mlp", *kinds])):
            raise ModelError(
                "an MLP or a mixture of experts comes first or follows another one, which is not supported"
            )
        super().check()

    @property
    def step_limits(self) -> tuple[float, float]:
        """As in transformers, time_step_limit has no effect."""
        return self.time_step_min, math.inf

    def recurrent(self) -> Mamba2:
        return replace(super().recurrent(), proj_bias=self.use_bias)

    def layers(self) -> tuple[LayerSpec, ...]:
        kinds, layers = [*(self.layer_types or ()), ""], super().layers()
        return tuple(
            replace(layer, mlp=layers[i + 1].mlp, mlp_number=i + 1)
            if kinds[i + 1] in _MLPS
            else replace(layer, mlp=None)
            for i, layer in enumerate(layers)
            if kinds[i] not in _MLPS
        )

    def is_dense(self, i: int) -> bool:
        return (self.layer_types or [])[i] != "moe"

    @property
    def shared_width(self) -> int:
        return self.moe_shared_expert_intermediate_size

    def experts(self) -> Experts:
        found = super().experts()
        return replace(found, shared=found.shared and replace(found.shared, bias=self.mlp_bias))


_MLPS = frozenset({"mlp", "moe"})
