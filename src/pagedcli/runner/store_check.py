"""Whether the blocks of a prefix store have the bits that the model computes: `pagedcli store check --read`."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from pagedcli.config import EngineConfig
from pagedcli.content_files import ContentFile, ContentFolder, differing
from pagedcli.core.prefixes import token_ids_of
from pagedcli.core.states import CheckpointPolicy, StateKind
from pagedcli.core.store import Kind, StoredNote
from pagedcli.errors import RequestError
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.runner.store import CacheMemory, StateMemory, store_identity
from pagedcli.sampling_params import SamplingParams


@dataclass(slots=True)
class Comparison:
    """What was recomputed of a store."""

    num_equal: Counter[Kind] = field(default_factory=Counter)
    wrong: dict[str, str] = field(default_factory=dict)  # names of files -> what has other bits
    skipped: dict[str, str] = field(default_factory=dict)  # names of files -> why they were not compared


def compare_with_model(
    config: EngineConfig, folder: ContentFolder, files: Sequence[ContentFile], share: float
) -> Comparison:
    """Recompute files drawn at random, until their blocks are this share of those that the configuration would read,
    and compare the bits. Raises: PagedcliError if there is no such engine; DamagedFile if a file changes meanwhile."""
    found = Comparison()
    with LLMEngine(msgspec.structs.replace(config, async_scheduling=False)) as engine:
        for kind in _states(engine):
            kind.plan.policy = CheckpointPolicy.named("end")
        identity = store_identity(config, engine.decision, engine.model_path)
        own = [file for file in files if file.head.identity == identity]
        for file in files:
            if file.head.identity != identity:
                found.skipped[file.path.name] = f"other {differing(file.head.identity, identity)}"
        random.shuffle(own)
        wanted, num_seen = share * sum(len(file.head.sizes) for file in own), 0
        for file in own:
            if num_seen >= wanted:
                break
            num_seen += len(file.head.sizes)
            _compare(engine, folder, file, found)
    return found


def _compare(engine: LLMEngine, folder: ContentFolder, file: ContentFile, found: Comparison) -> None:
    note, name = StoredNote.of(file), file.path.name
    try:
        computed = _recompute(engine, note)
    except RequestError as error:
        found.skipped[name] = error.message
        return
    kept = dict(zip(note.indices, folder.read(file, range(len(note.indices))), strict=True))
    other = [index for index in kept if index in computed and kept[index] != computed[index]]
    found.num_equal[note.kind] += len(kept.keys() & computed.keys()) - len(other)
    if other:
        found.wrong[name] = f"{note.kind} {', '.join(map(str, other))}: other bits than the model computes"
    if gone := kept.keys() - computed.keys():
        what = "states" if note.kind == "state" else note.kind
        found.skipped[name] = f"{len(gone)} of {len(kept)} {what} left the pool before they could be compared"


def _states(engine: LLMEngine) -> list[StateKind]:
    return [kind for kind in engine.cache.others if isinstance(kind, StateKind)]


def _recompute(engine: LLMEngine, note: StoredNote) -> dict[int, bytes]:
    """By index, the blocks or the state that a note names, as the model computes them now. Raises: RequestError if its
    tokens are more than the engine takes."""
    token_ids = token_ids_of(note.tokens)
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)  # it still runs after its prompt
    engine.add_request("again", token_ids, params)
    engine.step()
    [seq] = engine.scheduler.running
    while seq.num_computed_tokens < len(token_ids):
        engine.step()
    found: dict[int, bytes] = {}
    if note.kind == "state":
        [states] = _states(engine)
        slots = {index: states.slot_of(seq, index) for index in note.indices}
        memory = StateMemory.of(engine.runner.state.states)
        found = {index: memory.read(slot_id) for index, slot_id in slots.items() if slot_id is not None}
    else:
        blocks = {index: engine.block_manager.pool.find(seq.prefixes[index]) for index in note.indices}
        pool = CacheMemory.of(engine.runner.kv_cache)
        found = {index: pool.read(block.block_id) for index, block in blocks.items() if block is not None}
    while engine.has_unfinished_requests():
        engine.step()
    return found
