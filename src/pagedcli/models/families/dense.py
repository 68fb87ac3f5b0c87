"""Families with ordinary MLPs and attention in every layer. Free of torch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pagedcli.errors import ModelError
from pagedcli.models.checkpoint_files import Factor
from pagedcli.models.family import (
    ATTENTION_BIAS,
    UNBIASED,
    Alternating,
    Biases,
    Llama,
    RotatesByTheta,
    RotatesByWindow,
    RotatesInWindows,
    Windowed,
)
from pagedcli.models.mixers.attention import Attention, OutputGate
from pagedcli.models.rope import RopeSpec
from pagedcli.models.spec import LayerSpec, NormPlaces, Scales
from pagedcli.models.tensors import NormStyle, TensorNames

FLOAT_NORMS = NormStyle(eps=0.0, in_float32=True)
OFFSET_NORMS = NormStyle(eps=0.0, in_float32=True, offset=True)
BIASED_NORMS = NormStyle(eps=0.0, in_float32=True, centred="biased")
STACKED = ("gate_up_proj", "down_proj")
UNGATED = TensorNames(projections=("up_proj", "down_proj"))


class Mistral(Windowed):
    biases = UNBIASED


class Ministral3(Mistral):
    query_growth = True


class Arcee(Llama):
    activations = ("relu2",)
    gated_mlp = False
    names = UNGATED


class Nemotron(Arcee):
    renamed = {"norm_eps": "rms_norm_eps"}
    partial_rope = True
    norm_style = replace(BIASED_NORMS, offset=True)


class Apertus(Arcee):
    """Llama with norms of each head's q and k, and an activation with two numbers of each layer's own."""

    activations = ("xielu",)
    biases = ATTENTION_BIAS
    qk_norm = "heads"
    names = replace(UNGATED, branch_norms=("attention_layernorm", "feedforward_layernorm"))


class StableLm(Llama):
    use_qkv_bias: bool = False
    use_parallel_residual: bool = False

    renamed = {"layer_norm_eps": "rms_norm_eps"}
    biases = ("use_qkv_bias", False, False)
    partial_rope = True
    norm_style = BIASED_NORMS
    transformers_only = ("qk_layernorm",)

    def layers(self) -> tuple[LayerSpec, ...]:
        layers = super().layers()
        return tuple(replace(layer, norms="shared") for layer in layers) if self.use_parallel_residual else layers


class Starcoder2(Windowed):
    use_bias: bool = True

    renamed = {"norm_epsilon": "rms_norm_eps"}
    activations = ("gelu_pytorch_tanh",)
    own_activation = "ungated_gelu"
    gated_mlp = False
    biases = ("use_bias", "use_bias", "use_bias")
    norm_style = BIASED_NORMS
    names = TensorNames(projections=("c_fc", "c_proj"))


class Cohere(Llama):
    logit_scale: Factor = 0.0625

    renamed = {"layer_norm_eps": "rms_norm_eps"}
    biases = ATTENTION_BIAS
    interleaved = True
    norm_places = "shared"
    norm_style = NormStyle(eps=0.0, in_float32=True, centred="plain")
    transformers_only = ("use_qk_norm",)

    @property
    def scales(self) -> Scales:
        return Scales(logits_divisor=1 / self.logit_scale)


class Cohere2(RotatesInWindows, Cohere):
    sliding_window_pattern = 4

    @classmethod
    def through_transformers(cls, config: dict[str, Any]) -> bool:
        """A model without windows would have no rotary embedding in any layer."""
        return config.get("sliding_window", 4096) is None


class HunYuanDenseV1(Llama):
    biases = ATTENTION_BIAS
    rope_alpha = True
    qk_norm = "heads"
    names = TensorNames(head_norms=("query_layernorm", "key_layernorm"))

    def attention(self, i: int) -> Attention:
        return replace(super().attention(i), norms_last=True)


class Glm(Llama):
    eos_token_id = (151329, 151336, 151338)
    biases = ("attention_bias", False, False)
    partial_rope = True
    interleaved = True
    names = TensorNames(projections=STACKED)


class Glm4(Glm):
    norm_places = "around"
    names = TensorNames(
        branch_norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        projections=STACKED,
    )


class Exaone4(RotatesInWindows):
    biases = UNBIASED
    qk_norm = "heads"
    norm_places: ClassVar[NormPlaces] = "after"


class SeedOss(Llama):
    attention_out_bias: bool = False

    biases = ("attention_bias", "attention_out_bias", "mlp_bias")


class Ernie4_5(Llama):
    use_bias: bool = False

    biases = ("use_bias", "use_bias", "use_bias")
    interleaved = True


class Helium(Llama):
    biases = ("attention_bias", False, "mlp_bias")
    interleaved = True
    norm_style = FLOAT_NORMS


class Cwm(Alternating):
    eos_token_id = (128001, 128008, 128009)
    sliding_window_pattern = 4
    biases = (False, False, "mlp_bias")
    full_first = True


class ListedWindows(Windowed):
    use_sliding_window: bool = False

    windows = "the layers of layer_types, if switched on"

    def slides(self) -> list[bool]:
        if not (self.use_sliding_window and self.sliding_window):
            return [False] * self.num_hidden_layers
        if self.layer_types is None:
            raise ModelError("use_sliding_window is true, but layer_types does not say in which layers")
        return [kind == "sliding_attention" for kind in self.layer_types]


class Qwen2(ListedWindows):
    max_window_layers: int = 28

    windows = "some layers, if switched on"
    biases: ClassVar[Biases] = (True, False, False)

    def slides(self) -> list[bool]:
        if self.use_sliding_window and self.layer_types is None:
            return [i >= self.max_window_layers for i in range(self.num_hidden_layers)]
        return super().slides()


class Qwen3(Qwen2):
    biases = ATTENTION_BIAS
    qk_norm = "heads"


class Qwen3Vl(Llama):
    """Its rotary embedding has three positions, which are equal for text."""

    bos_token_id, eos_token_id = None, None
    biases = ATTENTION_BIAS
    qk_norm = "heads"


class Olmo2(Llama):
    biases = ATTENTION_BIAS
    qk_norm = "all"
    norm_places = "after"
    norm_style = FLOAT_NORMS


class Olmo3(RotatesByWindow, Olmo2):
    sliding_window_pattern = 4


class Granite(Llama):
    attention_multiplier: Factor | None = 1.0
    embedding_multiplier: Factor = 1.0
    residual_multiplier: Factor = 1.0
    logits_scaling: Factor = 1.0

    def attention(self, i: int) -> Attention:
        return replace(super().attention(i), scale=self.attention_multiplier)

    @property
    def scales(self) -> Scales:
        return Scales(
            embedding=self.embedding_multiplier, residual=self.residual_multiplier, logits_divisor=self.logits_scaling
        )


class GraniteSwa(RotatesByTheta, Granite):
    sliding_window_pattern = 4
    full_first = True
    sinks = True


class HyperClovaX(Granite):
    use_post_norm: bool = True

    @property
    def scales(self) -> Scales:
        """Here logits_scaling is a factor."""
        return replace(super().scales, logits_divisor=1 / self.logits_scaling)

    @property
    def tensor_names(self) -> TensorNames:
        norms = ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")
        return TensorNames(branch_norms=norms) if self.use_post_norm else self.names

    def layers(self) -> tuple[LayerSpec, ...]:
        layers = super().layers()
        return tuple(replace(layer, norms="around") for layer in layers) if self.use_post_norm else layers


class SmolLM3(ListedWindows):
    no_rope_layers: list[int] | None = None  # 0: the layer has no rotary embedding
    no_rope_layer_interval: int = 4

    def ropes(self) -> Sequence[RopeSpec | None]:
        rope, count = self.rope(), self.num_hidden_layers
        rotates = self.no_rope_layers or [(i + 1) % max(1, self.no_rope_layer_interval) for i in range(count)]
        if len(rotates) != count or not any(rotates):
            raise ModelError(f"no_rope_layers does not say of each of {count} layers whether it has one")
        return [rope if each else None for each in rotates]


class Phi3(Windowed):
    biases = UNBIASED
    partial_rope = True
    names = TensorNames(qkv=("qkv_proj",), projections=STACKED)


class NamesActivation(Llama):
    """config.json may have the activation as another field."""

    hidden_activation: str | None = None

    @property
    def activation(self) -> str:
        return self.hidden_activation or self.hidden_act


class Gemma(NamesActivation):
    activations = ("gelu_pytorch_tanh",)
    biases = ATTENTION_BIAS
    norm_style = OFFSET_NORMS

    @classmethod
    def through_transformers(cls, config: dict[str, Any]) -> bool:
        return (config.get("hidden_activation") or config.get("hidden_act")) == "gelu"

    @property
    def scales(self) -> Scales:
        return Scales(embedding=self.hidden_size**0.5)


class Gemma2(Alternating, Gemma):
    query_pre_attn_scalar: Factor = 256
    attn_logit_softcapping: Factor | None = 50.0
    final_logit_softcapping: Factor | None = 30.0

    norm_places = "around"

    @classmethod
    def through_transformers(cls, config: dict[str, Any]) -> bool:
        return False

    def attention(self, i: int) -> Attention:
        return replace(
            super().attention(i), scale=self.query_pre_attn_scalar**-0.5, soft_cap=self.attn_logit_softcapping
        )

    @property
    def scales(self) -> Scales:
        return replace(super().scales, logits_soft_cap=self.final_logit_softcapping)


class Gemma3(RotatesByWindow, Gemma2):
    sliding_window_pattern = 6
    local_theta = 1e4
    qk_norm = "heads"

    def attention(self, i: int) -> Attention:
        """As in transformers, attn_logit_softcapping has no effect."""
        return replace(super().attention(i), soft_cap=None)


class MuseGlimmer(RotatesByTheta, NamesActivation):
    """Muse Glimmer: gates of attention's result, norms of q and k by no weights, a normed embedding."""

    final_logit_softcapping: Factor = 20.0
    qk_scale_factor: Factor = 3.87
    output_multiplier: Factor = 0.19611613513818404
    post_norm_eps: float = 1e-8

    biases = ATTENTION_BIAS
    qk_norm = "unweighted"
    norm_places = "around"
    norm_style = replace(OFFSET_NORMS, offset_last=False)

    @property
    def norm(self) -> NormStyle:
        return replace(super().norm, added_eps=self.post_norm_eps)

    @property
    def scales(self) -> Scales:
        return Scales(
            norms_embedding=True,
            logits_divisor=1 / self.output_multiplier,
            logits_soft_cap=self.final_logit_softcapping,
        )

    def _counted_from_last(self) -> list[bool]:
        """Whether each layer is not one of every fourth from the last one back."""
        return [bool((self.num_hidden_layers - 1 - i) % 4) for i in range(self.num_hidden_layers)]

    def slides(self) -> list[bool]:
        return self._counted_from_last() if self.layer_types is None else super().slides()

    def usual_thetas(self, theta: float) -> list[float]:
        return [theta if each else 0.0 for each in self._counted_from_last()]

    def attention(self, i: int) -> Attention:
        plain = super().attention(i)
        scale = self.qk_scale_factor * self.head_size**-0.5
        return replace(plain, scale=scale, output_gate=OutputGate("gate_proj"))
