"""One self-contained HTML page of a recorded run: report.html with the folded trace inside. No network, no libraries.

Used by `pagedcli report`. The page only draws; all counting is done here, by the same folds as elsewhere.
"""

import dataclasses
import html
import re
from array import array
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import msgspec

from pagedcli.events import (
    BlockEvicted,
    BlocksAllocated,
    BlocksFilled,
    BlocksReleased,
    BlocksReused,
    EngineStarted,
    SequenceForked,
    StepFailed,
    StepScheduled,
)
from pagedcli.inspection.dispatch import View
from pagedcli.inspection.explain import Explainer
from pagedcli.inspection.fold import fold
from pagedcli.inspection.lookups import REASON_WORDS, Lookup, Totals, divergence_text
from pagedcli.inspection.moment import Moment
from pagedcli.inspection.state import PoolState
from pagedcli.inspection.stats import StepSeries
from pagedcli.inspection.timeline import Timelines
from pagedcli.inspection.trace_file import TraceReader

MAX_FRAMES = 20_000  # steps drawn individually; longer runs are summarised in groups, as the page notes
MAX_LOOKUPS = 20_000  # rows of the table of lookups
_GAUGES = ("used", "shared", "cached", "running", "waiting", "unfilled_slots", "saved")
_STATUSES = ("waiting", "prefill", "decode", "preempted")
_MOST_SHARED = 11  # largest number of owners distinguished on the map

_Blocks = BlocksReused | BlocksAllocated | BlocksFilled | BlocksReleased | SequenceForked
Decode = Callable[[tuple[int, ...]], str]


def render_report(reader: TraceReader, decode: Decode | None = None) -> bytes:
    """The page, in UTF-8. `decode` turns recorded token ids into text; without it they stay numbers.

    Raises: TraceError if the trace is damaged or inconsistent.
    """
    moment, series, timelines, explainer, frames = Moment(), StepSeries(), Timelines(), Explainer(), BlockFrames()
    state = fold(reader, moment, series, timelines, explainer, frames)
    explainer.finish()
    timelines.finish(state)
    frames.add(state)
    group = max(1, -(-len(series) // MAX_FRAMES))
    document = {
        "file": reader.path.name,
        "notes": reader.notes,
        "engine": msgspec.to_builtins(state.engine),
        "summary": {**moment.summary(), "sequences": [], "lookups": [], "events": []},
        "numUnfinished": len(state.seqs),
        "refused": [msgspec.to_builtins(event) for event in state.refused[:1000]],
        "firstStep": frames.first_step,
        "numSteps": len(series),
        "group": group,
        "columns": _grouped_columns(series, group),
        "frames": frames.grouped(group),
        "statuses": _STATUSES,
        "timelines": _timeline_rows(timelines),
        "explain": _explain_document(explainer, decode),
    }
    template = files("pagedcli.inspection").joinpath("report.html").read_text(encoding="utf-8")
    parts = {"{{title}}": html.escape(f"pagedcli report: {reader.path.name}"), "{{data}}": embedded_json(document)}
    return re.sub("{{title}}|{{data}}", lambda place: parts[place[0]], template).encode()


def embedded_json(document: Any) -> str:
    """JSON that is safe inside a script element, whatever text it contains."""
    text = msgspec.json.encode(document).decode()
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


class BlockFrames(View[PoolState]):
    """The pool at every step as changes since the previous step: block_id * 16 + code.

    0 empty, 1 cached and reusable, 2 being filled, 3 in use and full, 4 ... 13 shared by 2 ... 11 and more.
    """

    def __init__(self) -> None:
        self.deltas: list[array[int]] = []
        self.first_step = 0
        self._codes = bytearray()
        self._touched: set[int] = set()

    def on_engine_started(self, event: EngineStarted, state: PoolState) -> None:
        self._touched.update(range(len(self._codes)))  # another part begins with an empty pool

    def on_step_scheduled(self, event: StepScheduled, state: PoolState) -> None:
        self._add_step(event.step, state)

    def _add_step(self, step: int, state: PoolState) -> None:
        if not self.deltas:
            self.first_step = step
        self.add(state)

    def on_step_failed(self, event: StepFailed, state: PoolState) -> None:
        self._touched.update(range(state.num_blocks))
        if state.step is not None and not state.step.scheduled:
            self._add_step(event.step, state)

    def on_block_evicted(self, event: BlockEvicted, state: PoolState) -> None:
        self._touched.add(event.block_id)

    def _touch(self, event: _Blocks, state: PoolState) -> None:
        self._touched.update(event.block_ids)

    on_blocks_reused = on_blocks_allocated = on_blocks_filled = on_blocks_released = on_sequence_forked = _touch

    def add(self, state: PoolState) -> None:
        """Append a frame of the current pool."""
        codes = self._codes
        if not codes:
            codes.extend(bytes(state.num_blocks))
        delta = array("q")
        for block_id in sorted(self._touched):
            ref_count, full = state.ref_counts[block_id], state.hashes[block_id] is not None
            code = 2 + min(ref_count, _MOST_SHARED) if ref_count > 1 else 2 * ref_count + full
            if code != codes[block_id]:
                codes[block_id] = code
                delta.append(block_id * 16 + code)
        self._touched.clear()
        self.deltas.append(delta)

    def grouped(self, group: int) -> list[list[int]]:
        """One frame per group of steps, with all their changes, and one for the end of the run."""
        if group == 1:
            return [delta.tolist() for delta in self.deltas]
        *steps, end = self.deltas
        groups = [steps[start : start + group] for start in range(0, len(steps), group)]
        frames = [{packed >> 4: packed for delta in deltas for packed in delta} for deltas in groups]
        return [*(list(last.values()) for last in frames), end.tolist()]


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


def _timeline_rows(timelines: Timelines) -> list[list[Any]]:
    return [
        [
            seq.seq_id, seq.label, seq.num_prompt_tokens, seq.num_output_tokens, seq.finish_reason,
            [[_STATUSES.index(phase.status), phase.first_step, phase.last_step] for phase in seq.phases],
        ]
        for seq in timelines.seqs.values()
    ]  # fmt: skip


def _explain_document(explainer: Explainer, decode: Decode | None) -> dict[str, Any]:
    lookups = explainer.lookups
    if len(lookups) > MAX_LOOKUPS:
        lookups = sorted(lookups, key=Lookup.num_lost_tokens, reverse=True)[:MAX_LOOKUPS]
    return {
        "numLookups": len(explainer.lookups),
        "longestSharedPrefix": explainer.longest_shared_prefix(),
        "reasonWords": REASON_WORDS,
        "totals": {
            "first": _totals_document(explainer.totals(own=False)), "own": _totals_document(explainer.totals(own=True)),
        },
        "lookups": [
            [
                lookup.step, lookup.seq_id, lookup.label, lookup.kind, lookup.event.num_tokens,
                lookup.event.blocks_asked, lookup.event.blocks_hit, lookup.tokens_hit, lookup.ideal_tokens_hit,
                lookup.reason, lookup.why(),
                None if lookup.divergence is None else divergence_text(lookup.divergence, decode),
            ]
            for lookup in lookups
        ],
    }  # fmt: skip


def _totals_document(totals: Totals) -> dict[str, Any]:
    return {**dataclasses.asdict(totals), "reasons": dict(totals.reasons)}
