"""Drafts: guesses of a sequence's next tokens, from its own text, from the answers of sequences that have finished, and
from its grammar; and which steps check them.

Used by the scheduler, which has them checked in an ordinary step; needs no torch. A wrong guess costs time and nothing
else: what a sequence generates does not depend on its drafts.
"""

from collections import deque
from collections.abc import Sequence as Items
from itertools import islice

from pagedcli.core.limits import MOST_DRAFTED
from pagedcli.core.sequence import Draft, Guide, Sequence, TokenMask

FIRST_RIGHT = 2  # tokens that count as right before the first draft of a sequence
RUN_LENGTHS = (4, 2)  # tokens at the end of a text that are looked up, the longer run first
MOST_DECODES = 8  # sequences that decode in a step with guesses
NUM_LATEST = 32  # guessed tokens, of which at least half must have been right
STEPS_UNTIL_NEW_COUNT = 256  # steps without a guess


class _Text:
    """Where each short run of tokens occurred last in a text that grows, where another token follows it."""

    __slots__ = ("_next", "_num_seen", "_token_ids")

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids  # the owner's list, which it may extend
        self._num_seen = 0
        self._next: dict[tuple[int, ...], int] = {}  # run -> index of the token after its last occurrence

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def update(self) -> None:
        """Take in the tokens that were added. No loop in Python: this is done for every token of a run."""
        for length in RUN_LENGTHS:
            first = max(length, self._num_seen)  # the first token that a new run precedes
            tail = self._token_ids[first - length :]
            runs = zip(*(islice(tail, start, None) for start in range(length)), strict=False)
            self._next.update(zip(runs, range(first, len(self._token_ids)), strict=False))
        self._num_seen = len(self._token_ids)

    def extend(self, token_ids: list[int]) -> None:
        """Add tokens."""
        self._token_ids += token_ids
        self.update()

    def after(self, run: list[int], most: int) -> list[int]:
        """What followed the last occurrence of a run. Where the text ends before `most` tokens, it continues as if it
        repeated itself: after 1 2 3 1 2 come 3 1 2 3 ..."""
        place, token_ids = self._next.get(tuple(run)), self._token_ids
        if place is None:
            return []
        period = len(token_ids) - place
        return (
            token_ids[place : place + most] if period >= most else [token_ids[place + i % period] for i in range(most)]
        )


class NgramDrafter:
    """Drafts what followed the last tokens of a sequence before: in its own text, or in an answer that has finished.

    A draft is one token longer than what was right of the last one, as a row of a step is cheap, and eight are not. A
    sequence with a cache_salt drafts from its own text alone, and no other sequence from it.
    """

    def __init__(self, *, most_remembered: int = 2**16) -> None:
        self._most_remembered = most_remembered  # tokens of finished answers; at most twice as many are kept
        self._own: dict[int, _Text] = {}  # seq_id -> its text
        self._num_right: dict[int, int] = {}  # seq_id -> right guesses of its last draft
        self._newer, self._older = _Text([]), _Text([])  # answers that have finished
        self._unread: deque[list[int]] = deque()  # answers that are looked up in from the next draft on
        self._num_unread = 0  # tokens

    def draft(self, seq: Sequence, most: int) -> Draft | None:
        """Draft up to `most` tokens that may come next; None: no draft."""
        own = self._own.get(seq.seq_id)
        if own is None:
            own = self._own[seq.seq_id] = _Text(seq.token_ids)
        own.update()
        while self._unread:
            self._read(self._unread.popleft())
        most = min(most, self._num_right.get(seq.seq_id, FIRST_RIGHT) + 1)
        texts = (own, self._newer, self._older) if seq.cache_salt is None else (own,)
        for length in RUN_LENGTHS:
            run = seq.token_ids[-length:]
            for text in texts:
                if found := text.after(run, most):
                    return Draft(found, "own_text" if text is own else "answers")
        return None

    def checked(self, seq: Sequence, num_accepted: int) -> None:
        self._num_right[seq.seq_id] = num_accepted

    def ended(self, seq: Sequence) -> None:
        self._own.pop(seq.seq_id, None)
        self._num_right.pop(seq.seq_id, None)
        if seq.cache_salt is not None or seq.finish_reason not in ("stop", "length"):
            return
        # with the end of the prompt, after which the answer began
        self._unread.append(seq.token_ids[max(0, seq.num_prompt_tokens - RUN_LENGTHS[0]) :])
        self._num_unread += len(self._unread[-1])
        while self._num_unread > self._most_remembered and len(self._unread) > 1:
            self._num_unread -= len(self._unread.popleft())

    def _read(self, answer: list[int]) -> None:
        """Take in an answer that has finished."""
        if self._newer.num_tokens >= self._most_remembered:
            self._older, self._newer = self._newer, _Text([])
        self._newer.extend(answer)
        self._num_unread -= len(answer)


class Drafting:
    """Guesses while at most MOST_DECODES sequences decode and at least half of the last NUM_LATEST guesses were right;
    after STEPS_UNTIL_NEW_COUNT steps without a guess the count starts anew. Guesses after a wrong one do not count."""

    def __init__(self, drafter: NgramDrafter) -> None:
        self._drafter = drafter
        self._latest: deque[bool] = deque(maxlen=NUM_LATEST)  # of each guessed token: whether it was right
        self._last_step = 0  # with guesses

    def is_due(self, step: int, num_decodes: int) -> bool:
        """Whether a step checks guesses, if there are some."""
        if num_decodes > MOST_DECODES:
            return False
        are_few = len(self._latest) < NUM_LATEST or step - self._last_step > STEPS_UNTIL_NEW_COUNT
        return are_few or 2 * sum(self._latest) >= NUM_LATEST

    def choose(self, step: int, seqs: Items[Sequence], budget: int, chunk_size: int) -> list[tuple[int, Draft]]:
        """The places of sequences of a step, and what it guesses of each: at most `budget` tokens together, and of each
        at most `chunk_size` with the tokens that the step computes anyway."""
        chosen: list[tuple[int, Draft]] = []
        for place, seq in enumerate(seqs):
            num_left = seq.max_new_tokens - seq.num_output_tokens - 1  # the step adds one token in any case
            most = min(budget, MOST_DRAFTED, chunk_size - 1 - seq.num_behind_tokens, num_left)
            if most > 0 and seq.can_draft:
                draft = within_grammar(self._drafter.draft(seq, most), seq, most)
                if draft is not None:
                    chosen.append((place, draft))
                    budget -= len(draft.token_ids)
        if chosen:
            if step - self._last_step > STEPS_UNTIL_NEW_COUNT:
                self._latest.clear()
            self._last_step = step
        return chosen

    def checked(self, seq: Sequence, num_drafted: int, num_accepted: int) -> None:
        """So many of the first guessed tokens of a sequence were right."""
        self._drafter.checked(seq, num_accepted)
        self._latest += [True] * num_accepted + [False] * (num_accepted < num_drafted)

    def ended(self, seq: Sequence) -> None:
        """A sequence has ended, by itself or not."""
        self._drafter.ended(seq)


# ---------------------------------------------------------------------- grammars


def within_grammar(guessed: Draft | None, seq: Sequence, most: int) -> Draft | None:
    """A draft as far as the sequence's grammar allows it, and at most so many tokens with what the grammar forces."""
    if seq.guide is None:
        return guessed
    guesses = [] if guessed is None else guessed.token_ids
    token_ids, masks = _guided(seq.guide, guesses, most, seq.end_token_ids)
    if not token_ids:
        return None
    is_guess = guessed is not None and token_ids[0] == guesses[0]
    return Draft(token_ids, guessed.source if guessed is not None and is_guess else "grammar", masks)


def _guided(
    guide: Guide, guesses: list[int], most: int, end_token_ids: frozenset[int]
) -> tuple[list[int], list[TokenMask]]:
    """A draft of at most `most` tokens, after which the text of the grammar continues, and what may follow each. Where
    the grammar leaves one token, that is the next one; elsewhere a guess that all tokens before it agree with."""
    draft: list[int] = []
    masks: list[TokenMask] = []
    ahead, allowed = None, guide.allowed_tokens
    while len(draft) < most:
        token = _only_token(allowed)
        if token is None and len(draft) < len(guesses) and draft == guesses[: len(draft)]:
            token = guesses[len(draft)]
        if token is None or token in end_token_ids or not _has_token(allowed, token):
            break
        ahead = guide.copy() if ahead is None else ahead
        ahead.accept(token)
        if type(ahead).find_allowed([ahead]) == [True]:  # the text is complete: the step samples this token in any case
            break
        allowed = ahead.allowed_tokens
        draft.append(token)
        masks.append(allowed)
    return draft, masks


def _only_token(allowed: TokenMask) -> int | None:
    """The token of a mask with a single bit."""
    bits = int.from_bytes(allowed, "little")
    return bits.bit_length() - 1 if not bits & (bits - 1) else None


def _has_token(allowed: TokenMask, token_id: int) -> bool:
    return token_id // 8 < len(allowed) and bool(allowed[token_id // 8] >> token_id % 8 & 1)
