"""The named parts of a model's layers, taken from its tensors: what the decoders are built from."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pagedcli import layers
from pagedcli.attention.base import AttentionBackend
from pagedcli.errors import ModelError
from pagedcli.layers.basic import stores_in_one_pass
from pagedcli.layers.linear import LinearLayer
from pagedcli.models import rope_tables
from pagedcli.models.base import DecoderRequest, linear_kernels
from pagedcli.models.formats import AS_STORED, LayerFormat, Modules
from pagedcli.models.mixers.attention import Attention, LatentAttention
from pagedcli.models.rope import RopeSpec
from pagedcli.models.spec import ModelSpec
from pagedcli.models.stacking import UnreadTensors
from pagedcli.models.tensors import linear_names, take_linear


class Parts:
    """The named parts of a model's layers, from a spec and tensors, from which each is removed when it is taken."""

    def __init__(
        self, request: DecoderRequest, spec: ModelSpec, tensors: UnreadTensors, formats: Mapping[str, LayerFormat]
    ) -> None:
        self._request, self._spec, self._tensors, self._formats = request, spec, tensors, formats
        self._rope_tables: dict[tuple[RopeSpec, int], Tensor] = {}  # rotary embedding, head size -> its table
        self._query_scales: dict[RopeSpec, Tensor | None] = {}

    def norm(self, key: str) -> Tensor | None:
        """The weight [E] of a norm, or weight and bias [2, E]; None if the model does not have it."""
        if (weight := self._tensors.pop(key, None)) is None:
            return None
        if self._spec.norm.offset and (key != "final_norm" or self._spec.norm.offset_last):
            weight = weight + 1
        bias = self._tensors.pop(f"{key}_bias", None)
        return weight if bias is None else torch.stack((weight, bias))

    def head_norms(self, mixer: Attention, key: str) -> Tensor | None:
        """The weights of norms of each head, [2, D] of q and k, or [1, D] of q alone; None: heads are not normed."""
        if mixer.qk_norm == "unweighted":
            dtype = torch.float32 if self._spec.norm.in_float32 else self._request.dtype
            return torch.ones((2, mixer.head_dim), dtype=dtype, device=self._request.device)
        weights = self.norm(f"{key}.qk_norm")
        return None if weights is None else weights.view(-1, mixer.head_dim)

    def stored(self, key: str) -> tuple[LayerFormat, Modules, Tensor | None]:
        """A linear layer as the checkpoint has it: its format, its modules and its bias."""
        layer_format = self._formats[key]
        return layer_format, take_linear(self._tensors, key, layer_format), self._tensors.pop(f"{key}.bias", None)

    def discard(self, key: str) -> None:
        """Leave the tensors of a linear layer unread."""
        modules = linear_names(self._tensors, key, self._formats[key])
        for name in (*(name for module in modules for name in module.values()), f"{key}.bias"):
            self._tensors.discard(name)

    def unquantized(self, key: str) -> tuple[Modules, Tensor | None]:
        """The modules of a linear layer that is never quantized, AS_STORED, and its bias."""
        return [{"weight": self._tensors.pop(key)}], self._tensors.pop(f"{key}.bias", None)

    def latents_up(self, mixer: LatentAttention, key: str) -> tuple[Tensor, Tensor]:
        """What absorbs K in queries [H, rank, nope_dim], and what makes V of latents [H, value_dim, rank]."""
        name = f"{key}.latents_up"
        if mixer.ups_apart:
            return self._tensors.pop(f"{key}.key_up.weight"), self._tensors.pop(f"{key}.value_up.weight")
        if name in self._formats:
            layer_format, modules, _ = self.stored(name)
            widened = layer_format.widened(modules, self._request.dtype)
        else:
            widened = self._tensors.pop(f"{name}.weight")
        of_heads = widened.view(mixer.num_heads, -1, mixer.rank)
        key_up, value_up = of_heads.tensor_split([mixer.nope_dim], dim=1)
        return key_up.transpose(1, 2).contiguous(), value_up.contiguous()

    @property
    def eps(self) -> float:
        """The epsilon of norms."""
        return self._spec.norm.eps

    @property
    def device(self) -> torch.device:
        return self._request.device

    def needed(self, key: str) -> Tensor:
        return self._tensors.pop(key)

    def small(self, key: str) -> Tensor | None:
        """A small tensor; None if the model does not have it."""
        return self._tensors.pop(key, None)

    def xielu(self, key: str) -> Tensor:
        """What layers.basic.xielu takes, [4] float32."""
        of_positive, of_negative, linear, least = (
            self._tensors.pop(f"{key}.{part}").flatten() for part in ("alpha_p", "alpha_n", "beta", "eps")
        )
        return torch.cat((F.softplus(of_positive), linear + F.softplus(of_negative), linear, least))

    def conv(self, key: str) -> Tensor:
        """The weight [K, C] of a depthwise convolution."""
        return self._tensors.pop(f"{key}.conv").flatten(1).t().contiguous()

    def decay(self, key: str) -> Tensor:
        """How fast each head of a state forgets, [H]: -exp(A_log)."""
        return -self._tensors.pop(f"{key}.decay").flatten().exp()

    def router_norm(self, key: str) -> Tensor:
        """The norm of what a router sees, if that is the residual: its scale is that of a vector of length 1."""
        weight: Tensor = self._tensors.pop(f"{key}.router_norm")
        return weight.mul_(weight.shape[0] ** -0.5)

    def output(self, embedding: Tensor) -> tuple[Modules, Tensor | None]:
        """The modules of the output layer, which are the embedding [V, E] if tied, and its bias."""
        if self._spec.tie_word_embeddings:
            return [{"weight": embedding}], self._tensors.pop("lm_head.bias", None)
        if "lm_head" in self._formats:
            _, modules, bias = self.stored("lm_head")
            return modules, bias
        return self.unquantized("lm_head")

    def table(self, rope: RopeSpec, head_dim: int) -> Tensor:
        """The table of a rotary embedding, one for all layers that have it."""
        if (rope, head_dim) not in self._rope_tables:
            request = self._request
            table = rope_tables.rope_table(rope, head_dim, request.max_model_len, dtype=request.dtype)
            self._rope_tables[rope, head_dim] = table.to(request.device)
        return self._rope_tables[rope, head_dim]

    def query_scales(self, rope: RopeSpec) -> Tensor | None:
        """What queries are multiplied by at each position, one tensor for all layers; None: by 1."""
        if rope not in self._query_scales:
            request = self._request
            scales = rope_tables.query_scales(rope, request.max_model_len, dtype=request.dtype)
            self._query_scales[rope] = None if scales is None else scales.to(request.device)
        return self._query_scales[rope]


class TorchParts(Parts):
    """The parts as torch runs them, with the linear layers."""

    def __init__(
        self, request: DecoderRequest, spec: ModelSpec, tensors: UnreadTensors, formats: Mapping[str, LayerFormat]
    ) -> None:
        super().__init__(request, spec, tensors, formats)
        self.linear_bytes = 0  # the layers' linear layers as they are kept, without biases
        self.fused_store = stores_in_one_pass(request.backend)
        self.kernels = linear_kernels(spec, request.backend)

    def backend_of(self, place: int) -> AttentionBackend:
        """The backend of a layer, by its place among those that attend."""
        return self._request.backend.of(self._spec.attention_layers[place])

    def qk_norm(self, mixer: Attention, key: str) -> tuple[Tensor, float] | None:
        """The norm of q and k, [H + G, D] and eps; without k where a layer has none; None: they are not normed."""
        q_norm, k_norm = self.norm(f"{key}.q_norm"), self.norm(f"{key}.k_norm")
        if q_norm is not None and k_norm is not None:
            return torch.cat((q_norm, k_norm)).view(-1, mixer.head_dim), self.eps
        if (weights := self.head_norms(mixer, key)) is None:
            return None
        of_queries, *of_keys = weights.unbind(0)
        rows = [of_queries.expand(mixer.num_heads, -1), *(each.expand(mixer.num_kv_heads, -1) for each in of_keys)]
        return torch.cat(rows), self.eps

    def head_linear(self, weights: Tensor) -> Callable[[Tensor], Tensor]:
        """A linear layer for each head. Shapes: weights [H, O, I]; the layer [T, H, I] -> [T, H, O]."""
        if self.kernels != "cpu":
            self.linear_bytes += weights.nbytes
            return partial(torch.einsum, "hoi,thi->tho", weights)
        heads = [AS_STORED.native_linear([{"weight": weight}], None, weight.dtype) for weight in weights.unbind(0)]
        self.linear_bytes += sum(linear.nbytes for linear in heads)
        return lambda x: torch.stack([linear(x[:, h].contiguous()) for h, linear in enumerate(heads)], dim=1)

    def plain_linear(self, key: str) -> LinearLayer:
        return self._made(AS_STORED, *self.unquantized(key))

    def linear(self, key: str, *, with_bias: bool = True, gated: bool = False) -> LinearLayer:
        layer_format, modules, bias = self.stored(key)
        if not with_bias:
            bias = None
            modules = [{suffix: module[suffix] for suffix in module.keys() - {"bias"}} for module in modules]
        return self._made(layer_format, modules, bias, gated=gated)

    def _made(
        self, layer_format: LayerFormat, modules: Modules, bias: Tensor | None, *, gated: bool = False
    ) -> LinearLayer:
        linear = layer_format.linear(modules, bias, self._request.dtype, self.kernels, gated=gated)
        self.linear_bytes += linear.nbytes
        return self.by_chosen_kernels(linear)

    def by_chosen_kernels(self, linear: Any, dtype: torch.dtype | None = None) -> LinearLayer:
        """The layer by the kernels that the configuration asks for. `dtype`: of its results, if not the model's.

        Raises: ModelError if they cannot multiply by the weight."""
        kernels = self._request.backend.kernels
        if kernels == "fp8" and layers.triton_products.RoundingLinear.serves(linear):
            return layers.triton_products.RoundingLinear(linear)
        if kernels != "invariant":
            made: LinearLayer = linear
            return made
        if (found := layers.triton_products.weight_of(linear)) is None:
            raise ModelError("a weight has its inputs out of order, for which gpu_kernels invariant has no kernel")
        return layers.triton_products.OneTileLinear(*found, dtype)

    def summed_linear(self, key: str) -> Callable[[Tensor], Tensor]:
        """A layer with its inputs split over the ranks: the sum of all ranks' results, of which only rank 0 adds the
        bias."""
        parallel = self._request.parallel
        linear = self.linear(key, with_bias=parallel.rank == 0)
        return linear if parallel.size == 1 else lambda x: parallel.all_reduce(linear(x))
