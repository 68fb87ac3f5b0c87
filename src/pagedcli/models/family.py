"""What config.json says of a decoder, as Llama has it: fields with their defaults, and the layers that they lead to.

A family is a subclass that reads as its difference from another one, as in transformers' modular files. An assignment
gives a field another default. Errors do not name the file; models.reading adds it. Free of torch.
"""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, dataclass_transform

from pagedcli.errors import ModelError
from pagedcli.models.checkpoint_files import EosIds, Size
from pagedcli.models.mixers.attention import Attention
from pagedcli.models.mixers.recurrent import MatrixMixer
from pagedcli.models.mlps import ExpertNames, Experts, Mlp
from pagedcli.models.rope import RopeSpec, read_rope_spec
from pagedcli.models.spec import LayerInputs, LayerSpec, Mixer, NormPlaces, Recurrent, Scales
from pagedcli.models.tensors import LLAMA_NAMES, NormStyle, TensorNames

ATTENDS = frozenset({"full_attention", "attention"})  # entries of layer_types, new and old name
RECURS = frozenset({"linear_attention", "mamba", "conv"})
# whether q, k and v, attention's output and MLPs have biases, or the fields that say so
Biases = tuple[bool | str, bool | str, bool | str]
UNBIASED: Biases = (False, False, False)
ATTENTION_BIAS: Biases = ("attention_bias", "attention_bias", False)
QkNorm = Literal["none", "heads", "unweighted", "all"]
_ROPE_FIELDS = (
    *("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"),
)
_MOST_EXPERTS = 2**12


@dataclass_transform(kw_only_default=True)
@dataclass(kw_only=True)
class Llama:
    """Llama. config.json omits values that equal the defaults of transformers' config classes; where those differ from
    Llama's and are not computed, families/defaults.json has them."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None  # None: as many as query heads
    head_dim: Size | None = None  # None: hidden_size / num_attention_heads
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    max_position_embeddings: Size = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    layer_types: list[str] | None = None
    bos_token_id: int | None = 1
    eos_token_id: EosIds = 2
    dtype: str | None = None
    torch_dtype: str | None = None
    # models.rope checks their types
    rope_parameters: Any = None
    rope_scaling: Any = None
    rope_theta: Any = None
    partial_rotary_factor: Any = None
    original_max_position_embeddings: Any = None

    renamed: ClassVar[dict[str, str]] = {}  # fields of config.json -> what they are called here
    unsupported: ClassVar[dict[str, tuple[object, ...]]] = {  # fields of config.json -> their supported values
        "clip_qkv": (),
        "use_bidirectional_attention": (),
    }
    transformers_only: ClassVar[tuple[str, ...]] = ()  # fields of config.json that, if set, only transformers supports
    activations: ClassVar[tuple[str, ...]] = ("silu", "swish")  # supported ones
    own_activation: ClassVar[str | None] = None  # its name here; None: that of config.json
    known_layer_types: ClassVar[frozenset[str]] = frozenset()  # entries that layer_types may have; empty: any
    windows: ClassVar[str] = "none"  # the layers that have one, in words
    biases: ClassVar[Biases] = ("attention_bias", "attention_bias", "mlp_bias")
    qk_norm: ClassVar[QkNorm] = "none"
    sinks: ClassVar[bool] = False  # each query head has a learned logit that joins its softmax
    norm_places: ClassVar[NormPlaces] = "before"
    norm_style: ClassVar[NormStyle] = NormStyle(eps=0.0)  # its eps is that of the model
    gated_mlp: ClassVar[bool] = True
    has_layer_scalars: ClassVar[bool] = False
    names: ClassVar[TensorNames] = LLAMA_NAMES
    partial_rope: ClassVar[bool] = False  # partial_rotary_factor is read
    rope_alpha: ClassVar[bool] = False  # alpha of a dynamic rotary embedding is read, which then depends on no length
    interleaved: ClassVar[bool] = False  # rotary embedding turns the pairs (2i, 2i + 1)
    query_growth: ClassVar[bool] = False  # llama_4_scaling_beta is read

    def __init_subclass__(cls) -> None:
        """Makes a dataclass of a family. Its defaults are found as any attribute is; dataclasses alone would prefer
        those of the bases' bases, and would miss assignments without a type."""
        own, every = inspect.get_annotations(cls), dict[str, Any]()
        for base in reversed(cls.__mro__):
            every |= inspect.get_annotations(base)
        inherited = {name: getattr(cls, name) for name in every if name not in vars(cls) and hasattr(cls, name)}
        for name, default in inherited.items():
            setattr(cls, name, default)
        cls.__annotations__ = every
        dataclass(kw_only=True)(cls)
        cls.__annotations__ = own
        for name in inherited:
            delattr(cls, name)

    @classmethod
    def through_transformers(cls, config: dict[str, Any]) -> bool:
        """Whether config.json asks for what the native decoders have not and transformers has."""
        return any(config.get(name) for name in cls.transformers_only)

    @property
    def num_kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def activation(self) -> str:
        return self.hidden_act

    @property
    def mlp_width(self) -> int:
        return self.intermediate_size

    @property
    def tensor_names(self) -> TensorNames:
        return self.names

    @property
    def norm(self) -> NormStyle:
        return replace(self.norm_style, eps=self.rms_norm_eps)

    @property
    def scales(self) -> Scales:
        return Scales()

    @property
    def layer_inputs(self) -> LayerInputs | None:
        return None

    def check(self) -> None:
        """Raises: ModelError for sizes that do not go together, and layers that are not supported."""
        heads, groups, kinds = self.num_attention_heads, self.num_kv_heads, self.layer_types
        if kinds is not None and len(kinds) != self.num_hidden_layers:
            raise ModelError(f"layer_types has {len(kinds)} entries, but there are {self.num_hidden_layers} layers")
        if self.known_layer_types and kinds is not None:
            if unknown := sorted(set(kinds) - self.known_layer_types):
                raise ModelError(f"layer_types lists {unknown[0]!r}, which is not supported")
            if not ATTENDS & set(kinds):
                raise ModelError("no layer of layer_types attends, which is not supported")
        if heads % groups:
            raise ModelError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}")
        if self.head_size < 1:
            raise ModelError(f"hidden_size {self.hidden_size} has no element for each of the attention heads")
        if self.head_size % 2:
            raise ModelError(f"head_dim {self.head_size} is odd, but rotary embedding turns pairs of elements")

    def layers(self) -> tuple[LayerSpec, ...]:
        ropes, windows = self.ropes(), self.window_sizes()
        found = []
        for i in range(self.num_hidden_layers):
            layer = LayerSpec(
                mixer=self.mixer(i),
                mlp=self.mlp(i),
                norms=self.norm_places,
                number=i,
                has_scalar=self.has_layer_scalars,
            )
            if layer.attention is not None:
                rope, size = ropes[i], layer.attention.head_dim
                if rope is not None and rope.partial < 1 and rope.rotated(size) % 2:
                    raise ModelError(
                        f"partial_rotary_factor {rope.partial} rotates {rope.rotated(size)} of {size} elements of a"
                        f" head, but rotary embedding turns pairs of elements"
                    )
                layer = replace(layer, mixer=replace(layer.attention, rope=rope, window=windows[i]))
            found.append(layer)
        return tuple(found)

    def mixer(self, i: int) -> Mixer:
        """What mixes the tokens of a layer."""
        return self.attention(i)

    def attention(self, i: int) -> Attention:
        """The attention of a layer, without its rotary embedding and window."""
        qkv_bias, out_bias, _ = self._has_biases
        return Attention(
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            qk_norm=self.qk_norm,
            sinks=self.sinks,
        )

    def mlp(self, i: int) -> Mlp | Experts | None:
        """What follows the mixer of a layer."""
        activation = self.own_activation or self.activation
        return Mlp(width=self.mlp_width, activation=activation, gated=self.gated_mlp, bias=self._has_biases[2])

    @property
    def _has_biases(self) -> list[bool]:
        return [getattr(self, each) if isinstance(each, str) else each for each in self.biases]

    def slides(self) -> list[bool]:
        """Whether each layer has a sliding window, if the model has any."""
        return [False] * self.num_hidden_layers

    def window_sizes(self) -> Sequence[int | None]:
        """The window of each layer in tokens."""
        return [None] * self.num_hidden_layers

    def rope(self) -> RopeSpec:
        """The rotary embedding, where layers do not differ in it."""
        said = {name: getattr(self, name) for name in _ROPE_FIELDS}
        may = {"may_be_partial": self.partial_rope, "may_have_alpha": self.rope_alpha}
        rope = read_rope_spec(said, self.max_position_embeddings, **may)
        growth = rope.query_growth if self.query_growth else 0.0
        return replace(rope, interleaved=self.interleaved, query_growth=growth)

    def ropes(self) -> Sequence[RopeSpec | None]:
        """The rotary embedding of each layer."""
        return [self.rope()] * self.num_hidden_layers


class Windowed(Llama):
    """Every layer has a sliding window."""

    sliding_window: int | None = None

    windows = "every layer, if config.json names one"

    def slides(self) -> list[bool]:
        return [True] * self.num_hidden_layers

    def window_sizes(self) -> Sequence[int | None]:
        window, slides = self.sliding_window, self.slides()
        if window is not None and window < 1 and any(slides):
            raise ModelError(f"sliding_window is {window}, but must be at least 1")
        return [window if each else None for each in slides]


class Alternating(Windowed):
    """Layers with a window alternate with full attention."""

    sliding_window = 4096
    # one full-attention layer in each group of this size; or a letter for each layer of a group, L where it slides
    sliding_window_pattern: int | str | None = 2

    windows = "alternating layers"
    full_first: ClassVar[bool] = False  # the first layer of a group, not the last, has no window

    def slides(self) -> list[bool]:
        layers, pattern = range(self.num_hidden_layers), self.sliding_window_pattern
        if self.layer_types is not None:
            return [kind == "sliding_attention" for kind in self.layer_types]
        if isinstance(pattern, str) and pattern:
            return [pattern[i % len(pattern)] == "L" and i != layers[-1] for i in layers]
        return [bool((i + (0 if self.full_first else 1)) % max(1, int(pattern or 1))) for i in layers]


class RotatesInWindows(Alternating):
    """Only layers with a window have a rotary embedding, if there are any."""

    def ropes(self) -> Sequence[RopeSpec | None]:
        rope = self.rope()
        return [rope if each or self.sliding_window is None else None for each in self.slides()]


class RotatesByWindow(Alternating):
    """Layers with a window have another rotary embedding."""

    rope_local_base_freq: Any = None
    local_theta: ClassVar[float | None] = None  # rope theta of layers with a window; None: that of full attention

    def ropes(self) -> Sequence[RopeSpec | None]:
        nested, theta = _part(self.rope_parameters, "rope_parameters"), self.rope_theta or 1e6
        local_theta = self.rope_local_base_freq or self.local_theta or theta
        full = {"rope_theta": theta, **_part(self.rope_scaling, "rope_scaling")}
        full |= _part(nested.get("full_attention"), "full_attention")
        sliding = {"rope_theta": local_theta, **_part(nested.get("sliding_attention"), "sliding_attention")}
        positions, partial = self.max_position_embeddings, self.partial_rope
        forms = ({"rope_parameters": form} for form in (full, sliding))
        of_all, local = (read_rope_spec(form, positions, may_be_partial=partial) for form in forms)
        return [local if each else of_all for each in self.slides()]


def _part(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict | None):
        raise ModelError(f"{name} is {value!r}, not an object")
    return value or {}


class RotatesByTheta(Alternating):
    """A list has the theta of each layer, 0 for none."""

    layer_rope_theta: list[float] | None = None

    def usual_thetas(self, theta: float) -> list[float]:
        """The list where config.json has none."""
        return [theta] * self.num_hidden_layers

    def ropes(self) -> Sequence[RopeSpec | None]:
        rope, count = self.rope(), self.num_hidden_layers
        thetas = self.layer_rope_theta or self.usual_thetas(rope.theta)
        if len(thetas) != count or not all(0 <= theta < math.inf for theta in thetas):
            raise ModelError(f"layer_rope_theta has no theta, or 0, for each of {count} layers")
        return [replace(rope, theta=theta) if theta else None for theta in thetas]


class Mixture(Llama):
    """Experts in place of MLPs."""

    num_experts: int | None
    num_experts_per_tok: int | None
    moe_intermediate_size: Size | None = None
    norm_topk_prob: bool = False

    renamed = {"num_local_experts": "num_experts"}
    expert_names: ClassVar[ExpertNames] = ExpertNames()
    routing: ClassVar[dict[str, Any]] = {}  # fields of Experts that are the same in all models
    shared_size: ClassVar[str | None] = None  # the field with the width of the expert for every token

    @property
    def shared_width(self) -> int:
        """Width of the expert for every token; 0: there is none."""
        return 0 if self.shared_size is None else getattr(self, self.shared_size) or 0

    def check(self) -> None:
        super().check()
        if all(map(self.is_dense, range(self.num_hidden_layers))):
            return
        if not 1 <= (self.num_experts_per_tok or 0) <= (self.num_experts or 0) <= _MOST_EXPERTS:
            raise ModelError(
                f"num_experts_per_tok is {self.num_experts_per_tok} and num_experts {self.num_experts}, allowed: 1 to "
                f"num_experts, and up to {_MOST_EXPERTS}"
            )

    def is_dense(self, i: int) -> bool:
        """Whether a layer has an ordinary MLP."""
        return False

    def mlp(self, i: int) -> Mlp | Experts | None:
        return super().mlp(i) if self.is_dense(i) else self.experts()

    def experts(self) -> Experts:
        width = self.moe_intermediate_size or self.intermediate_size
        each = Mlp(width=width, activation=self.own_activation or self.activation, gated=self.gated_mlp)
        return Experts(
            num_experts=self.num_experts or 0,
            num_per_token=self.num_experts_per_tok or 1,
            each=each,
            shared=replace(each, width=self.shared_width) if self.shared_width else None,
            names=self.expert_names,
            **{"renormalize": self.norm_topk_prob, **self.routing},
        )


class Hybrid(Llama, ABC):
    """Some layers keep a state of fixed size instead of K and V."""

    known_layer_types = ATTENDS | RECURS

    @abstractmethod
    def attending(self) -> Sequence[int]:
        """The layers that attend, where layer_types does not say so."""

    @abstractmethod
    def recurrent(self) -> Recurrent:
        """The mixer of the other layers."""

    def mixer(self, i: int) -> Mixer:
        attends = i in self.attending() if self.layer_types is None else self.layer_types[i] not in RECURS
        return self.attention(i) if attends else self.recurrent()

    def check(self) -> None:
        super().check()
        mixer = self.recurrent()
        sizes, heads, groups = [size for tensor in mixer.state for size in tensor.shape], 1, 1
        if isinstance(mixer, MatrixMixer):
            heads, groups = mixer.num_heads, mixer.num_key_heads
        if not 2 <= mixer.kernel <= 8 or min(sizes) < 1 or groups < 1 or heads % groups:
            raise ModelError(
                f"a convolution over {mixer.kernel} inputs, {heads} heads and {groups} groups of them are not "
                f"supported (2 to 8 inputs, whole groups)"
            )
