"""Equal runs of tokens in many prompts, at any offset, and the hits that prompts have in an unlimited cache.

Used by answers.divergence. Works on rolling hashes, a batch of prompts at a time: what is kept per prompt are the
hashes of its blocks, and of about one window in `block_size / 2` tokens.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

Hashes = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]
Ids = Sequence[int]

MOST_BYTES = 2**28  # bytes of the windows that are kept; beyond it every other one is dropped, again and again
_BATCH_TOKENS = 2**16  # few enough for the arrays of a batch to fit into the cache of a core
_WINDOW_BYTES = 24  # two hashes, row and place of a window
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2**64
_NONE = np.uint64(2**64 - 1)


@dataclass(frozen=True, slots=True)
class EqualWindow:
    """A window of tokens that two prompts have after different beginnings."""

    row: int
    place: int  # the window's first token in this prompt
    other: int
    other_place: int


@dataclass(frozen=True, slots=True)
class EqualRuns:
    """What prompts have in common after they diverge."""

    pairs: list[EqualWindow]  # one of each prompt that has such a window
    share: float  # share of all tokens in such windows, roughly


def hit_tokens(prompts: Sequence[Ids], salts: Sequence[str | None], block_size: int) -> Ints:
    """The tokens of each prompt that an unlimited cache has from earlier ones. The last token is always computed."""
    block_hashes, rows, lengths = _blocks(prompts, salts, block_size)
    _, first, which = np.unique(block_hashes, return_index=True, return_inverse=True)
    is_hit = rows[first][which] < rows  # a block's hash covers all before it: hits are the leading blocks
    hits = np.bincount(rows[is_hit], minlength=len(prompts)).astype(np.int64) * block_size
    return np.minimum(hits, np.maximum(lengths - 1, 0))


def shared_tokens(prompts: Sequence[Ids], salts: Sequence[str | None], block_size: int) -> Ints:
    """The leading tokens of each prompt with which any other prompt also begins, in whole blocks."""
    block_hashes, rows, _ = _blocks(prompts, salts, block_size)
    found, which = np.unique(block_hashes, return_inverse=True)
    is_shared = np.bincount(which, minlength=len(found))[which] > 1
    return np.bincount(rows[is_shared], minlength=len(prompts)).astype(np.int64) * block_size


def equal_runs(prompts: Sequence[Ids], block_size: int, ignored: Sequence[Ids] = ()) -> EqualRuns:
    """The windows of a block that prompts have after different beginnings: an unlimited cache computes each once for
    every beginning. There is one in any run of two blocks that two prompts have. `ignored`: texts without such."""
    windows = _windows(prompts, block_size)
    _, which, counts = np.unique(windows.hashes, return_inverse=True, return_counts=True)
    is_ours = counts[which] > 1
    if ignored:
        is_ours &= ~np.isin(windows.hashes, _windows(ignored, block_size, keep_all=True).hashes)
    windows = windows.only(is_ours)
    windows = windows.only(np.lexsort((windows.rows, windows.prefixes, windows.hashes)))
    is_new_hash = np.diff(windows.hashes, prepend=_NONE) != 0
    is_first = is_new_hash | (np.diff(windows.prefixes, prepend=_NONE) != 0)  # the first of all with this beginning
    windows, is_new_hash = windows.only(is_first), is_new_hash[is_first]
    at = np.flatnonzero(~is_new_hash)
    at = at[windows.rows[at] != windows.rows[at - 1]]
    share = len(at) * (block_size / 2 + 1) / max(1, sum(map(len, prompts)))
    mine = np.concatenate([at, at - 1])  # each with its neighbour, so that the first one of a group has one, too
    theirs = np.concatenate([at - 1, at])
    first = np.lexsort((windows.places[mine], windows.rows[mine]))
    mine, theirs = mine[first], theirs[first]
    _, one = np.unique(windows.rows[mine], return_index=True)
    mine, theirs = mine[one], theirs[one]
    columns = windows.rows[mine], windows.places[mine], windows.rows[theirs], windows.places[theirs]
    return EqualRuns([EqualWindow(*map(int, each)) for each in zip(*columns, strict=True)], share)


def common_prefix(a: str, b: str) -> int:
    """The length of the common beginning of two texts."""
    return _common(min(len(a), len(b)), lambda num: a[:num] == b[:num])


def common_suffix(a: str, b: str) -> int:
    """The length of the common end of two texts."""
    return _common(min(len(a), len(b)), lambda num: a[len(a) - num :] == b[len(b) - num :])


def _common(most: int, is_equal: Callable[[int], bool]) -> int:
    high = 1
    while high <= most and is_equal(high):
        high *= 2
    return bisect_left(range(min(high, most + 1)), True, high // 2, key=lambda num: not is_equal(num)) - 1


# ---------------------------------------------------------------------- rolling hashes


@dataclass(frozen=True, slots=True)
class _Batch:
    """Some prompts, one after the other. The hash of the first n tokens of a prompt is the sum of each token's number
    times a power by its place in the prompt."""

    first_row: int
    lengths: Ints
    starts: Ints  # place of each prompt in the sums
    rows: Ints  # row of each token, counted from first_row
    places: Ints  # place of each token in its prompt
    sums: Hashes  # sum of all numbers before each token, then of all


def _batches(prompts: Sequence[Ids]) -> Iterator[tuple[_Batch, Hashes]]:
    """Batches of about this number of tokens, with the powers of the base for their places."""
    powers = _powers(_BASE, 1)
    first = 0
    while first < len(prompts):
        last, num_tokens = first, 0
        while last < len(prompts) and (last == first or num_tokens + len(prompts[last]) <= _BATCH_TOKENS):
            num_tokens += len(prompts[last])
            last += 1
        lengths = np.fromiter(map(len, prompts[first:last]), np.int64, last - first)
        if lengths.max(initial=0) >= len(powers):
            powers = _powers(_BASE, int(lengths.max()) + 1)
        flat = np.concatenate([np.asarray(ids, np.int64) for ids in prompts[first:last]])
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        rows = np.repeat(np.arange(last - first), lengths)
        places = np.arange(num_tokens) - starts[rows]
        sums = np.zeros(num_tokens + 1, np.uint64)
        np.cumsum(_mixed(flat) * powers[places], out=sums[1:])
        yield _Batch(first, lengths, starts, rows, places, sums), powers
        first = last


def _blocks(prompts: Sequence[Ids], salts: Sequence[str | None], block_size: int) -> tuple[Hashes, Ints, Ints]:
    """The hash of everything up to the end of each full block, the row of each block, and the length of each row."""
    numbers = np.fromiter((0 if salt is None else xxhash.xxh64_intdigest(salt.encode()) for salt in salts), np.uint64)
    hashes, rows, lengths = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for batch, _ in _batches(prompts):
        ends = np.flatnonzero(batch.places % block_size == block_size - 1)
        row = batch.rows[ends]
        # a length of its own in each hash: tokens that end in a zero number are no other prefix
        values = batch.sums[ends + 1] - batch.sums[batch.starts[row]] + _mixed(batch.places[ends])
        hashes.append(values ^ numbers[batch.first_row + row])
        rows.append(batch.first_row + row)
        lengths.append(batch.lengths)
    return np.concatenate(hashes), np.concatenate(rows), np.concatenate(lengths)


@dataclass(frozen=True, slots=True)
class _Windows:
    """Windows of tokens, in four columns."""

    hashes: Hashes
    prefixes: Hashes  # hash of everything before them
    rows: npt.NDArray[np.int32]
    places: npt.NDArray[np.int32]

    def only(self, chosen: npt.NDArray[Any]) -> "_Windows":
        return _Windows(self.hashes[chosen], self.prefixes[chosen], self.rows[chosen], self.places[chosen])


def _windows(prompts: Sequence[Ids], size: int, *, keep_all: bool = False) -> _Windows:
    """The windows of `size` tokens with the smallest hash of `size + 1` neighbours: equal runs have equal ones."""
    inverse, kept, num_kept, mask = _powers(pow(_BASE, -1, 2**64), 1), [], 0, np.uint64(0)
    for batch, powers in _batches(prompts):
        if len(inverse) < len(powers):
            inverse = _powers(pow(_BASE, -1, 2**64), len(powers))
        num_windows = max(0, len(batch.places) - size + 1)
        hashes = (batch.sums[size:][:num_windows] - batch.sums[:num_windows]) * inverse[batch.places[:num_windows]]
        hashes = _mixed(hashes)
        is_whole = batch.rows[size - 1 :] == batch.rows[:num_windows]
        hashes[~is_whole] = _NONE
        is_chosen = is_whole
        if not keep_all and num_windows:
            least = _sliding(hashes, size + 1, np.minimum)
            best = _sliding(np.concatenate([np.zeros(size, np.uint64), least])[::-1], size + 1, np.maximum)[::-1]
            is_chosen = is_whole & (best[size:] == hashes) & ((hashes & mask) == 0)
        chosen = np.flatnonzero(is_chosen)
        prefixes = batch.sums[chosen] - batch.sums[batch.starts[batch.rows[chosen]]]
        rows, places = batch.first_row + batch.rows[chosen], batch.places[chosen]
        kept.append(_Windows(hashes[chosen], prefixes, rows.astype(np.int32), places.astype(np.int32)))
        num_kept += len(chosen)
        while num_kept * _WINDOW_BYTES > MOST_BYTES:
            mask = mask << np.uint64(1) | np.uint64(1)
            kept = [each.only((each.hashes & mask) == 0) for each in kept]
            num_kept = sum(len(each.hashes) for each in kept)
    columns = [(each.hashes, each.prefixes, each.rows, each.places) for each in kept]
    return _Windows(*(np.concatenate(column) for column in zip(*columns, strict=True)))


def _sliding(values: Hashes, size: int, pick: Any) -> Hashes:
    """The smallest, or largest, of each value and the `size - 1` after it. Beyond the end there are none."""
    found, reach = values.copy(), 1
    while reach < size:
        step = min(reach, size - reach)
        num = max(0, len(found) - step)
        found[:num] = pick(found[:num], found[step:])
        reach += step
    return found


def _powers(base: int, num: int) -> Hashes:
    factors = np.full(max(num, 2**14), base, np.uint64)
    factors[0] = 1
    powers: Hashes = np.multiply.accumulate(factors)
    return powers


def _mixed(numbers: npt.NDArray[Any]) -> Hashes:
    """Numbers without order: the finalizer of splitmix64."""
    x = numbers.astype(np.uint64) + np.uint64(_BASE)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = x ^ (x >> np.uint64(31))
    return mixed
