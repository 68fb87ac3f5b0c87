"""What a model is: its layers as records, and the facts of the whole that planning and running need. Free of torch;
models.reading makes a ModelSpec."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from msgspec import structs

from pagedcli.attention.layer import AttentionLayer
from pagedcli.core.groups import cache_groups
from pagedcli.events import CacheGroup
from pagedcli.models.formats import WeightFormat
from pagedcli.models.mixers.attention import Attention
from pagedcli.models.mixers.recurrent import GatedDelta, KimiDelta, Mamba2, RecurrentMixer, ShortConv, StateTensor
from pagedcli.models.mlps import Experts, Mlp
from pagedcli.models.rope import RopeSpec
from pagedcli.models.tensors import LLAMA_NAMES, NormStyle, TensorNames

Recurrent = GatedDelta | KimiDelta | Mamba2 | ShortConv
Mixer = Attention | Recurrent  # LatentAttention is an Attention
# Places of the norms of mixer and MLP; shared: one norm is before both, whose results are added together
NormPlaces = Literal["before", "after", "around", "shared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer of a decoder."""

    mixer: Mixer
    mlp: Mlp | Experts | None
    beside: Mamba2 | None = None  # sees what the mixer sees, and is added to it
    norms: NormPlaces = "before"
    number: int  # its number in the names of the checkpoint
    mlp_number: int | None = None  # number of its MLP, where checkpoints call that a layer, too; None: the same
    has_scalar: bool = False  # whether a stored number multiplies the residual after the layer

    @property
    def attention(self) -> Attention | None:
        """Its mixer, if that attends."""
        match self.mixer:
            case Attention() as mixer:
                return mixer
        return None

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """What mixes its tokens."""
        return (self.mixer,) if self.beside is None else (self.mixer, self.beside)

    @property
    def recurrent(self) -> RecurrentMixer | None:
        """Its mixer with a state of fixed size, if it has one."""
        return next((each for each in self.mixers if isinstance(each, RecurrentMixer)), None)

    @property
    def shape(self) -> tuple[object, ...]:
        """What decides the shapes of its weights: equal for layers with equal ones."""
        return self.mixer.shape, self.beside, self.mlp

    @property
    def mlps(self) -> tuple[Mlp, ...]:
        """The MLPs that every token passes through, without shared experts."""
        mlp = self.mlp.beside if isinstance(self.mlp, Experts) else self.mlp
        return () if mlp is None else (mlp,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Factors on the way through a model."""

    embedding: float = 1.0
    norms_embedding: bool = False  # rows of the embedding are normed by no weights
    residual: float = 1.0  # factor of the results of mixers and MLPs
    logits_divisor: float = 1.0
    logits_soft_cap: float | None = None  # logits become soft_cap * tanh(logits / soft_cap)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """A second embedding table, with a row of inputs for each layer."""

    size: int  # width of a layer's input
    vocab_size: int  # rows of the table
    activation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The facts of a model that planning and running need. Read once from its folder, never changed."""

    model_type: str  # family as transformers names it, e.g. "qwen3"
    architecture: str  # class name in config.json, e.g. "Qwen3ForCausalLM"
    vocab_size: int  # V, rows of the embedding table
    hidden_size: int  # E, width of the residual stream
    intermediate_size: int  # width of an MLP, as config.json says even where no layer has an ordinary one
    layers: tuple[LayerSpec, ...]
    norm: NormStyle
    scales: Scales = Scales()
    tie_word_embeddings: bool  # lm_head is the embedding table
    head_bias: bool = False  # lm_head has a bias
    has_head: bool = True  # False: the checkpoint lacks lm_head, which then counts as tied, and makes vectors alone
    max_position_embeddings: int  # tokens; the length the model was made for, or that yarn stretches it to
    eos_token_ids: tuple[int, ...]  # those of generation_config.json first, then those only config.json has
    bos_token_id: int | None
    dtype: str  # dtype of the stored weights, e.g. "bfloat16"
    attention_chunk: int | None = None  # tokens; some layer attends only within chunks of so many
    layer_inputs: LayerInputs | None = None
    names: TensorNames = LLAMA_NAMES
    widened: str | None = None  # how the files store weights that become plain numbers while they are read
    quantization: WeightFormat | None = None  # how linear layers are stored; None: plain numbers
    is_fallback: bool = False  # transformers runs the layers, not our decoder

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The mixers that attend."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def num_heads(self) -> int:
        """Query heads of the first layer that attends."""
        return self.attentions[0].num_heads

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads of the first layer that attends."""
        return self.attentions[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        """Size of the heads of the first layer that attends."""
        return self.attentions[0].head_dim

    @property
    def experts(self) -> Experts | None:
        """The experts of the first layer with some, which all others have as well; None: there are none."""
        return next((layer.mlp for layer in self.layers if isinstance(layer.mlp, Experts)), None)

    @property
    def rope(self) -> RopeSpec | None:
        """The rotary embedding of the last layer that has one."""
        return next((mixer.rope for mixer in reversed(self.attentions) if mixer.rope is not None), None)

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """What each layer that attends asks of the attention backend. Of the fallback, as far as its config says."""
        names_heads = len({mixer.heads for mixer in self.attentions}) > 1
        return tuple(mixer.layer(names_heads=names_heads) for mixer in self.attentions)

    @property
    def last_keeper(self) -> int:
        """The last layer with K and V of its own or a state. In those after it no token looks at another's residual, so
        that a prompt's tokens without logits need not run through them."""
        return max(i for i, layer in enumerate(self.layers) if layer.mixer.keeps)

    @property
    def widest_attention(self) -> Attention:
        """The attention with most elements of q, k and v."""
        return max(self.attentions, key=lambda mixer: mixer.qkv_size)

    @property
    def widest_mlp(self) -> int:
        """The largest width of an MLP that every token passes through, without shared experts."""
        return max((mlp.width for layer in self.layers for mlp in layer.mlps), default=self.intermediate_size)

    @property
    def inputs_width(self) -> int:
        """Elements of a token's inputs to all layers together; 0: they have none."""
        return 0 if self.layer_inputs is None else self.num_layers * self.layer_inputs.size

    @property
    def activations(self) -> list[str]:
        """The activations of its MLPs and experts, each once."""
        experts = [layer.mlp.each for layer in self.layers if isinstance(layer.mlp, Experts)]
        return list(dict.fromkeys(mlp.activation for mlp in chain(experts, *(layer.mlps for layer in self.layers))))

    @property
    def states(self) -> tuple[tuple[StateTensor, ...], ...]:
        """What each layer with a state of fixed size keeps per sequence."""
        return tuple(layer.recurrent.state for layer in self.layers if layer.recurrent is not None)

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of a sequence's state in all its layers; itemsize is that of the activations. 0: it has none."""
        return sum(tensor.num_bytes(itemsize) for state in self.states for tensor in state)

    def with_mixers(self, change: Callable[[Attention], Attention]) -> "ModelSpec":
        """The spec with other mixers in the layers that attend."""

        def changed(layer: LayerSpec) -> LayerSpec:
            return layer if layer.attention is None else replace(layer, mixer=change(layer.attention))

        return replace(self, layers=tuple(map(changed, self.layers)))

    def within(self, max_model_len: int) -> "ModelSpec":
        """The spec for sequences up to this length: without windows that hide none of their tokens."""

        def seen(mixer: Attention) -> Attention:
            hides = mixer.window is not None and mixer.window < max_model_len
            return mixer if hides else replace(mixer, window=None)

        return self.with_mixers(seen)


def layer_groups(layers: Sequence[AttentionLayer]) -> tuple[CacheGroup, ...]:
    """The groups of layers that share blocks. Layers that read another's K and V are in none."""
    windows, heads = [layer.window for layer in layers], [layer.heads and layer.heads.kept for layer in layers]
    groups = cache_groups(windows, heads, [layer.source is None for layer in layers])
    return tuple(structs.replace(group, value_dim=layers[group.layers[0]].value_dim) for group in groups)
