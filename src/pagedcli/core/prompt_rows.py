"""Which rows of a step give log-probabilities of prompt tokens (SamplingParams.prompt_logprobs), and whose they are.

Built by StepBuilder, read by the model runner and by the core; needs no torch.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedcli.core.sequence import Sequence, TokenLogprobs

Ints = np.ndarray[tuple[int, ...], np.dtype[np.integer[Any]]]


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """Consecutive tokens of one prompt whose predecessors are computed in a step."""

    seq_id: int
    first: int  # position of the first of these tokens; at least 1
    num_tokens: int
    num_top: int  # of the likeliest tokens at each position


@dataclass(frozen=True, slots=True)
class PromptRows:
    """P prompt tokens to score, among the R + P rows of a step that get logits."""

    sampled: Ints  # [R] int64, which of these rows get a token
    scored: Ints  # [P] int64, which of them predict a prompt token
    token_ids: Ints  # [P] int64, that token
    pieces: tuple[PromptPiece, ...]  # the P tokens, in order


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of consecutive tokens of one prompt."""

    seq_id: int
    first: int  # position of the first token
    logprobs: list[TokenLogprobs]


def prompt_rows(
    seqs: list[Sequence], computed: Ints, new: Ints, starts: Ints, sampled: Ints
) -> tuple[Ints, PromptRows] | None:
    """The rows of a step that get logits, ascending, and what to score there. None if no sequence asks for it.

    `computed`, `new`: tokens per sequence before the step and in it. `starts`: first row of each sequence. `sampled`:
    rows that get a token, ascending.
    """
    pieces, rows, token_ids = [], [], []
    for seq, start, done, count in zip(seqs, starts.tolist(), computed.tolist(), new.tolist(), strict=True):
        num_top = seq.params.prompt_logprobs
        num_tokens = min(done + count, seq.num_prompt_tokens - 1) - done
        if num_top is None or seq.sample_index or num_tokens < 1:
            continue
        pieces.append(PromptPiece(seq.seq_id, done + 1, num_tokens, num_top))
        rows.append(np.arange(start, start + num_tokens))
        token_ids += seq.token_ids[done + 1 : done + 1 + num_tokens]
    if not pieces:
        return None
    scored = np.concatenate(rows)
    both = np.union1d(sampled, scored).astype(np.int64)
    places = np.searchsorted(both, sampled), np.searchsorted(both, scored)
    return both, PromptRows(*places, np.array(token_ids, dtype=np.int64), tuple(pieces))
