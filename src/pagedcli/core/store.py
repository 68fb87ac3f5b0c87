"""Full blocks of earlier processes in a folder: which prefixes it has, and which blocks of this run go there.

Used by core.cache; needs no torch: the tensors are behind BlockMemory, the files in content_files. A file has blocks of
one chain, with the tokens from its beginning on, so that a hash is only a hint here, too.
"""

from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from pagedcli.content_files import ContentFile, ContentFolder, DamagedFile, differing, digest_of
from pagedcli.core.block_manager import BlockManager, CacheUser
from pagedcli.core.prefixes import TOKEN_BYTES, Prefix, num_equal_bytes, token_bytes

FILE_BYTES = 2**26  # content of one file
MOST_IN_WRITING = 4  # files that are being written: their blocks are in memory twice


class BlockMemory(Protocol):
    """The memory of a pool's blocks."""

    @property
    def block_bytes(self) -> int: ...

    def read(self, block_id: int) -> bytes:
        """A copy of a block's K and V."""

    def write(self, block_id: int, content: bytes) -> None:
        """Replace a block's K and V."""


class _Note(msgspec.Struct, frozen=True, array_like=True):
    """What a file of blocks says of them."""

    salt: str | None  # digest of the cache_salt
    tokens: bytes  # from the beginning of the chain to the end of the last block
    indices: list[int]  # entry of the block table of each part
    hashes: list[int]  # chain hash of each part


@dataclass(frozen=True, slots=True)
class _Place:
    """A block in a file."""

    file: ContentFile
    note: _Note
    part: int


@dataclass(slots=True)
class _Offer:
    """Blocks of a chain that wait to be written."""

    salt: str | None
    tokens: bytes
    blocks: deque[tuple[int, Prefix, int]]  # entry of the block table, content, block


@dataclass(slots=True)
class StoreFacts:
    """What a run did with a store. Written is what is there when it ends."""

    num_found_blocks: int = 0  # when it was opened
    num_read_blocks: int = 0
    num_read_bytes: int = 0
    num_written_blocks: int = 0
    num_written_bytes: int = 0
    not_kept: Counter[str] = field(default_factory=Counter)  # why files were not written
    not_used: Counter[str] = field(default_factory=Counter)  # why files that are there were no hit
    no_room: str | None = None  # why the folder had more than its bound allows when it was opened; None: it had not


class PrefixStore:
    """The blocks in a folder that were computed as this engine computes them.

    `identity` names everything that the bits of a block depend on, apart from its tokens. Blocks are copied in the
    thread of the engine and written in another one.
    """

    def __init__(
        self, folder: ContentFolder, identity: dict[str, str], memory: BlockMemory, block_size: int, num_groups: int
    ) -> None:
        self.folder, self.identity, self.facts = folder, identity, StoreFacts()
        self._memory, self._num_groups = memory, num_groups
        self._span_bytes = block_size * TOKEN_BYTES
        self._places: dict[int, _Place] = {}  # by the hash of the chain
        self._offers: deque[_Offer] = deque()
        self._coming: set[int] = set()  # hashes of blocks that are offered or being written
        self._writing: list[tuple[Future[ContentFile | str], _Note]] = []
        self._thread = ThreadPoolExecutor(1, "prefix-store")
        self._written: list[ContentFile] = []
        trimmed = folder.trim()
        self.facts.not_used.update(trimmed.wrong.values())
        self.facts.no_room = trimmed.no_room
        for file in trimmed.files:
            if file.head.identity == identity:
                self._add(file, msgspec.msgpack.decode(file.head.note, type=_Note))
            else:
                self.facts.not_used[f"other {differing(file.head.identity, identity)}"] += 1
        self.facts.num_found_blocks = len(self._places)

    def _add(self, file: ContentFile, note: _Note) -> None:
        for part, block_hash in enumerate(note.hashes):
            self._places[block_hash] = _Place(file, note, part)

    # ------------------------------------------------------------------ reading

    def found(self, seq: CacheUser, num_entries: int) -> set[int]:
        """Which of the first entries of the sequence's block table have their content here, by its tokens."""
        tokens, salt = token_bytes(seq.token_ids), _salt(seq)
        num_same: dict[int, int] = {}  # bytes of tokens that a file's chain has in common with the sequence
        found = set()
        for index in range(num_entries):
            place = self._places.get(seq.prefixes[index].hash)
            if place is None or place.note.indices[place.part] != index or place.note.salt != salt:
                continue
            chain = place.note.tokens
            if id(chain) not in num_same:
                num_same[id(chain)] = num_equal_bytes(chain, tokens[: len(chain)])
            if num_same[id(chain)] >= (index // self._num_groups + 1) * self._span_bytes:
                found.add(index)
        return found

    def read(self, seq: CacheUser, indices: Sequence[int]) -> list[bytes] | None:
        """The blocks of some entries, all of which are here, each as it was written. None: a file is damaged or gone,
        and its blocks are no longer here."""
        contents: dict[int, bytes] = {}
        by_file: dict[int, list[tuple[int, _Place]]] = {}
        for index in indices:
            place = self._places[seq.prefixes[index].hash]
            by_file.setdefault(id(place.file), []).append((index, place))
        for places in by_file.values():
            file, note = places[0][1].file, places[0][1].note
            try:
                parts = self.folder.read(file, [place.part for _, place in places])
            except DamagedFile as error:
                self.facts.not_used[str(error)] += 1
                for block_hash in note.hashes:
                    self._places.pop(block_hash, None)
                return None
            contents.update(zip((index for index, _ in places), parts, strict=True))
        return [contents[index] for index in indices]

    def place_in_memory(self, block_id: int, content: bytes) -> None:
        """Give a block of the pool what was read."""
        self._memory.write(block_id, content)
        self.facts.num_read_blocks += 1
        self.facts.num_read_bytes += len(content)

    # ------------------------------------------------------------------ writing

    def offer(self, seq: CacheUser, block_ids: Sequence[int | None]) -> None:
        """Blocks at the beginning of the table that another request has computed: those that are missing here will be
        written, if they stay in the pool until then."""
        if not self.folder.is_writable:
            return
        blocks: deque[tuple[int, Prefix, int]] = deque()
        for index, block_id in enumerate(block_ids):
            prefix = seq.prefixes[index]
            if block_id is not None and prefix.hash not in self._coming and prefix.hash not in self._places:
                blocks.append((index, prefix, block_id))
        if blocks:
            self._coming.update(prefix.hash for _, prefix, _ in blocks)
            num_spans = len(block_ids) // self._num_groups
            tokens = token_bytes(seq.token_ids[: num_spans * self._span_bytes // TOKEN_BYTES])
            self._offers.append(_Offer(_salt(seq), tokens, blocks))

    def keep(self, blocks: BlockManager, seconds_per_token: float) -> None:
        """Start to write what was offered and is written in the pool by now. Called between steps."""
        self._note_written(wait=False)
        while self._offers and len(self._writing) < MOST_IN_WRITING:
            self._write_file(blocks, seconds_per_token)

    def close(self, blocks: BlockManager, seconds_per_token: float) -> None:
        """Write all that was offered, and wait for it."""
        while self._offers:
            self._write_file(blocks, seconds_per_token)
            self._note_written(wait=len(self._writing) >= MOST_IN_WRITING)
        self._note_written(wait=True)
        self._thread.shutdown()
        for file in self._written:
            if not file.path.exists():
                self.facts.num_written_blocks -= len(file.head.sizes)
                self.facts.num_written_bytes -= file.num_bytes
                self.facts.not_kept["removed again, for files that are worth more"] += 1

    def _write_file(self, blocks: BlockManager, seconds_per_token: float) -> None:
        """Copy the next blocks, as many as a file takes, and have them written."""
        offer = self._offers[0]
        most = max(1, FILE_BYTES // max(1, self._memory.block_bytes))
        parts: list[bytes] = []
        indices, hashes = [], []
        while offer.blocks and len(parts) < most:
            index, prefix, block_id = offer.blocks.popleft()
            if blocks.is_written(block_id, prefix):
                parts.append(self._memory.read(block_id))
                indices.append(index)
                hashes.append(prefix.hash)
            else:
                self._coming.discard(prefix.hash)
        if not offer.blocks:
            self._offers.popleft()
        if parts:
            num_bytes = (indices[-1] // self._num_groups + 1) * self._span_bytes
            note = _Note(offer.salt, offer.tokens[:num_bytes], indices, hashes)
            saved_s = seconds_per_token * len(parts) * self._span_bytes / TOKEN_BYTES / self._num_groups
            encoded, depth = msgspec.msgpack.encode(note), indices[0]
            written = self._thread.submit(
                self.folder.write, self.identity, encoded, parts, seconds=saved_s, depth=depth
            )
            self._writing.append((written, note))

    def _note_written(self, *, wait: bool) -> None:
        """Find what has been written from now on."""
        while self._writing and (wait or self._writing[0][0].done()):
            written, note = self._writing.pop(0)
            result = written.result()
            self._coming.difference_update(note.hashes)
            if isinstance(result, str):
                self.facts.not_kept[result] += 1
                continue
            self._add(result, note)
            self._written.append(result)
            self.facts.num_written_blocks += len(note.hashes)
            self.facts.num_written_bytes += result.num_bytes


def _salt(seq: CacheUser) -> str | None:
    return None if seq.cache_salt is None else digest_of(seq.cache_salt.encode())
