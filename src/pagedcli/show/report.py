"""One self-contained HTML page of a recorded run: the files of report_page/ with the folded trace inside. No
network, no libraries.

Used by `pagedcli explain -o`. The page only draws; all counting is done here, by the same folds as elsewhere.
"""

import dataclasses
import html
import re
from array import array
from collections.abc import Callable, Collection, Sequence
from importlib.resources import files
from typing import Any, TypeVar

import msgspec

import pagedcli.events as ev
from pagedcli.answers.why import PART_WORDS, REASON_WORDS, ExplainedLookup, Reasons, SaltRow, why
from pagedcli.core.prefixes import num_equal
from pagedcli.printable import id_ranges, percent_text
from pagedcli.show.pages import palette
from pagedcli.trace.dispatch import View
from pagedcli.trace.files import TraceReader
from pagedcli.trace.fold import fold
from pagedcli.trace.state import PoolState
from pagedcli.trace.tokens import Decode
from pagedcli.views.cache_groups import group_uses, group_words
from pagedcli.views.explain import SnapshotRow
from pagedcli.views.moment import Moment
from pagedcli.views.rows import ShownRow, chosen
from pagedcli.views.stats import StepSeries
from pagedcli.views.whole_run import PHASES, RequestRow, WholeRun, story

_MOST_SHARED = 11  # largest number of owners distinguished on the map
_BlockEvent = (
    ev.BlocksReused | ev.BlocksAllocated | ev.BlocksReleased | ev.SequenceForked | ev.WindowPassed | ev.DraftChecked
)
T = TypeVar("T")


class PoolFrames(View):
    """The pool at every step as changes since the previous step.

    `blocks` has (block_id * num_groups + group) * 16 + code, where code is 0 empty, 1 cached and reusable, 2 being
    filled, 3 in use and full, 4 ... 13 shared by 2 ... 11 and more, and empty blocks have group 0. `tables` has one
    `[seq_id, kept, *block_ids]` per changed block table: its first `kept` blocks stay, these replace the others.
    """

    def __init__(self) -> None:
        self.blocks: list[array[int]] = []
        self.tables: list[list[array[int]]] = []
        self.first_step = 0
        self._num_groups = 1
        self._cells: list[int] = []  # each block at the last frame: group * 16 + code
        self._held: dict[int, list[int]] = {}  # block tables at the last frame
        self._touched: set[int] = set()  # blocks
        self._touched_seqs: dict[int, None] = {}

    def on_engine_started(self, event: ev.EngineStarted, state: PoolState) -> None:
        self._num_groups = state.num_groups
        self._touch_all()  # another part begins with an empty pool

    def _touch_all(self) -> None:
        self._touched.update(range(len(self._cells)))
        self._touched_seqs.update(dict.fromkeys(self._held))

    def on_step_scheduled(self, event: ev.StepScheduled | ev.StepFailed, state: PoolState) -> None:
        if not self.blocks:
            self.first_step = event.step
        self.add(state)

    def on_step_failed(self, event: ev.StepFailed, state: PoolState) -> None:
        self._touch_all()
        if state.step is not None and not state.step.scheduled:
            self.on_step_scheduled(event, state)

    def on_block_evicted(self, event: ev.BlockEvicted, state: PoolState) -> None:
        self._touched.add(event.block_id)

    def on_blocks_filled(self, event: ev.BlocksFilled | ev.BlocksRestored, state: PoolState) -> None:
        self._touched.update(event.block_ids)

    on_blocks_restored = on_blocks_filled

    def on_block_copied(self, event: ev.BlockCopied, state: PoolState) -> None:
        self._touched_seqs[event.seq_id] = None

    def _touch(self, event: _BlockEvent, state: PoolState) -> None:
        self._touched.update(block_id for block_id in event.block_ids if block_id is not None)
        self._touched_seqs[event.seq_id] = None

    on_blocks_reused = on_blocks_allocated = on_blocks_released = on_sequence_forked = on_window_passed = _touch
    on_draft_checked = _touch

    def add(self, state: PoolState) -> None:
        """Append a frame of the current pool."""
        self._cells = self._cells or [0] * state.num_blocks
        blocks = array("q")
        for block_id in sorted(self._touched):
            ref_count, full = state.ref_counts[block_id], state.hashes[block_id] is not None
            code = 2 + min(ref_count, _MOST_SHARED) if ref_count > 1 else 2 * ref_count + full
            cell = state.block_groups[block_id] * 16 + code if code else 0
            if cell != self._cells[block_id]:
                self._cells[block_id] = cell
                blocks.append(block_id * self._num_groups * 16 + cell)
        tables = []
        for seq_id in self._touched_seqs:
            seq = state.seqs.get(seq_id)
            table, before = [] if seq is None else seq.held_block_ids, self._held.pop(seq_id, [])
            kept = num_equal(before, table)
            if kept < max(len(before), len(table)):
                tables.append(array("q", (seq_id, kept, *table[kept:])))
            if table:
                self._held[seq_id] = table
        self._touched.clear()
        self._touched_seqs.clear()
        self.blocks.append(blocks)
        self.tables.append(tables)

    def grouped_blocks(self, group: int) -> list[list[int]]:
        """One frame per group of steps, with the last change of each block, and one for the end of the run."""
        cells, frames = self._num_groups * 16, _grouped(self.blocks, group)
        last = ({packed // cells: packed for delta in deltas for packed in delta} for deltas in frames)
        return [list(changes.values()) for changes in last]

    def grouped_tables(self, group: int) -> list[list[list[int]]]:
        """One frame per group of steps, with all changes of the block tables in order, and one for the run's end."""
        frames = _grouped(self.tables, group)
        return [[change.tolist() for changes in deltas for change in changes] for deltas in frames]


def _grouped(deltas: list[T], group: int) -> list[list[T]]:
    """The changes by group of steps; those of the end of the run are a group of their own."""
    steps = deltas[:-1]
    return [*(steps[start : start + group] for start in range(0, len(steps), group)), deltas[-1:]]


MAX_LOOKUPS = 20_000  # rows of the table of lookups
_GAUGES = ("used", "shared", "cached", "running", "waiting", "unfilled_slots", "saved")
_NUM_SLOWEST = 10
_SCRIPTS = ("basics.js", "map.js", "charts.js", "requests.js", "main.js")  # the order matters


def render_report(
    reader: TraceReader,
    make_decoder: Callable[[], Decode | None] = lambda: None,
    *,
    selected: Collection[int] = (),
    views: Sequence[View] = (),
    what_to_change: Callable[[PoolState], Sequence[str]] = lambda state: (),
    most_frames: int = 20_000,
) -> bytes:
    """The page, in UTF-8. Once the trace is known to be valid, `make_decoder` returns what turns recorded token ids
    into text, without which they stay numbers, and `what_to_change` the first paragraph of the story; `views` see all
    events before that. The page opens at the `selected` sequences. Where there are more than `most_frames` steps, it
    draws groups of them, as it notes.

    Raises: TraceError if the trace is damaged or inconsistent.
    """
    moment, run, frames = Moment(), WholeRun(), PoolFrames()
    state = fold(reader, moment, run, frames, *views)
    run.finish(state)
    frames.add(state)
    reasons = why(run.explainer, state)
    slowest = sorted(run.requests, key=lambda row: -row.total_s)[:_NUM_SLOWEST]
    group = max(1, -(-len(run.series) // most_frames))
    document = {
        "file": reader.path.name,
        "notes": reader.notes,
        "engine": msgspec.to_builtins(state.engine),
        "groups": _groups_document(state),
        "verdicts": list(what_to_change(state)),
        "story": [story(run.findings(state), run.elapsed_s), reasons.answer],
        "summary": {**moment.summary(), "sequences": [], "lookups": [], "events": []},
        "numUnfinished": len(state.seqs),
        "refused": [msgspec.to_builtins(event) for event in state.refused[:1000]],
        "firstStep": frames.first_step,
        "numSteps": len(run.series),
        "group": group,
        "columns": _grouped_columns(run.series, group),
        "frames": frames.grouped_blocks(group),
        "tables": frames.grouped_tables(group),
        "statuses": PHASES,
        "requestColumns": [column.key for column in chosen(RequestRow, "page")],
        "requestTable": _headers(RequestRow),
        "requests": [_values(each) for each in run.requests],
        "slowest": [[row.seq_id, row.label, row.why()] for row in slowest],
        "selected": sorted(selected),
        "explain": _explain_document(reasons, make_decoder()),
    }
    return _page(f"pagedcli: {reader.path.name}", document)


def _groups_document(state: PoolState) -> list[dict[str, Any]]:
    """What does not change of each group of layers, and its words; empty if there is one, as all blocks are alike."""
    uses = group_uses(state) if state.num_groups > 1 else []
    return [
        {
            "words": group_words(state.started, use.group), "layers": id_ranges(use.layers), "window": use.window,
            "heads": None if use.num_kv_heads is None else f"{use.num_kv_heads} of {use.head_dim}",
            "usedBytes": use.used_bytes,
        }
        for use in uses
    ]  # fmt: skip


def _page(title: str, document: dict[str, Any]) -> bytes:
    """The template with its style, scripts and data inside."""
    folder = files("pagedcli.show").joinpath("report_page")

    def part(name: str) -> str:
        return folder.joinpath(name).read_text(encoding="utf-8")

    parts = {
        "{{title}}": html.escape(title),
        "{{style}}": palette() + part("page.css"),
        "{{data}}": embedded_json(document),
        "{{script}}": "".join(part(name) for name in _SCRIPTS),
    }
    return re.sub("|".join(parts), lambda place: parts[place[0]], part("page.html")).encode()


def embedded_json(document: Any) -> str:
    """JSON that is safe inside a script element, whatever text it contains."""
    text = msgspec.json.encode(document).decode()
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def _grouped_columns(series: StepSeries, group: int) -> dict[str, list[int]]:
    """Per group of steps: gauges at its end, counts summed over it."""
    columns = {}
    for name, column in series.columns.items():
        if group == 1:
            columns[name] = column.tolist()
            continue
        groups = [column[start : start + group] for start in range(0, len(column), group)]
        if name == "start_ns":
            columns[name] = [part[0] for part in groups]
        else:
            columns[name] = [part[-1] if name in _GAUGES else sum(part) for part in groups]
    start_ns = columns["start_ns"]
    columns["start_ns"] = [time_ns - start_ns[0] for time_ns in start_ns]  # exact in the browser's numbers
    return columns


def _headers(record: type, use: str = "table") -> list[tuple[str, str, str]]:
    """The name, header and type of each field that a table of the page shows."""
    return [(column.key, column.header, column.kind) for column in chosen(record, use)]


def _values(row: ShownRow, use: str = "page") -> list[Any]:
    """The values that the page has of a row; times are in seconds, rounded to microseconds."""
    values = ((getattr(row, column.key), column.show) for column in chosen(type(row), use))
    shown = ((show(value) if isinstance(value, dict) else value) for value, show in values)
    return [round(each, 6) if isinstance(each, float) else each for each in shown]


def _explain_document(reasons: Reasons, decode: Decode | None) -> dict[str, Any]:
    lookups = reasons.lookups if len(reasons.lookups) <= MAX_LOOKUPS else reasons.lost()[:MAX_LOOKUPS]
    totals = {name: reasons.totals(own=own) for name, own in (("first", False), ("own", True))}
    return {
        "numLookups": len(reasons.lookups),
        "longestSharedPrefix": reasons.longest_shared_prefix(),
        "reasonWords": REASON_WORDS,
        "partWords": PART_WORDS,
        "totals": {name: {**dataclasses.asdict(each), "reasons": dict(each.reasons)} for name, each in totals.items()},
        "snapshotColumns": _headers(SnapshotRow),
        "snapshots": [_values(use, "table") for use in reasons.snapshots[:MAX_LOOKUPS]],
        "saltColumns": _headers(SaltRow),
        "salts": [[*_values(row, "table")[:-1], percent_text(row.hit_rate)] for row in reasons.salts()[:MAX_LOOKUPS]],
        "lookupColumns": _headers(ExplainedLookup, "page"),
        "lookups": [_values(ExplainedLookup(lookup, decode)) for lookup in lookups],
    }
