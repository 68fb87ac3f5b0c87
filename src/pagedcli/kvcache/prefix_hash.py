"""Chained block hashes: the identity of a full block is its tokens and everything before them.

Used by block_manager; knows nothing of blocks or of the engine.
"""

from array import array
from collections.abc import Callable, Sequence

import xxhash

HashFunction = Callable[[Sequence[int], int | None], int]


def compute_hash(token_ids: Sequence[int], prefix: int | None = None) -> int:
    """xxh64 of the previous block's hash (8 little-endian bytes; nothing for the first block) and then of the
    block's tokens as int64. The values equal nano-vllm's.
    """
    digest = xxhash.xxh64()
    if prefix is not None:
        digest.update(prefix.to_bytes(8, "little"))
    digest.update(array("q", token_ids).tobytes())
    return digest.intdigest()


class Prefix:
    """One full block of tokens after another prefix: a node of a chain that ends at the first block (or at a salt).

    Equal hashes are a hint, equal chains a proof: 64 bits can collide. Blocks and sequences that share a prefix share
    the node, so the proof is usually one identity check.
    """

    __slots__ = ("hash", "parent", "token_ids")

    def __init__(
        self, token_ids: tuple[int, ...], parent: "Prefix | None", hash_function: HashFunction = compute_hash
    ) -> None:
        self.token_ids = token_ids
        self.parent = parent
        self.hash = hash_function(token_ids, None if parent is None else parent.hash)

    @classmethod
    def salt(cls, cache_salt: str) -> "Prefix":
        """The root of all chains of one cache_salt: its blocks are never equal to those of another salt."""
        return cls(tuple(cache_salt.encode()), _SALT)

    def same_as(self, other: "Prefix") -> bool:
        """Whether both stand for the same tokens from the very start."""
        a: Prefix | None = self
        b: Prefix | None = other
        while a is not b:
            if a is None or b is None or a.token_ids != b.token_ids:
                return False
            a, b = a.parent, b.parent
        return True


# marks a salt chain: no token id is negative, so no token block can equal it
_SALT = Prefix((-1,), None)
