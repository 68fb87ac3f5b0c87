"""How long a step takes: measured once for a machine, a model and a format (bench.calibration), kept in a file, and
read by `plan`, `simulate`, cures and the end time of a run. Needs no torch.
"""

import hashlib
import os
from bisect import bisect_right
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import msgspec
import numpy as np

from pagedcli.core.scheduler import Scheduler
from pagedcli.core.steps import ScheduledStep
from pagedcli.events import CacheGroup
from pagedcli.files import cache_home, is_stream, read_own, whole_file

FORM = 7  # version of what a calibration measures: other records are not read
FIRST_ERROR = 0.1  # mean share of the time, until a run has confirmed a calibration
_LEAST_ERROR = 0.03
_IN_RANGE = 2.5  # means of an error within which 19 of 20 are
_LEAST_RANGE, _LEAST_RANGE_S = 0.3, 0.1  # share of the time, and seconds: runs that are unlike those before
_NEWEST = 0.5  # weight of the newest run in what runs have shown
_KNOTS = ("prompts", "decodes", "distincts")  # fields of StepTime that are PiecewiseLinear; others in _s are seconds


@dataclass(frozen=True, slots=True)
class AttendedLayers:
    """Layers that attend to the same tokens."""

    window: int | None  # tokens that a query sees, itself included; None: all before it
    share: float  # part of the layers that attend

    def attended(self, start: int, num_new: int) -> float:
        """Tokens that `num_new` queries from position `start` on attend to, times the share of the layers."""
        if self.window is None:
            return self.share * (num_new * start + num_new * (num_new + 1) // 2)
        growing = min(max(self.window - start, 0), num_new)  # queries that see everything before them
        seen = growing * start + growing * (growing + 1) // 2 + (num_new - growing) * self.window
        return self.share * seen

    def read(self, start: int, num_new: int) -> float:
        """Tokens that at least one of these queries attends to, times the share of the layers."""
        before = start if self.window is None else min(start, self.window - 1)
        return self.share * (before + num_new)


EVERYTHING = (AttendedLayers(None, 1.0),)


def attended_layers(groups: Items[CacheGroup]) -> tuple[AttendedLayers, ...]:
    """The layers of a model by their window."""
    num_layers = sum(len(group.layers) for group in groups)
    windows = dict.fromkeys(group.window for group in groups)
    counts = {window: sum(len(group.layers) for group in groups if group.window == window) for window in windows}
    return tuple(AttendedLayers(window, count / num_layers) for window, count in counts.items()) or EVERYTHING


@dataclass(frozen=True, slots=True)
class StepWork:
    """What the time of a step depends on. Attended tokens are summed over its queries, and a mean over the layers."""

    num_tokens: int  # tokens computed by the model
    num_sampled: int  # rows of logits: one per sequence that gets a token, and one per guessed token
    num_chunks: int = 0  # sequences that compute several tokens
    attended_by_prompts: float = 0.0  # tokens that chunks of several tokens attend to
    attended_by_decodes: float = 0.0  # tokens that single tokens attend to
    distinct: float = 0.0  # upper bound of the different tokens among these
    num_first_used: int = 0  # blocks whose memory the system provides now, as they are used for the first time

    @classmethod
    def of(cls, work: ScheduledStep, scheduler: Scheduler, layers: Items[AttendedLayers] = EVERYTHING) -> "StepWork":
        """The work of a scheduled step that has not been computed yet."""
        starts: list[int] = []  # positions of sequences that compute one token
        num_tokens = num_sampled = num_chunks = 0
        by_prompts = 0.0
        for seq, num_new in zip(work.seqs, work.num_new_tokens, strict=True):
            start = seq.num_computed_tokens
            num_tokens += num_new
            num_sampled += seq.num_logits(start + num_new)
            if num_new == 1:
                starts.append(start)
            else:
                num_chunks += 1
                by_prompts += sum(each.attended(start, num_new) for each in layers)
        by_decodes = sum(_attended_once(starts, each) for each in layers)
        manager = scheduler.block_manager
        held = (manager.num_blocks - manager.num_free_blocks) * manager.block_size / manager.num_groups
        return cls(
            num_tokens=num_tokens,
            num_sampled=num_sampled,
            num_chunks=num_chunks,
            attended_by_prompts=by_prompts,
            attended_by_decodes=by_decodes,
            distinct=min(held, by_decodes),
            num_first_used=work.num_first_used,
        )

    @property
    def attended(self) -> float:
        """Tokens that all of the step's tokens attend to."""
        return self.attended_by_prompts + self.attended_by_decodes

    @property
    def is_decode(self) -> bool:
        """Whether every token of the step gives one."""
        return self.num_tokens == self.num_sampled


def _attended_once(starts: list[int], layers: AttendedLayers) -> float:
    if layers.window is None:
        return layers.share * (sum(starts) + len(starts))
    return layers.share * sum(min(start + 1, layers.window) for start in starts)


PiecewiseLinear = tuple[tuple[int, float], ...]
"""(number, seconds), ascending: piecewise linear, extrapolated with the slope of the last doubling."""


def between(knots: PiecewiseLinear, number: float) -> float:
    """Seconds at a number; there are at least two knots."""
    last = len(knots) - 1
    place = min(max(bisect_right(knots, number, key=lambda knot: knot[0]), 1), last)
    (low, low_s), (high, high_s) = knots[place - 1 : place + 1]
    if number > high:
        low, low_s = next((knot for knot in knots[last - 1 :: -1] if 2 * knot[0] <= high), knots[0])
    return low_s + (number - low) * (high_s - low_s) / (high - low)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The time of the steps of one model in one format on one machine. Seconds.

    A step is what `EngineCore.step` does: scheduling, building its input, the model, sampling, and reading the tokens.
    """

    prompts: PiecewiseLinear  # seconds by tokens of prompts, one of them sampled; without attention
    decodes: PiecewiseLinear  # seconds by sequences with one token each; without attention to each token
    attended_by_prompts_s: float  # seconds per attended token
    attended_by_decodes_s: float
    # more seconds by the different tokens among these, which are read: the first ones from the processor's caches
    distincts: PiecewiseLinear = ((0, 0.0), (1, 0.0))
    first_use_s: float = 0.0  # seconds per block that is used for the first time
    row_s: float = 0.0  # a row besides the work of its steps: reading, submitting, starting, ending, writing
    # outside of steps:
    prompt_token_s: float = 0.0  # time to read, submit and look up a token of a prompt
    text_token_s: float = 0.0  # time to tokenize a token of a prompt given as text
    output_token_s: float = 0.0  # time to hand on and write a generated token
    layers: tuple[AttendedLayers, ...] = EVERYTHING
    error: float = FIRST_ERROR  # share of a predicted time by which it is off, in the mean
    num_runs: int = 0  # finished runs that it has learned from
    disturbed: float = 0.0  # share of all cores that other work took while it was measured, if that was too much

    def seconds(self, work: StepWork) -> float:
        """The time of a step."""
        return sum(self.split(work).values())

    def split(self, work: StepWork) -> dict[str, float]:
        """The time of a step by what it is for."""
        attention = (
            work.attended_by_prompts * self.attended_by_prompts_s
            + work.attended_by_decodes * self.attended_by_decodes_s
            + between(self.distincts, work.distinct)
        )
        rest = {"attention": attention, "memory": work.num_first_used * self.first_use_s}
        if work.is_decode:
            return rest | {"generation": between(self.decodes, work.num_tokens) if work.num_tokens else 0.0}
        prompts_s, generating = between(self.prompts, work.num_tokens), work.num_sampled / work.num_tokens
        return rest | {
            "prompts": prompts_s * (1 - generating),
            "generation": prompts_s * generating,
            "sampling": self.sampling_s(work.num_sampled),
        }

    def sampling_s(self, num_sampled: int) -> float:
        """Extra time for sampling several sequences in a step that also has prompts: decode time minus prompt time at
        that number, without what any step with a prompt takes anyway."""
        if num_sampled < 2:
            return 0.0
        fewest, fewest_s = self.prompts[1]
        any_prompt_s = max(0.0, fewest_s - between(self.decodes, fewest))
        return max(0.0, between(self.decodes, num_sampled) - between(self.prompts, num_sampled) + any_prompt_s)

    def host_s(self, num_rows: float, num_prompt_tokens: float, num_output_tokens: float) -> float:
        """What rows take outside of steps, without tokenizing."""
        tokens_s = num_prompt_tokens * self.prompt_token_s + num_output_tokens * self.output_token_s
        return num_rows * self.row_s + tokens_s

    def likely(self, seconds: float) -> tuple[float, float]:
        """The shortest and the longest time of 19 of 20 runs with this prediction. Steps that were timed while other
        work ran may take far less without it: a program on the core of a thread that the others wait for halves them,
        and several on each core take their share of it."""
        error = max(_LEAST_RANGE, _IN_RANGE * self.error)
        busy_cores = self.disturbed * (os.cpu_count() or 1)
        slowed = max(min(1.0, busy_cores), self.disturbed / max(0.1, 1 - self.disturbed))
        low = seconds / (1 + error) / (1 + slowed) - _LEAST_RANGE_S
        return max(0.0, low), seconds * (1 + error) + _LEAST_RANGE_S

    def __call__(self, work: ScheduledStep, scheduler: Scheduler) -> int:
        """Nanoseconds of a scheduled step, as simulations ask for them."""
        return round(1e9 * self.seconds(StepWork.of(work, scheduler, self.layers)))

    def scaled(self, factor: float) -> "StepTime":
        """The same machine, slower by this factor in everything."""
        changes: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in _KNOTS:
                changes[each.name] = tuple((number, factor * seconds) for number, seconds in value)
            elif each.name.endswith("_s"):
                changes[each.name] = factor * value
        return replace(self, **changes)

    def learned(self, ratio: float) -> "StepTime":
        """After a run whose steps took `ratio` times as long as predicted. Runs that other work on the machine slowed
        down do not count for more than twice."""
        ratio = min(max(ratio, 0.5), 2.0)
        found = self.scaled(ratio**_NEWEST)
        off = abs(ratio - 1)
        error = max(_LEAST_ERROR, off if not self.num_runs else (1 - _NEWEST) * self.error + _NEWEST * off)
        return replace(found, error=error, num_runs=self.num_runs + 1)


def made_of(samples: Items[tuple[StepWork, float]], layers: tuple[AttendedLayers, ...]) -> StepTime:
    """A record from measured steps: (work, seconds). What attention adds comes from steps of one size after different
    contexts; the rest of each size is a knot."""
    decodes = [(work, seconds) for work, seconds in samples if work.is_decode]
    alone = [(work, seconds) for work, seconds in samples if work.num_chunks == 1 and not work.attended_by_decodes]
    by_decodes, distincts = _decode_attention(decodes)
    ones = [(work, seconds) for work, seconds in decodes if work.num_tokens == 1]
    short = [step for step in decodes if step[0].attended_by_decodes < _FEW * step[0].num_tokens]
    flat = ((1, _LEAST_S), (2, _LEAST_S))
    found = StepTime(
        prompts=flat,
        decodes=flat,
        attended_by_prompts_s=_slope(alone, "attended_by_prompts"),
        attended_by_decodes_s=by_decodes,
        distincts=distincts,
        layers=layers,
    )
    return replace(found, prompts=_knots(found, [*ones, *alone]), decodes=_knots(found, short or decodes))


_LEAST_S = 1e-6  # seconds of a knot, at least
_FEW = 64  # tokens that each decode attends to: of more, the error of the slopes would be in the knot


def _knots(found: StepTime, samples: Items[tuple[StepWork, float]]) -> PiecewiseLinear:
    """What steps of each size take without attention."""
    assert samples, "a calibration measures steps of each kind"
    rest: dict[int, list[float]] = {}
    least: dict[int, float] = {}  # attended tokens: steps with many would bring the error of the slopes into the knot
    for work, _ in samples:
        least[work.num_tokens] = min(least.get(work.num_tokens, work.attended), work.attended)
    for work, seconds in samples:
        if work.attended > least[work.num_tokens]:
            continue
        own = seconds - found.split(work)["attention"]
        rest.setdefault(work.num_tokens, []).append(max(_LEAST_S, own))
    return _means(rest)


def _means(times: dict[int, list[float]]) -> PiecewiseLinear:
    """The mean of each number. Where a larger number took less, both get their common mean: that is chance, and after
    the last knot it would make times fall without end."""
    pools: list[tuple[list[int], float]] = []  # (numbers, their seconds)
    for number, seconds in sorted(times.items()):
        numbers, mean = [number], sum(seconds) / len(seconds)
        while pools and pools[-1][1] > mean:
            earlier, earlier_s = pools.pop()
            mean = (len(earlier) * earlier_s + len(numbers) * mean) / (len(earlier) + len(numbers))
            numbers = earlier + numbers
        pools.append((numbers, mean))
    knots = [(number, mean) for numbers, mean in pools for number in numbers]
    return tuple(knots) if len(knots) > 1 else (knots[0], (knots[0][0] + 1, knots[0][1]))


def _slope(samples: Items[tuple[StepWork, float]], name: str) -> float:
    """Seconds for each unit of this field: least squares with a constant for each size of step, not below 0."""
    by_size: dict[int, list[tuple[float, float]]] = {}
    for work, seconds in samples:
        by_size.setdefault(work.num_tokens, []).append((float(getattr(work, name)), seconds))
    centred = [np.array(points) - np.mean(points, axis=0) for points in by_size.values()]
    units, times = np.concatenate(centred).T if centred else np.zeros((2, 1))
    return max(0.0, float(units @ times) / float(units @ units)) if units.any() else 0.0


def _decode_attention(decodes: Items[tuple[StepWork, float]]) -> tuple[float, PiecewiseLinear]:
    """Seconds for each attended token, and more by the number of different ones. Sequences with contexts of their own
    show the sum of both, those that share a beginning what each of them still takes."""
    shortest: dict[int, tuple[StepWork, float]] = {}  # the step of each size with the fewest attended tokens
    for step in decodes:
        known = shortest.setdefault(step[0].num_tokens, step)
        if step[0].attended < known[0].attended:
            shortest[step[0].num_tokens] = step
    sums: dict[int, list[float]] = {0: [0.0]}  # sums of both, by the number of different tokens
    for work, seconds in decodes:
        least, least_s = shortest[work.num_tokens]
        if work.distinct == work.attended and work.attended > 2 * least.attended:
            added_s = max(0.0, seconds - least_s) * work.attended / (work.attended - least.attended)
            sums.setdefault(round(work.attended), []).append(added_s)
    if len(sums) == 1:
        return 0.0, ((0, 0.0), (1, 0.0))
    own = _means(sums)
    again: list[float] = []  # seconds per token that is attended to once more
    for work, seconds in decodes:
        least, least_s = shortest[work.num_tokens]
        attended, distinct = work.attended - least.attended, work.distinct - least.distinct
        if work.distinct < work.attended / 2 and attended > distinct:
            own_s = between(own, work.distinct) - between(own, least.distinct)
            again.append((seconds - least_s - own_s) / (attended - distinct))
    each_s = min(max(0.0, float(np.median(again))), own[-1][1] / own[-1][0]) if again else 0.0
    return each_s, tuple((number, max(0.0, seconds - number * each_s)) for number, seconds in own)


# ---------------------------------------------------------------------- the file


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeKey:
    """What the time of a step depends on besides its work; see planning.decision."""

    version: str  # this program and its kernels
    processor: str
    threads: int
    device: str
    model: str  # its sizes
    weights: str  # how they are kept, and their bytes
    dtype: str
    kv_dtype: str
    backend: str
    decoder: str
    block_size: int  # tokens: kernels read small blocks more slowly

    @property
    def file_name(self) -> str:
        return hashlib.sha256(msgspec.json.encode(asdict(self))).hexdigest()[:20] + ".json"


def cache_folder() -> Path:
    """The folder of all calibrations of this user."""
    return cache_home() / "step-times"


class _File(msgspec.Struct, frozen=True):
    key: TimeKey
    time: StepTime


def load_step_time(key: TimeKey) -> StepTime | None:
    """The calibration with this key; None if there is none that can be read."""
    found = _read(key.file_name)
    return found.time if found is not None and found.key == key else None


def step_time_named(file_name: str) -> StepTime | None:
    """The calibration whose name an engine recorded; None if it is not on this machine."""
    found = _read(file_name)
    return found.time if found is not None and found.key.file_name == file_name else None


def _read(file_name: str) -> _File | None:
    try:
        return msgspec.json.decode(read_own(cache_folder() / Path(file_name).name), type=_File)
    except (OSError, ValueError):  # also of a name that no file can have
        return None


def why_not_kept() -> str | None:
    """Why a calibration would be lost, in words; None: it can be kept."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}"


def save_step_time(key: TimeKey, step_time: StepTime) -> None:
    """Keep a calibration. Without a folder that can be written it is lost, and the next command calibrates again."""
    path, content = cache_folder() / key.file_name, msgspec.json.encode(_File(key, step_time))
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_stream(path):  # it would be written to
            path.unlink()
        with whole_file(path, overwrite=True) as file:
            file.write(msgspec.json.format(content) + b"\n")


def learn(key: TimeKey, ratio: float | None) -> None:
    """Let a finished run refine the calibration, if there is one: the next prediction is closer. `ratio`: the time of
    its steps over the predicted one; None: too little has run."""
    known = load_step_time(key)
    if known is not None and ratio is not None:
        save_step_time(key, known.learned(ratio))
