"""Columns chosen by the user: where a line has its prompt and id, what its row copies and where it has the answer.

Used by batch.prompts and by the writers of rows.
"""

import difflib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from pagedcli.batch.column_template import ColumnTemplate
from pagedcli.batch.decisions import ANSWERS, run_questions
from pagedcli.batch.embeddings import EMBEDDING
from pagedcli.config import InputFormat, RunConfig
from pagedcli.errors import UsageError

_NAMES = msgspec.json.Decoder(dict[str, msgspec.Raw])
OutputKind = Literal["jsonl", "csv", "parquet"]
ALL = "all"
INVALID_ROW = "pagedcli_invalid_row"  # field of a line made from a row of a table that cannot be one: what is wrong
_ROW_FIELDS = frozenset(
    ("index", "id", "custom_id", "response", "error", "outputs", "finish_reason", "stop_reason", "beam_score")
) | {*("usage", "metrics", "logprobs", "prompt_logprobs", "token_ids", "reasoning_content", "tool_calls")}
_IDS = ("id", "custom_id")
REASONING, CALLS = frozenset(("reasoning_content", "reasoning_tokens")), frozenset(("tool_calls",))
SCORES = frozenset(("best", "scores"))
DISK = frozenset(("disk_cached_tokens",))
METRICS = ("queued_s", "ttft_s", "tpot_s", "latency_s", "preemptions", "recomputed_tokens")
_ONLY_IN: dict[OutputKind, frozenset[str]] = {
    "jsonl": frozenset(),
    "csv": frozenset(("sample", "prompt_tokens", "cached_tokens", "completion_tokens", "error_code", "error_message"))
    | {"reasoning_tokens", *DISK, *METRICS},
    "parquet": frozenset(("sample", "token_logprobs", "prompt_token_logprobs")),
}


_NOT_WRITTEN = (
    *(".tsv", ".txt", ".xlsx", ".xls", ".ods", ".json", ".xml", ".yaml", ".yml", ".html", ".md", ".pdf"),
    *(".arrow", ".feather", ".orc", ".avro", ".sqlite", ".db", ".pkl", ".npy", ".npz", ".zip", ".bz2", ".xz", ".7z"),
)


def kind_of(path: Path | None) -> OutputKind:
    """What the name of an output says it is; stdout (None) is JSON Lines.

    Raises: UsageError for what is not written.
    """
    if path is None:
        return "jsonl"
    name = path.name.lower()
    if name.endswith((".zst", ".parquet.gz")) or name.removesuffix(".gz").endswith(_NOT_WRITTEN):
        raise UsageError(f"cannot write {path}", hint="its name may end in .jsonl or .csv (also .gz), or .parquet")
    if name.endswith(".parquet"):
        return "parquet"
    return "csv" if name.removesuffix(".gz").endswith(".csv") else "jsonl"


@dataclass(frozen=True, slots=True)
class Columns:
    """Fields of an input line, and fields of its output row."""

    prompt: str | None = None  # field of the line with the prompt; None: prompt or messages, or an OpenAI batch line
    template: ColumnTemplate | None = None  # makes the prompt of several fields instead
    id: str | None = None  # field of the line with its id; None: id or custom_id
    answer: str = "text"  # field of a plain row with the generated text
    keep: tuple[str, ...] = ()  # fields of the line to copy into the row
    keep_all: bool = False
    token_ids: bool = False  # whether rows have the generated token ids
    metrics: bool = False  # whether rows have their latency
    keep_reasoning: bool = True  # whether rows have the reasoning that their chat format marks
    parse_tool_calls: bool = True  # whether rows with tools have the calls that their chat format marks
    kind: OutputKind = "jsonl"
    decided: frozenset[str] = frozenset()  # fields with the answers to the questions about all rows
    input_format: InputFormat = "auto"

    @classmethod
    def of(cls, run: RunConfig, *, kind: OutputKind = "jsonl") -> "Columns":
        """The columns of a configuration. Raises: UsageError if two output columns have the same name."""
        names = tuple(dict.fromkeys(name.strip() for name in (run.keep or "").split(",") if name.strip()))
        keep_all = names == (ALL,)
        decided = [ANSWERS, *(each for question in run_questions(run) for each in question.columns)]
        decided = decided[: 1 if kind == "jsonl" else None] if run.questions else [EMBEDDING] * run.embed
        columns = cls(
            prompt=run.field,
            template=ColumnTemplate.of(run),
            id=run.id_field,
            answer=run.output_field,
            keep=() if keep_all else names,
            keep_all=keep_all,
            token_ids=run.output_token_ids,
            metrics=run.output_metrics,
            keep_reasoning=run.keep_reasoning,
            parse_tool_calls=run.parse_tool_calls,
            kind=kind,
            decided=frozenset(decided),
            input_format=run.input_format,
        )
        if taken := sorted(columns.decided & (_ROW_FIELDS | _ONLY_IN[kind] | {run.output_field})):
            hint = "rename the question, or the answer's text with --output-field"
            raise UsageError(f"the output already has a column {taken[0]!r}, which the run adds", hint=hint)
        if columns.answer in columns._others:
            raise UsageError(f"--output-field is {columns.answer!r}, but the output already has a column of that name")
        return columns

    @property
    def sources(self) -> frozenset[str]:
        """The fields of the line that make its prompt; none: it has a prompt, messages, or an OpenAI batch line."""
        named = frozenset() if self.prompt is None else frozenset((self.prompt,))
        return named if self.template is None else self.template.names

    @property
    def filled_in(self) -> frozenset[str]:
        """The fields whose text goes into the prompt as it is, whatever their names."""
        return frozenset() if self.template is None else self.template.names

    @property
    def reserved(self) -> frozenset[str]:
        """Names of output columns, which no copied column may have."""
        return self._others | {self.answer}

    @property
    def _others(self) -> frozenset[str]:
        return (_ROW_FIELDS | _ONLY_IN[self.kind] | self.decided) - ((REASONING | CALLS) - self.marked)

    @property
    def marked(self) -> frozenset[str]:
        """Columns about reasoning and tool calls that tables may have."""
        reasoning = REASONING if self.keep_reasoning else frozenset(("reasoning_tokens",))
        return reasoning | CALLS if self.parse_tool_calls else reasoning

    @property
    def copies(self) -> bool:
        """Whether rows have columns of their lines."""
        return self.keep_all or bool(self.keep)

    @property
    def ids(self) -> tuple[str, ...]:
        """The fields that may hold a line's id, the first one first."""
        return ("custom_id", "id") if self.id is None else (self.id,)

    def kept_names(self, names: Iterable[str]) -> dict[str, str]:
        """The columns to copy, each with its name in the row: another one where the row has such a column itself.
        `names`: the line's."""
        copied, left_out = (names, {*self.ids, INVALID_ROW}) if self.keep_all else (self.keep, {*_IDS})
        reserved = self.reserved
        return {name: f"input_{name}" if name in reserved else name for name in copied if name not in left_out}

    def kept(self, document: dict[str, Any]) -> dict[str, Any]:
        """The columns of a line that its row copies; null for one that the line lacks."""
        return {new: document.get(name) for name, new in self.kept_names(document).items()}

    def check_found(self, names: set[str]) -> None:
        """Raises: UsageError if a column to copy is not among those of the input."""
        for name in self.keep:
            if name not in names:
                near = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.5)
                hint = f"did you mean {near[0]!r}?" if near else f"its columns: {', '.join(sorted(names))}"
                raise UsageError(f"--keep names {name!r}, which no row of the input has", hint=hint)

    def renamed(self, names: set[str]) -> list[str]:
        """What to say of columns that are copied under another name."""
        return notes_of(self.kept_names(sorted(names)), names)


def notes_of(kept: dict[str, str], names: Collection[str]) -> list[str]:
    """What to say of `kept`, columns with their new names. Raises: UsageError if the input has that one, too."""
    renamed = {name: new for name, new in kept.items() if name != new}
    for name, new in renamed.items():
        if new in names:
            raise UsageError(f"the columns {name!r} and {new!r} would have the same name in the output")
    return [f"the input's {name!r} is kept as {new!r}, as rows have their own" for name, new in renamed.items()]


def names_of(content: bytes | None) -> set[str]:
    """The top-level names of a JSON line that is an object; of another one none: it becomes an error row."""
    try:
        return set(_NAMES.decode(content or b"{}"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return set()
