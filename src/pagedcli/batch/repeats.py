"""Rows that ask for the same: `--deduplicate` computes the first one of them, and the others receive its answers.

Used by batch.run and batch.prompts. Which rows may be equal is known from a first pass over the input, so that answers
are kept only as long as a later row may need them. Memory: 8 bytes per row.
"""

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import xxhash

from pagedcli.batch.columns import Columns
from pagedcli.batch.requests import BatchRow, RowPrompt, asked_of, decode_line
from pagedcli.errors import RequestError

Answers = list[RowPrompt] | RequestError  # what equal rows get: finished prompts, or why they fail
_MOST_WAITING = 10_000  # rows in memory that wait for the answers of another one
_NO_REQUEST = 0  # stands for the digest of a line without a request


def request_key(row: BatchRow) -> bytes:
    """Equal for two rows whose answers are equal: the same prompts, and the same parameters with the same draws."""
    prompts = []
    for prompt in row.prompts:
        params = prompt.params
        draws = not params.greedy and params.beam_width is None
        asked = params if draws else msgspec.structs.replace(params, seed=None)
        scored = prompt.scored
        wanted = scored and (scored.continuations, scored.num_bytes, scored.with_tokens)
        prompts.append((prompt.token_ids, prompt.is_chat, prompt.tools, asked, wanted))
    return xxhash.xxh3_128_digest(msgspec.json.encode((row.shape, row.cache_salt, prompts)))


@dataclass(slots=True)
class _Same:
    """Rows with one key."""

    key: bytes
    digest: int
    outcome: Answers | None = None  # None: not known yet
    waiting: list[BatchRow] = field(default_factory=list)


class Repeats:
    """The equal rows of a run. `add` takes all lines of the input once; then the run takes its rows in that order."""

    def __init__(self, columns: Columns, *, limit: int | None, shard: tuple[int, int]) -> None:
        self._columns = columns
        self._limit = limit
        self._shard = shard
        self._digests = array("Q")  # one per line
        self._left: Counter[int] = Counter()  # digest -> rows still to come
        self._same: dict[int, _Same] = {}  # digest -> its rows
        self._first: dict[int, _Same] = {}  # index of the computed row -> its equals
        self._num_waiting = 0

    @property
    def full(self) -> bool:
        """Whether no more rows should be taken until some that are waited for are done."""
        return self._num_waiting >= _MOST_WAITING

    def add(self, content: bytes | None) -> None:
        """Look at a line."""
        index, (place, num_shards) = len(self._digests), self._shard
        digest = _NO_REQUEST
        if (self._limit is None or index < self._limit) and index % num_shards == place:
            digest = self._digest(content)
        self._digests.append(digest)
        if digest != _NO_REQUEST:
            self._left[digest] += 1

    def scanned(self) -> None:
        """All lines have been added."""
        self._left = Counter({digest: count for digest, count in self._left.items() if count > 1})

    def _digest(self, content: bytes | None) -> int:
        try:
            asked = asked_of(decode_line(content), self._columns)
        except RequestError:
            return _NO_REQUEST
        return xxhash.xxh3_64_intdigest(msgspec.json.encode(asked, order="deterministic")) or 1

    def leave_out(self, index: int) -> None:
        """A row asks for nothing: it is done already, or invalid."""
        digest = self._digests[index]
        if digest in self._left:
            self._left[digest] -= 1
            self._forget(digest)

    def take(self, row: BatchRow) -> Answers | bool:
        """What the row gets: the answers or the error of an equal one; True: it waits for them. False: compute it."""
        index = row.line.index
        digest = self._digests[index]
        if digest not in self._left:
            return False
        self._left[digest] -= 1
        same = self._same.get(digest)
        if same is None:
            same = self._same[digest] = self._first[index] = _Same(row.key, digest)
            return False
        if same.key != row.key:  # its draws are its own
            self._forget(digest)
            return False
        if same.outcome is not None:
            self._forget(digest)
            return same.outcome
        same.waiting.append(row)
        self._num_waiting += 1
        return True

    def finish(self, index: int, outcome: Answers) -> Iterator[BatchRow]:
        """The rows that have waited for this one."""
        same = self._first.pop(index, None)
        if same is None:
            return
        same.outcome = outcome
        self._forget(same.digest)
        self._num_waiting -= len(same.waiting)
        waiting, same.waiting = same.waiting, []
        yield from waiting

    def _forget(self, digest: int) -> None:
        """Drop the answers that no row to come may need."""
        if self._left[digest] <= 0:
            self._same.pop(digest, None)
