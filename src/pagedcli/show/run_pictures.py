"""Pictures of a run: the life of a request, the tree of prefixes with its hits, and waste, contiguous against paged.

Used by `trace RUN --picture`, the notebooks and the lessons.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from pagedcli.printable import one_line, percent_text, plural
from pagedcli.show import drawing as svg
from pagedcli.show.drawing import Area, Drawn, Picture, Shape
from pagedcli.trace.state import PoolState
from pagedcli.views.prefix_tree import Branch, PrefixTree, pruned
from pagedcli.views.request_life import Life
from pagedcli.views.whole_run import PHASES

_MOST_LIVES = 3
_MOST_BRANCHES = {Shape.SLIDE: 13, Shape.COLUMN: 10}


def ticks(first: float, last: float, most: int = 8) -> list[int]:
    """Round whole numbers of a range: steps of 1, 2 or 5 times a power of ten."""
    step = 1
    while (last - first) / step > most:
        step = step * 5 // 2 if str(step)[0] == "2" else step * 2
    return list(range(-(-math.ceil(first) // step) * step, math.floor(last) + 1, step))


# ---------------------------------------------------------------------- a request's life


def life_picture(name: str, lives: Sequence[Life], *, shape: Shape = Shape.SLIDE) -> Picture:
    """When the sequences of a request waited and ran, the blocks that they held, and what happened to them."""
    shown = [life for life in lives if life.held][:_MOST_LIVES]
    steps = [step for life in shown for step, held, _ in life.held if held]
    first = min([step for life in shown for step, _ in life.happenings], default=0)
    last = max([step for life in shown for step, _ in life.happenings] + steps, default=first)
    most_blocks = max((held for life in shown for _, held, _ in life.held), default=0)

    def body(area: Area) -> Drawn:
        side = area.width * 0.36 if area.height is not None else 0.0
        key = [
            *((svg.swatch(phase), phase) for phase in PHASES),
            (svg.swatch("held"), "its own blocks"),
            (svg.swatch("shared"), "shared blocks"),
        ]
        key_height = svg.legend(area, key)[1] + area.font
        height = 15 * area.font if area.height is None else (area.height - key_height) / max(1, len(shown))
        parts: list[str] = []
        y = area.y
        for life in shown:
            chart = Area(area.x, y, area.width - side - (2 * area.font if side else 0), height - area.font, area.font)
            parts += _life_chart(chart, life, (first, last), most_blocks)
            if side:
                drawn, _ = _happenings(Area(area.x + area.width - side, y, side, height, area.font), life)
            else:
                drawn, used = _happenings(Area(area.x, y + height, area.width, None, area.font), life)
                y += used + area.font
            parts += drawn
            y += height
        drawn, _ = svg.legend(Area(area.x, y + area.font, area.width, None, area.font), key)
        return [*parts, *drawn], y + key_height - area.y

    left = f" ({len(lives) - len(shown)} more not shown)" if len(lives) > len(shown) else ""
    caption = (
        f"{plural(len(lives), 'sequence')} of request {name}{left}, from step {first} to step {last}: what it did, and"
        f" below that the blocks that it held, at most {most_blocks}. Numbers mark what happened."
    )
    return svg.draw(f"The life of request {name}", caption, body, shape)


def _life_chart(area: Area, life: Life, steps: tuple[int, int], most_blocks: int) -> list[str]:
    first, last = steps
    assert area.height is not None, "the caller chose it"
    left, font = area.x + area.font * 2.2, area.font
    scale = (area.x + area.width - left) / (last - first + 1)
    band, bottom = area.y + font * 2.6, area.y + area.height - font * 1.4
    top = band + font * 2.2

    def x(step: float) -> float:
        return left + (step - first) * scale

    def y(blocks: float) -> float:
        return bottom - blocks / max(1, most_blocks) * (bottom - top)

    parts = [svg.text(area.x, area.y + font, f"sequence {life.seq_id}", "strong", font)]
    for tick in ticks(0, most_blocks, 4):
        parts += [
            svg.line(left, y(tick), x(last + 1), y(tick)),
            svg.text(left - 6, y(tick) + 4, tick, "muted", font * 0.8, "end"),
        ]
    for tick in ticks(first, last):
        parts.append(svg.text(x(tick + 0.5), bottom + font * 1.1, tick, "muted", font * 0.8, "middle"))
    parts.append(svg.text(area.x, bottom + font * 1.1, "step", "muted", font * 0.8))
    for (held, shared), same in groupby(life.held, key=lambda entry: entry[1:]):
        run = [step for step, _, _ in same]
        width = (run[-1] + 1 - run[0]) * scale
        if held:
            data = {"first": run[0], "last": run[-1], "held": held, "shared": shared}
            parts.append(svg.box(x(run[0]), y(held), width, y(shared) - y(held), "held", **data))
        if shared:
            parts.append(svg.box(x(run[0]), y(shared), width, bottom - y(shared), "shared"))
    for phase in life.phases:
        end = (phase.last_step if phase.last_step is not None else last) + 1
        width = (end - phase.first_step) * scale
        rests = phase.status in ("waiting", "preempted")  # lower, so that it is told apart without colours
        height, label = (font, "ink") if rests else (font * 1.5, "on")
        parts.append(
            svg.box(x(phase.first_step), band + font * 1.5 - height, width, height, phase.status, phase=phase.status)
        )
        if svg.text_width(phase.status, font * 0.85) < width:
            middle = x((phase.first_step + end) / 2)
            parts.append(
                svg.text(middle, band + font * 1.5 - height * 0.28, phase.status, label, font * 0.85, "middle")
            )
    before = -math.inf
    for number, (step, _) in enumerate(life.happenings, 1):
        at = max(x(step), before + font * 1.3)  # the numbers of one step stand side by side
        before = at
        parts += [
            svg.line(x(step), band, x(step), bottom, "edge"),
            svg.text(at, band - font * 0.4, number, "strong", font * 0.85),
        ]
    return parts


def _happenings(area: Area, life: Life) -> Drawn:
    """What happened, numbered; what does not fit is counted."""
    font, size = area.font * 0.85, area.font * 1.2
    most = 14 if area.height is None else int((area.height - area.font * 2) / size)
    lines = []
    for place, (step, what) in enumerate(life.happenings, 1):
        first, *others = svg.wrapped(f"step {step} {what}", area.width - 2 * area.font, font)
        lines += [(str(place), first), *(("", each) for each in others)]
    if len(lines) > most:
        lines = [*lines[: most - 1], ("", f"and {plural(len(lines) - most + 1, 'more line')}")]
    parts = []
    for place, (number, words) in enumerate(lines):
        y = area.y + area.font + place * size
        parts += [
            svg.text(area.x, y, number, "strong", font),
            svg.text(area.x + 1.6 * area.font, y, words, "ink", font),
        ]
    return parts, len(lines) * size + area.font


# ---------------------------------------------------------------------- the tree of prefixes


def tree_picture(tree: PrefixTree, block_size: int, *, shape: Shape = Shape.SLIDE) -> Picture:
    """The prefixes that lookups found: a bar is as long as its blocks, an edge as thick as its hits."""
    whole = tree.root()
    root, num_left = pruned(whole, _MOST_BRANCHES[shape])

    def body(area: Area) -> Drawn:
        drawing = _TreeDrawing(area, root, whole.num_hits)
        return drawing.parts, drawing.y - area.y

    left = f" {plural(num_left, 'smaller branch')} {'is' if num_left == 1 else 'are'} left out." if num_left else ""
    caption = (
        f"{plural(whole.num_hits, 'lookup')} of prompts, and the beginnings that they found in the cache: a bar is as"
        f" long as its blocks of {plural(block_size, 'token')}; the number and the width of an edge say how often it"
        f" was found.{left}"
    )
    return svg.draw("The tree of prefixes, and its hits", caption, body, shape)


class _TreeDrawing:
    """Draws a branch per line, those of a branch after it."""

    def __init__(self, area: Area, root: Branch, num_lookups: int) -> None:
        self._area, self._num_lookups = area, num_lookups
        self._gap = area.font * 3.2  # room for the hits on an edge
        branches = list(root.walk())
        ends = [branch.start + branch.num_blocks for branch in branches]
        self._right = area.x + area.width
        room = area.width - svg.text_width("x" * 30, area.font * 0.8) - self._gap * _depth(root)
        self._scale = room / max(1, *ends)
        rows = sum(1 + bool(branch.num_unfound) for branch in branches)
        most = area.font * 2.8
        self._row = most if area.height is None else min(most, (area.height - area.font * 2) / rows)
        self._bar = min(self._row * 0.55, area.font * 1.4)
        self.y = area.y + area.font * 1.6
        self.parts = [svg.text(area.x, area.y + area.font * 0.8, "start of the prompts", "muted", area.font * 0.8)]
        self._below(root, area.x + area.font, area.y + area.font)

    def _below(self, branch: Branch, x: float, y: float) -> None:
        """What follows a branch that ends at x, y."""
        font = self._area.font
        for each in branch.branches:
            self._branch(each, x, y)
        if branch.num_unfound:
            at = self.y + self._bar / 2
            self.parts.append(
                f'<path class="edge" stroke-width="1" d="M{x:.1f} {y:.1f}V{at:.1f}h{self._gap * 0.4:.1f}"/>'
            )
            words = f"{plural(branch.num_unfound, 'ending')} never found again"
            self.parts.append(svg.text(x + self._gap * 0.5, at + font * 0.3, words, "muted", font * 0.8))
            self.y += self._row

    def _branch(self, branch: Branch, x_from: float, y_from: float) -> None:
        font, middle = self._area.font, self.y + self._bar / 2
        x, length = x_from + self._gap, branch.num_blocks * self._scale
        width = 1 + 5 * math.sqrt(branch.num_hits / max(1, self._num_lookups))
        path = f"M{x_from:.1f} {y_from:.1f}V{middle:.1f}H{x:.1f}"
        facts = f"{plural(branch.num_blocks, 'block')}, first {one_line(branch.label)}"
        data: dict[str, Any] = {"hits": branch.num_hits, "blocks": branch.num_blocks, "start": branch.start}
        stop = x + length
        self.parts += [
            f'<path class="edge" stroke-width="{width:.1f}" d="{path}"/>',
            svg.box(x, self.y, length, self._bar, "shared", **data),
            svg.text(x - 6, middle - width / 2 - 3, f"{branch.num_hits:,}×", "strong", font * 0.85, "end"),
            svg.text(
                stop + 8, middle + font * 0.3, svg.cut(facts, self._right - stop - 8, font * 0.8), "ink", font * 0.8
            ),
        ]
        self.y += self._row
        self._below(branch, stop - min(length / 2, font), middle + self._bar / 2)


def _depth(branch: Branch) -> int:
    """How many branches follow each other at most."""
    return max((1 + _depth(each) for each in branch.branches), default=0)


# ---------------------------------------------------------------------- contiguous against paged


@dataclass(frozen=True, slots=True)
class Waste:
    """The slots that a way of reserving takes, and how many of them hold a token."""

    name: str
    num_slots: int
    num_filled: int


def waste(state: PoolState) -> list[Waste]:
    """The running sequences of a step in caches that reserve for each the model's longest sequence, reserve what the
    request may need, and take blocks as the tokens come."""
    engine, running = state.started, state.running()
    num_tokens = sum(seq.num_computed_tokens for seq in running) * state.num_groups
    needed = sum(min(seq.num_prompt_tokens + seq.max_new_tokens, engine.max_model_len) for seq in running)
    used = state.num_used_blocks * state.block_size
    longest = engine.max_model_len
    return [
        Waste(f"contiguous: {longest:,}, the longest possible, for each", longest * len(running) * state.num_groups,
              num_tokens),
        Waste("contiguous: prompt and max_tokens of each", needed * state.num_groups, num_tokens),
        Waste(f"paged: blocks of {state.block_size}, as the tokens come", used, used - state.num_unfilled_slots()),
    ]  # fmt: skip


def waste_picture(state: PoolState, *, shape: Shape = Shape.SLIDE) -> Picture:
    """How much of what is reserved holds a token, in three ways of reserving."""
    rows = waste(state)

    def body(area: Area) -> Drawn:
        height = area.font * 3
        space = area.font * 7 if area.height is None else min(area.font * 8, (area.height - area.font * 3) / len(rows))
        parts, y = [], area.y + area.font
        for row in rows:
            share = row.num_filled / row.num_slots if row.num_slots else 0.0
            facts = f"{plural(row.num_slots, 'slot')} reserved, {row.num_filled:,} hold a token ({percent_text(share)})"
            beside = svg.text_width(row.name + facts, area.font) < area.width * 0.95
            parts += [
                svg.text(area.x, y + area.font, row.name, "strong", area.font),
                svg.text(area.x + (area.width if beside else 0), y + area.font * (1 if beside else 2.2), facts, "muted",
                     area.font * 0.9, "end" if beside else "start"),
            ]  # fmt: skip
            y_bar = y + area.font * (1.5 if beside else 2.7)
            filled = row.num_filled
            parts += [
                svg.box(area.x, y_bar, area.width, height, "empty", slots=row.num_slots, filled=filled),
                svg.box(area.x, y_bar, area.width * share, height, "full"),
            ]
            y += space
        key = [(svg.swatch("full"), "slots that hold a token"), (svg.swatch("empty"), "reserved, but without a token")]
        drawn, used = svg.legend(Area(area.x, y, area.width, None, area.font), key)
        return [*parts, *drawn], y + used - area.y

    saved = state.num_blocks_saved
    sharing = f" Sharing saves {plural(saved, 'more block')}." if saved else ""
    step = "before the first step" if state.step_number is None else f"at step {state.step_number}"
    caption = (
        f"The {plural(state.num_running, 'sequence')} that run {step}: slots that three ways of reserving take for"
        f" them, each bar as wide as its own reservation.{sharing}"
    )
    return svg.draw("Waste: contiguous against paged", caption, body, shape)
