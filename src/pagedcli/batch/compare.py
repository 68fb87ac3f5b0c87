"""Compares rows sample by sample: tokens, texts, how they ended, log-probabilities to the last bit.

Used by cli.verify for two files, and by `generate --verify N`, which generates some rows of a finished run again, each
alone and with nothing in the prefix cache.
"""

import csv
import io
import math
import zlib
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from operator import mul
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal

import msgspec

from pagedcli import runner
from pagedcli.batch.columns import Columns
from pagedcli.batch.decisions import DECISION
from pagedcli.batch.embeddings import EMBEDDING
from pagedcli.batch.outputs import output_rows
from pagedcli.batch.prompts import BatchOptions
from pagedcli.batch.requests import BatchRow, RowPrompt, RowShape
from pagedcli.batch.rows import NOT_A_ROW, RowWriter, Sample, WrittenRow, why_not_a_row
from pagedcli.batch.run import BatchRun
from pagedcli.batch.score_comparison import TARGET, RowScores, first_difference
from pagedcli.batch.sinks import StreamSink
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.core.prefixes import num_equal
from pagedcli.errors import UsageError
from pagedcli.printable import plural

DifferenceKind = Literal[
    "missing",
    "error",
    "prompt",
    "samples",
    "tokens",
    "text",
    "ending",
    "logprobs",
    "prompt_logprobs",
    "scores",
    "answers",
    "vectors",
]
_AROUND = 24  # characters of text on either side of a difference


Listed = tuple[list[float], list[Any]]
"""Log-probabilities at one position: of its token, then of the likeliest; and which tokens these are."""


@dataclass(frozen=True, slots=True)
class ComparedSample:
    """What can be compared of one sample; None: unknown."""

    text: str | None
    reasoning: str | None
    token_ids: list[int] | None
    tokens: list[str] | None  # their texts, from the log-probabilities
    logprobs: list[Listed] | None  # per token
    prompt_logprobs: list[Listed] | None  # the same of the prompt's tokens from the second on
    prompt_token_ids: list[list[int | None]]  # per number of prompt_logprobs; None: the row does not say
    ending: tuple[Any, Any]  # finish reason, stop reason
    vector: list[float] | None = None

    def gap(self, other: "ComparedSample") -> tuple[float, float] | None:
        """The largest difference of two vectors, and their cosine; None if there are none."""
        if (a := self.vector) is None or (b := other.vector) is None:
            return None
        return _largest_delta(a, b), math.fsum(map(mul, a, b)) / (math.hypot(*a) * math.hypot(*b) or 1.0)


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """One row of an output."""

    key: Hashable  # equal in both files
    label: str  # name in messages
    error: str | None  # code
    num_prompt_tokens: int | None
    samples: list[ComparedSample]
    scores: RowScores | None = None  # scores of given continuations
    target: Any = None  # the right answer: a text, or the index of a continuation; None: not known
    decisions: dict[str, dict[str, Any]] = field(default_factory=dict)  # answers to questions

    @property
    def answers(self) -> list[str]:
        """The texts without white space around them, or the index of the best continuation; none of a failed row."""
        if self.scores is not None:
            return [str(self.scores.best["logprob"])]
        if self.decisions:
            return [str(each["choice"]) for each in self.decisions.values()]
        return [(sample.text or "").strip() for sample in self.samples]


@dataclass(frozen=True, slots=True)
class RowDifference:
    """The first difference of two rows."""

    label: Annotated[str, "row"]
    kind: Annotated[DifferenceKind, "what differs"]
    sample: int | None = None
    token: int | None = None  # 0-based position in the output
    character: int | None = None  # 0-based position in the text
    a: Annotated[str, "in A", repr] = ""
    b: Annotated[str, "in B", repr] = ""
    logprob_delta: Annotated[float | None, "logprobs differ by nats"] = None  # the largest of the row


def compare(a: ComparedRow, b: ComparedRow, *, tolerance: float = 0.0) -> RowDifference | None:
    """The first difference; None if there is none. `tolerance`: of log-probabilities."""

    def differ(kind: DifferenceKind, first: object, second: object) -> RowDifference:
        return RowDifference(a.label, kind, a=str(first), b=str(second))

    if a.error != b.error:
        return differ("error", a.error or "no error", b.error or "no error")
    for name in dict.fromkeys([*a.decisions, *b.decisions]):
        both = [{"choice": "no answer", **each.decisions.get(name, {})} for each in (a, b)]
        shares, others = (each.get("probabilities", {}) for each in both)
        if shares.keys() != others.keys() or any(abs(shares[each] - others[each]) > tolerance for each in shares):
            return differ("answers", *(f"{name}: {x['choice']} {x.get('confidence', 0):.6f}" for x in both))
    if None not in (a.num_prompt_tokens, b.num_prompt_tokens) and a.num_prompt_tokens != b.num_prompt_tokens:
        return differ("prompt", f"{a.num_prompt_tokens} prompt tokens", f"{b.num_prompt_tokens} prompt tokens")
    if a.scores is not None and b.scores is not None:
        return _compare_scores(a.label, a.scores, b.scores, tolerance)
    if len(a.samples) != len(b.samples):
        return differ("samples", plural(len(a.samples), "sample"), plural(len(b.samples), "sample"))
    for index, (first, second) in enumerate(zip(a.samples, b.samples, strict=True)):
        if (gap := first.gap(second)) is not None and gap[0] > tolerance:
            return differ("vectors", f"cosine {gap[1]:.9g}", f"{gap[0]:.3g} away")
        found = _compare_samples(a.label, index if len(a.samples) > 1 else None, first, second, tolerance)
        if found is not None:
            return found
    return None


def _compare_scores(label: str, a: RowScores, b: RowScores, tolerance: float) -> RowDifference | None:
    if len(a.scores) != len(b.scores):
        texts = plural(len(a.scores), "continuation"), plural(len(b.scores), "continuation")
        return RowDifference(label, "samples", None, None, None, *texts)
    if (found := first_difference(a, b, tolerance)) is None:
        return None
    index, in_a, in_b, delta = found
    return RowDifference(label, "scores", index, None, None, in_a, in_b, logprob_delta=delta)


def _compare_samples(
    label: str, index: int | None, a: ComparedSample, b: ComparedSample, tolerance: float
) -> RowDifference | None:
    texts = (a.reasoning, b.reasoning)
    character = None if a.reasoning is None or b.reasoning is None else _parting(a.reasoning, b.reasoning)
    if character is None:
        texts = (a.text, b.text)
        character = None if a.text is None or b.text is None else _parting(a.text, b.text)
    around = (_around(texts[0], character), _around(texts[1], character))
    for first, second in ((a.token_ids, b.token_ids), (a.tokens, b.tokens)):
        token = None if first is None or second is None else _parting(first, second)
        if token is not None and first is not None and second is not None:
            if character is None:
                around = (_tokens_around(first, token), _tokens_around(second, token))
            return RowDifference(label, "tokens", index, token, character, *around)
    if character is not None:
        return RowDifference(label, "text", index, None, character, *around)
    if a.ending[0] != b.ending[0] or (None not in (a.ending[1], b.ending[1]) and a.ending[1] != b.ending[1]):
        return RowDifference(label, "ending", index, None, None, _ending(a), _ending(b))
    return _compare_logprobs(label, "logprobs", index, a.logprobs, b.logprobs, tolerance) or _compare_logprobs(
        label, "prompt_logprobs", index, a.prompt_logprobs, b.prompt_logprobs, tolerance
    )


def _compare_logprobs(
    label: str,
    kind: Literal["logprobs", "prompt_logprobs"],
    index: int | None,
    a: list[Listed] | None,
    b: list[Listed] | None,
    tolerance: float,
) -> RowDifference | None:
    if a is None or b is None:
        return None
    if len(a) != len(b):
        return RowDifference(label, kind, index, a=f"{len(a)} positions", b=f"{len(b)} positions")
    deltas = [_largest_delta(first, second) for (first, _), (second, _) in zip(a, b, strict=True)]
    token = next((place for place, delta in enumerate(deltas) if not delta <= tolerance), None)
    if token is not None:
        texts = repr(a[token][0][0]), repr(b[token][0][0])
        return RowDifference(label, kind, index, token, None, *texts, logprob_delta=max(deltas))
    # within a tolerance above 0 neighbours in the list may change places
    token = next((place for place, (x, y) in enumerate(zip(a, b, strict=True)) if x[1] != y[1] and not tolerance), None)
    if token is None:
        return None
    return RowDifference(label, kind, index, token, None, str(a[token][1]), str(b[token][1]), logprob_delta=0.0)


def _parting(a: Any, b: Any) -> int | None:
    """The first position where two sequences differ; None if they are equal."""
    return None if a == b else num_equal(a, b)


def _largest_delta(a: list[float], b: list[float]) -> float:
    if len(a) != len(b):
        return math.inf
    return max((abs(x - y) if x != y else 0.0 for x, y in zip(a, b, strict=True)), default=0.0)


def _around(text: str | None, place: int | None) -> str:
    """The text around a character: what both have in common, then |, then where they diverge."""
    if text is None or place is None:
        return ""
    before = "..." * (place > _AROUND) + text[max(0, place - _AROUND) : place]
    return f"{before}|{text[place : place + _AROUND]}" + "..." * (len(text) > place + _AROUND)


def _tokens_around(tokens: Any, place: int) -> str:
    shown = [str(token) for token in tokens[max(0, place - 3) : place]], [str(token) for token in tokens[place:][:4]]
    return f"tokens {' '.join(shown[0])} | {' '.join(shown[1]) or 'end'}"


def _ending(sample: ComparedSample) -> str:
    finish_reason, stop_reason = sample.ending
    return str(finish_reason) if stop_reason is None else f"{finish_reason} ({stop_reason!r})"


# ---------------------------------------------------------------------- rows of files


def read_rows(
    path: Path, *, answer: str = "text", by_order: bool = False, target: str = TARGET
) -> Iterator[ComparedRow]:
    """The rows of an output. Rows match by id, those without one by their index in the input, or all by their order.
    `target`: the field with the right answer.

    Raises: UsageError if a line is not a row of generate.
    """
    number = 0
    try:
        for number, line in enumerate(output_rows(path), 1):
            yield _read_row(WrittenRow.of(line, answer), number, answer, by_order, target)
    except NOT_A_ROW as error:
        raise UsageError(
            f"line {number} of {path} is not a row of an output: {why_not_a_row(error)}",
            hint="verify reads JSONL, CSV and Parquet of generate, and batch outputs of OpenAI and vLLM",
        ) from error
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        raise UsageError(f"cannot read {path} after line {number}: {error}") from error


def _read_row(row: WrittenRow, number: int, answer: str, by_order: bool, target: str = TARGET) -> ComparedRow:
    key: Hashable = ("id", str(row.id))  # tables have texts for numbers
    label = f"id {row.id!r}"
    if by_order or row.id is None:
        place = number - 1 if by_order or row.index is None else row.index
        key = ("row", place)
        label = f"row {place}" if row.id is None else label
    right = row.fields.get(target)
    if row.error is not None:
        return ComparedRow(key, label, str(row.error.get("code") or row.error["type"]), None, [], None, right)
    is_openai = "response" in row.fields
    if row.usage is None and not is_openai:
        raise KeyError("usage")
    num_prompt_tokens = None if row.usage is None else row.usage["prompt_tokens"]
    samples = [_read_sample(sample, answer, may_lack_text=is_openai) for sample in row.samples]
    return ComparedRow(
        key, label, None, num_prompt_tokens, samples, RowScores.of(row.fields, right), right, row.answers
    )


def _read_sample(sample: Sample, answer: str, *, may_lack_text: bool) -> ComparedSample:
    logprobs = sample.logprobs
    tokens = values = None
    if isinstance(logprobs, dict) and "token_logprobs" in logprobs:  # the form of the completions endpoint
        tokens = msgspec.convert(logprobs["tokens"], list[str])
        values = [
            (_numbers([own, *top.values()]), list(top))
            for own, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=False)
        ]
    elif logprobs is not None:
        positions = logprobs["content"] if isinstance(logprobs, dict) else logprobs
        tokens = msgspec.convert([position["token"] for position in positions], list[str])
        values = _values(positions)
    _, *prompt = sample.prompt_logprobs or [None]
    prompt = prompt if all("logprob" in each for each in prompt) else []  # vLLM's are by token id
    token_ids = [[each.get("token_id"), *(top.get("token_id") for top in each["top_logprobs"])] for each in prompt]
    prompt_ids = msgspec.convert(token_ids, list[list[int | None]])
    ending = (sample.finish_reason, None if sample.stop_reason is None else str(sample.stop_reason))
    text = sample.text
    if sample.tool_calls:  # without their ids, which are those of a run
        calls = [call.get("function", call) for call in sample.tool_calls]
        text = (text or "") + msgspec.json.encode(calls).decode()
    has_no_text = may_lack_text or sample.finish_reason in ("score", DECISION, EMBEDDING)
    if text is None and not has_no_text and sample.token_ids is None:
        raise msgspec.ValidationError(f"it has no field {answer!r} (see --output-field)")
    ids, vector = sample.token_ids, sample.embedding
    return ComparedSample(text, sample.reasoning, ids, tokens, values, _values(prompt), prompt_ids, ending, vector)


def _values(positions: list[dict[str, Any]]) -> list[Listed]:
    return [
        (
            _numbers([each["logprob"], *(top["logprob"] for top in each["top_logprobs"])]),
            list(map(_name, each["top_logprobs"])),
        )
        for each in positions
    ]


def _numbers(logprobs: list[Any]) -> list[float]:
    return msgspec.convert(logprobs, list[float])


def _name(token: dict[str, Any]) -> str:
    """Its text; its bytes where these are no text."""
    return str(token["bytes"] if "\N{REPLACEMENT CHARACTER}" in token["token"] else token["token"])


def pairs(
    a: Iterable[ComparedRow], b: Iterable[ComparedRow]
) -> Iterator[tuple[ComparedRow | None, ComparedRow | None]]:
    """Rows with equal keys; None where the other file has none. Holds only rows whose partner has not come yet."""
    waiting: tuple[dict[Hashable, deque[ComparedRow]], dict[Hashable, deque[ComparedRow]]] = ({}, {})
    for both in zip_longest(a, b):
        for side, row in enumerate(both):
            if row is None:
                continue
            partners = waiting[1 - side].get(row.key)
            if not partners:
                waiting[side].setdefault(row.key, deque()).append(row)
                continue
            partner = partners.popleft()
            if not partners:
                del waiting[1 - side][row.key]
            yield (row, partner) if side == 0 else (partner, row)
    yield from ((row, None) for rows in waiting[0].values() for row in rows)
    yield from ((None, row) for rows in waiting[1].values() for row in rows)


class RowSample:
    """Some finished rows of a run, each equally likely; always the same ones for the same order of completion."""

    def __init__(self, num_wanted: int) -> None:
        self.rows: list[tuple[BatchRow, list[RowPrompt]]] = []
        self._num_wanted = num_wanted
        self._num_seen = 0
        self._random = Random(0)

    def add(self, row: BatchRow, answers: list[RowPrompt]) -> None:
        self._num_seen += 1
        if len(self.rows) < self._num_wanted:
            self.rows.append((row, answers))
        elif (place := self._random.randrange(self._num_seen)) < self._num_wanted:
            self.rows[place] = (row, answers)


def run_again(
    engine: "runner.LLMEngine", tokenizer: Tokenizer, rows: RowWriter, options: BatchOptions, sample: RowSample
) -> list[RowDifference]:
    """Generate the rows of a sample again, one after the other. Returns the first difference of each that has one."""
    with_tokens = replace(rows, columns=Columns(token_ids=True))

    def compared(row: BatchRow, answers: list[RowPrompt]) -> ComparedRow:
        shape: RowShape = "list" if row.shape == "list" else "plain"
        plain = msgspec.structs.replace(row, id=None, shape=shape, kept={})
        return _read_row(WrittenRow.of(with_tokens.encode_success(plain, answers)), 1, "text", by_order=False)

    differences = []
    for row, answers in sample.rows:
        again = RowSample(1)
        name, sink = f"again-{row.line.index}", StreamSink(io.BytesIO(), order="completion")
        alone = options.with_run(limit=None, max_errors=None, max_time=None, reorder="none")
        alone = replace(alone, shard=(0, 1), check_ids=False, cache_namespace=name)
        BatchRun(engine, tokenizer, [row.line], sink, rows, alone, observe_row=again.add).run()
        if not again.rows:
            differences.append(RowDifference(f"row {row.line.index}", "error", a="no error", b="an error"))
        elif (difference := compare(compared(row, answers), compared(*again.rows[0]))) is not None:
            differences.append(difference)
    return differences
