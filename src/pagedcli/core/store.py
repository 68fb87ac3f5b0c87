"""Full blocks and snapshots of earlier processes in a folder: which prefixes it has, and what of this run goes there.

Used by core.cache and core.states; needs no torch: the tensors are behind BlockMemory, the files in
content_files. A file has blocks of one chain, or the state after one, with the tokens from its beginning on, so that a
hash is only a hint here, too.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from pagedcli.content_files import ContentFile, ContentFolder, DamagedFile, differing, digest_of
from pagedcli.core.prefix_lookup import CacheUser
from pagedcli.core.prefixes import TOKEN_BYTES, Prefix, num_equal_bytes, token_bytes

FILE_BYTES = 2**26  # content of one file
MOST_IN_WRITING = 4  # files that are being written: their blocks are in memory twice
StoredKind = Literal["blocks", "state"]
IsWritten = Callable[[int, Prefix], bool]  # whether a block or slot has this content, all of it


class BlockMemory(Protocol):
    """The memory of a pool's blocks, or of slots of state: a block is one of either."""

    @property
    def block_bytes(self) -> int: ...

    def read(self, block_id: int) -> bytes:
        """A copy of a block."""

    def write(self, block_id: int, content: bytes) -> None:
        """Replace a block."""


class StoredNote(msgspec.Struct, frozen=True, array_like=True):
    """What a file says of its content."""

    salt: str | None  # digest of the cache_salt
    tokens: bytes  # tokens from the beginning of the chain to the end of the last block
    indices: list[int]  # entry of the block table of each part; of a state the number of spans before it
    hashes: list[int]  # chain hash of each part
    kind: StoredKind = "blocks"

    @classmethod
    def of(cls, file: ContentFile) -> "StoredNote":
        """Raises: DamagedFile if it is not one of this version."""
        try:
            note = msgspec.msgpack.decode(file.head.note, type=cls)
        except msgspec.DecodeError as error:
            raise DamagedFile(f"its note is not as this version writes it: {error}") from error
        if not len(note.indices) == len(note.hashes) == len(file.head.sizes):
            raise DamagedFile("its note does not fit its parts")
        return note


@dataclass(frozen=True, slots=True)
class _Place:
    """A block or a state in a file."""

    file: ContentFile
    note: StoredNote
    part: int


@dataclass(slots=True)
class _Offer:
    """Blocks of a chain, or the state after it, that wait to be written."""

    kind: StoredKind
    salt: str | None
    tokens: bytes
    blocks: deque[tuple[int, Prefix, int]]  # index as in StoredNote, content, block or slot
    is_written: IsWritten


@dataclass(slots=True)
class StoreFacts:
    """What a run did with a store. Written is what is there when it ends."""

    num_found_blocks: int = 0  # blocks found at its opening
    num_read_blocks: int = 0
    num_read_bytes: int = 0
    num_read_states: int = 0
    num_written_blocks: int = 0
    num_written_states: int = 0
    num_written_bytes: int = 0
    not_kept: Counter[str] = field(default_factory=Counter)  # why files were not written
    not_used: Counter[str] = field(default_factory=Counter)  # why files that are there were no hit
    num_removed: int = 0  # files removed at its opening
    no_room: str | None = None  # why the folder had more than its bound allows when it was opened; None: it had not


class PrefixStore:
    """The blocks in a folder that were computed as this engine computes them.

    `identity` names everything that the bits of a block depend on, apart from its tokens. Blocks are copied in the
    thread of the engine and written in another one. `states`: the slots of a model with recurrent state.
    """

    def __init__(
        self,
        folder: ContentFolder,
        identity: dict[str, str],
        memory: BlockMemory,
        block_size: int,
        num_groups: int,
        *,
        states: BlockMemory | None = None,
    ) -> None:
        self.folder, self.identity, self.facts = folder, identity, StoreFacts()
        self._memories: dict[StoredKind, BlockMemory] = {"blocks": memory}
        if states is not None:
            self._memories["state"] = states
        self._num_groups = num_groups
        self._span_bytes = block_size * TOKEN_BYTES
        self._places: dict[tuple[StoredKind, int], _Place] = {}  # kind and hash of the chain -> place
        self._offers: deque[_Offer] = deque()
        self._coming: set[tuple[StoredKind, int]] = set()  # what is offered or being written
        self._writing: list[tuple[Future[ContentFile | str], StoredNote]] = []
        self._thread = ThreadPoolExecutor(1, "prefix-store")
        self._written: list[tuple[ContentFile, StoredNote]] = []
        trimmed = folder.trim()
        self.facts.not_used.update(trimmed.wrong.values())
        self.facts.num_removed, self.facts.no_room = trimmed.num_removed, trimmed.no_room
        for file in trimmed.files:
            try:
                self._find(file)
            except DamagedFile as error:
                self.facts.not_used[str(error)] += 1
        self.facts.num_found_blocks = sum(kind == "blocks" for kind, _ in self._places)

    def _find(self, file: ContentFile) -> None:
        """Find a file's content from now on. Raises: DamagedFile if it is not of this engine."""
        identity = {**file.head.identity}
        if identity.pop("encryption", "none") != "none":  # earlier versions name it
            raise DamagedFile("encryption was removed: use another folder, or remove this one")
        if identity != self.identity:
            raise DamagedFile(f"other {differing(identity, self.identity)}")
        note = StoredNote.of(file)
        if note.kind not in self._memories:
            raise DamagedFile(f"this engine has no {note.kind}")
        self._add(file, note)

    def _add(self, file: ContentFile, note: StoredNote) -> None:
        for part, block_hash in enumerate(note.hashes):
            self._places[note.kind, block_hash] = _Place(file, note, part)

    # ------------------------------------------------------------------ reading

    def found(self, seq: CacheUser, num_entries: int) -> set[int]:
        """Which of the first entries of the sequence's block table have their content here, by its tokens."""
        return self._found("blocks", seq, dict(enumerate(seq.prefixes[:num_entries])))

    def found_states(self, seq: CacheUser, prefixes: Mapping[int, Prefix]) -> set[int]:
        """After which of these numbers of spans the state is here, by the tokens before it."""
        return self._found("state", seq, prefixes)

    def _found(self, kind: StoredKind, seq: CacheUser, prefixes: Mapping[int, Prefix]) -> set[int]:
        tokens, salt = token_bytes(seq.token_ids), _salt(seq)
        num_same: dict[int, int] = {}  # bytes of tokens that a file's chain has in common with the sequence
        found = set()
        for index, prefix in prefixes.items():
            place = self._places.get((kind, prefix.hash))
            if place is None or place.note.indices[place.part] != index or place.note.salt != salt:
                continue
            chain = place.note.tokens
            if id(chain) not in num_same:
                num_same[id(chain)] = num_equal_bytes(chain, tokens[: len(chain)])
            if num_same[id(chain)] >= self._num_spans(kind, index) * self._span_bytes:
                found.add(index)
        return found

    def _num_spans(self, kind: StoredKind, index: int) -> int:
        """Spans of tokens that an entry depends on."""
        return index if kind == "state" else index // self._num_groups + 1

    def read(self, seq: CacheUser, indices: Sequence[int]) -> list[bytes] | None:
        """The blocks of some entries, all of which are here, each as it was written. None: a file is damaged or gone,
        and its blocks are no longer here."""
        contents: dict[int, bytes] = {}
        by_file: dict[int, list[tuple[int, _Place]]] = {}
        for index in indices:
            place = self._places["blocks", seq.prefixes[index].hash]
            by_file.setdefault(id(place.file), []).append((index, place))
        for places in by_file.values():
            parts = self._read_file([place for _, place in places])
            if parts is None:
                return None
            contents.update(zip((index for index, _ in places), parts, strict=True))
        return [contents[index] for index in indices]

    def read_state(self, prefix: Prefix) -> bytes | None:
        """The state after some tokens, which is here, as it was written. None: as for blocks."""
        parts = self._read_file([self._places["state", prefix.hash]])
        return None if parts is None else parts[0]

    def _read_file(self, places: Sequence[_Place]) -> list[bytes] | None:
        """Parts of one file. None: it is damaged or gone, and what it had is no longer here."""
        file, note = places[0].file, places[0].note
        try:
            parts = self.folder.read(file, [place.part for place in places])
            if any(len(part) != self._memories[note.kind].block_bytes for part in parts):
                raise DamagedFile(f"its parts are no {note.kind} of this engine")
            return parts
        except DamagedFile as error:
            self.facts.not_used[str(error)] += 1
            for block_hash in note.hashes:
                self._places.pop((note.kind, block_hash), None)
            return None

    def place_in_memory(self, block_id: int, content: bytes) -> None:
        """Give a block of the pool what was read."""
        self._memories["blocks"].write(block_id, content)
        self.facts.num_read_blocks += 1
        self.facts.num_read_bytes += len(content)

    def place_state(self, slot_id: int, content: bytes) -> None:
        """Give a slot what was read."""
        self._memories["state"].write(slot_id, content)
        self.facts.num_read_states += 1
        self.facts.num_read_bytes += len(content)

    # ------------------------------------------------------------------ writing

    def offer(self, seq: CacheUser, block_ids: Sequence[int | None], is_written: IsWritten) -> None:
        """Blocks at the beginning of the table that another request has computed: those that are missing here will be
        written, if they stay in the pool until then."""
        blocks = (
            (index, seq.prefixes[index], block_id) for index, block_id in enumerate(block_ids) if block_id is not None
        )
        self._offer("blocks", seq, blocks, len(block_ids) // self._num_groups, is_written)

    def offer_state(self, seq: CacheUser, num_spans: int, prefix: Prefix, slot_id: int, is_written: IsWritten) -> None:
        """Offer the state after num_spans spans, to be written if it is missing here."""
        self._offer("state", seq, [(num_spans, prefix, slot_id)], num_spans, is_written)

    def _offer(
        self,
        kind: StoredKind,
        seq: CacheUser,
        blocks: Iterable[tuple[int, Prefix, int]],
        num_spans: int,
        is_written: IsWritten,
    ) -> None:
        if not self.folder.is_writable:
            return
        known = self._coming, self._places
        missing = deque(block for block in blocks if not any((kind, block[1].hash) in each for each in known))
        if missing:
            self._coming.update((kind, prefix.hash) for _, prefix, _ in missing)
            tokens = token_bytes(seq.token_ids[: num_spans * self._span_bytes // TOKEN_BYTES])
            self._offers.append(_Offer(kind, _salt(seq), tokens, missing, is_written))

    def keep(self, seconds_per_token: float) -> None:
        """Start to write what was offered and is written in the pool by now. Called between steps."""
        self._note_written(wait=False)
        while self._offers and len(self._writing) < MOST_IN_WRITING:
            self._write_file(seconds_per_token)

    def close(self, seconds_per_token: float) -> None:
        """Write all that was offered, and wait for it."""
        while self._offers:
            self._write_file(seconds_per_token)
            self._note_written(wait=len(self._writing) >= MOST_IN_WRITING)
        self._note_written(wait=True)
        self._thread.shutdown()
        for file, note in self._written:
            if not file.path.exists():
                self._count(note, -1, file.num_bytes)
                self.facts.not_kept["removed again, for files that are worth more"] += 1

    def _count(self, note: StoredNote, sign: int, num_bytes: int) -> None:
        """Count a file that was written, or with -1 that it is gone."""
        if note.kind == "state":
            self.facts.num_written_states += sign * len(note.hashes)
        else:
            self.facts.num_written_blocks += sign * len(note.hashes)
        self.facts.num_written_bytes += sign * num_bytes

    def _write_file(self, seconds_per_token: float) -> None:
        """Copy the next blocks, as many as a file takes, and have them written."""
        offer = self._offers[0]
        memory = self._memories[offer.kind]
        most = max(1, FILE_BYTES // max(1, memory.block_bytes))
        parts: list[bytes] = []
        indices, hashes = [], []
        while offer.blocks and len(parts) < most:
            index, prefix, block_id = offer.blocks.popleft()
            if offer.is_written(block_id, prefix):
                parts.append(memory.read(block_id))
                indices.append(index)
                hashes.append(prefix.hash)
            else:
                self._coming.discard((offer.kind, prefix.hash))
        if not offer.blocks:
            self._offers.popleft()
        if not parts:
            return
        num_spans = self._num_spans(offer.kind, indices[-1])
        note = StoredNote(offer.salt, offer.tokens[: num_spans * self._span_bytes], indices, hashes, offer.kind)
        # without a state nothing of its chain is of use; of the groups of layers all are needed
        saved_spans = num_spans if offer.kind == "state" else len(parts) / self._num_groups
        saved_s = seconds_per_token * saved_spans * self._span_bytes / TOKEN_BYTES
        encoded, depth = msgspec.msgpack.encode(note), num_spans
        written = self._thread.submit(self.folder.write, self.identity, encoded, parts, seconds=saved_s, depth=depth)
        self._writing.append((written, note))

    def _note_written(self, *, wait: bool) -> None:
        """Find what has been written from now on."""
        while self._writing and (wait or self._writing[0][0].done()):
            written, note = self._writing.pop(0)
            result = written.result()
            self._coming.difference_update((note.kind, block_hash) for block_hash in note.hashes)
            if isinstance(result, str):
                self.facts.not_kept[result] += 1
                continue
            self._add(result, note)
            self._written.append((result, note))
            self._count(note, 1, result.num_bytes)


def _salt(seq: CacheUser) -> str | None:
    return None if seq.cache_salt is None else digest_of(seq.cache_salt.encode())
