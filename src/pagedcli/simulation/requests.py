"""The requests of a trace: when they arrive, how long they are, and which of their blocks are equal.

Made by formats.py and prompts.py, read by everything else in this package.
"""

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from pagedcli.core.prefixes import Prefix, compute_hash
from pagedcli.printable import plural

if TYPE_CHECKING:
    from pagedcli.batch.requests import RowPrompt

MAX_TOKENS = 2**24  # tokens of one request: more is a broken line
MAX_LISTED = 20  # bad lines kept with their reason; all are counted


@dataclass(slots=True)
class Request:
    """One request, whoever made it. Either its token ids are known, or only which hash blocks it consists of."""

    request_id: str
    arrival_s: float | None  # None: the trace has no times
    num_prompt_tokens: int
    num_output_tokens: int | None  # None: the trace does not say
    hashes: "array[int]" = field(default_factory=lambda: array("q"))  # chain of each hash block, see Chains
    token_ids: "array[int] | None" = None  # prompt, and all of an only continuation but its last token
    output_ids: "list[array[int]] | None" = None  # token ids per sample, as an earlier run generated them
    stopped: list[bool] | None = None  # whether each of these stopped by itself
    max_new_tokens: int | None = None  # the request's own limit; None: its output length
    num_samples: int = 1
    cache_salt: str | None = None
    is_random: bool = False  # tokens are drawn at random, which takes longer than the likeliest one
    row_id: str | None = None  # the user's own id
    continuations: list[list[int]] | None = None  # tokens to score; None: it generates

    @property
    def num_context_tokens(self) -> int:
        """Prompt tokens before the continuations."""
        only = self.continuations[0] if self.continuations is not None and len(self.continuations) == 1 else [0]
        return self.num_prompt_tokens - len(only) + 1

    @property
    def num_positions(self) -> int:
        """Most tokens of it that one sequence has in the cache: the last one is never computed."""
        if self.continuations is None:
            return self.num_prompt_tokens + largest_output(self) - 1
        return self.num_context_tokens + max(map(len, self.continuations)) - 1

    @property
    def label(self) -> str:
        """What a person calls it, as SeqState.label."""
        return self.request_id if self.row_id is None else self.row_id


class Chains:
    """Numbers each hash after the same earlier hashes. Equal numbers mean equal prefixes, whether the hashes of the
    trace cover the blocks before (Mooncake, Dynamo) or not."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int | str], int] = {}

    def numbers(self, hash_ids: Sequence[int | str], *, after: int = -1) -> "array[int]":
        """One number per hash. `after`: the number that the chain continues; -1: it begins a prompt."""
        found, numbers = array("q"), self._numbers
        for hash_id in hash_ids:
            after = numbers.setdefault((after, hash_id), len(numbers))
            found.append(after)
        return found


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is not a request."""

    place: str  # file:line
    reason: str


@dataclass(slots=True)
class Requests:
    """All requests, in order of arrival."""

    requests: list[Request] = field(default_factory=list)
    format: str = ""
    hash_size: int | None = None  # tokens per hash; None: token ids are known
    num_bad: int = 0
    bad_lines: list[BadLine] = field(default_factory=list)  # the first MAX_LISTED
    notes: list[str] = field(default_factory=list)
    num_left_out: int = 0  # beam searches, which are not simulated
    has_times: bool = False

    def add_bad(self, place: str, reason: str) -> None:
        self.num_bad += 1
        if len(self.bad_lines) < MAX_LISTED:
            self.bad_lines.append(BadLine(place, reason))

    @property
    def first_bad(self) -> str:
        """Names the first bad line behind a message: ` (trace.jsonl:3: no prompt)`."""
        return f" ({self.bad_lines[0].place}: {self.bad_lines[0].reason})" if self.bad_lines else ""

    def finish(self) -> None:
        """Sort by time, and note what is odd."""
        times = [request.arrival_s for request in self.requests if request.arrival_s is not None]
        self.has_times = bool(times) and len(times) == len(self.requests)
        if not self.has_times:
            for request in self.requests:
                request.arrival_s = None
            return
        num_early = sum(later < earlier for earlier, later in pairwise(times))
        if num_early:
            self.notes.append(f"{plural(num_early, 'line')} with an earlier time than the line before: sorted by time")
            self.requests.sort(key=lambda request: request.arrival_s or 0.0)
        first_s = self.requests[0].arrival_s or 0.0
        for request in self.requests:
            request.arrival_s = (request.arrival_s or 0.0) - first_s

    def prompts(self) -> "Iterator[tuple[array[int] | tuple[()], str | None]]":
        """The token ids of each prompt, empty where they are not known, with its cache_salt."""
        return ((request.token_ids or (), request.cache_salt) for request in self.requests)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(request.num_prompt_tokens for request in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return 1 + max(request.num_positions for request in self.requests)


@dataclass(frozen=True, slots=True)
class RowOutput:
    """What an earlier run generated for a row, or for one of its prompts."""

    num_tokens: int  # tokens of all samples
    token_ids: list[list[int]]  # token ids per sample, if the rows have them
    stopped: list[bool]  # whether each sample stopped by itself

    def shares(self, num_prompts: int) -> "list[RowOutput]":
        """The outputs of each prompt of the row: samples are listed prompt after prompt."""
        each = len(self.stopped) // num_prompts
        spans = [slice(place * each, (place + 1) * each) for place in range(num_prompts)]
        return [RowOutput(self.num_tokens // num_prompts, self.token_ids[span], self.stopped[span]) for span in spans]


def request_of(
    request_id: str,
    prompt: "RowPrompt",
    cache_salt: str | None,
    max_tokens: int,
    output: RowOutput | None,
    *,
    with_tokens: bool = True,
) -> Request:
    """A prompt of a row, with the number of tokens that it may generate, or the output that it has generated."""
    num_samples = prompt.params.n
    request = Request(
        request_id,
        None,
        len(prompt.computed_ids),
        max_tokens,
        token_ids=array("q", prompt.computed_ids) if with_tokens else None,
        max_new_tokens=max_tokens,
        num_samples=num_samples,
        cache_salt=cache_salt,
        is_random=not prompt.params.greedy,
    )
    if prompt.scored is not None:
        request.continuations = prompt.scored.continuations if with_tokens else None
    elif output is not None:
        request.num_output_tokens = min(max(1, output.num_tokens // num_samples), max_tokens)
        if len(output.token_ids) == num_samples:
            request.output_ids = [array("q", ids) for ids in output.token_ids]
            request.stopped = output.stopped
    return request


def largest_output(request: Request) -> int:
    """Tokens that a request may generate."""
    return max(1, request.max_new_tokens or request.num_output_tokens or 1)


_REQUEST_WORK = 16  # generated tokens that take as long to simulate as to start and end a request


def work_of(request: Request) -> float:
    """How long a request takes to simulate, roughly, in generated tokens."""
    each = _REQUEST_WORK + (request.num_output_tokens or 1)
    return request.num_samples * each + request.num_prompt_tokens / 16


def early_ends(request: Request) -> list[int | None]:
    """For each sample, after how many tokens it stops by itself; None: it reaches its limit."""
    lengths = [max(1, request.num_output_tokens or 1)] * request.num_samples
    if request.output_ids is not None:
        lengths = [len(ids) for ids in request.output_ids]
    limit, stopped = largest_output(request), request.stopped or [False] * len(lengths)
    return [num if num < limit or stops else None for num, stops in zip(lengths, stopped, strict=True)]


def block_keys(request: Request, hash_size: int | None, block_size: int) -> Iterator[tuple[int, int]]:
    """What the content of each full block of the prompt depends on: equal keys mean equal prefixes.

    With hashes: the chain of the hash block in which the block ends, and where in it. With token ids: a chain hash.
    """
    num_blocks = request.num_prompt_tokens // block_size
    if request.token_ids is not None:
        parent = None if request.cache_salt is None else Prefix.salt(request.cache_salt).hash
        for start in range(0, num_blocks * block_size, block_size):
            parent = compute_hash(request.token_ids[start : start + block_size], parent)
            yield parent, 0
        return
    assert hash_size is not None, "a request without token ids has hashes"
    for end in range(block_size, num_blocks * block_size + 1, block_size):
        index = (end - 1) // hash_size
        if index < len(request.hashes):  # the trace may have no hash of a partial block
            yield request.hashes[index], end - index * hash_size


def synthetic_prefixes(request: Request, hash_size: int | None, block_size: int, num_groups: int = 1) -> list[Prefix]:
    """The prefixes of a prompt's full blocks in all groups of layers, made of its hashes. No token id is negative, so
    no block of tokens can equal them. Fresh objects: those that hit are replaced by the cached ones, so memory is that
    of cached blocks."""
    prefixes: list[Prefix] = []
    parent: Prefix | None = None
    for chain, end in block_keys(request, hash_size, block_size):
        for _ in range(num_groups):
            parent = Prefix(struct.pack("<qq", -1 - chain, end), parent)
            prefixes.append(parent)
    return prefixes
