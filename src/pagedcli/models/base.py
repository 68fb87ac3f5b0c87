"""The contract between the engine and a model: CausalLM."""

from typing import Protocol

from torch import Tensor

from pagedcli.attention.base import PagedBatch
from pagedcli.attention.layer import AttentionLayer
from pagedcli.models.spec import ModelSpec


class CausalLM(Protocol):
    """A language model that reads and writes the paged cache through an attention backend."""

    # What each layer asks of the attention backend. The scales of an fp8 cache come after the weights.
    attention_layers: tuple[AttentionLayer, ...]

    @property
    def spec(self) -> ModelSpec:
        """What the model is."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know about how this model runs, one line each."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, shared ones counted once."""
        ...

    def forward(self, input_ids: Tensor, positions: Tensor, batch: PagedBatch, kv_cache: Tensor) -> Tensor:
        """One step: hidden states of the new tokens, after the final norm.

        Shapes:  input_ids, positions [T] int64; kv_cache [2, L, N, ...], where kv_cache[0, i] and kv_cache[1, i] are K
                 and V of layer i in the backend's kv_shape; returns [T, E] in the model's dtype.
        Changes: kv_cache at batch.slots, batch.plan.
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Scores of every token of the vocabulary.

        Shapes:  hidden [R, E], any rows of forward's result; returns [R, V] in the model's dtype.
        """
        ...
