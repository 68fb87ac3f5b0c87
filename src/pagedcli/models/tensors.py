"""The tensors of a decoder and what a kind of layer says of its own: Parameter, and Tensors, which makes them. Free of
torch: dtypes are names."""

from collections.abc import Container, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Literal

from pagedcli.errors import ModelError
from pagedcli.later import torch
from pagedcli.models.formats import VECTOR, WEIGHT, Init, LayerFormat, MixedLayer, Modules, StoredTensor, WeightFormat


@dataclass(frozen=True, slots=True)
class RankPart:
    """One tensor-parallel rank's part of a checkpoint tensor: `first` ... `end`-1 along `dim`."""

    dim: int
    first: int
    end: int

    def of(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """A view of the tensor."""
        return tensor.narrow(self.dim, self.first, self.end - self.first)

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of that view."""
        return (*shape[: self.dim], self.end - self.first, *shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of the decoder: checkpoint tensors stacked along their output features (q, k and v make one qkv)."""

    shapes: Mapping[str, tuple[int, ...]]  # name in the checkpoint -> shape there, in stacking order
    init: Init | None = None  # its content with `--load-format dummy`; None: what `stored` says
    parts: Mapping[str, RankPart] = field(default_factory=dict)  # name -> this rank's part; all of it if not named
    stored: StoredTensor = WEIGHT  # its feature dimensions
    dtype: str | None = None  # dtype in memory; None: the model's, or that of `stored`
    layer_format: LayerFormat | None = None  # format of its linear layer
    factors: tuple[tuple[int, float], ...] = ()  # (number of rows, what they are multiplied by), of all; or none are

    @property
    def dim(self) -> int:
        """The dimension along which the tensors are stacked."""
        return self.stored.out_dim or 0

    @property
    def kept_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name in the checkpoint -> shape of the part that is kept."""
        return {
            name: self.parts[name].shape_of(shape) if name in self.parts else shape
            for name, shape in self.shapes.items()
        }

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the stacked tensor."""
        shapes, dim = list(self.kept_shapes.values()), self.dim
        if len(shapes) == 1:
            return shapes[0]
        return (*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :])

    def kept(self, name: str, tensor: "torch.Tensor") -> "torch.Tensor":
        """The part of a checkpoint tensor that is kept."""
        return self.parts[name].of(tensor) if name in self.parts else tensor

    def scaled(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """The stacked tensor times its factors."""
        if not self.factors:
            return tensor
        wide, first = tensor.float(), 0
        if wide is tensor:  # it may lie in the mapped file
            wide = wide.clone()
        for count, factor in self.factors:
            wide[first : first + count] *= factor
            first += count
        return wide.to(tensor.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormStyle:
    """The norms of a model."""

    eps: float  # number added to the mean square
    centred: Literal["no", "plain", "biased"] = "no"  # norms of layers also subtract the mean, and may add a bias
    in_float32: bool = False  # a norm multiplies by its weight before it rounds to the model's dtype
    offset: bool = False  # the weights are stored less 1
    offset_last: bool = True  # the weights of the last norm are, too, if any are
    added_eps: float | None = None  # eps of the norms of what is added to the residual; None: the same


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """How a checkpoint names the tensors of a decoder. The defaults are Llama's."""

    body: str = "model"  # the beginning of all names but the output layer's
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    branch_norms: tuple[str, ...] | None = None  # attention's, then the MLP's; None: the usual ones, see parameters
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # one: they are stacked
    attention_out: str = "o_proj"
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    recurrent: str = "linear_attn"
    mlp: str = "mlp"
    projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # two: gate and up are stacked
    skipped: tuple[str, ...] = ()  # beginnings of names of tensors outside the language model


LLAMA_NAMES = TensorNames()


@dataclass(frozen=True, slots=True)
class Tensors:
    """Makes the parameters of a model's layers."""

    width: int  # E of the residual stream
    norms: NormStyle
    names: TensorNames
    formats: WeightFormat

    def linear(
        self,
        key: str,
        rows: Mapping[str, int],
        columns: int,
        *,
        bias: bool = False,
        factors: tuple[tuple[int, float], ...] = (),
    ) -> dict[str, Parameter]:
        """The tensors of a linear layer that stacks the modules in `rows`, name -> output features. `factors`: see
        Parameter; those of 1 alone are none."""
        layer_format = joined_format(self.formats, rows)
        found: dict[str, Parameter] = {}
        factors = factors if any(factor != 1 for _, factor in factors) else ()
        if factors and not layer_format.stacks:
            raise ModelError(
                f"{', '.join(rows)} are quantized and have multipliers, which is not supported",
                hint="use the unquantized version of the model",
            )
        if layer_format.stacks:
            weights = {f"{name}.weight": (n, columns) for name, n in rows.items()}
            found[f"{key}.weight"] = Parameter(weights, layer_format=layer_format, factors=factors)
        else:
            for i, (name, n) in enumerate(rows.items()):
                for stored in self.formats.of(name).stored:
                    if stored.suffix == "bias" and bias:
                        continue
                    shapes = {f"{name}.{stored.suffix}": stored.shape(n, columns)}
                    found[f"{key}[{i}].{stored.suffix}"] = Parameter(shapes, stored=stored, layer_format=layer_format)
        if bias:
            found[f"{key}.bias"] = Parameter({f"{name}.bias": (n,) for name, n in rows.items()}, stored=VECTOR)
        return found

    def norm(self, sizes: Mapping[str, int]) -> Parameter:
        """The weights of norms, name -> elements, stacked."""
        return Parameter(
            {f"{name}.weight": (size,) for name, size in sizes.items()},
            init=0.0 if self.norms.offset else 1.0,
            stored=VECTOR,
            dtype="float32" if self.norms.in_float32 else None,
        )

    def layer_norm(self, key: str, name: str) -> dict[str, Parameter]:
        """A norm of the residual or of what is added to it."""
        found = {key: self.norm({name: self.width})}
        if self.norms.centred == "biased":
            found[f"{key}_bias"] = exact({f"{name}.bias": (self.width,)}, init=0.0)
        return found

    def table(self, name: str, num_rows: int, stored: StoredTensor = WEIGHT) -> Parameter:
        """The embedding or the output layer."""
        return Parameter({name: stored.shape(num_rows, self.width)}, stored=stored)


def exact(shapes: dict[str, tuple[int, ...]], *, init: Init | None = None) -> Parameter:
    """A small tensor that is computed with in float32."""
    return Parameter(shapes, init=init, stored=VECTOR, dtype="float32")


def joined_format(weight_format: WeightFormat, rows: Mapping[str, int]) -> LayerFormat:
    """The format of the layer that stacks the modules in `rows`, name -> output features.

    Raises: ModelError if theirs differ and cannot be one layer.
    """
    formats = [weight_format.of(name) for name in rows]
    if formats.count(formats[0]) == len(formats):
        return formats[0]
    if weight_format.mixes:
        return MixedLayer(formats, list(rows.values()))
    raise ModelError(
        f"{', '.join(rows)} are stored in different formats, and they are one layer here",
        hint="use the unquantized version of the model",
    )


def linear_formats(parameters: Mapping[str, Parameter]) -> dict[str, LayerFormat]:
    """The format of each linear layer by its key, e.g. "layers.3.qkv"."""
    formats = {}
    for key, parameter in parameters.items():
        if parameter.layer_format is not None:
            formats[key.rpartition(".")[0].partition("[")[0]] = parameter.layer_format
    return formats


def linear_names(names: Container[str], key: str, layer_format: LayerFormat) -> list[dict[str, str]]:
    """The tensors of a linear layer's modules by suffix, among `names`."""
    if layer_format.stacks:
        return [{"weight": f"{key}.weight"}]
    modules: list[dict[str, str]] = []
    while module := {
        stored.suffix: name
        for stored in layer_format.stored
        if (name := f"{key}[{len(modules)}].{stored.suffix}") in names
    }:
        modules.append(module)
    return modules


def take_linear(tensors: "MutableMapping[str, torch.Tensor]", key: str, layer_format: LayerFormat) -> "Modules":
    """The tensors of a linear layer's modules. Changes: tensors, from which they are removed."""
    modules = linear_names(tensors, key, layer_format)
    return [{suffix: tensors.pop(name) for suffix, name in module.items()} for module in modules]
