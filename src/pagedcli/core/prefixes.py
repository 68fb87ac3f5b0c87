"""Chained block hashes: the identity of a full block is its tokens and everything before them.

Used by BlockManager; needs neither blocks nor the engine. Tokens are kept as int64 bytes: fast to compare and hash,
and invisible to the garbage collector.
"""

import sys
from array import array
from collections.abc import Callable, Sequence

import xxhash

TOKEN_BYTES = 8
HashFunction = Callable[[bytes, int | None], int]


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int64."""
    values = array("q", token_ids)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def hash_block(tokens: bytes, prefix: int | None = None) -> int:
    """xxh64 of the previous block's hash (8 little-endian bytes; nothing for the first block) and then of the
    block's tokens as int64 bytes. The values equal nano-vllm's.
    """
    return xxhash.xxh64_intdigest(tokens if prefix is None else prefix.to_bytes(8, "little") + tokens)


def compute_hash(token_ids: Sequence[int], prefix: int | None = None) -> int:
    """hash_block of token ids."""
    return hash_block(token_bytes(token_ids), prefix)


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
        values = array("q", self.tokens)
        if sys.byteorder == "big":
            values.byteswap()
        return tuple(values)

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


MOST_SEEN_TOKENS = 2**21


class SeenPrefixes:
    """Tells of each sequence how much of its beginning an earlier one has, to the token.

    A tree whose edges are runs of tokens. After `1 2 3 4` and `1 2 9`, the first edge `1 2` leads to the edges `3 4`
    and `9`; of `1 2 9 9` three tokens are shared. It remembers at least the newest MOST_SEEN_TOKENS tokens, and at most
    twice as many: once the newer of two trees has that many, the older one goes.
    """

    def __init__(self) -> None:
        self._newer: _Trees = {}
        self._older: _Trees = {}
        self._num_tokens = 0  # of the newer one
        self.has_forgotten = False

    def add(self, token_ids: Sequence[int], salt: str | None = None) -> int:
        """Remember a sequence. Returns how many of its first tokens an earlier one of the same salt begins with."""
        tokens = token_bytes(token_ids)
        found, _ = _walk(self._older.get(salt, {}), tokens, insert=False)
        shared, num_new = _walk(self._newer.setdefault(salt, {}), tokens, insert=True)
        self._num_tokens += num_new
        if self._num_tokens >= MOST_SEEN_TOKENS:
            self.has_forgotten = self.has_forgotten or bool(self._older)
            self._older, self._newer, self._num_tokens = self._newer, {}, 0
        return max(shared, found)


class _Edge:
    """Tokens, and what follows them, by the first token."""

    __slots__ = ("edges", "tokens")

    def __init__(self, tokens: bytes, edges: "dict[bytes, _Edge]") -> None:
        self.tokens = tokens
        self.edges = edges


_Trees = dict[str | None, dict[bytes, _Edge]]  # by salt


def _walk(edges: dict[bytes, _Edge], tokens: bytes, *, insert: bool) -> tuple[int, int]:
    """How many tokens the tree begins with, too, and how many were inserted."""
    place = 0
    while place < len(tokens):
        first = tokens[place : place + TOKEN_BYTES]
        edge = edges.get(first)
        if edge is None:
            if insert:
                edges[first] = _Edge(tokens[place:], {})
                return place // TOKEN_BYTES, (len(tokens) - place) // TOKEN_BYTES
            break
        same = _num_equal_bytes(edge.tokens, tokens[place : place + len(edge.tokens)])
        place += same
        if same < len(edge.tokens):
            if not insert or place == len(tokens):
                break
            rest = _Edge(edge.tokens[same:], edge.edges)
            edge.tokens, edge.edges = edge.tokens[:same], {rest.tokens[:TOKEN_BYTES]: rest}
        edges = edge.edges
    return place // TOKEN_BYTES, 0


def _num_equal_bytes(a: bytes, b: bytes) -> int:
    """Bytes of the tokens that both begin with. `b` is not longer than `a`."""
    if a == b:
        return len(a)
    differ = int.from_bytes(a[: len(b)], "little") ^ int.from_bytes(b, "little")
    num_equal = (differ & -differ).bit_length() - 1 if differ else 8 * len(b)
    return num_equal // (8 * TOKEN_BYTES) * TOKEN_BYTES
