"""Penalties, bias, grammars and minimum lengths for all rows of a step at once, and the tokens that penalties look at.

Used by sampler.py. Host and device never wait for each other here.
"""

from itertools import chain

import numpy as np
import torch
from torch import Tensor

from pagedcli.core.step_input import Ints, LogitChanges
from pagedcli.layers.sampling import mask_tokens, penalize_counted, penalize_repeated
from pagedcli.runner.device_state import Upload


class KeptTokens:
    """Which tokens each running sequence with a penalty has, and how often it generated them, on the device. The tables
    are made when the first such sequence starts."""

    def __init__(self, num_places: int, upload: Upload) -> None:
        self._num_places = num_places  # running sequences
        self._upload = upload
        self._seen: Tensor | None = None  # [places, V] uint8: 1 for tokens of prompt and output
        self._counts: Tensor | None = None  # [places, V] int32: of the output

    def change(self, scores: Tensor, changes: LogitChanges) -> None:
        """Apply the changes to scores [R, V], float32 and contiguous, in place."""
        vocab_size = scores.shape[1]
        self._start(changes, vocab_size)
        # users may name stop tokens outside the vocabulary
        inside = (changes.banned_ids >= 0) & (changes.banned_ids < vocab_size)
        arrays = [
            changes.repeated,
            changes.repeated_places,
            changes.repetition,
            changes.counted,
            changes.counted_places,
            changes.frequency,
            changes.presence,
            changes.biased * vocab_size + changes.biased_ids,
            changes.bias,
            np.array([row for row, _, _ in changes.guided], dtype=np.int64),
            _allowed_words(changes, vocab_size),
            (changes.banned * vocab_size + changes.banned_ids)[inside],
        ]
        uploaded = self._upload(arrays)
        repeated, counted, (biased, bias, guided, words, banned) = uploaded[:3], uploaded[3:7], uploaded[7:]
        if repeated[0].shape[0]:
            assert self._seen is not None, "its sequence has started"
            penalize_repeated(scores, self._seen, *repeated)
        if counted[0].shape[0]:
            assert self._counts is not None, "its sequence has started"
            penalize_counted(scores, self._counts, *counted)
        flat = scores.view(-1)
        if biased.shape[0]:
            flat.index_copy_(0, biased, flat.index_select(0, biased) + bias)
        if guided.shape[0]:
            mask_tokens(scores, guided, words)
        if banned.shape[0]:
            flat.index_fill_(0, banned, float("-inf"))

    def add(self, tokens: Tensor, changes: LogitChanges) -> None:
        """Keep the tokens [R] that were sampled after these changes. INVALID, which ends its sequence, counts as 0."""
        if not changes.repeated.shape[0] and not changes.counted.shape[0]:
            return
        seen, seen_places, counted, counted_places = self._upload(
            [changes.repeated, changes.repeated_places, changes.counted, changes.counted_places]
        )
        if self._seen is not None and seen.shape[0]:
            _add_one(self._seen, seen_places, tokens.index_select(0, seen), counts=False)
        if self._counts is not None and counted.shape[0]:
            _add_one(self._counts, counted_places, tokens.index_select(0, counted), counts=True)

    def _start(self, changes: LogitChanges, vocab_size: int) -> None:
        """Keep the tokens of sequences that have just started, in place of those of earlier sequences."""
        if not changes.started:
            return
        device = self._upload.device
        repeated, counted = set(changes.repeated_places.tolist()), set(changes.counted_places.tolist())
        if repeated and self._seen is None:
            self._seen = torch.zeros((self._num_places, vocab_size), dtype=torch.uint8, device=device)
        if counted and self._counts is None:
            self._counts = torch.zeros((self._num_places, vocab_size), dtype=torch.int32, device=device)
        tables = ((self._seen, repeated, False), (self._counts, counted, True))
        for table, places, counts in tables:
            started = [(place, ids[start * counts :]) for place, ids, start in changes.started if place in places]
            if table is None or not started:
                continue
            own = _integers([place for place, _ in started])
            ids = _integers(list(chain.from_iterable(ids for _, ids in started)))
            of_ids = np.repeat(own, [len(ids) for _, ids in started])
            cleared, at, token_ids = self._upload([own, of_ids, ids])
            table.index_fill_(0, cleared, 0)
            _add_one(table, at, token_ids, counts=counts)


def _add_one(table: Tensor, places: Tensor, token_ids: Tensor, *, counts: bool) -> None:
    """Count tokens at their places, or mark them."""
    flat = places * table.shape[1] + token_ids.clamp(min=0)
    if counts:
        table.view(-1).index_add_(0, flat, torch.ones_like(flat, dtype=table.dtype))
    else:
        table.view(-1).index_fill_(0, flat, 1)


def _integers(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def _allowed_words(changes: LogitChanges, vocab_size: int) -> Ints:
    """[G, V / 32] int32: a bit per token, lowest first. Where a grammar allows only end tokens, it overrides the
    minimum length."""
    words = np.zeros((len(changes.guided), -(-vocab_size // 32)), dtype=np.int32)
    for found, (_, bits, end_token_ids) in zip(words.view(np.uint8), changes.guided, strict=True):
        allowed = np.frombuffer(bits, dtype=np.uint8, count=min(len(bits), -(-vocab_size // 8)))
        found[: len(allowed)] = allowed
        if vocab_size % 8:
            found[vocab_size // 8] &= (1 << vocab_size % 8) - 1
        if end_token_ids:
            longer = found.copy()
            for token_id in end_token_ids:
                if 0 <= token_id < vocab_size:
                    longer[token_id // 8] &= ~np.uint8(1 << token_id % 8)
            if longer.any():
                found[:] = longer
    return words
