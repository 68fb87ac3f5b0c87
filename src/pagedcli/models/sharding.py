"""Splits the decoder over tensor-parallel ranks: the sizes of one rank, and its part of every weight."""

from collections.abc import Mapping
from dataclasses import replace

from pagedcli.errors import ConfigError
from pagedcli.layers.parallel import ParallelContext
from pagedcli.models.formats import StoredTensor
from pagedcli.models.parameters import Parameter, Part
from pagedcli.models.spec import ModelSpec


def shard_spec(spec: ModelSpec, parallel: ParallelContext) -> ModelSpec:
    """The sizes of one rank: its heads and its part of the MLP; the vocabulary keeps its full size.

    Raises:  ConfigError if the model cannot be split over this number of ranks.
    """
    size = parallel.size
    if size == 1:
        return spec
    if spec.is_fallback:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but {spec.architecture} runs through transformers, on one device only",
            hint="use --tensor-parallel-size 1",
        )
    if (why := _why_whole(spec)) is not None:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but {spec.architecture} {why} and is not split",
            hint="use --tensor-parallel-size 1",
        )
    if spec.quantization is not None and spec.quantization.act_order:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but weights whose groups are not neighbours are not split: "
            f"{spec.quantization.description}",
            hint="use --tensor-parallel-size 1",
        )
    numbers = {"query heads": spec.num_heads, "MLP columns": spec.intermediate_size}
    if spec.experts is not None:
        numbers["columns of an expert"] = spec.experts.intermediate_size
        numbers["columns of the shared expert"] = spec.experts.shared_intermediate_size or 0
    wrong = [f"{number} {what}" for what, number in numbers.items() if number % size]
    kinds = dict.fromkeys(num_heads for num_heads, _ in spec.layer_heads or (spec.heads_of(0),))
    wrong += [f"{num_heads} key/value heads" for num_heads in kinds if num_heads % size and size % num_heads]
    if wrong:
        raise ConfigError(
            f"tensor_parallel_size is {size}, which does not divide the model's {', '.join(wrong)}",
            hint="use a power of two that divides them",
        )
    return replace(
        spec,
        num_heads=spec.num_heads // size,
        num_kv_heads=max(1, spec.num_kv_heads // size),
        layer_heads=tuple((max(1, num_heads // size), head_dim) for num_heads, head_dim in spec.layer_heads),
        intermediate_size=spec.intermediate_size // size,
        layer_widths=tuple(width // size for width in spec.layer_widths),
    )


def _why_whole(spec: ModelSpec) -> str | None:
    """What of a model keeps it from being split, in a few words; None: nothing."""
    if spec.recurrent is not None:
        return "keeps states of its sequences"
    projections = [spec.names.projections]
    if spec.experts is not None and spec.experts.shared_intermediate_size is not None:
        projections.append(spec.experts.names.shared_projections)
    if spec.fused_projections or (spec.gated_mlp and any(len(names) == 2 for names in projections)):
        return "stacks its projections"
    return "norms all heads of q and k together" if spec.qk_norm_all else None


def shard_parameters(
    parameters: Mapping[str, Parameter], spec: ModelSpec, parallel: ParallelContext
) -> dict[str, Parameter]:
    """This rank's part of the decoder's parameters. `spec` is that of the whole model."""
    if parallel.size == 1:
        return dict(parameters)
    return {key: replace(p, parts=_parts(key, p, spec, parallel)) for key, p in parameters.items()}


def _parts(key: str, parameter: Parameter, spec: ModelSpec, parallel: ParallelContext) -> dict[str, Part]:
    stored, layer = parameter.stored, key.split(".")[-2].split("[")[0] if "." in key else key
    if layer in ("embedding", "lm_head", "layer_table"):
        num_rows = spec.layer_vocab if layer == "layer_table" else spec.vocab_size
        return {name: Part(0, *parallel.part_of(num_rows)) for name in parameter.shapes}
    out_dim, out_per = stored.out_dim, stored.out_per
    in_dim, in_per = stored.in_dim, stored.in_per
    if key.endswith(".sinks"):
        return {name: Part(0, *parallel.part_of(spec.num_heads)) for name in parameter.shapes}
    if layer == "qkv" and out_dim is not None and out_per is not None:
        num_kv_heads, head_dim = spec.heads_of(int(key.split(".")[1]))
        counts = {name: spec.num_heads if ".q_proj." in name else num_kv_heads for name in parameter.shapes}
        heads = {name: _head_rows(count, head_dim, parallel) for name, count in counts.items()}
        return {name: _part(out_dim, rows, out_per, stored) for name, rows in heads.items()}
    if layer in ("gate_up", "up") and out_dim is not None and out_per is not None:
        sizes = {name: shape[out_dim] * out_per for name, shape in parameter.shapes.items()}
        parts = {name: parallel.part_of(size) for name, size in sizes.items()}
        return {name: _part(out_dim, rows, out_per, stored) for name, rows in parts.items()}
    if layer in ("out", "down") and in_dim is not None and in_per is not None:
        sizes = {name: shape[in_dim] * in_per for name, shape in parameter.shapes.items()}
        parts = {name: parallel.part_of(size) for name, size in sizes.items()}
        return {name: _part(in_dim, columns, in_per, stored) for name, columns in parts.items()}
    return {}


def _part(dim: int, features: tuple[int, int], per: int, stored: StoredTensor) -> Part:
    """A range of features as a range of elements. Raises: ConfigError if an element would have to be split."""
    first, end = features
    if first % per or end % per:
        raise ConfigError(
            f"a rank's features {first} to {end} do not end between the groups of {per} that {stored.suffix!r} holds",
            hint="use a smaller --tensor-parallel-size",
        )
    return Part(dim, first // per, end // per)


def _head_rows(num_heads: int, head_dim: int, parallel: ParallelContext) -> tuple[int, int]:
    """The rows of whole heads; if there are fewer key/value heads than ranks, neighbouring ranks share one."""
    share = max(1, num_heads // parallel.size)
    first = parallel.rank * num_heads // parallel.size
    return first * head_dim, (first + share) * head_dim
