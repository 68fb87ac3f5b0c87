"""The block pool at a step next to the block tables of sequences, as a picture and in characters.

Used by `trace RUN --picture`, the notebooks and the lessons. Shared blocks have the letter and colour of their prefix.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from pagedcli.errors import UsageError
from pagedcli.printable import one_line, plural
from pagedcli.show import drawing as svg
from pagedcli.show.drawing import NUM_PREFIX_COLOURS, Area, Drawn, Picture, Shape, Swatch
from pagedcli.trace.seq_state import SeqState
from pagedcli.trace.state import PoolState
from pagedcli.views.rows import BlockKind, block_kind, block_owners, num_tokens_of

_COLUMNS = (8, 10, 12, 16, 20, 25, 32, 40, 50, 64, 80, 100, 128, 160, 200, 250, 320, 400, 500)
_LEAST_CELL = 1.5  # a smaller cell cannot be seen
_CELLS_PER_LINE = 10  # width in characters
_TABLES_OF_COLUMN = 6


class PrefixLetters:
    """Letters of shared prefixes: A is the first one seen. One object for all frames of a film keeps them."""

    def __init__(self) -> None:
        self._places: dict[object, int] = {}

    def place(self, state: PoolState, owner: SeqState) -> int:
        """The number of the prefix that a sequence begins with: blocks with the same beginning have the same one."""
        first = owner.held_block_ids[0]
        content = state.hashes[first]
        return self._places.setdefault(("block", first) if content is None else content, len(self._places))


def letter(place: int) -> str:
    """A, B ... Z, A1, B1 ..."""
    rounds, index = divmod(place, len(ascii_uppercase))
    return ascii_uppercase[index] + (str(rounds) if rounds else "")


@dataclass(frozen=True, slots=True)
class ShownBlock:
    """What a picture shows of a block."""

    block_id: int
    kind: BlockKind
    ref_count: int
    num_tokens: int  # slots that hold a token after the step
    block_size: int
    owners: tuple[int, ...]  # sequences that hold it
    prefix: int | None  # number of the shared prefix that it belongs to; None: it is not shared
    is_written: bool  # the step computes tokens of it

    @property
    def state(self) -> str:
        return self.kind if self.kind in ("empty", "cached") else "in_use"

    @property
    def look(self) -> str:
        """The class of its colours."""
        return self.kind if self.prefix is None else f"prefix{self.prefix % NUM_PREFIX_COLOURS}"

    @property
    def mark(self) -> str:
        """`A` of a shared prefix, `s12` of sequence 12 alone; nothing where nobody holds it."""
        return letter(self.prefix) if self.prefix is not None else f"s{self.owners[0]}" if self.owners else ""

    def title(self) -> str:
        if not self.owners:
            return f"block {self.block_id}: {self.kind}"
        held = f"held by sequence {', '.join(map(str, self.owners))}"
        tokens = f"{self.num_tokens} of {plural(self.block_size, 'token')}"
        return f"block {self.block_id}: {held} (ref count {self.ref_count}), {tokens}"


def shown_blocks(state: PoolState, letters: PrefixLetters) -> list[ShownBlock]:
    """All blocks in the order of their ids."""
    owners, written = block_owners(state), _written(state)
    found = []
    for block_id, ref_count in enumerate(state.ref_counts):
        held = owners.get(block_id, [])
        kind = block_kind(state, block_id)
        num_tokens = num_tokens_of(block_id, held, state)
        prefix = letters.place(state, held[0][0]) if kind == "shared" else None
        found.append(
            ShownBlock(
                block_id, kind, ref_count, num_tokens, state.block_size, tuple(seq.seq_id for seq, _ in held), prefix,
                block_id in written,
            )
        )  # fmt: skip
    return found


def _written(state: PoolState) -> set[int]:
    """The blocks that hold tokens of the current step."""
    written: set[int] = set()
    size, num_groups = state.block_size, state.num_groups
    for seq_id, num_new in ({} if state.step is None else state.step.new_tokens).items():
        seq = state.seqs.get(seq_id)
        if seq is not None:
            first, end = seq.num_computed_tokens - num_new, seq.num_computed_tokens
            entries = seq.block_table[first // size * num_groups : -(-end // size) * num_groups]
            written.update(block_id for block_id in entries if block_id is not None)
    return written


def shown_sequences(state: PoolState, blocks: Sequence[ShownBlock], chosen: Collection[int] | None) -> list[SeqState]:
    """The chosen sequences that hold blocks, or all that do, those of a shared prefix side by side."""
    held = (seq for seq in state.seqs.values() if seq.held_block_ids)
    holders = [seq for seq in held if chosen is None or seq.seq_id in chosen]

    def order(seq: SeqState) -> tuple[float, int]:
        prefix = blocks[seq.held_block_ids[0]].prefix
        return (float("inf") if prefix is None else prefix, seq.seq_id)

    return sorted(holders, key=order)


def caption(state: PoolState, blocks: Sequence[ShownBlock]) -> str:
    step = state.step
    new_tokens = 0 if step is None else sum(step.num_new_tokens)
    num_written = sum(block.is_written for block in blocks)
    waiting = len(state.seqs) - state.num_running
    waits = f"; {plural(waiting, 'sequence')} wait{'s' if waiting == 1 else ''}" if waiting else ""
    writes = ""
    if num_written:
        writes = (
            f" The step computes {plural(new_tokens, 'token')} and writes {plural(num_written, 'block')} (outlined)."
        )
    return (
        f"{state.num_used_blocks:,} of {plural(state.num_blocks, 'block')} of {plural(state.block_size, 'token')} are"
        f" in use by {plural(state.num_running, 'sequence')}, {state.num_shared_blocks:,} of them shared;"
        f" {state.num_cached_blocks:,} cached, {state.num_empty_blocks:,} empty{waits}.{writes}"
    )


# ---------------------------------------------------------------------- as a picture


def pool_picture(
    state: PoolState,
    *,
    follow: Collection[int] | None = None,
    shape: Shape = Shape.SLIDE,
    letters: PrefixLetters | None = None,
) -> Picture:
    """The pool of a step, as its forward pass sees it, and the tables of the sequences to follow, or as many as fit."""
    blocks = shown_blocks(state, letters or PrefixLetters())
    seqs = shown_sequences(state, blocks, follow)
    title = "KV cache before the first step" if state.step_number is None else f"KV cache at step {state.step_number}"

    def body(area: Area) -> Drawn:
        key, key_height = svg.legend(area, _legend())
        if area.height is None:
            pool, used = _pool(area, blocks)
            tables, more = _tables(
                Area(area.x, area.y + used + area.font, area.width, None, area.font), blocks, seqs, state
            )
            below = used + more + 2 * area.font
        else:
            room = area.height - key_height - area.font
            pool, _ = _pool(Area(area.x, area.y, area.width * 0.56, room, area.font), blocks)
            left = area.x + area.width * 0.59
            tables, _ = _tables(Area(left, area.y, area.width * 0.41, room, area.font), blocks, seqs, state)
            below = room + area.font
        key, _ = svg.legend(Area(area.x, area.y + below, area.width, None, area.font), _legend())
        return [*pool, *tables, *key], below + key_height

    return svg.draw(title, caption(state, blocks), body, shape)


def _legend() -> list[tuple[Swatch, str]]:
    def block(kind: BlockKind, share: float = 1.0, prefix: int | None = None, *, is_written: bool = False) -> Swatch:
        shown = ShownBlock(0, kind, 1, round(100 * share), 100, (), prefix, is_written)
        return lambda x, y, size: "".join([svg.box(x, y, size, size, shown.look), *_marks(shown, x, y, size)])

    return [
        (block("empty"), "empty"),
        (block("cached"), "cached: free, but findable"),
        (block("partial", 0.5), "being filled"),
        (block("full"), "full; s3: of sequence 3"),
        (block("shared", prefix=0), "A ×2: prefix A, held twice"),
        (block("empty", is_written=True), "written in this step"),
    ]


def _pool(area: Area, blocks: Sequence[ShownBlock]) -> Drawn:
    """A square per block. Raises: UsageError if they are too many to be seen."""
    columns, size = _grid(len(blocks), area)
    inner = size * 0.92 if size > 5 else size
    parts = []
    for place, block in enumerate(blocks):
        x, y = area.x + place % columns * size, area.y + place // columns * size
        parts.append(
            svg.box(
                x, y, inner, inner, block.look, title=block.title(), block=block.block_id, ref_count=block.ref_count,
                state=block.state, owners=" ".join(map(str, block.owners)), tokens=block.num_tokens,
            )
        )  # fmt: skip
        parts += _marks(block, x, y, inner)
        if inner >= 26:
            parts += _block_words(block, x, y, inner)
    return parts, -(-len(blocks) // columns) * size


def _grid(num_blocks: int, area: Area) -> tuple[int, float]:
    """How many blocks a line has, and the size of each."""
    height = 0.9 * area.width if area.height is None else area.height
    most = 4.8 * area.font

    def size(columns: int) -> float:
        return min(most, area.width / columns, height / -(-num_blocks // columns))

    columns = max(_COLUMNS, key=lambda each: (round(size(each), 2), each))
    if size(columns) < _LEAST_CELL:
        raise UsageError(
            f"a pool of {num_blocks:,} blocks is too large for a picture",
            hint="use explain -o PAGE.html, or simulate a smaller pool",
        )
    return columns, size(columns)


def _marks(block: ShownBlock, x: float, y: float, size: float) -> list[str]:
    """The part without tokens, the dot of a cached block and the frame of a written one: seen without colours, too."""
    parts = []
    if (block.owners and block.num_tokens < block.block_size) or block.kind == "partial":
        height = size * (1 - block.num_tokens / block.block_size)
        parts.append(f'<path class="hole" d="M{x:.1f} {y:.1f}h{size:.1f}v{height:.1f}h{-size:.1f}z"/>')
    if block.kind == "cached" and size >= 7:
        parts.append(f'<circle class="dot" cx="{x + size / 2:.1f}" cy="{y + size / 2:.1f}" r="{size / 6:.1f}"/>')
    if block.is_written:
        edge = 1.5 if size > 12 else size / 8
        parts.append(
            f'<path class="written" d="M{x + edge:.1f} {y + edge:.1f}h{size - 2 * edge:.1f}v{size - 2 * edge:.1f}'
            f'h{2 * edge - size:.1f}z"/>'
        )
    return parts


def _block_words(block: ShownBlock, x: float, y: float, size: float) -> list[str]:
    """The id of a block, whose it is, and its ref count if that is more than one."""
    on = "on" if block.kind in ("full", "shared") else "halo"
    small = size * (0.24 if size >= 40 else 0.3)
    parts = [
        svg.text(x + size * 0.1, y + size * 0.1 + small * 0.8, block.block_id, on if block.owners else "ink", small)
    ]
    if block.mark:
        main = min(size * 0.36, size * 0.8 / (len(block.mark) * 0.6))
        parts.append(svg.text(x + size / 2, y + size * 0.64, block.mark, on, main, "middle"))
    if block.ref_count > 1:
        parts.append(svg.text(x + size * 0.92, y + size * 0.92, f"×{block.ref_count}", on, small, "end"))
    return parts


def _tables(area: Area, blocks: Sequence[ShownBlock], seqs: Sequence[SeqState], state: PoolState) -> Drawn:
    """A block table per sequence: its blocks in order, and in the middle the number of those left out."""
    size = area.font * 1.6
    row = area.font * 1.25 + size * 1.35
    most = _TABLES_OF_COLUMN if area.height is None else int((area.height + size * 0.35 - area.font * 1.3) // row)
    shown = seqs if len(seqs) <= most else seqs[:most]
    parts, y = [], area.y
    step = state.step
    new_tokens = {} if step is None else step.new_tokens
    for seq in shown:
        new = f" +{new_tokens[seq.seq_id]}" if seq.seq_id in new_tokens else ""
        facts = f"{plural(seq.num_computed_tokens, 'token')}, {state.status_of(seq)}{new}"
        name, room = f"s{seq.seq_id}", area.width - svg.text_width(facts, area.font * 0.85)
        label = svg.cut(one_line(seq.label), room - svg.text_width(name, area.font) - 2 * area.font, area.font)
        parts += [
            svg.text(area.x, y + area.font * 0.9, name, "strong", area.font),
            svg.text(area.x + svg.text_width(f"{name}  ", area.font), y + area.font * 0.9, label, "ink", area.font),
            svg.text(area.x + area.width, y + area.font * 0.9, facts, "muted", area.font * 0.85, "end"),
        ]
        parts += _entries(area, y + area.font * 1.25, size, seq, blocks)
        y += row
    left = len(seqs) - len(shown)
    if left:
        parts.append(svg.text(area.x, y + area.font * 0.9, f"and {plural(left, 'more sequence')}", "muted", area.font))
    return parts, y + (area.font if left else 0) - area.y


def _entries(area: Area, y: float, size: float, seq: SeqState, blocks: Sequence[ShownBlock]) -> list[str]:
    table = list(enumerate(seq.block_table))
    most = int(area.width / size)
    num_left = max(0, len(table) - most)
    if num_left:  # a place for their number
        head = most // 2
        table = [*table[:head], *table[len(table) - (most - head - 1) :]]
    parts = []
    for column, (place, block_id) in enumerate(table):
        at = column + (1 if num_left and column >= most // 2 else 0)
        x, inner = area.x + at * size, size * 0.94
        if block_id is None:
            parts.append(svg.text(x + inner / 2, y + size * 0.65, "–", "muted", area.font, "middle"))
            continue
        block = blocks[block_id]
        on = "on" if block.kind in ("full", "shared") else "halo"
        font = min(area.font * 0.8, inner / (len(str(block_id)) * 0.75))
        parts.append(svg.box(x, y, inner, inner, block.look, seq=seq.seq_id, place=place, entry=block_id))
        parts += _marks(block, x, y, inner)
        parts.append(svg.text(x + inner / 2, y + inner / 2 + font * 0.36, block_id, on, font, "middle"))
    if num_left:
        x = area.x + (most // 2 + 0.5) * size
        parts.append(svg.text(x, y + size * 0.6, f"+{num_left + 1}", "muted", area.font * 0.7, "middle"))
    return parts


# ---------------------------------------------------------------------- in characters

_GLYPHS = {"empty": "·", "cached": "○", "partial": "▫", "full": "■", "shared": ""}


def pool_text(state: PoolState, *, follow: Collection[int] | None = None) -> str:
    """Draw the pool in characters: blocks with their owner or shared prefix, then the block tables."""
    blocks = shown_blocks(state, PrefixLetters())

    def cell(block: ShownBlock) -> str:
        held = f"×{block.ref_count}" if block.ref_count > 1 else ""
        return f"{block.block_id} {_GLYPHS[block.kind]}{block.mark}{held}{'*' if block.is_written else ''}"

    cells = [cell(block) for block in blocks]
    width = max(map(len, cells)) + 2
    rows = [cells[start : start + _CELLS_PER_LINE] for start in range(0, len(cells), _CELLS_PER_LINE)]
    lines = ["".join(each.ljust(width) for each in row).rstrip() for row in rows]
    tables = []
    for seq in shown_sequences(state, blocks, follow):
        entries = " ".join("-" if each is None else str(each) for each in seq.block_table)
        facts = f"{plural(seq.num_computed_tokens, 'token')}, {state.status_of(seq)}"
        tables.append(f"s{seq.seq_id} {one_line(seq.label)}: [{entries}] {facts}")
    key = "· empty  ○ cached  ▫ filling  ■ full  s0 sequence 0  A×2 prefix A, held twice  * written now"
    return "\n".join([*lines, "", *tables, "", key])
