"""Decisions: questions with options about a row. A question becomes one prompt for each order of its options, these are
scored, and the scores become probabilities.

Used by batch.columns, batch.requests, batch.prompts and batch.rows; the engine sees requests with continuations. How a
question is written stands in `Asked` alone.
"""

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from string import ascii_uppercase
from typing import Any, Literal, Self

import msgspec

from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.config import RunConfig
from pagedcli.core.prefixes import num_equal
from pagedcli.core.scoring import ContinuationScore
from pagedcli.errors import RequestError, UsageError
from pagedcli.printable import plural

ANSWERS = "answers"  # field of a row
DECISION = "decision"  # finish reason of a row that has it
_IMPOSSIBLE = -9999.0  # for the logarithm of 0


class Question(msgspec.Struct, frozen=True):
    """A question with its options; all fields but the name are those of a line or a file."""

    name: str
    question: str
    options: tuple[str, ...] = ()
    levels: tuple[str | int | float, ...] = ()  # after `of` the number of each option; none: they have no order
    yes_no: bool = False
    score: Literal["letter", "per_token", "sum"] = "letter"  # of an option: its letter, or its text by mean or sum

    @classmethod
    def of(cls, name: Any, given: Any) -> Self:
        """Raises: RequestError 'invalid_question'."""

        def wrong(what: str) -> RequestError:
            return RequestError("invalid_question", f"question {name!r:.80}: {what}")

        known = cls.__struct_fields__[1:]
        for key in set(given).difference(known) if isinstance(given, dict) else ():
            raise wrong(f"unknown key {key!r}, did you mean {difflib.get_close_matches(str(key), known, 1, 0)[0]!r}?")
        try:
            found = msgspec.convert({"name": name, **msgspec.convert(given, dict[str, Any])}, cls)
        except msgspec.ValidationError as error:
            hint = " (YAML reads yes and no without quotes as true and false)" if "got `bool`" in str(error) else ""
            raise wrong(f"{error}{hint}") from error
        kinds = [kind for kind in ("options", "levels", "yes_no") if getattr(found, kind)]
        if len(kinds) != 1:
            raise wrong(f"it needs options, levels or yes_no, this one has {' and '.join(kinds) or 'none of them'}")
        options = ("yes", "no") if found.yes_no else found.options or tuple(map(str, found.levels))
        if not 2 <= len(options) <= len(ascii_uppercase):
            raise wrong(f"it has {plural(len(options), 'option')}, allowed: 2 to {len(ascii_uppercase)}")
        if len(set(options)) < len(options) or not all(map(str.strip, options)):
            raise wrong("it has an option twice, or an empty one")
        has_text = any(isinstance(level, str) for level in found.levels)
        levels = tuple(range(1, len(options) + 1)) if has_text else found.levels
        return msgspec.structs.replace(found, options=options, levels=levels)

    @property
    def columns(self) -> list[str]:
        """The columns of its answer in a table."""
        more = ["expected_level"] if self.levels else []
        return [self.name, *(f"{self.name}.{each}" for each in [*self.options, *more])]

    def asked(self, run: RunConfig) -> "list[Asked]":
        """The question with its options as they are, or in all cyclic orders."""
        places, temperature = tuple(range(len(self.options))), (run.calibration or {}).get(self.name, 1.0)
        firsts = places if run.shifts == "all" else places[:1]
        return [Asked(self, places[first:] + places[:first], temperature) for first in firsts]


@dataclass(frozen=True, slots=True)
class Asked:
    """A question with its options in one order."""

    question: Question
    order: tuple[int, ...]  # number of the option in each place
    temperature: float = 1.0  # fitted by verify --calibrate; 1.0: none

    @property
    def _options(self) -> tuple[str, ...]:
        return tuple(self.question.options[place] for place in self.order)

    @property
    def are_letters(self) -> bool:
        return self.question.score == "letter"

    @property
    def scored(self) -> tuple[str, ...]:
        """What is scored after the prompt, place after place."""
        return tuple(ascii_uppercase[: len(self.order)]) if self.are_letters else self._options

    @property
    def text(self) -> str:
        marks = [f"{letter}." for letter in self.scored] if self.are_letters else ["-"] * len(self.order)
        return "\n".join([self.question.question, *map(" ".join, zip(marks, self._options, strict=True))])

    @property
    def plain_text(self) -> str:
        """What follows a text that is no chat."""
        return f"\n\n{self.text}\n{_ANSWER}"

    def in_chat(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The chat with the question at the end of its last message, or after that if it is not the user's."""
        if messages[-1]["role"] != "user":
            return [*messages, {"role": "user", "content": self.text}]
        content, text = messages[-1]["content"], f"\n\n{self.text}"
        if isinstance(content, str):
            content += text
        else:  # a part of its own would come after a line break in some templates
            content = [*content[:-1], content[-1] | {"text": content[-1]["text"] + text}]
        return [*messages[:-1], messages[-1] | {"content": content}]


_ANSWER = "Answer:"


def option_tokens(
    tokenizer: Tokenizer, scored: tuple[str, ...], *, are_letters: bool, is_chat: bool
) -> tuple[list[int], list[list[int]]]:
    """The tokens that end the prompt because all letters begin with them, as a space may be, and then those of what is
    scored, place after place.

    Raises: RequestError 'invalid_question' for a letter of several tokens, and for options of equal tokens.
    """
    before, space = ("", "") if is_chat else (_ANSWER, " ")
    encode = partial(tokenizer.encode, add_special_tokens=False)
    num_before = len(encode(before)) if before else 0
    found = [encode(before + space + each)[num_before:] for each in scored]
    num_shared = num_equal(min(found), max(found)) if are_letters else 0
    ends = [token_ids[num_shared:] for token_ids in found]
    if are_letters and any(len(token_ids) != 1 for token_ids in ends):
        raise RequestError("invalid_question", "letters are not one token each of this tokenizer: use score: per_token")
    if len(set(map(tuple, ends))) < len(ends):
        raise RequestError("invalid_question", f"two of the options {', '.join(scored):.80} have the same tokens")
    return found[0][:num_shared], ends


def read_questions(given: Any) -> tuple[Question, ...]:
    """The questions of a line or a file. Raises: RequestError 'invalid_question'."""
    if not isinstance(given, dict) or not given:
        raise RequestError("invalid_question", "'questions' must be an object of names, each with what it asks")
    return tuple(Question.of(name, each) for name, each in given.items())


def run_questions(run: RunConfig) -> tuple[Question, ...]:
    """The questions about all rows. Raises: UsageError."""
    if not all(each > 0 for each in (run.calibration or {}).values()):
        raise UsageError("--calibration: a temperature must be above 0")
    try:
        return () if run.questions is None else read_questions(run.questions)
    except RequestError as error:
        raise UsageError(f"--questions: {error.message}") from error


# ---------------------------------------------------------------------- answers


def answers_of(found: Iterable[tuple[Asked, Sequence[ContinuationScore]]]) -> dict[str, dict[str, Any]]:
    """The answers of a row by question, from the scores of each order: softmax over the options; orders are averaged in
    log space. A temperature changes no choice."""
    answers = {}
    for question, same in groupby(found, lambda each: each[0].question):
        total, scale, per_token = [0.0] * len(question.options), 0.0, question.score == "per_token"
        for asked, scores in same:
            values = [max(each.logprob, _IMPOSSIBLE) / (len(each.token_ids) if per_token else 1) for each in scores]
            for place, value in zip(asked.order, log_softmax(values), strict=True):
                total[place] += value
            scale += asked.temperature
        shares = [math.exp(each) for each in log_softmax([value / scale for value in total])]
        best = total.index(max(total))
        answer = {"choice": question.options[best], "confidence": shares[best]}
        answer["probabilities"] = dict(zip(question.options, shares, strict=True))
        if question.levels:
            levels = map(float, question.levels)
            answer["expected_level"] = math.fsum(map(math.prod, zip(levels, shares, strict=True)))
        answers[question.name] = answer
    return answers


def log_softmax(values: Sequence[float]) -> list[float]:
    largest = max(values)
    total = math.log(math.fsum(math.exp(value - largest) for value in values))
    return [value - largest - total for value in values]


def cells_of(answers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The answers of a row by the column of a table."""
    cells: dict[str, Any] = {}
    for name, answer in answers.items():
        level = {each: answer[each] for each in answer.keys() & {"expected_level"}}
        cells[name] = answer["choice"]
        cells |= {f"{name}.{each}": value for each, value in (answer["probabilities"] | level).items()}
    return cells
