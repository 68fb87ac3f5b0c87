"""Guesses next tokens by the model's head, after the tokens of a step are sampled: on a CPU, where the host may look at
them at once. Used by ModelRunner.

The head's layer keeps K and V of every token in the same blocks as the others, under the same block tables. Entry i is
of token i + 1 and the hidden state of token i, so it is written in the step that computes token i, once it is known
which token follows. The last entry of a full block that sequences share may belong to another continuation: guesses may
be wrong by it, and nothing else is. Of tokens that were computed in steps without the head there are no entries: it
sees the tokens after them alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pagedcli.attention.base import LateTokens, PagedBatch
from pagedcli.core.limits import Limits
from pagedcli.core.step_input import HeadInput, Ints, StepInput
from pagedcli.layers.sampling import INVALID, likeliest_tokens
from pagedcli.models.base import CausalLM
from pagedcli.models.blocks import DraftHead, layer_steps
from pagedcli.runner.device_state import DeviceState


@dataclass(frozen=True, slots=True)
class Seen:
    """What the model's layers saw of a step, and what came out."""

    batch: PagedBatch
    positions: Tensor  # [T] int64
    hidden: Tensor  # [T, E]


@dataclass(slots=True)
class Guesser:
    """Runs the head of a model."""

    model: CausalLM
    head: DraftHead
    state: DeviceState
    limits: Limits
    seen: Seen | None = None  # what the step saw whose tokens are being sampled

    def guess(
        self, step: StepInput, given: HeadInput, token_ids: Tensor, logits_rows: Ints | None
    ) -> dict[int, list[int]]:
        """The likeliest next tokens of sequences that were sampled, by the row of the last token that counts of each.

        Shapes:  token_ids [R] int64, sampled; logits_rows: see SamplingInput.
        Changes: the cache of the head's layer; seen.
        """
        assert self.seen is not None, "the model has computed the step"
        seen, self.seen = self.seen, None
        tokens, rows = token_ids.numpy(), _sampled_rows(step, logits_rows)
        next_ids = given.next_ids.copy()
        next_ids[rows[::-1]] = tokens[::-1]  # where samples fork, the first one counts
        np.maximum(next_ids, 0, out=next_ids)  # INVALID, and what nothing follows
        seqs = np.flatnonzero(given.num_guesses)
        last = _last_rows(step, given, next_ids, seqs)
        late = LateTokens.of(step.cu_q, last, self.state.upload)
        batch = _each_group(seen.batch, lambda each: replace(each, late=late))
        before: Ints = np.zeros(step.num_seqs, dtype=np.int64)  # tokens in blocks that the head does not see
        if given.begins is not None:
            batch = self._from(batch, step, given.begins)
            before = given.begins // self.state.block_size * self.state.block_size
        [ids] = self.state.upload([next_ids])
        hidden = self.head(ids, seen.hidden, seen.positions, batch, self.state.kv_cache)
        if not len(seqs):
            return {}
        positions = step.positions[last]
        # further entries lie in the last block of each sequence: no other is taken for them
        size = self.state.block_size
        ends = np.minimum(-(-step.num_tokens[seqs] // size) * size, self.limits.max_model_len)
        counts = np.minimum(given.num_guesses[seqs], ends - positions)
        row_of = dict(zip(rows[::-1].tolist(), range(len(rows) - 1, -1, -1), strict=True))
        found: list[list[int]] = [[] for _ in seqs]
        places, num_guessed = np.arange(len(seqs)), 0  # sequences of which more is guessed
        while len(places):
            guessed, num_guessed = likeliest_tokens(self.model.compute_logits(hidden)).numpy(), num_guessed + 1
            for place, token_id in zip(places.tolist(), guessed.tolist(), strict=True):
                found[place] += [] if token_id == INVALID else [token_id]
            more = np.flatnonzero((guessed != INVALID) & (counts[places] > num_guessed))
            places = places[more]
            if len(places):
                at = positions[places] + num_guessed
                ids, kept, at_device = self.state.upload([guessed[more], more, at])
                further = self._further(batch, seqs[places], at - before[seqs[places]])
                hidden = self.head(ids, hidden.index_select(0, kept), at_device, further, self.state.kv_cache)
        return {row_of[row]: guesses for row, guesses in zip(last.tolist(), found, strict=True)}

    def _from(self, batch: PagedBatch, step: StepInput, begins: Ints) -> PagedBatch:
        """The batch, as if each sequence began with the block of this token. Where that token is new, what the block
        has before it is another sequence's, or nobody's, and becomes 0.

        Changes: the cache of the head's layer.
        """
        size = self.state.block_size
        spans, firsts = begins // size, step.num_tokens - np.diff(step.cu_q)
        num_tokens = (step.num_tokens - spans * size).astype(np.int32)
        fresh = np.flatnonzero((begins > 0) & (begins == firsts) & (step.slots[0, step.cu_q[:-1]] >= 0))
        # tokens that are computed once more have K and V of the model's layers, but perhaps none of the head's
        again = np.flatnonzero(step.slots[0] < 0)
        seqs = np.searchsorted(step.cu_q, again, side="right") - 1
        arrays = [spans, num_tokens, fresh, spans[fresh], again, seqs, step.positions[again]]
        skipped, kept, rows, columns, again_rows, again_seqs, at = self.state.upload(arrays)

        def of_group(each: PagedBatch) -> PagedBatch:
            width = each.block_table.shape[1]
            columns = (torch.arange(width, device=skipped.device) + skipped[:, None]).clamp_(max=width - 1)
            slots = each.block_table[again_seqs, at // size] * size + at % size
            return replace(
                each,
                slots=each.slots.index_copy(0, again_rows, slots.int()),
                num_tokens=kept,
                block_table=each.block_table.gather(1, columns),
                max_total=int(num_tokens.max()),
                num_tokens_host=num_tokens.tolist(),
                work=None,
            )

        if len(fresh):
            layers = self.head.attention_layers
            own = layer_steps(batch, self.state.kv_cache, self.head.backend, layers)[-1]
            block_ids = own.batch.block_table[rows, columns]
            for cache in (own.k_cache, own.v_cache):
                cache[block_ids] = 0
        return _each_group(batch, of_group)

    def _further(self, batch: PagedBatch, seqs: Ints, positions: Ints) -> PagedBatch:
        """A token of each of these sequences after those of the step; positions are those in the batch."""
        size, ends, cu_q = self.state.block_size, (positions + 1).astype(np.int32), np.arange(len(seqs) + 1)
        rows, spans, offsets, starts, num_tokens = self.state.upload(
            [seqs, positions // size, positions % size, cu_q.astype(np.int32), ends]
        )

        def of_group(each: PagedBatch) -> PagedBatch:
            table = each.block_table.index_select(0, rows)
            slots = table.gather(1, spans[:, None])[:, 0] * size + offsets
            return replace(
                each,
                cu_q=starts,
                num_tokens=num_tokens,
                block_table=table,
                slots=slots.int(),
                max_new=1,
                max_total=int(ends.max()),
                cu_q_host=cu_q.tolist(),
                num_tokens_host=ends.tolist(),
                work=None,
                late=None,
            )

        return _each_group(batch, of_group)


def _each_group(batch: PagedBatch, change: Callable[[PagedBatch], PagedBatch]) -> PagedBatch:
    return replace(change(batch), others=tuple(map(change, batch.others)))


def _sampled_rows(step: StepInput, logits_rows: Ints | None) -> Ints:
    """[R] int64, which of the step's tokens each sampled token follows."""
    rows: Ints = np.arange(step.input_ids.shape[0]) if step.logits_rows is None else step.logits_rows
    if step.prompt_rows is not None:
        rows = rows[step.prompt_rows.sampled]
    return rows if logits_rows is None else rows[logits_rows]


def _last_rows(step: StepInput, given: HeadInput, next_ids: Ints, seqs: Ints) -> Ints:
    """The row of the step after which the last token that counts of each of these sequences was sampled: the first
    sampled one, or the one after the last right guess."""
    found = []
    for first, end in zip(step.cu_q[seqs].tolist(), step.cu_q[seqs + 1].tolist(), strict=True):
        row = first + int(np.argmax(given.next_ids[first:end] < 0))
        while row + 1 < end and next_ids[row] == step.input_ids[row + 1]:
            row += 1
        found.append(row)
    return np.array(found, dtype=np.int64)
