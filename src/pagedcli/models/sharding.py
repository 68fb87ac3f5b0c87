"""How the decoder is split over tensor-parallel ranks: the sizes that one rank sees, and its part of every weight."""

from collections.abc import Mapping
from dataclasses import replace

from pagedcli.errors import ConfigError
from pagedcli.layers.parallel import ParallelContext
from pagedcli.models.spec import ModelSpec
from pagedcli.models.weights import Parameter, Part


def shard_spec(spec: ModelSpec, parallel: ParallelContext) -> ModelSpec:
    """The sizes of one rank: its heads and its part of the MLP; the vocabulary keeps its full size.

    Raises:  ConfigError if the model cannot be split over so many ranks.
    """
    size = parallel.size
    if size == 1:
        return spec
    if spec.is_fallback:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but {spec.architecture} runs through transformers, on one device only",
            hint="use --tensor-parallel-size 1",
        )
    numbers = {"query heads": spec.num_heads, "MLP columns": spec.intermediate_size}
    wrong = [f"{number} {what}" for what, number in numbers.items() if number % size]
    if spec.num_kv_heads % size and size % spec.num_kv_heads:
        wrong.append(f"{spec.num_kv_heads} key/value heads")
    if wrong:
        raise ConfigError(
            f"tensor_parallel_size is {size}, which does not divide the model's {', '.join(wrong)}",
            hint="use a power of two that divides them",
        )
    return replace(
        spec,
        num_heads=spec.num_heads // size,
        num_kv_heads=max(1, spec.num_kv_heads // size),
        intermediate_size=spec.intermediate_size // size,
    )


def shard_parameters(
    parameters: Mapping[str, Parameter], spec: ModelSpec, parallel: ParallelContext
) -> dict[str, Parameter]:
    """This rank's part of the decoder's parameters. `spec` is that of the whole model."""
    if parallel.size == 1:
        return dict(parameters)
    return {key: replace(p, parts=_parts(key, p, spec, parallel)) for key, p in parameters.items()}


def _parts(key: str, parameter: Parameter, spec: ModelSpec, parallel: ParallelContext) -> dict[str, Part]:
    if key in ("embedding", "lm_head"):
        return {name: Part(0, *parallel.part_of(spec.vocab_size)) for name in parameter.shapes}
    if key.endswith((".qkv.weight", ".qkv.bias")):
        return {name: _head_rows(name, spec, parallel) for name in parameter.shapes}
    if key.endswith((".gate_up.weight", ".gate_up.bias")):
        return {name: Part(0, *parallel.part_of(shape[0])) for name, shape in parameter.shapes.items()}
    if key.endswith((".out.weight", ".down.weight")):
        return {name: Part(1, *parallel.part_of(shape[1])) for name, shape in parameter.shapes.items()}
    return {}


def _head_rows(name: str, spec: ModelSpec, parallel: ParallelContext) -> Part:
    """The rows of whole heads; key/value heads fewer than the ranks are shared by neighbours."""
    num_heads = spec.num_heads if ".q_proj." in name else spec.num_kv_heads
    share = max(1, num_heads // parallel.size)
    first = parallel.rank * num_heads // parallel.size
    return Part(0, first * spec.head_dim, (first + share) * spec.head_dim)
