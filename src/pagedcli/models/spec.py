"""What a model is: ModelSpec, the facts that planning and running need. Free of torch; models.reading makes one."""

from dataclasses import dataclass

from pagedcli.attention.layer import AttentionLayer
from pagedcli.models.rope import RopeSpec


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
    sliding_window: int | None  # tokens a query of a sliding layer sees, itself included; None: no layer slides
    eos_token_ids: tuple[int, ...]  # those of generation_config.json first, then those only config.json has
    bos_token_id: int | None
    soft_cap: float | None = None  # attention scores become soft_cap * tanh(score / soft_cap)
    dtype: str  # dtype of the stored weights, e.g. "bfloat16"
    is_fallback: bool = False  # transformers runs the layers, not our decoder

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """What each layer asks of the attention backend. Of the fallback, as far as its config says."""
        return (AttentionLayer(scale=self.head_dim**-0.5, soft_cap=self.soft_cap),) * self.num_layers
