"""Log-probabilities of prompt tokens, on the device and on their way to the host. Used by the model runner."""

from collections.abc import Callable

import torch
from torch import Tensor

from pagedcli.core.sequence import TokenLogprobs
from pagedcli.core.step_input import PromptLogprobs, PromptRows
from pagedcli.layers.sampling import top_tokens
from pagedcli.runner.transfer import Download, Upload

_ROWS = 64  # whose logits are in memory at once


class PromptScores:
    """Log-probabilities being copied to the host."""

    def __init__(self, rows: PromptRows, chosen: Tensor, values: Tensor, ids: Tensor) -> None:
        self._pieces = rows.pieces
        self._download = Download([chosen, values, ids, torch.from_numpy(rows.token_ids)])

    def read(self) -> list[PromptLogprobs]:
        """Wait for them."""
        chosen, values, ids, token_ids = (tensor.tolist() for tensor in self._download.wait())
        found, start = [], 0
        for piece in self._pieces:
            logprobs = [
                TokenLogprobs(token_ids[i], chosen[i], list(zip(ids[i], values[i], strict=True))[: piece.num_top])
                for i in range(start, start + piece.num_tokens)
            ]
            found.append(PromptLogprobs(piece.seq_id, piece.first, logprobs))
            start += piece.num_tokens
        return found


def score_prompts(
    hidden: Tensor, compute_logits: Callable[[Tensor], Tensor], rows: PromptRows, upload: Upload
) -> PromptScores:
    """Log-probabilities of the prompt tokens that follow.

    Shapes:  hidden [R + P, E], of all rows that get logits.
    """
    places, token_ids = upload([rows.scored, rows.token_ids])
    hidden = hidden.index_select(0, places)
    num_top = max(piece.num_top for piece in rows.pieces)
    parts = []
    for start in range(0, hidden.shape[0], _ROWS):
        logprobs = compute_logits(hidden[start : start + _ROWS]).float().log_softmax(-1)
        own = logprobs.gather(1, token_ids[start : start + _ROWS, None])[:, 0]
        parts.append((own, *top_tokens(logprobs, num_top)))
    return PromptScores(rows, *(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
