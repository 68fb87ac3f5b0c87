"""Errors that several parts of models/ raise."""

from pagedcli.errors import ModelError


def window_refusal(architecture: str, window: int, max_model_len: int) -> ModelError:
    """The error for a sliding window or chunk shorter than the sequences may get; both in tokens."""
    return ModelError(
        f"{architecture} has layers that see only a window of {window} tokens, which is not implemented, and "
        f"max_model_len {max_model_len} is longer",
        hint=f"use --max-model-len {window}: up to there the window changes nothing",
    )


def length_refusal(architecture: str, limit: int, rope_type: str, max_model_len: int) -> ModelError:
    """The error for lengths in tokens at which the rope angles of one sequence begin to depend on its neighbours."""
    return ModelError(
        f"{architecture}: above {limit} tokens its rope type {rope_type!r} depends on the longest sequence of a batch, "
        f"and max_model_len is {max_model_len}",
        hint=f"use --max-model-len {limit}",
    )
