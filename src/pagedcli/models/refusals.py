"""Errors that several parts of models/ raise."""

from pagedcli.errors import ModelError


def chunk_refusal(architecture: str, chunk: int, max_model_len: int) -> ModelError:
    """The error for layers that attend within chunks shorter than the sequences may get; both in tokens."""
    return ModelError(
        f"{architecture} has layers that attend within chunks of {chunk} tokens, which is not implemented, and "
        f"max_model_len {max_model_len} is longer",
        hint=f"use --max-model-len {chunk}: up to there the chunks change nothing",
    )


def length_refusal(architecture: str, limit: int, rope_type: str, max_model_len: int) -> ModelError:
    """The error for lengths in tokens at which the rope angles of one sequence begin to depend on its neighbours."""
    return ModelError(
        f"{architecture}: above {limit} tokens its rope type {rope_type!r} depends on the longest sequence of a batch, "
        f"and max_model_len is {max_model_len}",
        hint=f"use --max-model-len {limit}",
    )
