"""How many guessed tokens each step checks: every guess, or those that are worth their time on this machine.

Used by the scheduler; needs no torch. What is decided here changes how long a run takes, never what it generates.
"""

import operator
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from itertools import accumulate, pairwise
from statistics import median_low
from typing import NamedTuple, Protocol

from pagedcli.core.drafts import Draft, Drafter, HeadDrafter, NgramDrafter, within_grammar
from pagedcli.core.limits import MOST_DRAFTED
from pagedcli.core.sequence import Sequence
from pagedcli.events import DraftSource, Speculation

LEAST_GAIN = 1.03  # expected tokens per second with guesses over those without: below, there are none
SHARE_OF_TRIES = 0.005  # share of the time of steps for looking for guesses and for wrong ones in a long run
FIRST_TRIES = 0.5  # the account at first, in steps without guesses
UNKNOWN_RISK = 1.0  # least assumed cost of several guesses of which no step is timed, in steps without guesses
MOST_SAVED = 8.0  # the most in the account, in steps without guesses
STEPS_BETWEEN_TRIES = 16  # steps between two with guesses that are not expected to pay
STEPS_BETWEEN_ESTIMATES = 4  # steps between two that look whether the head pays by now
SURE_CHANCE = 0.7  # chance of the head's first guess from which on it has a credit, after two right ones of two
HEAD_CREDIT = 1.0  # the credit, in steps without guesses
STEPS_WITHOUT_AHEAD = 16  # the most steps in a row of the head for its K and V alone, as texts repeat themselves
UNKNOWN_HEAD = 0.25  # time of the head for a token of each sequence until it has run, in steps without guesses
PROMPT_HEADS = 2  # the head's time counts so often in prompts, as the last layer computes all of their tokens for it
STEPS_WITH_GUESSES = 64  # the most in a row; a step without guesses then is timed again
STEPS_KNOWN = 256  # the age at which the time with a number of guesses is forgotten
FEWEST_PLAIN = 2  # timed steps without guesses before the first with some
NUM_LATEST = 5  # timed steps of a kind; their median is its time
UNKNOWN_RIGHT, UNKNOWN_TRIED = 1.0, 2.0  # right guesses and all guesses, as if the run had begun with them
OWN_WEIGHT = 2.0  # weight of the run's average, in guesses of the sequence itself
KEPT_OF_RUN, KEPT_OF_OWN = 0.99, 0.9  # factors of the counts with each draft that is checked
LEAST_CHANCE = 0.02  # least chance of a token to be right; below, a draft ends
_SIZES = (*range(1, 9), 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # guesses of all sequences of a step together


class Room(NamedTuple):
    """What guesses have room for in a step. Tokens."""

    budget: int  # tokens of all sequences
    chunk_size: int  # most that the step may compute of one
    only_decodes: bool = True  # whether the step computes one token of each sequence, guesses left out
    num_behind: int = 0  # right guesses of the step before that it computes once more, see Sequence.num_behind_tokens

    def most(self, seq: Sequence) -> int:
        """Most guesses of a sequence."""
        num_left = seq.max_num_tokens - seq.num_tokens - 1  # the step adds one token in any case
        return min(MOST_DRAFTED, self.chunk_size - 1 - seq.num_behind_tokens, num_left)


class Drafting(Protocol):
    """Decides what steps check."""

    drafter: Drafter
    head: HeadDrafter | None  # drafts what the model's head guessed; None: the head is not used
    head_pauses: bool  # whether there are steps in which the head does not run

    def choose(self, seqs: Items[Sequence], room: Room) -> list[tuple[int, Draft]]:
        """The places of sequences of a step, and what it guesses of each."""

    def checked(self, seq: Sequence, source: DraftSource, num_drafted: int, num_accepted: int) -> None:
        """So many of the guessed tokens of a sequence were right."""

    def ended(self, seq: Sequence) -> None:
        """A sequence has ended, by itself or not."""

    def ahead(self, seqs: Items[Sequence], most: Callable[[], list[int]]) -> list[int] | None:
        """How many tokens the model's head guesses of each sequence after the step for which `choose` was called last.
        None: the head does not run. `most`: gives the most that it can guess of each."""

    def step_took(self, step_ns: int, head_ns: int = 0) -> None:
        """The step for which `choose` was called last has ended; the head took a part of its time."""


def guess(seq: Sequence, most: int, find: Callable[[Sequence, int], Draft | None]) -> Draft | None:
    """At most so many of a sequence's next tokens; None: no guess."""
    return within_grammar(find(seq, most), seq, most) if most > 0 and seq.can_draft else None


class EveryGuess:
    """Checks every guess, as far as the step has room."""

    head_pauses = False

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.head = drafter if isinstance(drafter, HeadDrafter) else None

    def choose(self, seqs: Items[Sequence], room: Room) -> list[tuple[int, Draft]]:
        chosen: list[tuple[int, Draft]] = []
        budget = room.budget
        for place, seq in enumerate(seqs):
            if budget <= 0:
                break
            if (draft := guess(seq, min(budget, room.most(seq)), self.drafter.draft)) is not None:
                chosen.append((place, draft))
                budget -= len(draft.token_ids)
        return chosen

    def checked(self, seq: Sequence, source: DraftSource, num_drafted: int, num_accepted: int) -> None:
        self.drafter.checked(seq, num_accepted)

    def ended(self, seq: Sequence) -> None:
        self.drafter.ended(seq)

    def ahead(self, seqs: Items[Sequence], most: Callable[[], list[int]]) -> list[int] | None:
        return most()

    def step_took(self, step_ns: int, head_ns: int = 0) -> None:
        pass


class GuessesThatPay:
    """Checks as many guesses as are expected to give the most tokens per second, and none if that is hardly more than
    without any.

    With 4 sequences, a step takes 50 ms, and with 2 guesses 52 ms: if these are right with chances of 0.8 and 0.5, then
    (4 + 1.3) / 52 ms is 27 % more than 4 / 50 ms. The chances come from what was right before, the times
    from the steps of the run; `least_ns` is the least that a step of so many tokens takes by what is known of this
    machine, and keeps from trying what cannot pay.

    Chances and times can be wrong, so there is an account of time: each step pays a small share into it, right guesses
    pay what they save, and wrong ones, looking for guesses and trying again are paid from it. While it is empty,
    nothing is guessed: so a run loses no more than that share, however wrong the guesses are.

    The model's head guesses at the end of a step, before it is known what else is guessed in the next one. It runs
    where the guesses are expected to pay for its time, too, and that time is paid from the account.
    """

    head_pauses = True

    def __init__(
        self,
        drafter: Drafter,
        *,
        clock_ns: Callable[[], int],
        least_ns: Callable[[int], float] | None = None,
        head: HeadDrafter | None = None,
    ) -> None:
        self.drafter, self.head = drafter, head
        self._head_times = _HeadTimes()
        self._head_pays = False  # by the latest estimate, which steps with prompts rely on
        self._num_ahead = self._depth = 0  # of the running step: sequences with guesses of the head, and most of each
        self._last_head_try = self._last_estimate = self._last_ahead = 0  # steps that only decode
        self._clock_ns = clock_ns
        self._times = _StepTimes(least_ns)
        self._chances = _Chances()
        self._account_ns: float | None = None  # None: no step has been timed
        self._num_steps = self._last_try = self._last_plain = 0  # steps that only decode
        self._num_seqs = 0  # sequences of the step that runs; 0: it is not one that only decodes
        self._budget = 0  # most guesses of the running step, in tokens
        self._chosen: list[tuple[int, Draft]] = []  # its guesses
        self._num_drafted = self._num_accepted = self._num_behind = self._choose_ns = 0  # counts of that step

    def choose(self, seqs: Items[Sequence], room: Room) -> list[tuple[int, Draft]]:
        self._num_seqs = len(seqs) if room.only_decodes and room.budget > 0 else 0
        self._num_behind, self._budget = room.num_behind, room.budget
        self._num_drafted = self._num_accepted = self._choose_ns = self._num_ahead = 0
        self._chosen = []
        if not self._num_seqs or self._account_ns is None or self._account_ns <= 0:
            return []
        plain_ns = self._times.plain_ns(self._num_seqs)
        if plain_ns is None or self._num_steps - self._last_plain >= STEPS_WITH_GUESSES:
            return []
        start_ns = self._clock_ns()
        self._chosen = self._worth(self._guesses(seqs, room, start_ns + self._account_ns), plain_ns, room.budget)
        self._choose_ns = self._clock_ns() - start_ns
        return self._chosen

    def ahead(self, seqs: Items[Sequence], most: Callable[[], list[int]]) -> list[int] | None:
        if self._account_ns is None or self._account_ns <= 0:
            return None
        if not self._num_seqs:  # K and V of the tokens for later guesses, and none now: prompts may come next, too
            return [0] * len(seqs) if self._head_pays else None
        plain_ns = self._times.plain_ns(self._num_seqs)
        if plain_ns is None:
            return [0] * len(seqs) if self._head_pays else None
        if not self._head_pays and self._num_steps - self._last_estimate < STEPS_BETWEEN_ESTIMATES:
            return None
        start_ns, self._last_estimate = self._clock_ns(), self._num_steps
        chances = self._chances.of_head(seqs)
        size = self._size_ahead(chances, plain_ns)
        counts = self._counts_ahead(seqs, size, chances[0], most()) if size else [0] * len(seqs)
        self._num_ahead, self._depth = sum(map(bool, counts)), max(counts)
        if self._num_ahead:
            self._last_ahead = self._num_steps
        self._choose_ns += self._clock_ns() - start_ns
        is_wanted = self._head_pays and self._num_steps - self._last_ahead < STEPS_WITHOUT_AHEAD
        return counts if self._num_ahead or is_wanted else None

    def _size_ahead(self, chances: list[float], plain_ns: float) -> int:
        """How many tokens of all sequences together the head should guess; 0: none. `chances`: see of_head."""
        assert self._account_ns is not None
        num_seqs, credit_ns = self._num_seqs, self._credit_ns(plain_ns)
        sums = list(accumulate(chances, initial=0.0))
        best = untried = most = 0
        best_gain, is_due = 0.0, self._num_steps - self._last_head_try >= STEPS_BETWEEN_TRIES
        for size in _SIZES:
            depth, num_deeper = divmod(size, num_seqs)
            took_ns = self._times.with_guesses_ns(num_seqs, size, plain_ns)
            if size > min(self._budget, num_seqs * MOST_DRAFTED) or took_ns is None:
                break
            head_ns = self._head_times.of(min(size, num_seqs), -(-size // num_seqs), plain_ns)
            risk_ns = head_ns + self._risk_ns(size, took_ns, plain_ns)
            if risk_ns > self._account_ns + (credit_ns if size <= num_seqs else 0.0):
                break
            right = num_seqs * sums[depth] + (num_deeper and num_deeper * chances[depth])
            gain = (1 + right / num_seqs) * plain_ns / (took_ns + head_ns)
            if gain > best_gain:
                best, best_gain = size, gain
            if gain >= LEAST_GAIN and not self._times.is_known(num_seqs, size):
                untried = size
            if size == 1 or risk_ns <= self._account_ns / 2:
                most = size
        self._head_pays = best_gain >= LEAST_GAIN
        if self._num_steps + 1 - self._last_plain >= STEPS_WITH_GUESSES:  # the next step checks none
            return 0
        if self._head_pays:
            return max(best, untried)
        if not is_due or not most:
            return 0
        self._last_head_try, self._last_try = self._num_steps, self._num_steps - STEPS_BETWEEN_TRIES  # checked next
        return most

    def _credit_ns(self, plain_ns: float) -> float:
        """What one guess of the head for each of several sequences may take on top of the account, once its guesses
        were mostly right: for a single one the head takes nearly as long, which hardly ever pays."""
        is_sure = self._num_seqs > 1 and self._chances.of_run("mtp") >= SURE_CHANCE
        return HEAD_CREDIT * plain_ns if is_sure else 0.0

    def _counts_ahead(self, seqs: Items[Sequence], size: int, first: float, most: list[int]) -> list[int]:
        """The guesses of each sequence: of those with more left first, and of none whose text repeats itself more
        surely than the head guesses, whose first token is right with the chance `first`."""
        counts = [0] * len(seqs)
        repeating = {
            place
            for place, draft in self._chosen
            if draft.source != "mtp" and self._chances.of(seqs[place], draft)[0] > first
        }
        places = [place for place in range(len(seqs)) if most[place] > 0 and place not in repeating]
        places.sort(key=lambda place: len(seqs[place].token_ids) - seqs[place].max_num_tokens)
        if places:
            depth, num_deeper = divmod(size, len(places))
            for index, place in enumerate(places):
                counts[place] = min(most[place], depth + (index < num_deeper))
        return counts

    def checked(self, seq: Sequence, source: DraftSource, num_drafted: int, num_accepted: int) -> None:
        self.drafter.checked(seq, num_accepted)
        self._num_drafted += num_drafted
        self._num_accepted += num_accepted
        if seq.finish_reason is None:  # otherwise what came after the end may have been right
            self._chances.count(seq, source, num_drafted, num_accepted)

    def ended(self, seq: Sequence) -> None:
        self.drafter.ended(seq)
        self._chances.forget(seq)

    def step_took(self, step_ns: int, head_ns: int = 0) -> None:
        if not self._num_seqs:
            if self.head is not None and self._account_ns is not None:
                self._account_ns += SHARE_OF_TRIES * step_ns - PROMPT_HEADS * head_ns
            return
        self._num_steps += 1
        took_ns = step_ns - self._choose_ns - head_ns
        if self._num_ahead:
            self._head_times.add(self._num_ahead, self._depth, head_ns)
        has_guesses = self._num_drafted or self._num_behind  # or what is left of those of the step before
        if not has_guesses:
            self._last_plain = self._num_steps
        plain_ns = self._times.plain_ns(self._num_seqs)
        if self._num_drafted or not has_guesses:
            self._times.add(self._num_seqs, self._num_drafted, took_ns, self._num_steps)
        if plain_ns is None:
            if (plain_ns := self._times.plain_ns(self._num_seqs)) is not None and self._account_ns is None:
                self._account_ns = FIRST_TRIES * plain_ns
            return
        assert self._account_ns is not None, "it is opened when the first time is known"
        saved_ns = plain_ns * (1 + self._num_accepted / self._num_seqs) - took_ns if has_guesses else 0
        account_ns = self._account_ns + saved_ns - self._choose_ns - head_ns + SHARE_OF_TRIES * took_ns
        self._account_ns = min(account_ns, MOST_SAVED * plain_ns)

    def _guesses(self, seqs: Items[Sequence], room: Room, end_ns: float) -> list[tuple[int, Draft, list[float], int]]:
        """Guesses: the sequence's place, its draft, the chances that all tokens of that up to each are right, and how
        many tokens the sequence may still generate."""
        found = []
        for place, seq in enumerate(seqs):
            if self._clock_ns() > end_ns:  # the account has no more for looking
                break
            if (draft := guess(seq, room.most(seq), self._guess)) is not None:
                num_left = seq.max_num_tokens - len(seq.token_ids)
                found.append((place, draft, self._chances.of(seq, draft), num_left))
        return found

    def _guess(self, seq: Sequence, most: int) -> Draft | None:
        """The guess from texts or of the head, of which more is expected to be right."""
        draft = self.drafter.draft(seq, most)
        ahead = None if self.head is None else self.head.draft(seq, most)
        if draft is None or ahead is None:
            return draft or ahead
        return max(draft, ahead, key=lambda each: sum(self._chances.of(seq, each)))

    def _worth(
        self, guesses: list[tuple[int, Draft, list[float], int]], plain_ns: float, budget: int
    ) -> list[tuple[int, Draft]]:
        """The guesses that pay, each cut where its further tokens do not."""
        num_seqs = self._num_seqs
        # Of a guess, each token is at most as likely as those before it: the best ones are beginnings. Sequences with
        # more left go first: the last one alone takes nearly as long for a token as all of them do.
        likeliest = [
            (chance * left**3, chance, index)
            for index, (_, _, chances, left) in enumerate(guesses)
            for chance in chances
        ]
        likeliest = sorted(likeliest, reverse=True)[:budget]
        if not likeliest:
            return []
        assert self._account_ns is not None, "there is nothing to choose before it is opened"
        # guesses of the head are there already, so what they took does not count any more; one is checked in any case,
        # which shows how often they are right
        is_paid = any(draft.source == "mtp" for _, draft, _, _ in guesses)
        credit_ns = self._credit_ns(plain_ns) if is_paid else 0.0
        best, best_gain = 0, 0.0
        sums = list(accumulate((chance for _, chance, _ in likeliest), initial=0.0))
        sizes = [size for size in _SIZES if size < len(sums)]
        untried = 0
        for size in sizes:
            took_ns = self._times.with_guesses_ns(num_seqs, size, plain_ns)
            limit_ns = self._account_ns + (credit_ns if size <= num_seqs else 0.0)
            if took_ns is None or self._risk_ns(size, took_ns, plain_ns) > limit_ns:
                break
            gain = (1 + sums[size] / num_seqs) * plain_ns / took_ns
            if gain > best_gain:
                best, best_gain = size, gain
            if gain >= LEAST_GAIN and not self._times.is_known(num_seqs, size):
                untried = size
        if best_gain < (1.0 if is_paid else LEAST_GAIN):
            best = self._size_of_try(sizes, plain_ns) or int(is_paid)
        elif untried > best:  # even if it were worse than the best, it would be better than nothing
            best = untried
        counts: dict[int, int] = defaultdict(int)
        for _, _, index in likeliest[:best]:
            counts[index] += 1
        return [
            (guesses[index][0], Draft(guesses[index][1].token_ids[:count], guesses[index][1].source))
            for index, count in sorted(counts.items())
        ]

    def _risk_ns(self, size: int, took_ns: float, plain_ns: float) -> float:
        """What so many guesses lose if all are wrong. Where it is not known it may be much, as after the last row of a
        pass over the weights; a single guess is tried anyway."""
        is_known = size == 1 or self._times.is_known(self._num_seqs, size)
        return took_ns - plain_ns if is_known else max(took_ns - plain_ns, UNKNOWN_RISK * plain_ns)

    def _size_of_try(self, sizes: list[int], plain_ns: float) -> int:
        """How many tokens to guess although it is not expected to pay: now and then, as many as the account allows."""
        assert self._account_ns is not None
        if self._num_steps - self._last_try < STEPS_BETWEEN_TRIES:
            return 0
        self._last_try, most = self._num_steps, 0
        for size in sizes:
            took_ns = self._times.with_guesses_ns(self._num_seqs, size, plain_ns)
            if took_ns is None or self._risk_ns(size, took_ns, plain_ns) > self._account_ns / (1 if size == 1 else 2):
                break
            most = size
        return most


class _StepTimes:
    """How long steps of decodes take, by their number of sequences and of guesses: medians of the latest."""

    def __init__(self, least_ns: Callable[[int], float] | None) -> None:
        self._least_ns = least_ns
        self._latest: dict[tuple[int, int], deque[int]] = {}
        self._known: dict[int, dict[int, float]] = defaultdict(dict)  # class of sequences -> guesses -> ns
        self._ends: dict[tuple[int, int], int] = {}  # the number of the last step of each kind

    def add(self, num_seqs: int, num_drafted: int, took_ns: int, num_steps: int) -> None:
        """A step took so long; it is the `num_steps`-th."""
        kind = _class_of(num_seqs), num_drafted
        if num_steps - self._ends.get(kind, num_steps) > STEPS_KNOWN:
            del self._latest[kind]
        self._ends[kind] = num_steps
        latest = self._latest.setdefault(kind, deque(maxlen=NUM_LATEST))
        latest.append(took_ns)
        if num_drafted or len(latest) >= FEWEST_PLAIN:
            self._known[kind[0]][num_drafted] = median_low(latest)
        if num_drafted:
            self._forget(kind[0], num_steps)

    def _forget(self, of_class: int, num_steps: int) -> None:
        """Times with numbers of guesses that have not been tried for long."""
        known = self._known[of_class]
        for num_drafted in [each for each in known if num_steps - self._ends[of_class, each] > STEPS_KNOWN]:
            if num_drafted:
                del known[num_drafted]

    def plain_ns(self, num_seqs: int) -> float | None:
        """Without guesses; None: not known."""
        return self._known[_class_of(num_seqs)].get(0)

    def is_known(self, num_seqs: int, num_drafted: int) -> bool:
        """Whether steps with so many guesses have been timed."""
        return num_drafted in self._known[_class_of(num_seqs)]

    def with_guesses_ns(self, num_seqs: int, num_drafted: int, plain_ns: float) -> float | None:
        """With guesses. A number that has not been tried is expected to take little more than a smaller one that has:
        trying it shows what it takes. None: it is more than twice the most that has been tried."""
        known = self._known[_class_of(num_seqs)]
        if (took_ns := known.get(num_drafted)) is not None:
            return took_ns
        tried = sorted(known)
        if num_drafted > 2 * tried[-1] + 1:
            return None
        below = tried[bisect_right(tried, num_drafted) - 1]
        slopes = ((known[after] - known[before]) / (after - before) for before, after in pairwise(tried))
        took_ns = known[below] + max(0.0, min(slopes, default=0.0)) * (num_drafted - below)
        if self._least_ns is not None:
            took_ns = max(took_ns, plain_ns * self._least_ns(num_seqs + num_drafted) / self._least_ns(num_seqs))
        return took_ns


def _class_of(num_seqs: int) -> int:
    """Numbers of sequences whose steps are timed together: up to 16 each alone, then eight between powers of two."""
    shift = max(0, num_seqs.bit_length() - 4)
    return num_seqs >> shift << shift


class _Chances:
    """How often guesses were right, if all before them were: in the run, by source and place in the guess, and in each
    sequence, by source. What happened long ago counts less."""

    def __init__(self) -> None:
        self._run: dict[DraftSource, list[list[float]]] = defaultdict(list)  # source -> [right, tried] of each place
        self._own: dict[int, dict[DraftSource, list[float]]] = defaultdict(dict)  # seq_id -> source -> [right, tried]

    def of(self, seq: Sequence, draft: Draft) -> list[float]:
        """The chances that all tokens of a guess up to each are right, without those that hardly ever are."""
        right, tried = self._own[seq.seq_id].get(draft.source, (0.0, 0.0))
        chances, chance = list[float](), 1.0
        for place in range(len(draft.token_ids)):
            chance *= (right + OWN_WEIGHT * self.of_run(draft.source, place)) / (tried + OWN_WEIGHT)
            chances.append(chance)
            if chance < LEAST_CHANCE:
                break
        return chances

    def count(self, seq: Sequence, source: DraftSource, num_drafted: int, num_accepted: int) -> None:
        """A guess was checked."""
        places, num_tried = self._run[source], min(num_accepted + 1, num_drafted)
        while len(places) < num_drafted:
            places.append([UNKNOWN_RIGHT, UNKNOWN_TRIED])
        for place in range(num_tried):
            counts = places[place]
            counts[0] = KEPT_OF_RUN * counts[0] + (place < num_accepted)
            counts[1] = KEPT_OF_RUN * counts[1] + 1
        own = self._own[seq.seq_id].setdefault(source, [0.0, 0.0])
        own[0] = KEPT_OF_OWN * own[0] + num_accepted
        own[1] = KEPT_OF_OWN * own[1] + num_tried

    def of_run(self, source: DraftSource, place: int = 0) -> float:
        """The chance that this token of a guess is right if those before it are, in the run."""
        places = self._run[source]
        right, tried = places[place] if place < len(places) else (UNKNOWN_RIGHT, UNKNOWN_TRIED)
        return right / tried

    def of_head(self, seqs: Items[Sequence]) -> list[float]:
        """The chances that all tokens of a guess of the head up to each are right, in the mean of these sequences."""
        chances = list[float]()
        known = [each["mtp"] for seq in seqs if (each := self._own.get(seq.seq_id)) is not None and "mtp" in each]
        num_unknown = len(seqs) - len(known)
        for place in range(MOST_DRAFTED):
            run = self.of_run("mtp", place)
            own = [(right + OWN_WEIGHT * run) / (tried + OWN_WEIGHT) for right, tried in known]
            chances.append((sum(own) + num_unknown * run) / len(seqs))
        return list(accumulate(chances, operator.mul))

    def forget(self, seq: Sequence) -> None:
        """A sequence has ended."""
        self._own.pop(seq.seq_id, None)


class _HeadTimes:
    """How long the model's head takes, by how many sequences it guesses of and how far: medians of the latest."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, int], deque[int]] = {}

    def add(self, num_seqs: int, depth: int, took_ns: int) -> None:
        """It took so long for at most `depth` tokens of each of so many sequences."""
        self._latest.setdefault((_class_of(num_seqs), depth), deque(maxlen=NUM_LATEST)).append(took_ns)

    def of(self, num_seqs: int, depth: int, plain_ns: float) -> float:
        """The time for at most `depth` tokens of each of so many sequences, by the most similar case that was timed:
        each further token takes as long as one. Before any, a part of a step without guesses."""
        kind = _class_of(num_seqs), depth
        if not self._latest:
            return UNKNOWN_HEAD * plain_ns * depth
        near = min(self._latest, key=lambda each: (abs(each[0] - kind[0]), abs(each[1] - depth)))
        return median_low(self._latest[near]) * max(1.0, depth / near[1])


def make_drafting(
    speculation: Speculation,
    *,
    clock_ns: Callable[[], int],
    least_ns: Callable[[int], float] | None = None,
    has_head: bool = False,
) -> Drafting | None:
    """What decides for a plan's `speculation`; `least_ns` as for GuessesThatPay, `has_head`: whether the model has one
    that runs."""
    match speculation:
        case "off":
            return None
        case "ngram":
            return EveryGuess(NgramDrafter())
        case "mtp":
            return EveryGuess(HeadDrafter())
        case "auto":
            head = HeadDrafter(one_more=False) if has_head else None
            return GuessesThatPay(NgramDrafter(one_more=False), clock_ns=clock_ns, least_ns=least_ns, head=head)
