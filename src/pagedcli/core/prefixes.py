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
