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

    @property
    def num_after(self) -> int:
        return 0 if self.after is None else self.after[1]

    @property
    def num_tokens(self) -> int:
        """An upper bound of what it costs."""
        return len(self.words) + self.num_after + self.n * self.max_new


@dataclass(frozen=True, slots=True)
class ComparedPair:
    """Two requests of a probe, by number, whose answers are compared."""

    cold: int
    warm: int
    must_differ: bool = False  # the prompts differ in the last token of a block, so the answers do, too
    is_control: bool = False  # the prompts differ in the middle of a block: shows that one token changes an answer

    @property
    def must_agree(self) -> bool:
        return not (self.must_differ or self.is_control)


@dataclass(frozen=True, slots=True)
class Probe:
    """Steps one after the other, each of requests sent at the same time. Requests are numbered through all steps."""

    check: str
    length: int  # tokens of the prompt in question
    steps: tuple[tuple[Ask, ...], ...]
    pairs: tuple[ComparedPair, ...] = ()

    def asks(self) -> list[Ask]:
        return [ask for step in self.steps for ask in step]

    def num_tokens(self) -> int:
        """An upper bound of what it costs."""
        return sum(ask.num_tokens for ask in self.asks())


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

    @property
    def long(self) -> int:
        """Tokens of the long prompts whose times are taken."""
        return min(self.max_length - MAX_NEW - 3, max(1024, 4 * self.smallest))

    def whole(self, num_tokens: int) -> int:
        """The tokens of so many that a cache can have: whole blocks, from the shortest prefix that it keeps."""
        whole = num_tokens // (self.unit or 1) * (self.unit or 1)
        return whole if whole >= self.smallest else 0

    def boundaries(self, multiples: Sequence[int] = (1, 2, 4, 8)) -> list[int]:
        """Lengths at which whole blocks end, from the shortest prefix that is cached; half of what the server takes if
        no such prompt fits."""
        first = max(1, -(-self.smallest // self.step))
        lengths = [(first + multiple - 1) * self.step for multiple in multiples]
        longest = self.max_length - MAX_NEW - 2 - self.num_extra
        fitting = [length for length in lengths if self.num_extra + 4 <= length - 1 and length + 1 <= longest]
        return fitting or [self.max_length // 2]


class ProbePrompts:
    """Random prompts; none begins as another one, by design or by any likely chance."""

    def __init__(self, target: Target, seed: int) -> None:
        self._random = random.Random(seed)
        self.target = target

    def new(self, length: int) -> Words:
        """A prompt of `length` tokens for the server."""
        return self.words(length - self.target.num_extra)

    def words(self, count: int) -> Words:
        return tuple(self.number(self.target.num_words) for _ in range(count))

    def changed(self, words: Words, place: int) -> Words:
        """The prompt with one other word at `place`, counted in tokens."""
        place -= self.target.num_extra
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

    def tenant(self) -> int:
        """The number of a salt or a user; the next one is new, too."""
        return 1 + self.number(1 << 60)


def _series(check: str, length: int, first: Ask, *others: Ask) -> Probe:
    """Requests one after the other, each answer compared with the first."""
    pairs = tuple(ComparedPair(0, number) for number in range(1, len(others) + 1))
    return Probe(check, length, tuple((ask,) for ask in (first, *others)), pairs)


def _noise(prompts: ProbePrompts, length: int) -> Probe:
    """Past the cache, so that no fault of a cache passes for noise; if it cannot be bypassed, three times warm."""
    ask = Ask(prompts.new(length))
    if prompts.target.bypass is None:
        return Probe("noise", length, ((ask,),) * 4, (ComparedPair(1, 2), ComparedPair(2, 3), ComparedPair(1, 3)))
    cold = replace(ask, is_cold=True)
    return Probe("noise", length, ((ask,), (cold,), (cold,)), (ComparedPair(0, 1), ComparedPair(1, 2)))


def _repeat(prompts: ProbePrompts, length: int) -> Probe:
    ask = Ask(prompts.new(length))
    return _series("repeat", length, ask, ask, ask)


def _resume(prompts: ProbePrompts, length: int) -> Probe:
    ask = Ask(prompts.new(length))
    skip = 1 + prompts.number(MAX_NEW // 2)
    return _series("resume", length, ask, replace(ask, after=(0, skip), max_new=MAX_NEW - skip))


def _stream(prompts: ProbePrompts, length: int) -> Probe:
    ask = Ask(prompts.new(length))
    return _series("stream", length, ask, replace(ask, stream=True))


def _samples(prompts: ProbePrompts, length: int) -> Probe:
    ask = Ask(prompts.new(length))
    return _series("samples", length, ask, replace(ask, n=2))


def _crowd(prompts: ProbePrompts, length: int) -> Probe:
    """Prompts alone when cold, all together when warm, among cold ones; these are then repeated alone."""
    half = max(1, prompts.target.concurrency // 2)
    early, late = ([Ask(prompts.new(length)) for _ in range(half)] for _ in range(2))
    steps = (*((ask,) for ask in early), (*early, *late), *((ask,) for ask in late))
    pairs = [ComparedPair(start + i, start + half + i) for start in (0, 2 * half) for i in range(half)]
    return Probe("crowd", length, steps, tuple(pairs))


def _twins(prompts: ProbePrompts, length: int) -> Probe:
    target, words = prompts.target, prompts.new(length + _FRESH)
    other = Ask(prompts.changed(words, length - 1))
    if target.bypass is None:
        control = Ask(prompts.changed(words, length - target.step // 2))
        pairs = (ComparedPair(0, 1, must_differ=True), ComparedPair(0, 2, is_control=True))
        return Probe("twins", length, ((Ask(words),), (other,), (control,)), pairs)
    return Probe("twins", length, ((Ask(words),), (other,), (replace(other, is_cold=True),)), (ComparedPair(2, 1),))


def _moved(prompts: ProbePrompts, length: int) -> Probe:
    """A block that is cached at one place comes again at another place, after the same first block."""
    target = prompts.target
    first, skipped, block = prompts.new(length), prompts.words(target.step), prompts.words(target.step)
    before = Ask((*first, *skipped, *block, *prompts.words(_FRESH)))
    after = Ask((*first, *block, *prompts.words(_FRESH)))
    if target.bypass is None:
        return Probe("moved", length, ((before,), (after,)))
    return Probe("moved", length, ((before,), (after,), (replace(after, is_cold=True),)), (ComparedPair(2, 1),))


def _salts(prompts: ProbePrompts, length: int) -> Probe:
    salt = prompts.tenant()
    ask = Ask(prompts.new(length), salt=salt)
    return _series("salts", length, ask, ask, replace(ask, salt=salt + 1))


def _users(prompts: ProbePrompts, length: int) -> Probe:
    user = prompts.tenant()
    ask = Ask(prompts.new(length), user=user)
    return _series("users", length, ask, ask, replace(ask, user=user + 1))


def _speed(prompts: ProbePrompts, length: int) -> Probe:
    """A short cold prompt, a long one cold, then warm, and with another salt if there are salts."""
    target = prompts.target
    salt = prompts.tenant() if target.isolates is not None else None
    short = Ask(prompts.new(max(length // 8, target.num_extra + 4)), max_new=1, stream=True, salt=salt)
    long = replace(short, words=prompts.new(length))
    others = () if salt is None else (replace(long, salt=salt + 1),)
    return Probe("speed", length, tuple((ask,) for ask in (short, long, long, *others)))


def evict(prompts: ProbePrompts, length: int, num_tokens: int) -> Probe:
    """Prompts that are sent again after more and more pressure from others."""
    target = prompts.target
    long = min(target.max_length - MAX_NEW - 2, _LONGEST_PRESSURE)
    victims = [Ask(prompts.new(length + i)) for i in (-1, 0, 1, target.step, 2 * target.step - 1)[: _WAVES + 1]]
    total = num_tokens - 2 * sum(ask.num_tokens for ask in victims)
    steps: list[tuple[Ask, ...]] = [(ask,) for ask in victims]
    pairs, place = [], len(victims)
    for wave, victim in enumerate(victims):
        count = max(0, (total >> (len(victims) - wave)) // (long + 1))
        asks = [Ask(prompts.new(long), max_new=1) for _ in range(count)]
        steps += [tuple(asks[start : start + target.concurrency]) for start in range(0, count, target.concurrency)]
        steps.append((victim,))
        pairs.append(ComparedPair(wave, place + count))
        place += count + 1
    return Probe("evict", length, tuple(steps), tuple(pairs))


@dataclass(frozen=True, slots=True)
class Check:
    """What is asked of a cache: its probes, and what is said of their pairs."""

    build: Callable[..., Probe]  # prompts, tokens of the prompt in question
    num_probes: float  # usual number; of `repeat` per length
    meaning: str
    said: str = ""  # {}: one of the verbs
    equal: str = "equal"
    different: str = "differ from"


CHECKS = {
    "noise": Check(_noise, 6, "the same request again: how much do answers differ with no cache to blame"),
    "repeat": Check(
        _repeat, 1.6,
        "each prompt cold, then warm twice, at one token less than whole blocks, whole blocks, and one more",
        "warm answers {} cold ones",
    ),
    "resume": Check(
        _resume, 8, "a prompt with the beginning of its answer, as in the next turn of a chat",
        "answers after a cached turn {} those of decoding",
    ),
    "stream": Check(_stream, 6, "cold as a whole, warm as a stream", "streamed warm answers {} cold ones"),
    "samples": Check(
        _samples, 4, "cold with one answer, warm with n = 2", "samples of a warm prompt (n = 2) {} the cold answer"
    ),
    "crowd": Check(
        _crowd, 2, "cold alone, warm among others, and the reverse", "answers in a crowd {} those alone"
    ),
    "twins": Check(
        _twins, 6, "prompts that differ in the last token of a block only",
        "prompts that differ in the last token of a block are {}", "told apart", "confused",
    ),
    "moved": Check(
        _moved, 3, "a cached block at another place of the prompt",
        "a block cached at another place is {}", "not confused", "confused",
    ),
    "salts": Check(
        _salts, 4, "the same prompt with another cache_salt", "answers with other salts {} those without a cache"
    ),
    "users": Check(_users, 3, "the same prompt with another user", "answers with another user {} cold ones"),
    "speed": Check(_speed, 8, "time to the first token: short, long, long and warm"),
    "evict": Check(
        evict, 1, "prompts again after others have filled the cache", "answers after eviction {} those before"
    ),
}  # fmt: skip


def plan(
    prompts: ProbePrompts, *, max_requests: int, max_tokens: int, checks: Sequence[str] = tuple(CHECKS)
) -> list[Probe]:
    """All probes of a run, within most of its requests and tokens; the rest is for the survey and for shrinking."""
    share = min(4.0, max_requests / 300)
    probes = _probes(prompts, share, checks)
    while share > _SMALLEST_SHARE and _num_tokens(probes) > _PLANNED_TOKENS * max_tokens:
        share *= 0.7
        probes = _probes(prompts, share, checks)
    if "evict" in checks:
        longest = min(prompts.target.max_length - MAX_NEW - 2, _LONGEST_PRESSURE)
        left = (max_tokens - _num_tokens(probes)) // 2
        first = prompts.target.boundaries()[0]
        probes.append(evict(prompts, first, max(0, min(left, longest * (max_requests // 10)))))
    return probes


def _num_tokens(probes: Sequence[Probe]) -> int:
    return sum(probe.num_tokens() for probe in probes)


def _probes(prompts: ProbePrompts, share: float, checks: Sequence[str]) -> list[Probe]:
    """All probes but the pressure; their numbers are multiplied by `share`."""
    target = prompts.target
    boundaries = target.boundaries()
    whole = target.long // target.step * target.step  # enough blocks for faults that need many
    around = [length + i for length in boundaries for i in (-1, 0, 1)]
    around += [whole + i for i in (0, 1, -1)] if whole > boundaries[-1] + 1 else []
    middle = [length + i for length in boundaries[:3] for i in (0, 1, -1)]
    room = target.max_length - 2 * target.step - _FRESH - MAX_NEW
    lengths = {
        "noise": [boundaries[-1], boundaries[0] + 1],
        "repeat": around,
        "resume": [length + i for length in boundaries for i in (-1, 0, -3)],
        "stream": middle,
        "samples": middle,
        "crowd": [boundaries[0] + 1, *boundaries[1:]],  # all of them have a block to hit
        "twins": boundaries,
        "moved": [length for length in boundaries[:2] if length < room],
        "salts": boundaries if target.isolates is not None else [],
        "users": boundaries if target.reports else [],
        "speed": [target.long],
    }
    probes = []
    for check, places in lengths.items():
        if check in checks and places:
            usual = CHECKS[check].num_probes
            count = max(3, round(usual * share * len(places))) if check == "repeat" else max(1, round(usual * share))
            probes += [CHECKS[check].build(prompts, places[i % len(places)]) for i in range(count)]
    return probes


def shared_length(words: Sequence[object], others: Sequence[Sequence[object]]) -> int:
    """The longest prefix, in words or characters, that a prompt or a text shares with any of the others."""
    longest = 0
    for other in others:
        if words[:longest] == other[:longest]:  # else it parts earlier than another one
            while longest < min(len(words), len(other)) and words[longest] == other[longest]:
                longest += 1
    return longest
