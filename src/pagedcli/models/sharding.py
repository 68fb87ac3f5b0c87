"""Splits the decoder over tensor-parallel ranks: the sizes of one rank, and its part of every weight."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from pagedcli.errors import ConfigError
from pagedcli.layers.parallel import ParallelContext
from pagedcli.models.formats import StoredTensor
from pagedcli.models.spec import ModelSpec
from pagedcli.models.tensors import Parameter, RankPart


def shard_spec(spec: ModelSpec, parallel: ParallelContext) -> ModelSpec:
    """The sizes of one rank: its heads and its part of the MLP; the vocabulary keeps its full size.

    Raises:  ConfigError if the model cannot be split over this number of ranks.
    """
    size = parallel.size
    if size == 1:
        return spec
    if (why := _why_whole(spec)) is not None:
        raise ConfigError(f"tensor_parallel_size is {size}, but {why}", hint="use --tensor-parallel-size 1")
    wrong = dict.fromkeys(f"{number} {what}" for number, what in _divided(spec) if number % size)
    kinds = dict.fromkeys(mixer.num_kv_heads for mixer in spec.attentions)
    wrong |= dict.fromkeys(f"{number} key/value heads" for number in kinds if number % size and size % number)
    if wrong:
        raise ConfigError(
            f"tensor_parallel_size is {size}, which does not divide the model's {', '.join(wrong)}",
            hint="use a power of two that divides them",
        )
    layers = tuple(
        replace(layer, mixer=layer.mixer.split(size), mlp=layer.mlp.split(size) if layer.mlp is not None else None)
        for layer in spec.layers
    )
    return replace(spec, layers=layers, intermediate_size=spec.intermediate_size // size)


def _divided(spec: ModelSpec) -> Iterator[tuple[int, str]]:
    """The numbers that all ranks have equal parts of, in words."""
    yield from ((mixer.num_heads, "query heads") for mixer in spec.attentions)
    yield spec.intermediate_size, "MLP columns"
    if (experts := spec.experts) is not None:
        yield experts.each.width, "columns of an expert"
        yield experts.shared.width if experts.shared is not None else 0, "columns of the shared expert"


def _why_whole(spec: ModelSpec) -> str | None:
    """Why a model is not split over ranks; None: it is."""
    if spec.is_fallback:
        return f"{spec.architecture} runs through transformers, on one device only"
    names, weights = spec.names, spec.quantization
    reasons = [mixer.unsplit_reason(names.qkv) for layer in spec.layers for mixer in layer.mixers]
    reasons += [layer.mlp.unsplit_reason(names.projections) for layer in spec.layers if layer.mlp is not None]
    if (reason := next(filter(None, reasons), None)) is not None:
        return f"{spec.architecture} {reason} and is not split"
    if weights is not None and weights.act_order:
        return f"weights whose groups are not neighbours are not split: {weights.name}"
    return None


def shard_parameters(
    parameters: Mapping[str, Parameter], spec: ModelSpec, parallel: ParallelContext
) -> dict[str, Parameter]:
    """This rank's part of the decoder's parameters. `spec` is that of the whole model."""
    if parallel.size == 1:
        return dict(parameters)
    return {key: replace(p, parts=_parts(key, p, spec, parallel)) for key, p in parameters.items()}


_TABLES = ("embedding", "layer_table", "key_up", "value_up")  # split along their first dimension
_BY_OUTPUTS = ("lm_head", "qkv", "gate_up", "up", "latents", "queries", "latents_up")
_BY_INPUTS = ("out", "down")
_OF_HEADS = ("q_proj", "q_b_proj", "kv_b_proj")  # modules of latent attention whose outputs are those of heads


def _parts(key: str, parameter: Parameter, spec: ModelSpec, parallel: ParallelContext) -> dict[str, RankPart]:
    stored, layer = parameter.stored, key.split(".")[-2].split("[")[0] if "." in key else key
    if layer in _TABLES or key.endswith(".sinks"):
        return {name: RankPart(0, *parallel.part_of(shape[0])) for name, shape in parameter.shapes.items()}
    dim, per = (stored.in_dim, stored.in_per) if layer in _BY_INPUTS else (stored.out_dim, stored.out_per)
    if layer not in (*_BY_INPUTS, *_BY_OUTPUTS) or dim is None or per is None:
        return {}
    ranges = {name: parallel.part_of(shape[dim] * per) for name, shape in parameter.shapes.items()}
    if layer == "qkv":
        mixer = spec.layers[int(key.split(".")[1])].attention
        assert mixer is not None, "others are not split"
        gate = mixer.output_gate.module if mixer.output_gate is not None else None
        for name in ranges:
            count = mixer.num_heads if ".q_proj." in name else mixer.num_kv_heads
            is_gate = gate is not None and f".{gate}." in name
            ranges[name] = parallel.part_of(mixer.num_gates) if is_gate else _head_rows(count, mixer.head_dim, parallel)
    elif layer in ("latents", "queries", "latents_up"):
        ranges = {name: rows for name, rows in ranges.items() if any(f".{part}." in name for part in _OF_HEADS)}
    return {name: _part(dim, features, per, stored) for name, features in ranges.items()}


def _part(dim: int, features: tuple[int, int], per: int, stored: StoredTensor) -> RankPart:
    """A range of features as a range of elements. Raises: ConfigError if an element would have to be split."""
    first, end = features
    if first % per or end % per:
        raise ConfigError(
            f"a rank's features {first} to {end} do not end between the groups of {per} that {stored.suffix!r} holds",
            hint="use a smaller --tensor-parallel-size",
        )
    return RankPart(dim, first // per, end // per)


def _head_rows(num_heads: int, head_dim: int, parallel: ParallelContext) -> tuple[int, int]:
    """The rows of whole heads; if there are fewer key/value heads than ranks, neighbouring ranks share one."""
    share = max(1, num_heads // parallel.size)
    first = parallel.rank * num_heads // parallel.size
    return first * head_dim, (first + share) * head_dim
