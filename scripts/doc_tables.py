"""The tables of docs/kv-cache.md, computed by the real block manager.

Each function with a docstring is one table. A fenced block in the document that follows `<!-- table: name -->` holds
what the function of that name returns; tests/test_docs.py compares them, `scripts/renew.py --write kv_cache` renews.
"""

from collections.abc import Callable

from pagedcli.core.block_manager import BlockManager
from pagedcli.core.sequence import Sequence
from pagedcli.printable import id_ranges
from pagedcli.sampling_params import SamplingParams


class Story:
    """A pool and some sequences; the tokens that a model would sample are given by the story."""

    def __init__(self, num_blocks: int, block_size: int, *, windows: tuple[int | None, ...] = (None,)) -> None:
        self.manager = BlockManager(num_blocks, block_size, windows=windows)
        self.seqs: dict[str, Sequence] = {}
        self.lines: list[str] = []

    def start(self, name: str, token_ids: list[int]) -> Sequence:
        seq = Sequence(len(self.seqs), name, token_ids, SamplingParams(), max_new_tokens=100)
        hit = self.manager.lookup(seq)
        self.manager.allocate(seq, hit, len(token_ids) - self.manager.num_computed_after(seq, hit))
        self.num_cached = seq.num_computed_tokens
        seq.num_computed_tokens = len(token_ids)
        self.seqs[name] = seq
        return seq

    def append(self, name: str, token_id: int) -> list[tuple[int, int]]:
        seq = self.seqs[name]
        seq.token_ids.append(token_id)
        self.manager.release_unseen(seq)
        copies = self.manager.may_append(seq)
        seq.num_computed_tokens += 1
        return copies

    def fork(self, parent: str, child: str) -> None:
        other = self.seqs[parent]
        self.seqs[child] = Sequence(len(self.seqs), child, other.token_ids, SamplingParams(), max_new_tokens=100)
        self.manager.fork(other, self.seqs[child])

    def end(self, name: str) -> None:
        self.manager.deallocate(self.seqs.pop(name))

    def say(self, text: str) -> None:
        self.lines.append(text)

    def show(self, text: str) -> None:
        """The pool: a line per block, the tables, the free list."""
        self.manager.check(list(self.seqs.values()))
        size = self.manager.block_size
        self.lines += ["", text, "block  state    refs  tokens"]
        for block in self.manager.blocks:
            owners = [seq for seq in self.seqs.values() if block.block_id in seq.block_table]
            if block.hash is not None:
                state, tokens = "full" if block.ref_count else "cached", list(block.token_ids)
            elif owners:
                start = owners[0].block_table.index(block.block_id) * size
                state, tokens = "partial", owners[0].token_ids[start : start + size]
            else:
                state, tokens = "empty", []
            self.lines.append(
                f"{block.block_id:5}  {state:7}  {block.ref_count:4}  {' '.join(map(str, tokens))}".rstrip()
            )
        for name, seq in self.seqs.items():
            self.lines.append(f"table of {name}: {seq.block_table}")
        self.lines.append(f"free list, next first: {list(self.manager.free_block_ids)}")

    def text(self) -> str:
        return "\n".join(self.lines).strip("\n")


def pool() -> str:
    """Six blocks of four tokens carried through time."""
    story = Story(6, 4)
    story.show("1. an empty pool")
    story.start("A", [11, 12, 13, 14, 21, 22])
    story.show("2. A arrives with 6 tokens: one block is full, one is partial")
    story.append("A", 23)
    story.append("A", 24)
    story.show("3. two tokens later A's second block is full, too: shareable")
    story.start("B", [11, 12, 13, 14, 21, 22, 23, 24, 31])
    story.show(f"4. B arrives with 9 tokens, 8 of them A's: {story.num_cached} cached tokens, one fresh block")
    story.append("A", 41)
    story.end("A")
    story.show(
        "5. A generates 41 in a block of its own and ends: that partial block goes to the front of the free list"
    )
    story.end("B")
    story.show("6. B ends: its full blocks stay cached, tail before head")
    story.start("C", [11, 12, 13, 14, 51])
    story.show(f"7. C begins as A did: {story.num_cached} cached tokens, block 0 is revived")
    story.start("D", list(range(61, 75)))
    story.show("8. D needs four blocks: the three empty ones go first, only then cached block 1 is evicted")
    return story.text()


def two_long_prompts() -> str:
    """The classic: 600 and 520 tokens at block size 256."""
    story = Story(8, 256)
    shared = list(range(512))
    s1 = story.start("S1", shared + [9000 + i for i in range(88)])
    story.say(f"S1: 600 tokens, {story.num_cached:3} cached, table {s1.block_table}")
    s2 = story.start("S2", shared + [8000 + i for i in range(8)])
    story.say(f"S2: 520 tokens, {story.num_cached:3} cached, table {s2.block_table}")
    counts = [story.manager.blocks[block_id].ref_count for block_id in range(4)]
    story.say(f"ref counts of blocks 0 to 3: {counts}")
    return story.text()


def slot_numbers() -> str:
    """300 tokens at block size 256, in blocks 5 and 12."""
    story, size = Story(14, 256), 256
    story.start("before", list(range(5 * size)))
    seq = story.start("S", list(range(9000, 9000 + size)))
    story.start("after", list(range(20_000, 20_000 + 6 * size)))
    for token_id in range(44):
        story.append("S", token_id)
    slots = [seq.block_table[place // size] * size + place % size for place in range(300)]
    story.say(f"S: {len(seq.token_ids)} tokens, table {seq.block_table}")
    story.say(f"its tokens are in slots {id_ranges(slots)}")
    story.append("S", 44)
    story.say(f"its next token goes to slot {seq.block_table[-1]} * {size} + {300 % size} = {slots[-1] + 1}")
    return story.text()


def growth() -> str:
    """One sequence at block size 4, from 4 tokens to 9."""
    story = Story(4, 4)
    seq = story.start("A", [1, 2, 3, 4])
    story.say("tokens  blocks  last block")
    for length in range(4, 10):
        if length > 4:
            story.append("A", length)
        last = story.manager.blocks[seq.block_table[-1]]
        state = "full" if last.hash is not None else "new, partial" if length % 4 == 1 else "partial"
        story.say(f"{length:6}  {len(seq.block_table):6}  {state}")
    return story.text()


def three_prompts() -> str:
    """A = [1..8], B = [1..8, 9, 10], C = [0, 2..8, 9, 10] at block size 4."""
    story = Story(12, 4)
    one_to_eight = list(range(1, 9))
    for name, token_ids in (("A", one_to_eight), ("B", [*one_to_eight, 9, 10]), ("C", [0, *one_to_eight[1:], 9, 10])):
        seq = story.start(name, token_ids)
        reused = sum(story.manager.blocks[block_id].ref_count > 1 for block_id in seq.block_table)
        story.say(f"{name}: table {seq.block_table!s:10} reuses {reused} blocks, {story.num_cached} cached tokens")
    return story.text()


def whole_prompt_cached() -> str:
    """A prompt of exactly two blocks, twice."""
    story = Story(4, 4)
    story.start("A", list(range(8)))
    seq = story.start("B", list(range(8)))
    story.say(
        f"B: {len(seq.token_ids)} tokens, {story.num_cached} cached, 1 computed, 0 written, table {seq.block_table}"
    )
    return story.text()


def copy_on_write() -> str:
    """Two samples of one prompt."""
    story = Story(4, 4)
    story.start("A", [1, 2, 3, 4, 5])
    story.fork("A", "A'")
    story.show("A and its second sample A' share every block, the partial one too")
    copies = story.append("A'", 7)
    story.append("A", 6)
    story.show(f"A' writes first and gets a copy (block {copies[0][0]} -> {copies[0][1]}); A then writes in place")
    return story.text()


def window() -> str:
    """A sequence that outgrows its window."""
    story = Story(4, 2, windows=(4,))
    seq = story.start("A", [1, 2])
    story.say("tokens  blocks held  block table")
    for token_id in range(3, 12):
        story.append("A", token_id)
        table = ["-" if block_id is None else block_id for block_id in seq.block_table]
        held = len(seq.block_table) - seq.block_table.count(None)
        story.say(f"{token_id:6}  {held:11}  {' '.join(map(str, table))}")
    story.end("A")
    story.start("B", [*range(1, 11), 99])
    hit = story.seqs["B"].block_table
    story.say(
        f"B begins with A's first 10 tokens: {story.num_cached} cached, of {hit.count(None)} blocks none is needed"
    )
    return story.text()


TABLES: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        pool, slot_numbers, two_long_prompts, growth, three_prompts, whole_prompt_cached, copy_on_write, window,
    )
}  # fmt: skip
