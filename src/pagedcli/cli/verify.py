"""`pagedcli verify`: whether two outputs are the same, row by row, and where they diverge."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from pagedcli.batch.answer_comparison import AnswerQuality, Judged, targets_of
from pagedcli.batch.compare import ComparedRow, RowDifference, compare, pairs, read_rows
from pagedcli.batch.score_comparison import (
    TARGET,
    BestAnswers,
    Interval,
    LogitComparison,
    LogitMeasure,
    ScoreComparison,
    interval,
    interval_text,
)
from pagedcli.cli.options import FormatOption
from pagedcli.errors import UsageError
from pagedcli.files import whole_file, writing
from pagedcli.printable import capitalized, plural
from pagedcli.show.tables import Format, Table, print_tables, table

EXIT_DIFFERENT = 1
_MAX_SHOWN, _MAX_LISTED = 10, 1000
_MEANINGS = {
    "missing": "in one file only",
    "error": "different errors",
    "prompt": "different prompts",
    "samples": "different numbers of samples",
    "tokens": "different tokens",
    "text": "different texts",
    "ending": "ended differently",
    "logprobs": "equal tokens, different log-probabilities",
    "prompt_logprobs": "different log-probabilities of the prompt",
    "scores": "different scores",
    "answers": "different answers to a question",
    "vectors": "different vectors",
}


_Outputs = Annotated[
    list[Path],
    typer.Argument(
        metavar="OUTPUT", help="JSONL (also .gz), CSV or Parquet of generate, or a batch output of OpenAI or vLLM."
    ),
]
_ByOrder = Annotated[bool, typer.Option("--by-order", help="Match rows by position instead of by id.")]
_TOLERANCE_HELP = "Largest difference of log-probabilities that counts as equal."
_Tolerance = Annotated[float, typer.Option("--tolerance", metavar="X", min=0, help=_TOLERANCE_HELP)]
_LOGITS_HELP = "Compare the log-probabilities of the prompts' tokens instead of the outputs."
_CALIBRATE_HELP = "Write the temperature of each question that fits one output with right answers best, for generate."
_Calibrate = Annotated[Path | None, typer.Option("--calibrate", metavar="FILE.json", help=_CALIBRATE_HELP)]
_TEXT_HELP, _KEEP_HELP = "Field of plain rows that holds the text.", "Column of the rows with the right answer."


def verify(
    files: _Outputs,
    *,
    by_order: _ByOrder = False,
    tolerance: _Tolerance = 0.0,
    calibrate: _Calibrate = None,
    logits: Annotated[bool, typer.Option("--logits", help=_LOGITS_HELP)] = False,
    output_field: Annotated[str, typer.Option("--output-field", metavar="NAME", help=_TEXT_HELP)] = "text",
    keep: Annotated[str, typer.Option("--keep", metavar="NAME", help=_KEEP_HELP)] = TARGET,
    format_: FormatOption = Format.TABLE,
) -> None:
    """Compare two or more outputs row by row: tokens, texts, finish reasons, and log-probabilities to the last bit.

    Rows match by id; rows without an id by their index in the input. Where a row differs, the position of the first
    different token is shown with the text on either side of |. More than two files are compared with the first, in one
    table. Cached tokens, ids and times of the run are not compared, tokens by id where both files have token_ids.

    For rows with scores of continuations it shows how many answers flipped and how far log-probabilities differ. If
    rows have the right answer, or the index of the right continuation, in a column (`target`, or that of --keep), it
    also shows how often each file is right: what other weights cost.

    For rows with answers to questions it shows the same for each question, also Brier score, log loss and expected
    calibration error (10 bins); --tolerance is of probabilities. --calibrate fits a temperature per question to one
    output, for generate --calibration.

    --logits shows what quantized weights or caches cost, from prompts with prompt_logprobs: perplexities, how often the
    likeliest token is the same, and the KL divergence of B from A. Rows list only the likeliest tokens, so the
    divergence is computed over the tokens that both files list at a position, and all others as one: a lower bound.
    Intervals are of 95 %; 32 neighbouring tokens count as one observation.

    \b
    Examples:
      pagedcli generate prompts.jsonl -o a.jsonl --output-token-ids --logprobs 3
      pagedcli generate prompts.jsonl -o b.jsonl --output-token-ids --logprobs 3 --max-num-seqs 1
      pagedcli verify a.jsonl b.jsonl
      pagedcli verify cpu.jsonl gpu.jsonl --tolerance 0.01
      pagedcli verify ours.jsonl vllm.jsonl
      pagedcli verify bf16.jsonl int4.jsonl    (rows of `generate questions.jsonl --keep target`)
      pagedcli verify a.jsonl b.csv c.parquet --keep label
      pagedcli verify labelled.jsonl --calibrate cal.json
      pagedcli verify bf16.jsonl int4.jsonl --logits      (both of `generate texts.jsonl --prompt-logprobs 100`)

    Exit codes: 0 all rows are equal, or with --logits compared, 1 rows differ, 2 a file cannot be compared.
    """
    a, *others = files
    _check_files(files, (1, 1) if calibrate else (2, 2) if logits else (2, len(files)))
    rows = partial(read_rows, answer=output_field, by_order=by_order, target=keep)
    if calibrate is not None:
        _calibrate(rows(a), str(a), calibrate, format_)
    elif logits:
        _compare_logits(pairs(rows(a), rows(others[0])), format_)
    else:
        found = [_Comparison(tolerance) for _ in others]
        for path, each in zip(others, found, strict=True):
            for both in pairs(rows(a), rows(path)):
                each.add(*both)
        _print_comparisons(files, found, format_, keep)
        raise typer.Exit(EXIT_DIFFERENT if any(each.differences for each in found) else 0)


def _check_files(files: list[Path], numbers: tuple[int, int]) -> None:
    """Raises: UsageError. `numbers`: how many files there may be at least and at most."""
    if not numbers[0] <= len(files) <= numbers[1]:
        whose = {(1, 1): "--calibrate reads one output", (2, 2): "--logits compares two outputs"}
        raise UsageError(f"{whose.get(numbers, 'verify needs two outputs')}, got {len(files)}")
    if (wrong := next((path for path in files if not path.is_file()), None)) is not None:
        what = f"{wrong} is not a file of rows" if wrong.exists() else f"there is no {wrong}"
        raise UsageError(what, hint="pagedcli merge joins the parts of a --ray run" if wrong.exists() else None)


@dataclass(frozen=True, slots=True)
class ComparedFile:
    """One of several outputs, compared with the first one."""

    file: str
    rows: int  # rows that either file has
    equal: Annotated[int | None, "equal rows"] = None  # None: it is the first file
    answers_differ: Annotated[int | None, "answers that differ"] = None
    with_target: Annotated[int, "rows with the right answer"] = 0
    right: Annotated[float | None, "right", "{:.1%}".format] = None
    interval: Annotated[Interval | None, "95 %", interval_text] = None


def _print_comparisons(files: list[Path], found: "list[_Comparison]", format_: Format, keep: str) -> None:
    """One line per file; of two files what differs, too. Raises: UsageError if no row has the field `keep`."""
    if keep != TARGET and not any(each.num_targets or each.judged for each in found):
        raise UsageError(f"no row has a field {keep!r} (--keep)", hint="generate --keep copies a column of the input")
    of_two = found[0]
    rows = [ComparedFile(str(files[0]), of_two.num_rows, None, None, *of_two.accuracy(0))]
    for path, each in zip(files[1:], found, strict=True):
        equal = each.num_rows - each.kinds.total()
        rows.append(ComparedFile(str(path), each.num_rows, equal, each.num_other_answers, *each.accuracy(1)))
    names, rated = list(map(str, files)), []
    for name, (first, _) in of_two.judged.items():
        others = (each.judged[name][1].quality(name, file) for file, each in zip(names[1:], found, strict=True))
        rated += [first.quality(name, names[0]), *others]
    columns = "file rows equal answers_differ" + " with_target right interval" * any(row.with_target for row in rows)
    all_files = table(ComparedFile, "files", "Files", rows, columns)
    if len(found) > 1:
        differ = "; ".join(f"{row.file} {row.answers_differ:,} of {row.rows:,}" for row in rows[1:])
        print_tables(
            [all_files, *_answer_tables(rated)],
            format_,
            story=[f"Answers that differ from those of {files[0]}: {differ}."],
        )
        return
    tables, story = [*of_two.tables(), *_answer_tables(rated)], [of_two.answer()]
    if format_ is Format.TABLE and not of_two.differences:  # the answer has all counts
        story += tables.pop(0).notes
    tables += [all_files] if of_two.num_targets and not of_two.scores.num_rows else []
    print_tables(tables, format_, facts=of_two.facts(), story=story)


def _answer_tables(rows: list[AnswerQuality]) -> list[Table]:
    """How good the answers to each question are; none if there are no questions."""
    columns = "question file rows flipped"
    if any(row.with_target for row in rows):
        columns += " with_target right interval brier log_loss calibration_error error_interval"
    return [table(AnswerQuality, "questions", "Answers to questions", rows, columns)] if rows else []


def _calibrate(rows: Iterable[ComparedRow], name: str, path: Path, format_: Format) -> None:
    """Raises: UsageError if no answer has its right one."""
    judged: dict[str, Judged] = defaultdict(Judged)
    for row in rows:
        targets = targets_of(row.decisions, row.target)
        for question, answer in row.decisions.items():
            judged[question].add(answer, targets.get(question))
    found = {question: each.best_temperature() for question, each in judged.items() if each.labelled}
    if not found:
        raise UsageError(f"{name} has no answer with the right one", hint="generate --questions @FILE --keep target")
    if path.exists():
        raise UsageError(f"--calibrate: {path} already exists", hint="name another file")
    with writing(f"the temperatures {path}", UsageError), whole_file(path, overwrite=False) as file:
        file.write(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    both = ((name, 1.0), ("calibrated", None))
    rated = [judged[each].quality(each, file, one or found[each]) for each in found for file, one in both]
    story = ", ".join(f"{each} {value:g} (from {len(judged[each].labelled):,})" for each, value in found.items())
    print_tables(_answer_tables(rated), format_, facts=found, story=[f"Temperatures, in {path}: {story}."])


def _compare_logits(rows: Iterable[tuple[ComparedRow | None, ComparedRow | None]], format_: Format) -> None:
    """Raises: UsageError if there is nothing to compare."""
    found = LogitComparison()
    for both in rows:
        samples = [row.samples if row is not None else [] for row in both]
        for a, b in zip_longest(*samples):
            if a is None or b is None:
                found.num_left_out += 1
            elif a.prompt_logprobs or b.prompt_logprobs:
                prompts = (
                    (each.prompt_token_ids, [values for values, _ in each.prompt_logprobs or ()]) for each in (a, b)
                )
                found.add(*prompts)
    if not found.num_prompts:
        raise UsageError(
            "no prompt has log-probabilities of the same tokens in both files",
            hint="generate both with --prompt-logprobs 100",
        )
    compared = f"{plural(found.num_tokens, 'token')} of {plural(found.num_prompts, 'prompt')}"
    lists = f"KL of the tokens that both files list, {found.num_listed} at most, and all others as one"
    left_out = f"{plural(found.num_left_out, 'prompt')} without the same tokens in both files"
    answer = f"{capitalized(found.finding())} ({compared}; {lists})."
    answer += f" Left out: {left_out}." if found.num_left_out else ""
    facts = {"num_prompts": found.num_prompts, "num_tokens": found.num_tokens, "num_left_out": found.num_left_out}
    tables = [table(LogitMeasure, "logits", "Log-probabilities of the prompts", found.measures())]
    print_tables(tables, format_, facts=facts, story=[answer])


@dataclass(frozen=True, slots=True)
class RowCount:
    """How many rows of a kind there are."""

    what: str
    rows: int


@dataclass(slots=True)
class _Comparison:
    """The counters of a comparison, and its first differences."""

    tolerance: float
    num_rows: int = 0
    kinds: Counter[str] = field(default_factory=Counter)  # kind of difference -> rows
    num_with_ids: int = 0  # rows compared by token ids
    num_with_logprobs: int = 0
    scores: ScoreComparison = field(default_factory=ScoreComparison)
    largest_delta: float = 0.0
    differences: list[RowDifference] = field(default_factory=list)
    num_decided: int = 0  # rows with answers to questions
    num_vectors: int = 0
    largest_gap: tuple[float, str] = 0.0, ""  # the largest difference of a vector's elements, and the row
    least_cosine: tuple[float, str] = math.inf, ""
    num_other_answers: int = 0  # rows with another text, or another best continuation, in B
    num_targets: int = 0  # rows whose right answer is known
    num_right: list[int] = field(default_factory=lambda: [0, 0])  # rows in A and B
    judged: dict[str, tuple[Judged, Judged]] = field(default_factory=lambda: defaultdict(lambda: (Judged(), Judged())))

    def add(self, a: ComparedRow | None, b: ComparedRow | None) -> None:
        self.num_rows += 1
        if a is None or b is None:
            only = a or b
            assert only is not None, "one file has the row"
            here, there = ("missing" if row is None else "present" for row in (a, b))
            difference: RowDifference | None = RowDifference(only.label, "missing", a=here, b=there)
        else:
            difference = compare(a, b, tolerance=self.tolerance)
            if a.scores is not None and b.scores is not None and len(a.scores.scores) == len(b.scores.scores):
                self.scores.add(a.scores, b.scores)
            samples = list(zip(a.samples, b.samples, strict=False))
            for gap, cosine in filter(None, (x.gap(y) for x, y in samples)):
                self.num_vectors += 1
                self.largest_gap = max(self.largest_gap, (gap, a.label))
                self.least_cosine = min(self.least_cosine, (cosine, a.label))
            self.num_other_answers += a.answers != b.answers
            self._add_target(a, b)
            self.num_with_ids += any(x.token_ids is not None and y.token_ids is not None for x, y in samples)
            self.num_with_logprobs += any(x.logprobs is not None and y.logprobs is not None for x, y in samples)
        if difference is not None:
            self.kinds[difference.kind] += 1
            self.largest_delta = max(self.largest_delta, difference.logprob_delta or 0.0)
            if len(self.differences) < _MAX_LISTED:
                self.differences.append(difference)

    def _add_target(self, a: ComparedRow, b: ComparedRow) -> None:
        """Count two rows if one of them has the target."""
        target = b.target if a.target is None else a.target
        targets = targets_of(a.decisions, target)
        self.num_decided += bool(a.decisions)
        for name in (each for each in a.decisions if each in b.decisions):
            right = targets.get(name)
            self.judged[name][0].add(a.decisions[name], right)
            self.judged[name][1].add(b.decisions[name], right, a.decisions[name])
        if target is not None and not a.decisions:
            self.num_targets += 1
            for place, row in enumerate((a, b)):
                self.num_right[place] += row.answers[:1] == [str(target).strip()]

    def accuracy(self, place: int) -> tuple[int, float | None, Interval | None]:
        """Of A (0) or B (1): the rows with a target, the share of right ones, and its interval."""
        if not self.num_targets:
            return 0, None, None
        num_right = self.num_right[place]
        return self.num_targets, num_right / self.num_targets, interval(num_right, self.num_targets)

    def facts(self) -> dict[str, Any]:
        num_different = self.kinds.total()
        return {
            "num_rows": self.num_rows,
            "num_equal": self.num_rows - num_different,
            "num_different": num_different,
            "num_compared_by_token_ids": self.num_with_ids,
            "num_compared_with_logprobs": self.num_with_logprobs,
            "largest_logprob_difference": self.largest_delta,
            **(self.scores.facts() if self.scores.num_rows else {}),
        } | ({"vector_gap": self.largest_gap, "least_cosine": self.least_cosine} if self.num_vectors else {})

    def answer(self) -> str:
        """Whether the rows are equal; otherwise how many differ, and where the first one does."""
        num_different, all_rows = self.kinds.total(), plural(self.num_rows, "row")
        finding = f"{self.num_rows:,} of {all_rows} {'is' if self.num_rows == 1 else 'are'} equal"
        if self.differences:
            first = self.differences[0]
            token = "" if first.token is None else f" at token {first.token}"
            finding = (
                f"{num_different:,} of {all_rows} differ{'s' if num_different == 1 else ''}; first"
                f" {first.label}{token}: {_MEANINGS[first.kind]}"
            )
        compared = ["scores"] * bool(self.scores.num_rows) + ["answers"] * bool(self.num_decided)
        compared += ["vectors"] * bool(self.num_vectors)
        if self.scores.num_rows + self.num_decided + self.num_vectors < self.num_rows:
            compared.append("token ids" if self.num_with_ids else "texts")
        if self.num_with_logprobs:
            compared.append("log-probabilities")
        within = f" within {self.tolerance:g}" if self.tolerance else ""
        text = f"{finding} (compared: {', '.join(compared)}{within})."
        if self.largest_gap[0]:
            (gap, row), (cosine, of_row) = self.largest_gap, self.least_cosine
            text += f" Vectors differ by {gap:.3g} at most ({row}); the smallest cosine is {cosine:.9g} ({of_row})."
        return text

    def tables(self) -> list[Table]:
        num_different = self.kinds.total()
        counts = {"rows": self.num_rows, "equal": self.num_rows - num_different}
        counts |= {_MEANINGS[kind]: number for kind, number in sorted(self.kinds.items())}
        rows = [RowCount(what, number) for what, number in counts.items()]
        tables = [table(RowCount, "rows", "Rows", rows, notes=self._notes())]
        if self.scores.num_rows:
            answers, notes = self.scores.answers(), [self.scores.note()]
            tables.append(table(BestAnswers, "answers", "Best continuations", answers, self._columns(), notes=notes))
        if self.differences:
            more = num_different - min(_MAX_SHOWN, len(self.differences))
            notes = [f"and {more:,} more; --format json lists the first {_MAX_LISTED:,}"] if more else []
            columns, listed = "label kind sample token a b", self.differences
            title = ("differences", "Differences")
            tables.append(table(RowDifference, *title, listed, columns, notes=notes, max_shown=_MAX_SHOWN))
        return tables

    def _columns(self) -> str:
        """Columns of the best continuations: how many are right where targets are known."""
        has_targets = any(each.with_target for each in self.scores.answers())
        return "measure flipped with_target right_a interval_a right_b interval_b" if has_targets else "measure flipped"

    def _notes(self) -> list[str]:
        notes: list[str] = []
        if self.scores.num_rows + self.num_decided + self.num_vectors >= self.num_rows:
            return notes
        if not self.num_with_ids:
            notes.append("texts were compared, not token ids: generate --output-token-ids adds them")
        if not self.num_with_logprobs:
            notes.append("no log-probabilities were compared: generate --logprobs adds them")
        elif self.largest_delta:
            notes.append(f"log-probabilities of equal tokens differ by up to {self.largest_delta:.3g}")
        return notes
