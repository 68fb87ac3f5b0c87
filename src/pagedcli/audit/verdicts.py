"""What the answers say about the cache, in one sentence each: ok, a fault, or not to be determined, with counts.

Used by the reports and by the exit code. Sends nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil, comb
from statistics import median
from typing import Annotated

from pagedcli.audit.compare import LARGEST_TOLERANCE, ROUNDED, AnswerDifference, Noise, compare, measure_noise
from pagedcli.audit.plan import CHECKS, Target
from pagedcli.audit.restart import CHECK as RESTART
from pagedcli.audit.restart import Memory
from pagedcli.audit.run import ProbeOutcome, Seen
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

    status: Annotated[Status, ""]
    check: str
    text: Annotated[str, "verdict"]
    num_pairs: int | None = None
    num_different: Annotated[int | None, "different pairs"] = None
    largest_difference: Annotated[float | None, "largest difference, nats"] = None


@dataclass(slots=True)
class Evidence:
    """Everything that a run has seen."""

    survey: Survey
    checks: Sequence[str]  # checks that were asked for
    outcomes: list[ProbeOutcome] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)  # check -> why it was not finished
    cases: dict[str, str] = field(default_factory=dict)  # check -> words on its shortest failing pair
    memory: Memory | None = None  # answers of an earlier audit
    recalled: list[ProbeOutcome] = field(default_factory=list)  # a probe for each of its prompts

    @property
    def target(self) -> Target:
        return self.survey.target

    @property
    def seen(self) -> list[Seen]:
        return self.survey.runner.seen

    def of(self, check: str) -> list[ProbeOutcome]:
        return [outcome for outcome in self.outcomes if outcome.probe.check == check]

    def noise(self) -> Noise:
        same = [found for outcome in self.of("noise") for _, found in outcome.compared()]
        repeats = [each for check in ("repeat", "stream") for each in self.of(check)]
        return measure_noise(same, [found for outcome in repeats for _, found in outcome.compared()])

    def fault(self, check: str, text: str, *figures: int) -> Verdict:
        """A verdict that names where the failing pair of its check is, if one was written."""
        return Verdict(Status.FAULT, check, text + self.cases.get(check, ""), *figures)

    def unknown(self, check: str, otherwise: str, *, name: str | None = None) -> Verdict:
        """A check that could not be made, and why."""
        return Verdict(Status.UNKNOWN, name or check, self.not_run.get(check, otherwise))


@dataclass(frozen=True, slots=True)
class Counted:
    """The pairs of a check whose answers must be equal."""

    known: tuple[AnswerDifference, ...]
    different: tuple[tuple[ProbeOutcome, AnswerDifference], ...]
    lengths: tuple[int, ...]  # tokens of the prompts of the different pairs
    num_hits: int  # pairs whose warm request was a hit, as the server says

    def is_fault(self, noise: Noise) -> bool:
        """Whether noise cannot explain the different pairs."""
        certain = any((each.distance or 0.0) > LARGEST_TOLERANCE for _, each in self.different)
        few = noise.chance(len(self.different), len(self.known)) < _MOST_CHANCE
        return bool(self.different) and not noise.is_too_large and (certain or few)


def count_pairs(outcomes: Sequence[ProbeOutcome], noise: Noise) -> Counted:
    known, different, lengths, num_hits = [], [], [], 0
    for outcome in outcomes:
        for pair, found in outcome.compared():
            if not pair.must_agree:
                continue
            known.append(found)
            num_hits += bool(outcome.seen[pair.warm].answer.num_cached)
            if found.exceeds(noise.tolerance):
                different.append((outcome, found))
                lengths.append(outcome.seen[pair.warm].answer.num_prompt or outcome.probe.length)
    return Counted(tuple(known), tuple(different), tuple(lengths), num_hits)


def judge(evidence: Evidence) -> list[Verdict]:
    """All verdicts, in the order of the checks."""
    verdicts = [*_reporting(evidence), _noise(evidence), *_law(evidence)]
    for check in CHECKS:
        if check in evidence.checks and check != "noise":
            verdicts += _JUDGES.get(check, _pairs)(evidence, check)
    return verdicts if evidence.memory is None else [*verdicts, *_restart(evidence, evidence.memory)]


def _reporting(evidence: Evidence) -> list[Verdict]:
    survey, target = evidence.survey, evidence.target
    if not target.reports:
        text = (
            "the server reports no cached tokens: the match unit, the law of hits and what was cached are unknown "
            "(vLLM: --enable-prompt-tokens-details, SGLang: --enable-cache-report)"
        )
        if (field := survey.cached_field) is not None:
            text = f"the server reports cached tokens in {field}, but no prompt was ever a hit: is caching off?"
        return [Verdict(Status.UNKNOWN, "reports", text)]
    found = Verdict(Status.OK, "reports", f"cached tokens are reported, in {survey.cached_field}")
    if target.unit is None:
        return [found, Verdict(Status.UNKNOWN, "unit", "hits of shared prefixes fit no block size")]
    shortest = f"the shortest cached prefix has {max(target.smallest, target.unit):,}"
    return [found, Verdict(Status.OK, "unit", f"prefixes match in units of {plural(target.unit, 'token')}; {shortest}")]


def _noise(evidence: Evidence) -> Verdict:
    noise = evidence.noise()
    if noise.num_pairs == 0:
        return evidence.unknown("noise", "no request was repeated")
    pairs = plural(noise.num_pairs, "pair")
    if noise.largest is None:
        text = f"equal requests give other texts in {noise.num_different} of {pairs}; there are no log-probabilities"
    else:
        text = (
            f"equal requests differ by up to {noise.largest:.2g} in log-probability ({pairs}); "
            f"more than {noise.tolerance:.2g} counts as different"
        )
    if noise.is_too_large:
        return Verdict(Status.UNKNOWN, "noise", text + ": too noisy to judge a cache", noise.num_pairs)
    return Verdict(Status.OK, "noise", text, noise.num_pairs, noise.num_different, noise.largest)


def _law(evidence: Evidence) -> list[Verdict]:
    target, verdicts = evidence.target, list[Verdict]()
    if not target.reports:
        return verdicts
    # salts and users have verdicts of their own
    unsalted = [each for each in evidence.seen if each.ask.salt is None and each.ask.user is None]
    too_much = [each for each in unsalted if each.claims_too_much(target.unit)]
    if too_much:
        worst = max(too_much, key=lambda each: each.num_cached - each.num_shared)
        text = (
            f"{len(too_much)} of {len(unsalted)} requests claim more cached tokens than were ever sent: "
            f"{worst.num_cached:,} where {worst.num_shared:,} are shared"
        )
        verdicts.append(evidence.fault("law", text, len(unsalted), len(too_much)))
    if target.unit is not None:
        # the last tokens and what has been evicted or was lost at a restart are not the law's business
        found = [each.follows_law(target) for each in unsalted if each.check not in ("evict", RESTART)]
        known = [each for each in found if each is not None]
        num_right = sum(known)
        law = f"floor(shared / {target.unit}) x {target.unit}"
        text = f"hits follow {law} in {num_right} of {plural(len(known), 'lookup')}"
        status = Status.OK if num_right == len(known) else Status.NOTE
        if status is Status.NOTE and not too_much:
            text += "; the others were evicted or not kept, which costs time but changes no answer"
        verdicts.append(Verdict(status, "law", text, len(known), len(known) - num_right))
    return verdicts


def _pairs(evidence: Evidence, check: str) -> list[Verdict]:
    """Whether the answers of all pairs are equal."""
    said, target, noise = CHECKS[check], evidence.target, evidence.noise()
    counted = count_pairs(evidence.of(check), noise)
    num, num_different = len(counted.known), len(counted.different)
    if num == 0:
        return [evidence.unknown(check, _no_pairs(evidence, check))]
    if noise.is_too_large or noise.num_pairs == 0:
        text = f"{num_different} of {num} pairs differ, but the noise is too large or unknown"
        return [Verdict(Status.UNKNOWN, check, text)]
    largest = max((each.distance for each in counted.known if each.distance is not None), default=None)
    status = Status.OK
    if num_different:
        size = "" if largest is None else f", by up to {largest:.2g}"
        text = f"{said.said.format(said.different)} in {num_different} of {num} pairs"
        text += f"{size}{_places(counted.lengths, target)}{evidence.cases.get(check, '')}"
        status = Status.FAULT
        if not counted.is_fault(noise):
            status, text = Status.UNKNOWN, f"{text}; too few to tell from noise"
        return [Verdict(status, check, text, num, num_different, largest)]
    text = f"{said.said.format(said.equal)} in {num} of {num} pairs"
    if target.reports and check != "evict" and counted.num_hits < num:
        text += f" ({counted.num_hits} were hits)"
    if check in evidence.not_run:
        status, text = Status.UNKNOWN, f"{text}, then {evidence.not_run[check]}"
    elif check == "evict":
        status, text = _eviction(evidence, text)
    elif target.reports and counted.num_hits == 0 and check not in ("twins", "moved"):
        status, text = Status.UNKNOWN, f"{text}, but none of them was a hit"
    return [Verdict(status, check, text, num, 0, largest)]


def _no_pairs(evidence: Evidence, check: str) -> str:
    if check == "resume" and not evidence.target.has_logprobs:
        return "the server names no tokens (logprobs), so the next turn cannot be written exactly"
    if check == "resume":
        return "no answer began with whole words, so that the next turn is the same tokens for certain"
    return "no two answers could be compared"


def _places(failing: Sequence[int], target: Target) -> str:
    """Where in a block the failing prompts end, if they have it in common."""
    lengths = sorted(set(failing))
    few = ", ".join(f"{length:,}" for length in lengths[:4]) + (f", ... {lengths[-1]:,}" if len(lengths) > 4 else "")
    rests = {length % target.step for length in lengths}
    ends = {0: "whole blocks exactly", 1: "one token more than whole blocks", target.step - 1: "one token less than"
            " whole blocks"}  # fmt: skip
    end = ends.get(rests.pop()) if len(rests) == 1 else None
    return f", of {few} tokens" if end is None else f", all of {end} ({few} tokens)"


def _eviction(evidence: Evidence, text: str) -> tuple[Status, str]:
    (outcome,) = evidence.of("evict")
    target = evidence.target
    num_pressure = sum(len(ask.words) for ask in outcome.probe.asks() if ask.max_new == 1)
    others = f"{plural(num_pressure, 'token')} of other prompts"
    if not target.reports:
        return Status.UNKNOWN, f"{text} through {others}; whether any was evicted is not reported"
    warm = [outcome.seen[pair.warm] for pair in outcome.probe.pairs]
    num_evicted = sum(each.num_cached < target.whole((each.num_prompt or 0) - 1) for each in warm)
    if num_evicted == 0:
        return Status.UNKNOWN, f"{text}, but {others} evicted nothing: --max-tokens and --max-requests allow more"
    return Status.OK, f"{text} ({num_evicted} had been evicted by {others})"


def _twins(evidence: Evidence, check: str) -> list[Verdict]:
    """Without a way around the cache: an answer that ignores the last token of a block is that of the other prompt."""
    noise = evidence.noise()
    if evidence.target.bypass is not None:
        return _pairs(evidence, check)
    compared = [each for outcome in evidence.of(check) for each in outcome.compared()]
    twins, controls = ([found for pair, found in compared if pair.must_differ is differ] for differ in (True, False))
    if len(twins) < 3 or noise.num_pairs == 0:
        return [evidence.unknown(check, "too few prompts with one changed token", name="change")]
    limit = max(ROUNDED, noise.largest or 0.0)
    num_ignored, num_insensitive = (sum(not found.exceeds(limit) for found in some) for some in (twins, controls))
    text = "a change in the last token of a block changes the answer in"
    text += f" {len(twins) - num_ignored} of {plural(len(twins), 'prompt')}"
    if num_insensitive > len(controls) / 2:
        return [Verdict(Status.UNKNOWN, "change", f"{text}, but one token elsewhere rarely changes it either")]
    status = Status.OK
    if num_ignored >= max(2, 2 * num_insensitive + 1, len(twins) / 2):
        status = Status.FAULT
        text += f"; one in the middle of a block does in {len(controls) - num_insensitive} of {len(controls)}"
    return [Verdict(status, "change", text, len(twins), num_ignored)]


def _moved(evidence: Evidence, check: str) -> list[Verdict]:
    """Without a way around the cache only the reported hits can tell, and the law has judged them."""
    if evidence.target.bypass is not None:
        return _pairs(evidence, check)
    text = "whether a block cached at another place is confused"
    if not evidence.target.reports or check in evidence.not_run:
        why = f"{text} cannot be seen: the server neither reports hits nor computes without its cache"
        return [evidence.unknown(check, why)]
    return [Verdict(Status.NOTE, check, f"{text} is seen from the reported hits only (see law)")]


def _salts(evidence: Evidence, check: str) -> list[Verdict]:
    if evidence.target.isolates is None:
        return [Verdict(Status.NOTE, check, "cache_salt is not offered: all users of the server share one cache")]
    outcomes, verdicts = evidence.of(check), _pairs(evidence, check)
    if not evidence.target.reports or not outcomes:
        return verdicts
    crossed, num = sum(each.seen[2].is_hit for each in outcomes), len(outcomes)
    if crossed:
        text = f"{crossed} of {plural(num, 'prompt')} were hits of another salt: a tenant sees what others have sent"
        return [evidence.fault(check, text, num, crossed)]
    return [*verdicts, Verdict(Status.OK, check, f"no prompt was a hit of another salt, in {num} of {num}", num, 0)]


def _users(evidence: Evidence, check: str) -> list[Verdict]:
    """No server documents that `user` separates caches, so that shared hits are no fault: whether they are shared."""
    outcomes = evidence.of(check)
    if not outcomes:
        text = evidence.not_run.get(check, "whether users share hits is not reported")
        return [Verdict(Status.NOTE, check, text)]
    verdicts = _pairs(evidence, check)
    crossed, warm = (sum(each.seen[place].is_hit for each in outcomes) for place in (2, 1))
    text = f"{crossed} of {plural(len(outcomes), 'prompt')} were hits of another user"
    if crossed:
        text += ": the field user does not separate caches"
        return [*verdicts, Verdict(Status.NOTE, check, text, len(outcomes), crossed)]
    return [*verdicts, Verdict(Status.OK, check, text, len(outcomes), 0)] if warm else verdicts


def _speed(evidence: Evidence, check: str) -> list[Verdict]:
    outcomes = evidence.of(check)
    if len(outcomes) < _FEWEST_TIMES:
        return [evidence.unknown(check, "too few times to the first token")]
    columns = [[outcome.seen[i].answer.seen_s for outcome in outcomes] for i in range(len(outcomes[0].seen))]
    short, cold, warm = (_typical(column) for column in columns[:3])
    length = outcomes[0].probe.length
    times = f"{length:,} tokens take {seconds_text(cold)} cold and {seconds_text(warm)} warm"
    if _share_of_smaller(columns[0], columns[1]) < _CLEAR or cold < 1.2 * short:
        text = f"{times}, fewer tokens {seconds_text(short)}: too alike or too uneven to see a cache by time"
        return [Verdict(Status.UNKNOWN, check, text)]
    verdicts = [_claimed(evidence, outcomes, times, _saving(*columns[:3]))]
    if len(columns) > 3:
        saving = _saving(columns[0], columns[1], columns[3])
        text = f"with another salt {seconds_text(_typical(columns[3]))} ({times})"
        status, who = _LEAKS[saving.is_there]
        text = f"{who} sees another's hits by time: {text}{saving.needs(len(columns))}"
        verdicts.append(Verdict(status, "tenants", text))
    return verdicts


def _restart(evidence: Evidence, memory: Memory) -> list[Verdict]:
    """Whether the answers of an earlier audit are those of now, and whether the hits on its prompts can be true."""
    outcomes, num = evidence.recalled, len(memory.prompts)
    if len(outcomes) < num:
        return [evidence.unknown(RESTART, "not all remembered prompts were sent again")]
    without = int(evidence.target.bypass is not None)  # the request past the cache; else the first one
    noise = evidence.noise()
    if without:  # any other prompt may be a hit, by chance, of something kept that is wrong
        same = [compare(*(outcome.seen[i].answer.choices[0] for i in (1, 2))) for outcome in outcomes]
        noise = measure_noise(same, [found for outcome in outcomes for _, found in outcome.compared()])
    if noise.is_too_large or noise.num_pairs == 0:
        return [evidence.unknown(RESTART, "the noise is too large or unknown")]
    num_hits = sum(outcome.seen[0].is_hit for outcome in outcomes)
    hits = f"{num_hits} of {plural(num, 'remembered prompt')} were hits"
    found = [
        (outcome, compare(prompt.choice, outcome.seen[without].answer.choices[0]))
        for prompt, outcome in zip(memory.prompts, outcomes, strict=True)
    ]
    tolerance = max(noise.tolerance, memory.tolerance)  # both answers have the noise of their server
    different = tuple(each for each in found if each[1].exceeds(tolerance))
    is_other = Counted(tuple(each for _, each in found), different, (), num_hits).is_fault(noise)
    wrong = count_pairs(outcomes, noise)
    verdicts = []
    if wrong.is_fault(noise):
        text = f"answers changed after the restart: {len(wrong.different)} of {len(wrong.known)} differ from those"
        text += f" {'without the cache' if without else 'of the same prompt a moment later'}; {hits}"
        verdicts.append(Verdict(Status.FAULT, RESTART, text, len(wrong.known), len(wrong.different)))
    changed = f"{len(different)} of {num} answers are no longer the remembered ones"
    if is_other and num_hits:
        text = f"hits are claimed that cannot be: {changed} even without the cache, but {hits}"
        if not without:
            text = f"answers changed after the restart: {changed}, but {hits}: of another model, or wrong"
        verdicts.append(Verdict(Status.FAULT, RESTART, text, num, len(different)))
    elif is_other:
        status = Status.NOTE if evidence.target.reports else Status.UNKNOWN
        verdicts.append(
            Verdict(status, RESTART, f"another model or arithmetic: {changed}; {hits}", num, len(different))
        )
    if verdicts:
        return verdicts
    if different or wrong.different:
        text = f"{changed}; too few to tell from noise"
        return [Verdict(Status.UNKNOWN, RESTART, text, num, len(different))]
    text = f"answers are the remembered ones in {num} of {num}; {hits}"
    return [Verdict(Status.OK if num_hits else Status.NOTE, RESTART, text, num, 0)]


_LEAKS = {
    True: (Status.FAULT, "a tenant"),
    False: (Status.OK, "no tenant"),
    None: (Status.UNKNOWN, "whether a tenant"),
}


def _claimed(evidence: Evidence, outcomes: Sequence[ProbeOutcome], times: str, saving: "Saving") -> Verdict:
    """Whether the reported hits save time."""
    claims = median([outcome.seen[2].num_cached / outcome.probe.length for outcome in outcomes])
    claimed = f"{times}, though {100 * claims:.0f} % of the tokens are reported as cached"
    if not evidence.target.reports:
        status, text = Status.NOTE, f"{'a' if saving.is_there else 'no'} cache is seen by time: {times}"
    elif claims < _SAVED:
        status, text = Status.UNKNOWN, f"too little of the long prompts was a hit to see it by time: {times}"
    elif saving.is_there:
        status, text = Status.OK, f"reported hits save time: {times}"
    elif saving.is_there is False:
        status, text = Status.FAULT, f"the cache is only claimed: {claimed}"
    else:
        needs = saving.needs(len(outcomes[0].seen))
        status, text = Status.UNKNOWN, f"whether reported hits save time is not clear: {claimed}{needs}"
    return Verdict(status, "speed", text)


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


_JUDGES = {"twins": _twins, "moved": _moved, "salts": _salts, "users": _users, "speed": _speed}
