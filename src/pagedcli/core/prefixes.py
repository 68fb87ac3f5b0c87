"""Prefixes of prompts: chained block hashes, prefixes that were seen before, and what every comparison of them shares.

The identity of a full block is its tokens and everything before them. Needs neither blocks nor the engine. Tokens are
kept as int64 bytes: fast to compare and hash, and invisible to the garbage collector.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import xxhash

TOKEN_BYTES = 8
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)  # tokens: those that reports compare
SMALLEST_RECOMMENDED = 16  # tokens per block; the GPU kernels support no smaller ones
WINDOW_ROWS = 8192  # most requests that are sorted by prefix at a time
WINDOW_TOKENS = 2**20  # most tokens of their prompts: about 40 MB
HashFunction = Callable[[bytes, int | None], int]


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as int64."""
    return array("q", token_ids).tobytes()


def token_ids_of(tokens: bytes) -> list[int]:
    """The inverse of token_bytes."""
    return array("q", tokens).tolist()


def hash_block(tokens: bytes, prefix: int | None = None) -> int:
    """xxh64 of the previous block's hash (8 little-endian bytes; nothing for the first block) and then of the
    block's tokens as int64 bytes. The values equal nano-vllm's.
    """
    return xxhash.xxh64_intdigest(tokens if prefix is None else prefix.to_bytes(8, "little") + tokens)


def compute_hash(token_ids: Sequence[int], prefix: int | None = None) -> int:
    """hash_block of token ids."""
    return hash_block(token_bytes(token_ids), prefix)


def unit_digests(token_ids: Sequence[int], cache_salt: str | None, unit: int) -> list[int]:
    """The digest of every prefix of whole units of tokens, shortest first: the block manager's hashes of blocks of that
    size. A salt changes them all."""
    data, step = token_bytes(token_ids), unit * TOKEN_BYTES
    prefix = None if cache_salt is None else Prefix.salt(cache_salt).hash
    digests = []
    for start in range(0, len(data) - step + 1, step):
        prefix = hash_block(data[start : start + step], prefix)
        digests.append(prefix)
    return digests


def num_equal(a: Sequence[object], b: Sequence[object]) -> int:
    """The length of the common beginning of two prompts, blocks or texts."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((place for place, (x, y) in pairs if x != y), min(len(a), len(b)))


class Prefix:
    """One full block of tokens after another prefix: a node of a chain that ends at the first block (or at a salt).

    Equal hashes are only a hint, as 64 bits can collide; equal chains are proof. Blocks and sequences with a common
    prefix share the node, so the check is usually one identity comparison.
    """

    __slots__ = ("hash", "parent", "tokens")

    def __init__(self, tokens: bytes, parent: "Prefix | None", hash_function: HashFunction = hash_block) -> None:
        self.tokens = tokens
        self.parent = parent
        self.hash: int = hash_function(tokens, None if parent is None else parent.hash)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token_ids_of(self.tokens))

    @classmethod
    def salt(cls, cache_salt: str) -> "Prefix":
        """The root of all chains of one cache_salt: its blocks are never equal to those of another salt."""
        return cls(token_bytes(list(cache_salt.encode())), _SALT)

    def same_as(self, other: "Prefix") -> bool:
        """Whether both stand for the same tokens from the first one on."""
        a: Prefix | None = self
        b: Prefix | None = other
        while a is not b:
            if a is None or b is None or a.tokens != b.tokens:
                return False
            a, b = a.parent, b.parent
        return True


# marks a salt chain: no token id is negative, so no token block can equal it
_SALT = Prefix(token_bytes([-1]), None)


class SeenPrefixes:
    """Tells of each sequence how much of its beginning an earlier one has, to the token.

    It remembers at least the newest `most_tokens` tokens, and at most twice as many: once the newer of two trees has
    that many, the older one goes.
    """

    def __init__(self, most_tokens: int = 2**21) -> None:
        self.most_tokens = most_tokens
        self._newer: dict[str | None, TokenTree] = {}  # salt -> tree
        self._older: dict[str | None, TokenTree] = {}
        self._num_tokens = 0  # tokens in the newer tree
        self.has_forgotten = False

    def add(self, token_ids: Sequence[int], salt: str | None = None, *, look_back: bool = True) -> int:
        """Remember a sequence. Returns how many of its first tokens an earlier one of the same salt begins with;
        without `look_back` only those that came last count."""
        tokens, older = token_bytes(token_ids), self._older.get(salt) if look_back else None
        found = 0 if older is None else older.find(tokens).num_tokens
        shared = self._newer.setdefault(salt, TokenTree()).add(tokens)
        self._num_tokens += len(token_ids) - shared.num_tokens
        if self._num_tokens >= self.most_tokens:
            self.has_forgotten = self.has_forgotten or bool(self._older)
            self._older, self._newer, self._num_tokens = self._newer, {}, 0
        return max(shared.num_tokens, found)


class Beginning(NamedTuple):
    """The longest beginning of a sequence that an earlier one has, and the first that had it."""

    num_tokens: int
    owner: int | None  # None: no earlier one begins with the same token


class _Edge(msgspec.Struct, eq=False):
    """Tokens, the first sequence that had them here, and what follows them, by the first token."""

    tokens: bytes
    owner: int
    edges: "dict[bytes, _Edge]"


class TokenTree:
    """Sequences of tokens by their beginnings. Edges are runs of tokens: after `1 2 3 4` and `1 2 9`, the first edge
    `1 2` leads to the edges `3 4` and `9`; of `1 2 9 9` three tokens are found."""

    def __init__(self) -> None:
        self._edges: dict[bytes, _Edge] = {}

    def find(self, tokens: bytes) -> Beginning:
        """How the sequence begins, as far as an earlier one does. Changes nothing."""
        return self._walk(tokens, None)

    def add(self, tokens: bytes, owner: int = 0) -> Beginning:
        """Find how the sequence begins, and remember it."""
        return self._walk(tokens, owner)

    def _walk(self, tokens: bytes, new_owner: int | None) -> Beginning:
        edges, place, owner = self._edges, 0, None
        while place < len(tokens):
            first = tokens[place : place + TOKEN_BYTES]
            edge = edges.get(first)
            if edge is None:
                if new_owner is not None:
                    edges[first] = _Edge(tokens[place:], new_owner, {})
                break
            same = num_equal_bytes(edge.tokens, tokens[place : place + len(edge.tokens)])
            place, owner = place + same, edge.owner
            if same < len(edge.tokens):
                if new_owner is None or place == len(tokens):
                    break
                rest = _Edge(edge.tokens[same:], edge.owner, edge.edges)
                edge.tokens, edge.edges = edge.tokens[:same], {rest.tokens[:TOKEN_BYTES]: rest}
            edges = edge.edges
        return Beginning(place // TOKEN_BYTES, owner)


def num_equal_bytes(a: bytes, b: bytes) -> int:
    """Bytes of the tokens that both begin with. `b` is not longer than `a`."""
    if a == b:
        return len(a)
    differ = int.from_bytes(a[: len(b)], "little") ^ int.from_bytes(b, "little")
    num_equal = (differ & -differ).bit_length() - 1 if differ else 8 * len(b)
    return num_equal // (8 * TOKEN_BYTES) * TOKEN_BYTES
