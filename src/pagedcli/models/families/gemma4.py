"""Gemma 4: layers that differ in their heads and widths, shared K and V, embeddings of layers. Free of torch."""

from dataclasses import replace
from functools import cached_property

from pagedcli.errors import ModelError
from pagedcli.models.checkpoint_files import Factor, Size
from pagedcli.models.families.dense import FLOAT_NORMS, NamesActivation
from pagedcli.models.family import ATTENDS, ATTENTION_BIAS, Llama, Mixture, RotatesByWindow
from pagedcli.models.mixers.attention import Attention
from pagedcli.models.mlps import ExpertNames, Experts, Mlp
from pagedcli.models.spec import LayerInputs, Scales


class Gemma4(RotatesByWindow, NamesActivation, Mixture):
    sliding_window_pattern = 6
    global_head_dim: Size = 512
    num_global_key_value_heads: Size | None = None
    per_layer_config: dict[str, dict[str, Size]] | None = None  # number of a layer -> its head_dim, num_key_value_heads
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: int = 256
    vocab_size_per_layer_input: Size | None = None
    enable_moe_block: bool = False
    num_experts = 0
    num_experts_per_tok = 1
    final_logit_softcapping: Factor | None = None

    renamed = {"top_k_experts": "num_experts_per_tok"}
    unsupported = Llama.unsupported | {"use_bidirectional_attention": ("vision",)}  # text is causal there
    activations = ("gelu_pytorch_tanh",)
    known_layer_types = ATTENDS | {"sliding_attention"}
    biases = ATTENTION_BIAS
    qk_norm = "heads"
    norm_places = "around"
    norm_style = FLOAT_NORMS
    has_layer_scalars = True
    expert_names = ExpertNames(block="", router="router.proj")
    routing = {"renormalize": True}

    @property
    def scales(self) -> Scales:
        return Scales(embedding=self.hidden_size**0.5, logits_soft_cap=self.final_logit_softcapping)

    @property
    def layer_inputs(self) -> LayerInputs | None:
        size, vocab_size = self.hidden_size_per_layer_input, self.vocab_size_per_layer_input or 262144
        return LayerInputs(size=size, vocab_size=vocab_size, activation=self.activation) if size else None

    def slides(self) -> list[bool]:
        return [*super().slides()[:-1], False]

    @cached_property
    def _first_shared(self) -> int:
        """The first layer that reads the K and V of an earlier one of its kind."""
        return self.num_hidden_layers - max(0, self.num_kv_shared_layers)

    def _source(self, i: int) -> int | None:
        slides = self.slides()
        own = [j for j in range(self._first_shared) if slides[j] == slides[i]]
        return own[-1] if i >= self._first_shared and own else None

    def check(self) -> None:
        if self.enable_moe_block and not 1 <= (self.num_experts_per_tok or 0) <= (self.num_experts or 0):
            raise ModelError(
                f"enable_moe_block is true, but num_experts is {self.num_experts} and top_k_experts"
                f" {self.num_experts_per_tok}"
            )
        super().check()
        heads = self.num_attention_heads
        for mixer in map(self.attention, range(self.num_hidden_layers)):
            if mixer.head_dim % 2 or heads % mixer.num_kv_heads:
                raise ModelError(
                    f"a layer has {mixer.num_kv_heads} key/value heads of size {mixer.head_dim}, which is not supported"
                    f" for {heads} query heads"
                )
        shared, count = self.num_kv_shared_layers, self.num_hidden_layers
        has_sources = all(self._source(i) is not None for i in range(self._first_shared, count))
        if shared and not (0 < shared < count and has_sources):
            raise ModelError(
                f"num_kv_shared_layers is {shared}, but not all of the last {shared} layers have one of their kind"
                " before them to read K and V of"
            )
        inputs = self.layer_inputs
        if inputs is not None and not self.vocab_size <= inputs.vocab_size <= 2**24:
            raise ModelError(f"vocab_size_per_layer_input is {inputs.vocab_size}, but vocab_size is {self.vocab_size}")

    def is_dense(self, i: int) -> bool:
        return not self.enable_moe_block

    def attention(self, i: int) -> Attention:
        is_sliding = self.slides()[i]
        num_kv_heads, head_dim = self.num_kv_heads, self.head_size
        keys_as_values = self.attention_k_eq_v and not is_sliding
        if not is_sliding:
            num_kv_heads = (keys_as_values and self.num_global_key_value_heads) or num_kv_heads
            head_dim = self.global_head_dim
        own = (self.per_layer_config or {}).get(str(i))
        if own is not None:
            num_kv_heads = own.get("num_key_value_heads", self.num_kv_heads)
            head_dim = own.get("head_dim", self.head_size)
        return replace(
            super().attention(i),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            source=self._source(i),
            scale=1.0,
            value_norm=True,
            keys_as_values=keys_as_values and i < self._first_shared,
        )

    def mlp(self, i: int) -> Mlp | Experts:
        is_wide = self.use_double_wide_mlp and self._source(i) is not None
        mlp = Mlp(width=self.intermediate_size * (2 if is_wide else 1), activation=self.activation)
        return replace(self.experts(), beside=mlp) if self.enable_moe_block else mlp


class Gemma4Unified(Gemma4):
    hidden_size_per_layer_input = 0
