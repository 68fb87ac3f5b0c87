"""The probes, as data: which prompts are sent in which order, and whose answers have to agree.

Prompts are random words, each one token for the server at hand, so lengths and shared prefixes are known exactly.
Used by the run, by --dry-run, and to repeat a failing probe with fresh prompts. Sends nothing.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

MAX_NEW = 8  # tokens of an answer that is compared
_FRESH = 6  # words at the end of a prompt that is to part from another one: never all equal by chance
_PLANNED_TOKENS, _SMALLEST_SHARE = 0.7, 0.1  # share of the limit before pressure; of the usual number of probes
_LONGEST_PRESSURE = 2048
_WAVES = 4  # waves of pressure, each twice as large as the one before

Words = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    words: Words  # numbers of the words of the prompt
    max_new: int = MAX_NEW
    stream: bool = False
    n: int = 1
    salt: int | None = None  # requests with different numbers must not share cached tokens
    user: int | None = None  # the OpenAI field, which may or may not separate caches
    is_cold: bool = False  # bypass the cache, in the way that the server offers
    after: tuple[int, int] | None = None  # (number of an earlier request, tokens of its answer that follow the prompt)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two requests of a probe, by number, whose answers are compared."""

    cold: int
    warm: int
    must_differ: bool = False  # the prompts differ in the last token of a block, so the answers do, too
    is_control: bool = False  # the prompts differ in the middle of a block: shows that one token changes an answer


@dataclass(frozen=True, slots=True)
class Probe:
    """Steps one after the other, each of requests sent at the same time. Requests are numbered through all steps."""

    check: str
    length: int  # tokens of the prompt in question
    steps: tuple[tuple[Ask, ...], ...]
    pairs: tuple[Pair, ...] = ()

    def asks(self) -> list[Ask]:
        return [ask for step in self.steps for ask in step]

    def num_tokens(self) -> int:
        """An upper bound of what it costs."""
        return sum(len(ask.words) + ask.n * ask.max_new + (ask.after[1] if ask.after else 0) for ask in self.asks())


@dataclass(frozen=True, slots=True)
class Target:
    """What probes have to know of a server."""

    num_words: int  # words to choose from
    num_extra: int = 0  # tokens before the first word, e.g. the one that begins every text
    max_length: int = 2048  # tokens of prompt and answer
    unit: int | None = None  # tokens per block; None if it could not be determined
    smallest: int = 0  # tokens of the shortest prefix that is cached
    bypass: Literal["salt", "cache_prompt"] | None = None
    isolates: bool | None = None  # the server knows cache_salt: whether salts were seen to separate. None: not offered
    has_logprobs: bool = True
    reports: bool = True  # cached tokens are reported
    concurrency: int = 8

    @property
    def step(self) -> int:
        """Tokens between the boundaries to probe: the unit, or the usual 16 where units are tiny or unknown."""
        return self.unit if self.unit is not None and self.unit > 4 else 16

    def boundaries(self, multiples: Sequence[int] = (1, 2, 4, 8)) -> list[int]:
        """Lengths at which whole blocks end, from the shortest prefix that is cached."""
        first = max(1, -(-self.smallest // self.step))
        lengths = [(first + multiple - 1) * self.step for multiple in multiples]
        longest = self.max_length - MAX_NEW - 2 - self.num_extra
        return [length for length in lengths if self.num_extra + 4 <= length - 1 and length + 1 <= longest]


class Prompts:
    """Random prompts; none begins as another one, by design or by any likely chance."""

    def __init__(self, target: Target, seed: int) -> None:
        self._random = random.Random(seed)
        self.target = target

    def new(self, length: int) -> Words:
        """A prompt of `length` tokens for the server."""
        return self.words(length - self.target.num_extra)

    def words(self, count: int) -> Words:
        return tuple(self._random.randrange(self.target.num_words) for _ in range(count))

    def changed(self, words: Words, place: int) -> Words:
        """The prompt with one other word at `place`."""
        other = (words[place] + self._random.randrange(1, self.target.num_words)) % self.target.num_words
        return (*words[:place], other, *words[place + 1 :])

    def parting(self, words: Words, shared: int, count: int) -> Words:
        """A prompt of `count` words that shares exactly `shared` with another one."""
        tail = self.words(count - shared)
        if shared < len(words) and tail and tail[0] == words[shared]:
            tail = ((tail[0] + 1) % self.target.num_words, *tail[1:])
        return (*words[:shared], *tail)

    def number(self, below: int) -> int:
        return self._random.randrange(below)


def repeat(prompts: Prompts, length: int, check: str = "repeat") -> Probe:
    """The same prompt cold, as a first hit and as a second one."""
    ask = Ask(prompts.new(length))
    return Probe(check, length, ((ask,), (ask,), (ask,)), (Pair(0, 1), Pair(0, 2)))


def noise(prompts: Prompts, length: int) -> Probe:
    """The same prompt three times past the cache, so that no fault of a cache passes for noise; if it cannot be
    bypassed, three times warm."""
    ask = Ask(prompts.new(length))
    if prompts.target.bypass is None:
        return Probe("noise", length, ((ask,),) * 4, (Pair(1, 2), Pair(2, 3), Pair(1, 3)))
    cold = replace(ask, is_cold=True)
    return Probe("noise", length, ((ask,), (cold,), (cold,)), (Pair(0, 1), Pair(1, 2)))


def resume(prompts: Prompts, length: int) -> Probe:
    """A prompt, then with the beginning of its answer, as in a chat: the rest of the answer must follow."""
    ask = Ask(prompts.new(length))
    skip = 1 + prompts.number(MAX_NEW // 2)
    again = replace(ask, after=(0, skip), max_new=MAX_NEW - skip)
    return Probe("resume", length, ((ask,), (again,)), (Pair(0, 1),))


def crowd(prompts: Prompts, length: int) -> Probe:
    """Prompts alone when cold, all together when warm, among cold ones; these are then repeated alone."""
    half = max(1, prompts.target.concurrency // 2)
    early = [Ask(prompts.new(length)) for _ in range(half)]
    late = [Ask(prompts.new(length)) for _ in range(half)]
    steps = (*((ask,) for ask in early), (*early, *late), *((ask,) for ask in late))
    pairs = [Pair(i, half + i) for i in range(half)] + [Pair(2 * half + i, 3 * half + i) for i in range(half)]
    return Probe("crowd", length, steps, tuple(pairs))


def stream(prompts: Prompts, length: int) -> Probe:
    """Cold as a whole and warm as a stream."""
    ask = Ask(prompts.new(length))
    return Probe("stream", length, ((ask,), (replace(ask, stream=True),)), (Pair(0, 1),))


def samples(prompts: Prompts, length: int) -> Probe:
    """Cold, then warm with two answers."""
    ask = Ask(prompts.new(length))
    return Probe("samples", length, ((ask,), (replace(ask, n=2),)), (Pair(0, 1),))


def twins(prompts: Prompts, length: int) -> Probe:
    """Two prompts that differ in the last token of a block only."""
    target = prompts.target
    words = prompts.new(length + _FRESH)
    other = prompts.changed(words, length - 1 - target.num_extra)
    asks = [(Ask(words),), (Ask(other),)]
    if target.bypass is None:
        control = Ask(prompts.changed(words, length - target.step // 2 - target.num_extra))
        pairs = (Pair(0, 1, must_differ=True), Pair(0, 2, is_control=True))
        return Probe("twins", length, (*asks, (control,)), pairs)
    return Probe("twins", length, (*asks, (Ask(other, is_cold=True),)), (Pair(2, 1),))


def moved(prompts: Prompts, length: int) -> Probe:
    """A block that is cached at one place comes again at another place, after the same first block."""
    target = prompts.target
    first, skipped, block = prompts.new(length), prompts.words(target.step), prompts.words(target.step)
    before = Ask((*first, *skipped, *block, *prompts.words(_FRESH)))
    after = Ask((*first, *block, *prompts.words(_FRESH)))
    if target.bypass is None:
        return Probe("moved", length, ((before,), (after,)))
    return Probe("moved", length, ((before,), (after,), (replace(after, is_cold=True),)), (Pair(2, 1),))


def salts(prompts: Prompts, length: int) -> Probe:
    """The same prompt twice with one salt, then with another."""
    first = 1 + prompts.number(1 << 60)
    ask = Ask(prompts.new(length), salt=first)
    return Probe("salts", length, ((ask,), (ask,), (replace(ask, salt=first + 1),)), (Pair(0, 1), Pair(0, 2)))


def users(prompts: Prompts, length: int) -> Probe:
    """The same prompt twice with one `user`, then with another."""
    first = 1 + prompts.number(1 << 60)
    ask = Ask(prompts.new(length), user=first)
    return Probe("users", length, ((ask,), (ask,), (replace(ask, user=first + 1),)), (Pair(0, 1), Pair(0, 2)))


def speed(prompts: Prompts, length: int) -> Probe:
    """A short cold prompt, a long one cold, then warm, and with another salt if there are salts: for their times."""
    target = prompts.target
    salt = 1 + prompts.number(1 << 60) if target.isolates is not None else None
    short = Ask(prompts.new(max(length // 8, target.num_extra + 4)), max_new=1, stream=True, salt=salt)
    long = Ask(prompts.new(length), max_new=1, stream=True, salt=salt)
    steps = [(short,), (long,), (long,)]
    if salt is not None:
        steps.append((replace(long, salt=salt + 1),))
    return Probe("speed", length, tuple(steps))


def evict(prompts: Prompts, length: int, num_tokens: int) -> Probe:
    """Prompts that are sent again after more and more pressure from others."""
    target = prompts.target
    long = min(target.max_length - MAX_NEW - 2, _LONGEST_PRESSURE)
    victims = [Ask(prompts.new(length + i)) for i in (-1, 0, 1, target.step, 2 * target.step - 1)[: _WAVES + 1]]
    steps: list[tuple[Ask, ...]] = [(ask,) for ask in victims]
    pairs, total = [], num_tokens - 2 * sum(len(ask.words) + MAX_NEW for ask in victims)
    place = len(victims)
    for wave, victim in enumerate(victims):
        share = total >> (len(victims) - wave)
        count = max(0, share // (long + 1))
        asks = [Ask(prompts.new(long), max_new=1) for _ in range(count)]
        size = target.concurrency
        steps += [tuple(asks[start : start + size]) for start in range(0, count, size)]
        steps.append((victim,))
        place += count
        pairs.append(Pair(wave, place))
        place += 1
    return Probe("evict", length, tuple(steps), tuple(pairs))


BUILDERS: dict[str, Callable[[Prompts, int], Probe]] = {
    "noise": noise, "repeat": repeat, "resume": resume, "stream": stream, "samples": samples, "crowd": crowd,
    "twins": twins, "moved": moved, "salts": salts, "users": users, "speed": speed,
}  # fmt: skip
CHECKS = (*BUILDERS, "evict")
MEANINGS = {
    "noise": "the same request again: how much do answers differ with no cache to blame",
    "repeat": "each prompt cold, then warm twice, at one token less than whole blocks, whole blocks, and one more",
    "resume": "a prompt with the beginning of its answer, as in the next turn of a chat",
    "stream": "cold as a whole, warm as a stream",
    "samples": "cold with one answer, warm with n = 2",
    "crowd": "cold alone, warm among others, and the reverse",
    "twins": "prompts that differ in the last token of a block only",
    "moved": "a cached block at another place of the prompt",
    "salts": "the same prompt with another cache_salt",
    "users": "the same prompt with another user",
    "speed": "time to the first token: short, long, long and warm",
    "evict": "prompts again after others have filled the cache",
}


def plan(prompts: Prompts, *, max_requests: int, max_tokens: int, checks: Sequence[str] = CHECKS) -> list[Probe]:
    """All probes of a run, within most of its requests and tokens; the rest is for the survey and for shrinking."""
    share = min(4.0, max_requests / 300)
    probes = _probes(prompts, share, checks)
    while share > _SMALLEST_SHARE and _num_tokens(probes) > _PLANNED_TOKENS * max_tokens:
        share *= 0.7
        probes = _probes(prompts, share, checks)
    if "evict" in checks:
        longest = min(prompts.target.max_length - MAX_NEW - 2, _LONGEST_PRESSURE)
        left = (max_tokens - _num_tokens(probes)) // 2
        first = (prompts.target.boundaries() or [prompts.target.max_length // 2])[0]
        probes.append(evict(prompts, first, max(0, min(left, longest * (max_requests // 10)))))
    return probes


def _num_tokens(probes: Sequence[Probe]) -> int:
    return sum(probe.num_tokens() for probe in probes)


def _probes(prompts: Prompts, share: float, checks: Sequence[str]) -> list[Probe]:
    """All probes but the pressure; their numbers are multiplied by `share`."""
    target = prompts.target

    def several(count: int) -> int:
        return max(1, round(count * share))

    boundaries = target.boundaries() or [target.max_length // 2]
    around = [length + i for length in boundaries for i in (-1, 0, 1)]
    whole = speed_length(target) // target.step * target.step  # enough blocks for faults that need many
    long = [whole + i for i in (0, 1, -1)] if whole > boundaries[-1] + 1 else []
    middle = [length + i for length in boundaries[:3] for i in (0, 1, -1)]
    lengths = {
        "noise": _cycle([boundaries[-1], boundaries[0] + 1], several(6)),
        "repeat": _cycle([*around, *long], max(3, round(1.6 * share * (len(around) + len(long))))),
        "resume": _cycle([length + i for length in boundaries for i in (-1, 0, -3)], several(8)),
        "stream": _cycle(middle, several(6)),
        "samples": _cycle(middle, several(4)),
        "crowd": _cycle([boundaries[0] + 1, *boundaries[1:]], several(2)),  # all of them have a block to hit
        "twins": _cycle(boundaries, several(6)),
        "moved": _cycle(boundaries[:2], several(3)),
        "salts": _cycle(boundaries, several(4)) if target.isolates is not None else [],
        "users": _cycle(boundaries, several(3)) if target.reports else [],
        "speed": _cycle([speed_length(target)], several(8)),
    }
    return [
        BUILDERS[check](prompts, length)
        for check in BUILDERS
        if check in checks
        for length in lengths[check]
        if check != "moved" or length + 2 * target.step + _FRESH + MAX_NEW < target.max_length
    ]


def speed_length(target: Target) -> int:
    """Tokens of the long prompts whose times are taken."""
    return min(target.max_length - MAX_NEW - 3, max(1024, 4 * target.smallest))


def shared_length(words: Words, others: Sequence[Words]) -> int:
    """The longest prefix, in words, that a prompt shares with any of the others."""
    longest = 0
    for other in others:
        if words[:longest] == other[:longest]:  # else it parts earlier than another one
            while longest < min(len(words), len(other)) and words[longest] == other[longest]:
                longest += 1
    return longest


def _cycle(lengths: Sequence[int], count: int) -> list[int]:
    return [lengths[i % len(lengths)] for i in range(count)]
