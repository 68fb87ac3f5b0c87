"""What the answers say about the cache, in one sentence each: ok, a fault, or not to be determined, with counts.

Used by the reports and by the exit code. Sends nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil, comb
from statistics import median

from pagedcli.audit.compare import LARGEST_TOLERANCE, ROUNDED, Difference, Noise, measure_noise
from pagedcli.audit.plan import Target
from pagedcli.audit.run import Outcome, Seen
from pagedcli.audit.survey import Survey
from pagedcli.printable import plural, seconds_text

_MOST_CHANCE = 1e-4  # a check fails if noise explains its different pairs with less than this probability
_SAVED, _NOT_SAVED = 0.5, 0.25  # shares of the time that caching could save
_CLEAR = 0.8  # share of pairs in which the short prompt is the faster one
_CHANCE_OF_TIMES, _NORMAL = 0.01, 2.576  # chance that a median is outside its bounds; the same in standard deviations
_FEWEST_TIMES = 4
_FEWEST_AGREEING = 0.6  # share of the probes


class Status(StrEnum):
    """What a verdict means for the exit code."""

    OK = "ok"
    FAULT = "FAULT"
    UNKNOWN = "unknown"  # could not be determined
    NOTE = "note"  # a fact that is neither right nor wrong


@dataclass(frozen=True, slots=True)
class Verdict:
    """One sentence about one check."""

    check: str
    status: Status
    text: str
    num_pairs: int | None = None
    num_different: int | None = None
    largest: float | None = None  # distance


@dataclass(slots=True)
class Evidence:
    """Everything that a run has seen."""

    survey: Survey
    checks: Sequence[str]  # asked for
    outcomes: list[Outcome] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)  # check -> why it was not finished
    num_other_lengths: int = 0

    def of(self, check: str) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.probe.check == check]

    def noise(self) -> Noise:
        same = [each for outcome in self.of("noise") for each in outcome.differences if each is not None]
        repeats = [each for check in ("repeat", "stream") for each in self.of(check)]
        return measure_noise(same, [each for outcome in repeats for each in outcome.differences if each is not None])


@dataclass(frozen=True, slots=True)
class Counted:
    """The pairs of a check whose answers must be equal."""

    known: tuple[Difference, ...]
    different: tuple[tuple[Outcome, Difference], ...]
    lengths: tuple[int, ...]  # tokens of the prompts of the different pairs
    num_hits: int  # pairs whose warm request was a hit, as the server says

    def is_fault(self, noise: Noise) -> bool:
        """Whether noise cannot explain the different pairs."""
        certain = any((each.distance or 0.0) > LARGEST_TOLERANCE for _, each in self.different)
        few = noise.chance(len(self.different), len(self.known)) < _MOST_CHANCE
        return bool(self.different) and not noise.is_too_large and (certain or few)


def count_pairs(outcomes: Sequence[Outcome], noise: Noise) -> Counted:
    known, different, lengths, num_hits = [], [], [], 0
    for outcome in outcomes:
        for pair, found in zip(outcome.probe.pairs, outcome.differences, strict=True):
            if found is None or pair.must_differ or pair.is_control:
                continue
            known.append(found)
            num_hits += bool(outcome.seen[pair.warm].answer.num_cached)
            if found.exceeds(noise.tolerance):
                different.append((outcome, found))
                lengths.append(outcome.seen[pair.warm].answer.num_prompt or outcome.probe.length)
    return Counted(tuple(known), tuple(different), tuple(lengths), num_hits)


def judge(evidence: Evidence, cases: dict[str, str]) -> list[Verdict]:
    """All verdicts. `cases` has, per check, a few words on where its shortest failing pair was written."""
    noise = evidence.noise()
    verdicts = [*_reporting(evidence), *_noise(evidence, noise), *_law(evidence, cases)]
    for check in _SUBJECTS:
        if check in ("salts", "users") or (check in ("twins", "moved") and evidence.survey.target.bypass is None):
            continue
        if check in evidence.checks:
            verdicts.append(_pairs(evidence, noise, check, cases))
    if evidence.survey.target.bypass is None:
        if "twins" in evidence.checks:
            verdicts.append(_twins(evidence, noise))
        if "moved" in evidence.checks:
            verdicts.append(_moved(evidence))
    if "salts" in evidence.checks:
        verdicts += _salts(evidence, noise, cases)
    if "users" in evidence.checks:
        verdicts += _users(evidence, noise, cases)
    if "speed" in evidence.checks:
        verdicts += _speed(evidence)
    return verdicts


# check -> what is said of its pairs if they are equal, and if some differ
_SUBJECTS = {
    "repeat": ("warm answers equal cold ones", "warm answers differ from cold ones"),
    "resume": (
        "answers after a cached turn equal those of decoding",
        "answers after a cached turn differ from those of decoding",
    ),
    "stream": ("streamed warm answers equal cold ones", "streamed warm answers differ from cold ones"),
    "samples": (
        "both samples of a warm prompt (n = 2) equal the cold answer",
        "samples of a warm prompt (n = 2) differ from the cold answer",
    ),
    "crowd": ("answers in a crowd equal those alone", "answers in a crowd differ from those alone"),
    "twins": (
        "prompts that differ in the last token of a block are told apart",
        "prompts that differ in the last token of a block are confused",
    ),
    "moved": ("a block cached at another place is not confused", "a block cached at another place is confused"),
    "salts": (
        "answers with other salts equal those without a cache",
        "answers with other salts differ from those without a cache",
    ),
    "users": ("answers with another user equal cold ones", "answers with another user differ from cold ones"),
    "evict": ("answers after eviction equal those before", "answers after eviction differ from those before"),
}  # fmt: skip


def _reporting(evidence: Evidence) -> list[Verdict]:
    survey, target = evidence.survey, evidence.survey.target
    if survey.cached_field is not None and not target.reports:
        text = (
            f"the server reports cached tokens in {survey.cached_field}, but no prompt was ever a hit: is caching off?"
        )
        return [Verdict("reports", Status.UNKNOWN, text)]
    if not target.reports:
        text = (
            "the server reports no cached tokens: the match unit, the law of hits and what was cached are unknown "
            "(vLLM: --enable-prompt-tokens-details, SGLang: --enable-cache-report)"
        )
        return [Verdict("reports", Status.UNKNOWN, text)]
    found = [Verdict("reports", Status.OK, f"cached tokens are reported, in {survey.cached_field}")]
    if target.unit is None:
        return [*found, Verdict("unit", Status.UNKNOWN, "hits of shared prefixes fit no block size")]
    text = f"prefixes match in units of {plural(target.unit, 'token')}; the shortest cached prefix has {max(target.smallest, target.unit):,}"  # noqa: E501
    return [*found, Verdict("unit", Status.OK, text)]


def _noise(evidence: Evidence, noise: Noise) -> list[Verdict]:
    if noise.num_pairs == 0:
        return [Verdict("noise", Status.UNKNOWN, _why(evidence, "noise", "no request was repeated"))]
    pairs = plural(noise.num_pairs, "pair")
    if noise.largest is None:
        text = f"equal requests give other texts in {noise.num_different} of {pairs}; there are no log-probabilities"
    else:
        text = (
            f"equal requests differ by up to {noise.largest:.2g} in log-probability ({pairs}); "
            f"more than {noise.tolerance:.2g} counts as different"
        )
    if noise.is_too_large:
        return [Verdict("noise", Status.UNKNOWN, text + ": too noisy to judge a cache", noise.num_pairs)]
    return [Verdict("noise", Status.OK, text, noise.num_pairs, noise.num_different, noise.largest)]


def _law(evidence: Evidence, cases: dict[str, str]) -> list[Verdict]:
    target = evidence.survey.target
    if not target.reports:
        return []
    verdicts = []
    # salts and users have verdicts of their own
    unsalted = [each for each in evidence.seen if each.ask.salt is None and each.ask.user is None]
    too_much = [each for each in unsalted if each.claims_too_much(target.unit)]
    if too_much:
        worst = max(too_much, key=lambda each: (each.answer.num_cached or 0) - each.num_shared)
        text = (
            f"{len(too_much)} of {len(unsalted)} requests claim more cached tokens than were ever sent: "
            f"{worst.answer.num_cached:,} where {worst.num_shared:,} are shared{cases.get('law', '')}"
        )
        verdicts.append(Verdict("law", Status.FAULT, text, len(unsalted), len(too_much)))
    if target.unit is not None:
        # the last tokens and what has been evicted are not the law's business
        found = [each.follows_law(target.unit, target.smallest) for each in unsalted if each.check != "evict"]
        known = [each for each in found if each is not None]
        num_right = sum(known)
        law = f"floor(shared / {target.unit}) x {target.unit}"
        text = f"hits follow {law} in {num_right} of {plural(len(known), 'lookup')}"
        status = Status.OK if num_right == len(known) else Status.NOTE
        if status is Status.NOTE and not too_much:
            text += "; the others were evicted or not kept, which costs time but changes no answer"
        verdicts.append(Verdict("law", status, text, len(known), len(known) - num_right))
    return verdicts


def _pairs(evidence: Evidence, noise: Noise, check: str, cases: dict[str, str]) -> Verdict:
    equal, different = _SUBJECTS[check]
    counted = count_pairs(evidence.of(check), noise)
    num, num_different = len(counted.known), len(counted.different)
    largest = max((each.distance for each in counted.known if each.distance is not None), default=None)
    if num == 0:
        return Verdict(check, Status.UNKNOWN, _why(evidence, check, _no_pairs(evidence, check)))
    if noise.is_too_large or noise.num_pairs == 0:
        return Verdict(
            check, Status.UNKNOWN, f"{num_different} of {num} pairs differ, but the noise is too large or unknown"
        )
    if num_different:
        places = _places(counted.lengths, evidence.survey.target)
        size = "" if largest is None else f", by up to {largest:.2g}"
        text = f"{different} in {num_different} of {num} pairs{size}{places}{cases.get(check, '')}"
        if counted.is_fault(noise):
            return Verdict(check, Status.FAULT, text, num, num_different, largest)
        return Verdict(check, Status.UNKNOWN, f"{text}; too few to tell from noise", num, num_different, largest)
    text = f"{equal} in {num} of {num} pairs"
    if evidence.survey.target.reports and check != "evict" and counted.num_hits < num:
        text += f" ({counted.num_hits} were hits)"
    if check in evidence.not_run:
        return Verdict(check, Status.UNKNOWN, f"{text}, then {evidence.not_run[check]}", num, 0, largest)
    if check == "evict":
        return _eviction(evidence, text, num, largest)
    if evidence.survey.target.reports and counted.num_hits == 0 and check not in ("twins", "moved"):
        return Verdict(check, Status.UNKNOWN, f"{text}, but none of them was a hit", num, 0, largest)
    return Verdict(check, Status.OK, text, num, 0, largest)


def _no_pairs(evidence: Evidence, check: str) -> str:
    if check == "resume" and not evidence.survey.target.has_logprobs:
        return "the server names no tokens (logprobs), so the next turn cannot be written exactly"
    if check == "resume":
        return "no answer began with whole words, so that the next turn is the same tokens for certain"
    return "no two answers could be compared"


def _places(failing: Sequence[int], target: Target) -> str:
    """Where in a block the failing prompts end, if they have it in common."""
    lengths = sorted(set(failing))
    rests = {length % target.step for length in lengths}
    if rests == {0}:
        return f", all of whole blocks exactly ({_few(lengths)} tokens)"
    if rests == {1}:
        return f", all of one token more than whole blocks ({_few(lengths)} tokens)"
    if rests == {target.step - 1}:
        return f", all of one token less than whole blocks ({_few(lengths)} tokens)"
    return f", of {_few(lengths)} tokens"


def _few(lengths: Sequence[int]) -> str:
    shown = ", ".join(f"{length:,}" for length in lengths[:4])
    return shown if len(lengths) <= 4 else f"{shown}, ... {lengths[-1]:,}"


def _eviction(evidence: Evidence, text: str, num: int, largest: float | None) -> Verdict:
    (outcome,) = evidence.of("evict")
    num_pressure = sum(len(ask.words) for ask in outcome.probe.asks() if ask.max_new == 1)
    others = f"{num_pressure:,} tokens of other prompts"
    if not evidence.survey.target.reports:
        text = f"{text} through {others}; whether any was evicted is not reported"
        return Verdict("evict", Status.UNKNOWN, text, num, 0, largest)
    num_evicted = sum(
        (outcome.seen[pair.warm].answer.num_cached or 0) < _expected(outcome.seen[pair.warm], evidence.survey.target)
        for pair in outcome.probe.pairs
    )
    if num_evicted == 0:
        text = f"{text}, but {others} evicted nothing: --max-tokens and --max-requests allow more"
        return Verdict("evict", Status.UNKNOWN, text, num, 0, largest)
    return Verdict("evict", Status.OK, f"{text} ({num_evicted} had been evicted by {others})", num, 0, largest)


def _expected(seen: Seen, target: Target) -> int:
    """Cached tokens of a prompt that is sent again and was not evicted, at least."""
    length, unit = seen.num_prompt or 0, target.unit or 1
    whole = (length - 1) // unit * unit
    return whole if whole >= target.smallest else 0


def _twins(evidence: Evidence, noise: Noise) -> Verdict:
    """Without a way around the cache: an answer that ignores the last token of a block is that of the other prompt."""
    differences: dict[bool, list[Difference]] = {True: [], False: []}
    for outcome in evidence.of("twins"):
        for pair, found in zip(outcome.probe.pairs, outcome.differences, strict=True):
            if found is not None:
                differences[pair.must_differ].append(found)
    twins, controls = differences[True], differences[False]
    if len(twins) < 3 or noise.num_pairs == 0:
        return Verdict("change", Status.UNKNOWN, _why(evidence, "twins", "too few prompts with one changed token"))
    limit = max(ROUNDED, noise.largest or 0.0)

    def is_ignored(each: Difference) -> bool:
        return each.is_same if each.distance is None else each.distance <= limit

    num_ignored, num_insensitive = sum(map(is_ignored, twins)), sum(map(is_ignored, controls))
    num = f"{len(twins) - num_ignored} of {len(twins)}"
    text = f"a change in the last token of a block changes the answer in {num} prompts"
    if num_insensitive > len(controls) / 2:
        return Verdict("change", Status.UNKNOWN, f"{text}, but one token elsewhere rarely changes it either")
    if num_ignored >= max(2, 2 * num_insensitive + 1, len(twins) / 2):
        text += f"; one in the middle of a block does in {len(controls) - num_insensitive} of {len(controls)}"
        return Verdict("change", Status.FAULT, text, len(twins), num_ignored)
    return Verdict("change", Status.OK, text, len(twins), num_ignored)


def _moved(evidence: Evidence) -> Verdict:
    """Without a way around the cache only the reported hits can tell, and the law has judged them."""
    text = "whether a block cached at another place is confused"
    if not evidence.survey.target.reports or "moved" in evidence.not_run:
        text = f"{text} cannot be seen: the server neither reports hits nor computes without its cache"
        return Verdict("moved", Status.UNKNOWN, _why(evidence, "moved", text))
    return Verdict("moved", Status.NOTE, f"{text} is seen from the reported hits only (see law)")


def _salts(evidence: Evidence, noise: Noise, cases: dict[str, str]) -> list[Verdict]:
    target = evidence.survey.target
    if target.isolates is None:
        return [Verdict("salts", Status.NOTE, "cache_salt is not offered: all users of the server share one cache")]
    outcomes = evidence.of("salts")
    verdict = _pairs(evidence, noise, "salts", cases)
    if not target.reports or not outcomes:
        return [verdict]
    crossed = sum(bool(each.seen[2].answer.num_cached and each.seen[2].answer.num_cached > 6) for each in outcomes)
    if crossed:
        text = f"{crossed} of {len(outcomes)} prompts were hits of another salt: a tenant sees what others have sent{cases.get('salts', '')}"  # noqa: E501
        return [Verdict("salts", Status.FAULT, text, len(outcomes), crossed)]
    text = f"no prompt was a hit of another salt, in {len(outcomes)} of {len(outcomes)}"
    return [verdict, Verdict("salts", Status.OK, text, len(outcomes), 0)]


def _users(evidence: Evidence, noise: Noise, cases: dict[str, str]) -> list[Verdict]:
    """No server documents that `user` separates caches, so that shared hits are no fault: whether they are shared."""
    outcomes = evidence.of("users")
    if not outcomes:
        return [Verdict("users", Status.NOTE, _why(evidence, "users", "whether users share hits is not reported"))]
    verdict = _pairs(evidence, noise, "users", cases)
    crossed, warm = (sum((each.seen[place].answer.num_cached or 0) > 6 for each in outcomes) for place in (2, 1))
    num = f"{crossed} of {plural(len(outcomes), 'prompt')}"
    if crossed:
        text = f"{num} were hits of another user: the field user does not separate caches"
        return [verdict, Verdict("users", Status.NOTE, text, len(outcomes), crossed)]
    if not warm:
        return [verdict]
    return [verdict, Verdict("users", Status.OK, f"{num} were hits of another user", len(outcomes), 0)]


def _speed(evidence: Evidence) -> list[Verdict]:
    outcomes = evidence.of("speed")
    if len(outcomes) < _FEWEST_TIMES:
        return [Verdict("speed", Status.UNKNOWN, _why(evidence, "speed", "too few times to the first token"))]
    columns = [[outcome.seen[i].answer.seen_s for outcome in outcomes] for i in range(len(outcomes[0].seen))]
    short, cold, warm = (_typical(column) for column in columns[:3])
    length = outcomes[0].probe.length
    times = f"{length:,} tokens take {seconds_text(cold)} cold and {seconds_text(warm)} warm"
    if _share_of_smaller(columns[0], columns[1]) < _CLEAR or cold < 1.2 * short:
        text = f"{times}, fewer tokens {seconds_text(short)}: too alike or too uneven to see a cache by time"
        return [Verdict("speed", Status.UNKNOWN, text)]
    verdicts = [_claimed(evidence, outcomes, times, _saving(*columns[:3]))]
    if len(columns) > 3:
        saving = _saving(columns[0], columns[1], columns[3])
        text = f"with another salt {seconds_text(_typical(columns[3]))} ({times})"
        status, words = {
            True: (Status.FAULT, "a tenant sees another's hits by time"),
            False: (Status.OK, "no tenant sees another's hits by time"),
            None: (Status.UNKNOWN, "whether a tenant sees another's hits by time"),
        }[saving.is_there]
        verdicts.append(Verdict("tenants", status, f"{words}: {text}{saving.needs(len(columns))}"))
    return verdicts


def _claimed(evidence: Evidence, outcomes: Sequence[Outcome], times: str, saving: "Saving") -> Verdict:
    """Whether the reported hits save time."""
    claims = median([(outcome.seen[2].answer.num_cached or 0) / outcome.probe.length for outcome in outcomes])
    if not evidence.survey.target.reports:
        seen = "a cache is seen by time" if saving.is_there else "no cache is seen by time"
        return Verdict("speed", Status.NOTE, f"{seen}: {times}")
    if claims < _SAVED:
        return Verdict("speed", Status.UNKNOWN, f"too little of the long prompts was a hit to see it by time: {times}")
    if saving.is_there:
        return Verdict("speed", Status.OK, f"reported hits save time: {times}")
    text = f"{times}, though {100 * claims:.0f} % of the tokens are reported as cached"
    if saving.is_there is False:
        return Verdict("speed", Status.FAULT, f"the cache is only claimed: {text}")
    needs = saving.needs(len(outcomes[0].seen))
    return Verdict("speed", Status.UNKNOWN, f"whether reported hits save time is not clear: {text}{needs}")


@dataclass(frozen=True, slots=True)
class Saving:
    """The share of the time between short and long prompts that is saved, in each probe, smallest first.

    The bounds of its median need no assumption about the times: so many of the probes are below or above them that
    chance puts the median outside in one of a hundred cases.
    """

    shares: Sequence[float]

    @property
    def is_there(self) -> bool | None:
        """None: not clear yet."""
        num, outside, chance = len(self.shares), -1, 0.0
        while outside < num // 2 and 2 * (chance := chance + comb(num, outside + 1) / 2**num) <= _CHANCE_OF_TIMES:
            outside += 1
        if outside < 0:
            return None
        if self.shares[outside] > _NOT_SAVED:
            return True
        return False if self.shares[num - 1 - outside] < _SAVED and median(self.shares) <= _NOT_SAVED else None

    def needs(self, num_requests: int) -> str:
        """How many more requests would tell, at `num_requests` per probe."""
        if self.is_there is not None:
            return ""
        num = len(self.shares)
        is_large = median(self.shares) > _NOT_SAVED
        agreeing = sum(share > _NOT_SAVED if is_large else share < _SAVED for share in self.shares) / num
        if agreeing < _FEWEST_AGREEING:
            return "; the times are too uneven for any number of requests"
        more = max(1, ceil((_NORMAL / (2 * agreeing - 1)) ** 2) - num) * num_requests
        return f"; about {plural(more, 'more request')} would tell (--max-requests, --max-tokens)"


def _saving(short: Sequence[float], cold: Sequence[float], tested: Sequence[float]) -> Saving:
    whole = _typical(cold) - _typical(short)
    return Saving(sorted((slow - time_s) / whole for slow, time_s in zip(cold, tested, strict=True)))


def _typical(times: Sequence[float]) -> float:
    """The lower quartile: whatever else a machine does only adds to a time."""
    return sorted(times)[len(times) // 4]


def _share_of_smaller(times: Sequence[float], others: Sequence[float]) -> float:
    """The share of pairs in which the first is the smaller one; 0.5 if both are alike."""
    return sum(a < b for a in times for b in others) / (len(times) * len(others))


def _why(evidence: Evidence, check: str, otherwise: str) -> str:
    return evidence.not_run.get(check, otherwise)
