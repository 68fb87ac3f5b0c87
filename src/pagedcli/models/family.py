"""What may be said of a native family: the fields of its config.json, and how it differs from Llama. Free of torch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from pagedcli.models.config_json import Factor, Ids, Size

OptionalInt = int | msgspec.UnsetType | None  # null and absent differ
OptionalSize = Size | msgspec.UnsetType | None
StepLimit = float | dict[str, str]
ATTENDS = frozenset({"full_attention", "attention"})  # entries of layer_types, new and old name
RECURS = frozenset({"linear_attention", "mamba", "conv"})


class FamilyConfig(msgspec.Struct):
    """The fields of config.json that the native families use. UNSET by default if the file may omit them."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: OptionalSize = msgspec.UNSET
    head_dim: OptionalSize = msgspec.UNSET
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    max_position_embeddings: Size | None = None
    use_sliding_window: bool = False
    sliding_window: OptionalInt = msgspec.UNSET
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    eos_token_id: Ids | msgspec.UnsetType = msgspec.UNSET
    bos_token_id: OptionalInt = msgspec.UNSET
    dtype: str | None = None
    torch_dtype: str | None = None
    hidden_activation: str | None = None
    attention_multiplier: Factor | None = 1.0
    embedding_multiplier: Factor = 1.0
    residual_multiplier: Factor = 1.0
    logits_scaling: Factor = 1.0
    no_rope_layers: list[int] | None = None  # 0: the layer has no rotary embedding
    no_rope_layer_interval: int = 4
    layer_rope_theta: list[float] | None = None  # 0: the layer has no rotary embedding
    attn_logit_softcapping: Factor | None = None
    final_logit_softcapping: Factor | None = None
    query_pre_attn_scalar: Factor = 256
    # one full-attention layer in each group of this size; or a letter for each layer of a group, L where it slides
    sliding_window_pattern: int | str | None = 2
    qkv_bias: bool = False
    attention_out_bias: bool = False
    use_bias: bool = False  # every linear layer has one
    use_post_norm: bool = True
    num_experts: int | None = 0
    num_local_experts: int | None = None
    num_experts_per_tok: int | None = 1
    moe_intermediate_size: Size | None = None
    shared_expert_intermediate_size: Size | None = None
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    mlp_layer_types: list[str] | None = None
    full_attention_interval: int = 4  # one layer in each group of this size attends, where layer_types is absent
    linear_conv_kernel_dim: Size = 4
    linear_key_head_dim: Size = 128
    linear_value_head_dim: Size = 128
    linear_num_key_heads: Size = 16
    linear_num_value_heads: Size = 32
    conv_L_cache: Size = 3
    conv_bias: bool = False
    full_attn_idxs: list[int] | None = None
    block_auto_adjust_ff_dim: bool = True
    block_ffn_dim_multiplier: float | None = 1.0
    block_multiple_of: Size = 256
    attn_layer_indices: list[int] | None = None
    mamba_n_heads: Size = 128
    mamba_d_head: Size | str = "auto"  # auto: all heads together are mamba_expand * hidden_size wide
    mamba_n_groups: Size = 1
    mamba_d_state: Size = 256
    mamba_d_conv: Size = 4
    mamba_expand: Size = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_min: float = 0.001
    time_step_limit: tuple[StepLimit, StepLimit] | None = None  # {"__float__": "Infinity"} is transformers' infinity
    shared_intermediate_size: int = 1024
    position_embedding_type: str | None = None
    num_dense_layers: int = 2
    use_expert_bias: bool = True
    routed_scaling_factor: float = 1.0
    logit_scale: Factor = 1.0
    use_parallel_residual: bool = False
    use_qk_norm: bool = False
    n_shared_experts: int | None = 0
    moe_layer_start_index: int = 1
    moe_layer_end_index: int = -1  # the last layer
    moe_layer_interval: int = 1
    global_head_dim: Size = 512
    num_global_key_value_heads: Size | None = None
    per_layer_config: dict[str, dict[str, Size]] | None = None  # number of a layer -> its head_dim, num_key_value_heads
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: int = 0
    vocab_size_per_layer_input: Size | None = None
    enable_moe_block: bool = False

    def slides(self, *, full_first: bool = False, full_last: bool = False) -> list[bool]:
        """Whether each layer has a window, in a model in which windows alternate with full attention."""
        layers, pattern = range(self.num_hidden_layers), self.sliding_window_pattern
        if self.layer_types is not None:
            sliding = [kind == "sliding_attention" for kind in self.layer_types]
        elif isinstance(pattern, str) and pattern:
            sliding = [pattern[i % len(pattern)] == "L" and i != layers[-1] for i in layers]
        else:
            sliding = [bool((i + (0 if full_first else 1)) % max(1, int(pattern or 1))) for i in layers]
        return [*sliding[:-1], False] if full_last else sliding


@dataclass(frozen=True, slots=True)
class Family:
    """How a native family differs from Llama. The defaults are those of its transformers config class, because
    config.json omits values that equal them."""

    architecture: str
    num_kv_heads: int | None  # None: as many as query heads
    head_dim: int | None  # None: hidden_size / num_heads
    max_position_embeddings: int
    special_ids: tuple[int | None, int | None]  # bos, eos
    sliding: Literal["never", "all", "by layer", "as listed", "alternating", "alternating, full first", "if used"]
    qkv_bias: bool | None = None  # None: attention_bias of config.json
    out_bias: bool | None = None  # None: attention_bias of config.json
    mlp_bias: bool | None = False  # None: mlp_bias of config.json
    activations: tuple[str, ...] = ("silu", "swish")  # accepted values of hidden_act
    # which layers have which rotary embedding: all the same one; none in those where no_rope_layers is 0; one for full
    # attention and one for windows; only in layers with windows, if the model has any; one of each theta in
    # layer_rope_theta; none unless position_embedding_type is rope
    ropes: Literal["same", "as listed", "by window", "in windows", "by theta", "if named"] = "same"
    local_theta: float | None = None  # theta of layers with a window, where ropes differ; None: that of full attention
    partial_rope: bool = False  # partial_rotary_factor is read
    rope_alpha: bool = False  # alpha of a dynamic rotary embedding is read, which then depends on no length
    neighbours: bool = False  # rotary embedding turns the pairs (2i, 2i + 1)
    query_growth: bool = False  # llama_4_scaling_beta is read
    defaults: dict[str, Any] = field(default_factory=dict)  # defaults of other fields of config.json
    traits: Callable[["FamilyConfig"], dict[str, Any]] = lambda _: {}  # fields of ModelSpec that differ from Llama's
    layer_types: frozenset[str] = frozenset()  # accepted entries of layer_types; empty: it is not read
    full_last: bool = False  # the last layer has no window, whatever the others have
    bidirectional: tuple[str, ...] = ()  # values of use_bidirectional_attention that leave text causal
    # the language model is a part, `text_config`, of one that sees images: its tensors lie in `model.language_model`.
    # If it is of another native family, that one's entry describes it
    nested: bool = False
    renamed: dict[str, str] = field(default_factory=dict)  # fields of config.json -> what others call them
    # whether config.json asks for what the native decoders have not and transformers has
    through_transformers: Callable[[dict[str, Any]], bool] = lambda _: False
    layer_letters: dict[str, str] = field(default_factory=dict)  # hybrid_override_pattern's letter -> layer_types
