"""What a model is: ModelSpec, the facts that planning and running need. Free of torch; models.reading makes one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pagedcli.attention.layer import AttentionLayer, Heads
from pagedcli.core.groups import cache_groups
from pagedcli.events import CacheGroup
from pagedcli.models.gguf.quantization import GgufQuantization
from pagedcli.models.recurrent_spec import Recurrent, StateTensor
from pagedcli.models.rope import RopeSpec
from pagedcli.models.stored_quantization import Quantization


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """How a checkpoint names a mixture of experts within a layer. The defaults are Qwen's."""

    block: str = "mlp"  # "": they are parts of the layer itself
    router: str = "gate"
    preference: str = "expert_bias"  # a number per expert, see ExpertsSpec.prefers
    projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "mlp.shared_expert"
    shared_projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # two: gate and up are stacked


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts: gated MLPs of which a router picks some for each token."""

    num_experts: int
    num_per_token: int  # experts that each token goes to
    intermediate_size: int  # width of an expert
    renormalize: bool  # the picked scores are divided by their sum
    sigmoid: bool = False  # scores are sigmoids of the router's logits instead of their softmax
    prefers: bool = False  # a number per expert is added to the scores for picking alone
    least_sum: float = 0.0  # added to the sum that the picked scores are divided by
    scale: float = 1.0  # of the picked scores
    shared_intermediate_size: int | None = None  # width of an expert for every token
    gates_shared: bool = True  # that expert is weighted by a gate of its own
    has_biases: bool = False  # of the router and the experts' projections
    alternating: bool = False  # stacked in the checkpoint as [experts, in, out], in which gates and ups alternate
    dense_layers: frozenset[int] = frozenset()  # layers with an ordinary MLP
    beside_mlp: bool = False  # each has an ordinary MLP, too, and the router norms the residual by weights of its own
    names: ExpertNames = ExpertNames()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """How a checkpoint names the tensors of a decoder. The defaults are Llama's."""

    body: str = "model"  # what the names of all but the output layer begin with
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    branch_norms: tuple[str, ...] | None = None  # of attention, then of the MLP; None: as layer_norms says
    attention: str = "self_attn"
    attention_out: str = "o_proj"
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    recurrent: str = "linear_attn"
    mlp: str = "mlp"
    projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # two: gate and up are stacked
    # of each layer the numbers of its attention or state and of its MLP, which the checkpoint calls layers; None: it
    # has no MLP. Empty: both have the layer's number
    branches: tuple[tuple[int, int | None], ...] = ()
    skipped: tuple[str, ...] = ()  # tensors whose names begin so are not of the language model


LayerKind = Literal["attention", "recurrent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The facts of a model that planning and running need. Read once from its folder, never changed."""

    model_type: str  # family as transformers names it, e.g. "qwen3"
    architecture: str  # class name in config.json, e.g. "Qwen3ForCausalLM"
    vocab_size: int  # V, rows of the embedding table
    hidden_size: int  # E, width of the residual stream
    intermediate_size: int  # width of the gated MLP
    num_layers: int  # L
    num_heads: int  # H, query heads
    num_kv_heads: int  # G, key/value heads; divides H
    head_dim: int  # D; need not be hidden_size / num_heads
    rms_norm_eps: float  # added to the mean square
    rope: RopeSpec | None  # None: the fallback computes positions itself
    tie_word_embeddings: bool  # lm_head is the embedding table
    qkv_bias: bool  # this and the next three describe the native decoder; all False for the fallback
    attention_out_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over head_dim of q and k, before rope
    hidden_act: str  # activation of the MLP's gate
    max_position_embeddings: int  # tokens; the length the model was made for, or that yarn stretches it to
    eos_token_ids: tuple[int, ...]  # those of generation_config.json first, then those only config.json has
    bos_token_id: int | None
    dtype: str  # dtype of the stored weights, e.g. "bfloat16"
    windows: tuple[int | None, ...] = ()  # of each layer: tokens a query sees, itself included; empty: all see all
    attention_chunk: int | None = None  # tokens; some layer attends only within chunks of so many
    layer_heads: tuple[Heads, ...] = ()  # G and D of each layer, where layers differ; empty: the same in all
    kv_sources: tuple[int | None, ...] = ()  # of each layer: an earlier one whose K and V it reads; empty: none does
    # What follows describes the native decoder, and differs from Llama where it is set.
    norms_last: bool = False  # the norms of q and k come after the rotary embedding
    qk_norm_all: bool = False  # RMSNorm over all heads of q together, and of k
    # where attention and MLP are normed; shared: one norm is before both, whose results are added together
    layer_norms: Literal["before", "after", "around", "shared"] = "before"
    centred_norms: Literal["no", "plain", "biased"] = "no"  # norms of layers also subtract the mean, and may add a bias
    float_norms: bool = False  # a norm multiplies by its weight before it rounds to the model's dtype
    norm_offset: bool = False  # the weights of norms are stored less 1
    query_scale: float | None = None  # of attention scores; None: 1/sqrt(head_dim)
    sinks: bool = False  # each query head has a learned logit that joins its softmax, see AttentionBackend.attend
    soft_cap: float | None = None  # attention scores become soft_cap * tanh(score / soft_cap)
    logits_soft_cap: float | None = None  # logits become soft_cap * tanh(logits / soft_cap)
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what each attention and MLP adds
    logits_divisor: float = 1.0
    layer_ropes: tuple[RopeSpec | None, ...] = ()  # of each layer, None: no rotary embedding; empty: `rope` in all
    fused_projections: bool = False  # the checkpoint stacks q, k, v and gate, up
    gated_mlp: bool = True  # False: MLPs are down(activation(up(x)))
    experts: ExpertsSpec | None = None  # in place of the MLP
    recurrent: Recurrent | None = None  # in place of attention, in some layers
    layer_kinds: tuple[LayerKind, ...] = ()  # of each layer; empty: all attend
    keys_as_values: frozenset[int] = frozenset()  # layers without v_proj: K, before it is normed and rotated, is V
    value_norm: bool = False  # each head of V is normed, by no weights
    layer_widths: tuple[int, ...] = ()  # of each layer's gated MLP; empty: intermediate_size in all
    layer_inputs: int | None = None  # width of what each layer gets for a token from a second embedding table
    layer_vocab: int = 0  # rows of that table
    layer_scalars: bool = False  # after each layer the residual is multiplied by a number
    output_gate: bool = False  # attention is multiplied by the sigmoid of a part of q_proj
    names: TensorNames = TensorNames()
    quantization: Quantization | GgufQuantization | None = (
        None  # how the checkpoint's linear layers are stored; None: as numbers
    )
    is_fallback: bool = False  # transformers runs the layers, not our decoder

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """What each layer that attends asks of the attention backend. Of the fallback, as far as its config says."""
        nothing = (None,) * (self.num_layers - len(self.recurrent_layers))
        facts = zip(self.windows or nothing, self.layer_heads or nothing, self.kv_sources or nothing, strict=True)
        return tuple(
            AttentionLayer(
                scale=self.query_scale or (heads[1] if heads is not None else self.head_dim) ** -0.5,
                window=window,
                soft_cap=self.soft_cap,
                sinks=self.sinks,
                heads=heads,
                source=source,
            )
            for window, heads, source in facts
        )

    def heads_of(self, layer: int) -> Heads:
        """Key/value heads of a layer and their size."""
        return self.layer_heads[layer] if self.layer_heads else (self.num_kv_heads, self.head_dim)

    def keeps(self, layer: int) -> bool:
        """Whether a layer has K and V of its own."""
        return not self.kv_sources or self.kv_sources[layer] is None

    @property
    def last_keeper(self) -> int:
        """The last layer with K and V of its own or a state. In those after it no token looks at another's residual, so
        that a prompt's tokens without logits need not run through them."""
        return max(filter(self.keeps, range(self.num_layers)))

    def shape_of(self, layer: int) -> tuple[object, ...]:
        """What decides the shapes of a layer's weights, where layers differ."""
        attention = self.heads_of(layer), self.keeps(layer), layer in self.keys_as_values
        return *attention, self.has_mlp(layer), self.width_of(layer)

    def width_of(self, layer: int) -> int:
        """Of the gated MLP of a layer."""
        return self.layer_widths[layer] if self.layer_widths else self.intermediate_size

    @property
    def widest_heads(self) -> Heads:
        """Key/value heads of the layer with most elements of q, k and v, and their size."""
        own = self.num_kv_heads, self.head_dim
        return max(self.layer_heads, key=lambda heads: (self.num_heads + 2 * heads[0]) * heads[1], default=own)

    @property
    def widest_qkv(self) -> int:
        """The most elements of q, its gates, k and v that a layer makes of a token."""
        num_kv_heads, head_dim = self.widest_heads
        return ((2 if self.output_gate else 1) * self.num_heads + 2 * num_kv_heads) * head_dim

    @property
    def widest_mlp(self) -> int:
        """The largest of the layers' widths."""
        return max(self.layer_widths, default=self.intermediate_size)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """The layers that keep a state instead of K and V."""
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind == "recurrent")

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP, or experts in place of it."""
        return not self.names.branches or self.names.branches[layer][1] is not None

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """What each recurrent layer keeps per sequence; empty: the model has none."""
        return self.recurrent.state if self.recurrent is not None else ()

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of a sequence's state in all its layers; itemsize is that of the activations. 0: it has none."""
        return len(self.recurrent_layers) * sum(tensor.num_bytes(itemsize) for tensor in self.state)

    def within(self, max_model_len: int) -> "ModelSpec":
        """The spec for sequences of at most so many tokens: without windows that hide none of them."""
        windows = [None if window is None or window >= max_model_len else window for window in self.windows]
        return replace(self, windows=tuple(windows) if any(windows) else ())


def layer_groups(layers: Sequence[AttentionLayer]) -> tuple[CacheGroup, ...]:
    """The groups of layers that share blocks. Layers that read another's K and V are in none."""
    windows, heads = [layer.window for layer in layers], [layer.heads for layer in layers]
    return cache_groups(windows, heads, [layer.source is None for layer in layers])
