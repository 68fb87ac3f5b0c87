"""What a model's weights are and take in memory: a sum over its named parameters and their formats; and what the
tensors of a step take. Free of torch.

Read by the forecast of memory, by the tables of `profile-memory` and by the floors of `bench` and `simulate`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagedcli.core.budget import ITEMSIZE
from pagedcli.core.limits import STEP_TOKENS
from pagedcli.core.plan import Kernels
from pagedcli.models.formats import AS_STORED, VECTOR, WeightFormat
from pagedcli.models.mixers.attention import LatentAttention
from pagedcli.models.parameters import decoder_parameters
from pagedcli.models.spec import ModelSpec
from pagedcli.models.tensors import Parameter, joined_format

GPU_STEP_TOKENS, LARGE_GPU_STEP_TOKENS = 8192, 16384  # tokens per step, the second from this size on:
LARGE_GPU_BYTES = 70 * 2**30
Shard = Callable[[dict[str, Parameter]], dict[str, Parameter]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Some of a model's weights."""

    parameters: int = 0
    num_bytes: int = 0  # bytes in memory

    def __add__(self, other: "Weights") -> "Weights":
        return Weights(parameters=self.parameters + other.parameters, num_bytes=self.num_bytes + other.num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The weights of a model, or of one rank's part of it, by what a step reads of them."""

    layers: Weights  # linear layers that every token passes through
    experts: Weights  # all experts that a router picks from
    vectors: Weights  # norms and biases
    embedding: Weights  # no parameters if the output layer is the same table, no bytes if that is the only copy
    head: Weights  # the output layer
    share_of_experts: float = 0.0  # share of the experts that one token goes to

    @property
    def whole(self) -> Weights:
        """All weights, shared ones once."""
        return self.layers + self.experts + self.vectors + self.embedding + self.head

    @property
    def parameters(self) -> int:
        return self.whole.parameters

    @property
    def num_bytes(self) -> int:
        return self.whole.num_bytes

    @property
    def active_parameters(self) -> float:
        """The linear layers that one token passes through, without the output layer."""
        return self.layers.parameters + self.share_of_experts * self.experts.parameters

    def active_bytes(self, num_tokens: int) -> float:
        """Bytes of the layers that a step of num_tokens reads: of its experts those that so many tokens go to if each
        picks its own at random."""
        return self.layers.num_bytes + (1 - (1 - self.share_of_experts) ** num_tokens) * self.experts.num_bytes


def footprint(
    spec: ModelSpec, formats: WeightFormat, kernels: Kernels, itemsize: int, *, shard: Shard | None = None
) -> Footprint:
    """The weights of a model whose linear layers have these formats. Units: itemsize in bytes, of the model's dtype.
    `shard`: takes the part of one of several ranks (see sharding.shard_parameters)."""
    counted = _counted(spec)
    parameters = {key: parameter for key, (parameter, _) in counted.items()}
    if shard is not None:
        parameters = shard(parameters)
    tables = {key: parameters.pop(key) for key in list(parameters) if key in ("embedding", "lm_head")}
    layer_table = parameters.pop("layer_table", None)  # embeddings that layers add
    layers = experts = vectors = Weights()
    for key, parameter in parameters.items():
        count = counted[key][1]
        if parameter.stored is VECTOR:
            each = 4 if parameter.dtype == "float32" else itemsize
            vectors += _weights(parameter, math.prod(parameter.shape) * each, count)
            continue
        modules = {name.removesuffix(".weight"): shape[0] for name, shape in parameter.kept_shapes.items()}
        layer_format = AS_STORED if parameter.layer_format is None else joined_format(formats, modules)
        gated = key.endswith("gate_up.weight")
        shapes: Sequence[tuple[int, ...]] = [parameter.shape]
        if key.endswith((".latents_up.weight", ".key_up.weight", ".value_up.weight")):
            shapes = _by_heads(spec, key, parameter.shape)
        kept = (layer_format.kept_bytes(shape, itemsize, kernels, gated=gated) for shape in shapes)
        found = _weights(parameter, sum(kept), count)
        if ".experts." in key:
            experts += found
        else:
            layers += found
    embedding, head = _tables(tables, formats, kernels, itemsize, is_alone=shard is None)
    if layer_table is not None:
        embedding += _weights(layer_table, math.prod(layer_table.shape) * itemsize, 1)
    share = spec.experts.share if spec.experts is not None else 0.0
    return Footprint(
        layers=layers, experts=experts, vectors=vectors, embedding=embedding, head=head, share_of_experts=share
    )


def _by_heads(spec: ModelSpec, key: str, shape: tuple[int, ...]) -> Sequence[tuple[int, ...]]:
    """The linear layers that K's and V's matrices of a layer with latents become: two for each head."""
    if len(shape) == 3:
        return shape[0] * [shape[1:]]
    match spec.layers[int(key.split(".")[1])].mixer:
        case LatentAttention(rank=rank, nope_dim=nope_dim, value_dim=value_dim):
            return shape[0] // (nope_dim + value_dim) * [(rank, nope_dim), (value_dim, rank)]
    raise AssertionError("others have no such matrices")


def _counted(spec: ModelSpec) -> dict[str, tuple[Parameter, int]]:
    """Parameters, and how many of the model each stands for: itself if formats differ by name, otherwise all layers of
    its kind, and all experts of those."""
    if spec.quantization is not None:
        return {key: (parameter, 1) for key, parameter in decoder_parameters(spec, AS_STORED).items()}
    num_experts = spec.experts.num_experts if spec.experts is not None else 0
    shapes = [layer.shape for layer in spec.layers]
    kinds = {shape: i for i, shape in enumerate(shapes)}  # the last layer of each kind
    num_layers = {f"layers.{i}": shapes.count(shape) for shape, i in kinds.items()}
    counted = {}
    for key, parameter in decoder_parameters(spec, AS_STORED, layers=kinds.values(), num_experts=1).items():
        count = num_layers.get(".".join(key.split(".")[:2]), 1)
        counted[key] = (parameter, count * num_experts if ".experts." in key else count)
    return counted


def _tables(
    tables: dict[str, Parameter], formats: WeightFormat, kernels: Kernels, itemsize: int, *, is_alone: bool
) -> tuple[Weights, Weights]:
    """The embedding and the output layer: one table if they are tied, unless the output layer is packed."""
    table = tables["embedding"]
    embedding = _weights(table, math.prod(table.shape) * itemsize, 1)
    head = tables.get("lm_head", table)
    # no Triton kernel multiplies by the output layer
    head_bytes = formats.lm_head.kept_bytes(head.shape, itemsize, kernels if kernels == "cpu" else "torch")
    if "lm_head" not in tables:
        is_shared = kernels != "cpu" or (formats.lm_head.keeps_rows and is_alone)
        embedding = Weights(num_bytes=0 if is_shared else embedding.num_bytes)
    return embedding, _weights(head, head_bytes, 1)


def _weights(parameter: Parameter, num_bytes: int, count: int) -> Weights:
    return Weights(parameters=count * math.prod(parameter.shape), num_bytes=count * num_bytes)


def step_tokens(spec: ModelSpec, itemsize: int, device_bytes: int) -> int:
    """Tokens that a GPU computes per step. It reads all weights once per step and launches hundreds of kernels, so a
    step takes as many tokens as its memory holds easily: their activations stay within a sixteenth of it."""
    num_tokens = LARGE_GPU_STEP_TOKENS if device_bytes >= LARGE_GPU_BYTES else GPU_STEP_TOKENS
    while num_tokens > STEP_TOKENS and step_bytes(spec, num_tokens, itemsize) > device_bytes // 16:
        num_tokens //= 2
    return num_tokens


def step_bytes(spec: ModelSpec, num_tokens: int, itemsize: int) -> int:
    """Tensors of a step alive at once in torch, at the widest point of a layer."""
    width, inner, mixer = spec.hidden_size, spec.widest_mlp, spec.widest_attention
    heads, kv_heads, head = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    wide = ITEMSIZE["float32"]  # norms are computed in float32
    # the last inputs of attention: q, k (a view into q and k together) and v (a view into all three)
    given = (heads + (heads + kv_heads) + (heads + 2 * kv_heads)) * head
    # alive in every layer: the residual, its norm, the last layer's output, cosines and sines, q, k and v
    always = itemsize * (3 * width + 2 * head + given)
    # q, k and v, and what turns q and k: three copies to rotate them, or two float32 ones and a result to norm them
    rotating = 3 * itemsize
    norming = (mixer.qk_norm == "heads") * (2 * wide + itemsize)
    attention = itemsize * (heads + 2 * kv_heads) * head + (heads + kv_heads) * head * max(rotating, norming)
    mlp = itemsize * 3 * inner  # gate, up and their product
    inputs = itemsize * 3 * spec.inputs_width  # looked up, projected, and their sum
    return num_tokens * (always + inputs + max(attention, mlp))
