"""The length of the requests that a model serves: the default, and lengths that it cannot have."""

from pagedcli.config import EngineConfig
from pagedcli.errors import ConfigError, ModelError
from pagedcli.models.spec import ModelSpec

LONGEST_DEFAULT = 2**20  # default length of a request: tables are built for every position


def resolve_max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    """Most tokens of prompt and output together. Raises: ConfigError if the model has fewer positions."""
    limit = spec.max_position_embeddings
    if config.max_model_len is None:
        exact = spec.rope.exact_length if spec.rope is not None else None
        return min(limit, exact or LONGEST_DEFAULT)
    if config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the model's positions end at {limit}",
            hint=f"use --max-model-len {limit} or less",
        )
    return config.max_model_len


def check_length(spec: ModelSpec, max_model_len: int) -> None:
    """Raises: ModelError if the model cannot serve requests of max_model_len tokens."""
    if (chunk := spec.attention_chunk) is not None and max_model_len > chunk:
        raise ModelError(
            f"{spec.architecture} has layers that attend within chunks of {chunk} tokens, which is not implemented,"
            f" and max_model_len {max_model_len} is longer",
            hint=f"use --max-model-len {chunk}: up to there the chunks change nothing",
        )
    rope = spec.rope
    if rope is not None and rope.extends(max_model_len) and not rope.long_factor:
        assert rope.exact_length is not None, "only then it extends"
        raise length_refusal(spec.architecture, rope.exact_length, "longrope", max_model_len)


def length_refusal(architecture: str, limit: int, rope_type: str, max_model_len: int) -> ModelError:
    """The error for lengths in tokens at which the rope angles of one sequence begin to depend on its neighbours."""
    return ModelError(
        f"{architecture}: above {limit} tokens its rope type {rope_type!r} depends on the longest sequence of a batch, "
        f"and max_model_len is {max_model_len}",
        hint=f"use --max-model-len {limit}",
    )
