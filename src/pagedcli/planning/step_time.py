"""How long a step takes: measured once for a machine, a model and a format (bench.calibration), kept in a file, and
read by `answers.time`. Needs no torch.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile

import msgspec
import numpy as np

from pagedcli.core.scheduler import Scheduler
from pagedcli.core.steps import ScheduledStep
from pagedcli.events import CacheGroup
from pagedcli.files import cache_home, is_stream, read_own, whole_file

FORM = 8  # version of what a calibration measures: other records are not read


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

    def attended_once(self, starts: Items[int]) -> float:
        """Tokens that one query from each of these positions attends to, times the share of the layers."""
        if self.window is None:
            return self.share * (sum(starts) + len(starts))
        return self.share * sum(min(start + 1, self.window) for start in starts)

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
    num_sampled: int  # rows of logits: one per sequence that gets a token, and one per draft token
    num_chunks: int = 0  # sequences that compute several tokens
    attended: float = 0.0  # tokens that all of the step's tokens attend to
    read: float = 0.0  # upper bound of the different tokens that single tokens attend to

    @classmethod
    def of(cls, work: ScheduledStep, scheduler: Scheduler, layers: Items[AttendedLayers] = EVERYTHING) -> "StepWork":
        """The work of a scheduled step that has not been computed yet."""
        starts: list[int] = []  # positions of sequences that compute one token
        num_sampled = num_chunks = 0
        by_prompts = 0.0
        for seq, num_new in zip(work.seqs, work.num_new_tokens, strict=True):
            start = seq.num_computed_tokens
            num_sampled += seq.num_logits(start + num_new)
            if num_new == 1:
                starts.append(start)
            else:
                num_chunks += 1
                by_prompts += sum(each.attended(start, num_new) for each in layers)
        by_decodes = sum(each.attended_once(starts) for each in layers)
        manager = scheduler.block_manager
        held = (manager.num_blocks - manager.num_free_blocks) * manager.block_size / manager.num_groups
        num_tokens, read = sum(work.num_new_tokens), min(held, by_decodes)
        return cls(num_tokens, num_sampled, num_chunks, by_prompts + by_decodes, read)

    @property
    def is_decode(self) -> bool:
        """Whether every token of the step gives one."""
        return self.num_tokens == self.num_sampled


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
    """The time of the steps of one model in one format on one machine, and of what rows take next to them. Seconds.

    A step is what `EngineCore.step` does: scheduling, building its input, the model, sampling, and reading the tokens.
    """

    prompts: PiecewiseLinear  # seconds by tokens of prompts, one of them sampled; without attention
    decodes: PiecewiseLinear  # seconds by sequences with one token each; without attention
    attended_s: float  # seconds per attended token
    read_s: float  # seconds more per token that decodes read
    row_s: float = 0.0  # a row outside of steps: submitting, starting, ending, writing
    prompt_token_s: float = 0.0  # a token of a prompt outside of steps: reading, tokenizing, looking up
    layers: tuple[AttendedLayers, ...] = EVERYTHING

    def seconds(self, work: StepWork) -> float:
        """The time of a step."""
        return sum(self.split(work).values())

    def split(self, work: StepWork) -> dict[str, float]:
        """The time of a step by what it is for."""
        attention_s = work.attended * self.attended_s + work.read * self.read_s
        if work.is_decode:
            generation_s = between(self.decodes, work.num_tokens) if work.num_tokens else 0.0
            return {"attention": attention_s, "generation": generation_s}
        tokens_s, generating = between(self.prompts, work.num_tokens), work.num_sampled / work.num_tokens
        return {
            "attention": attention_s,
            "prompts": tokens_s * (1 - generating),
            "generation": tokens_s * generating + self._sampling_s(work.num_sampled),
        }

    def _sampling_s(self, num_sampled: int) -> float:
        """Extra time for sampling several sequences in a step that also has prompts: decode time minus prompt time at
        that number, without what any step with a prompt takes anyway."""
        if num_sampled < 2:
            return 0.0
        fewest, fewest_s = self.prompts[1]
        any_prompt_s = max(0.0, fewest_s - between(self.decodes, fewest))
        return max(0.0, between(self.decodes, num_sampled) - between(self.prompts, num_sampled) + any_prompt_s)

    def __call__(self, work: ScheduledStep, scheduler: Scheduler) -> int:
        """Nanoseconds of a scheduled step, as simulations ask for them."""
        return round(1e9 * self.seconds(StepWork.of(work, scheduler, self.layers)))


def made_of(samples: Items[tuple[StepWork, float]], layers: tuple[AttendedLayers, ...]) -> StepTime:
    """A record from measured steps of sequences that share nothing: (work, seconds). What attention adds comes from
    steps of one size after different contexts; the rest of each size is a knot."""
    decodes = [(work, seconds) for work, seconds in samples if work.is_decode]
    alone = [(work, seconds) for work, seconds in samples if work.num_chunks == 1 and not work.read]
    ones = [(work, seconds) for work, seconds in decodes if work.num_tokens == 1]
    by_prompts_s, by_decodes_s = _slope(alone), _slope(decodes)
    attended_s = min(by_prompts_s, by_decodes_s)
    return StepTime(
        prompts=_knots([*ones, *alone], by_prompts_s),
        decodes=_knots(decodes, by_decodes_s),
        attended_s=attended_s,
        read_s=by_decodes_s - attended_s,
        layers=layers,
    )


_LEAST_S = 1e-6  # seconds of a knot, at least


def _slope(samples: Items[tuple[StepWork, float]]) -> float:
    """Seconds for each attended token: least squares with a constant for each size of step, not below 0."""
    by_size: dict[int, list[tuple[float, float]]] = {}
    for work, seconds in samples:
        by_size.setdefault(work.num_tokens, []).append((work.attended, seconds))
    centred = [np.array(points) - np.mean(points, axis=0) for points in by_size.values()]
    attended, times = np.concatenate(centred).T if centred else np.zeros((2, 1))
    return max(0.0, float(attended @ times) / float(attended @ attended)) if attended.any() else 0.0


def _knots(samples: Items[tuple[StepWork, float]], attended_s: float) -> PiecewiseLinear:
    """What steps of each size take without attention, from the step with the fewest attended tokens: the error of the
    slope would be in others. Where a larger number took less, both get their common mean: that is chance, and after the
    last knot it would make times fall without end."""
    fewest: dict[int, tuple[float, float]] = {}  # number -> (attended tokens, seconds without attention)
    for work, seconds in samples:
        own = work.attended, max(_LEAST_S, seconds - attended_s * work.attended)
        fewest[work.num_tokens] = min(fewest.get(work.num_tokens, own), own)
    assert fewest, "a calibration measures steps of each kind"
    pools: list[tuple[list[int], float]] = []  # (numbers, their seconds)
    for number, (_, mean) in sorted(fewest.items()):
        numbers = [number]
        while pools and pools[-1][1] > mean:
            earlier, earlier_s = pools.pop()
            mean = (len(earlier) * earlier_s + len(numbers) * mean) / (len(earlier) + len(numbers))
            numbers = earlier + numbers
        pools.append((numbers, mean))
    knots = [(number, mean) for numbers, mean in pools for number in numbers]
    return tuple(knots) if len(knots) > 1 else (knots[0], (knots[0][0] + 1, knots[0][1]))


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
