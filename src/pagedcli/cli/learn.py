"""`pagedcli learn`: how a paged KV cache works, in lessons that run and check themselves.

A lesson is a file in assets/lessons: what to predict, where the trace has the answer, and what the text claims of it;
then the text, with its files and commands. NAME.zh.md has the text in Chinese.
`sequences[step=0, row_id=mia].num_blocks` names a value of a trace: a table, conditions that select rows with one and
the same value, and a column of --dump-kv, or of `explained` lookups.
"""

import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer
import yaml
from rich.console import Console
from rich.markdown import Markdown

from pagedcli.answers.why import ExplainedLookup
from pagedcli.cli.options import option
from pagedcli.cli.picture import PictureOptions
from pagedcli.cli.run_picture import draw_run
from pagedcli.errors import PagedcliError, UsageError
from pagedcli.files import check_files
from pagedcli.printable import plural
from pagedcli.show.pool_picture import PrefixLetters, caption, pool_text, shown_blocks
from pagedcli.show.terminal import is_interactive
from pagedcli.trace.check import check_trace
from pagedcli.trace.files import TraceReader
from pagedcli.views.explain import explain_trace
from pagedcli.views.moment import Replay
from pagedcli.views.rows import values_of
from pagedcli.views.step_choice import StepChoice
from pagedcli.views.step_rows import FileRow, StepRows, file_columns

_PART = re.compile(r"---\n(.*?)---\n\n(.*?)\n(?:## Run\n\n(.*?)\n)?## Answer\n\n(.*)", re.DOTALL)
_FILE = re.compile(r"<!-- file: (\S+) -->\n```(?:json|python)\n(.*?)```", re.DOTALL)
_COMMAND = re.compile(r"\$ (pagedcli|python) ([^\n]+)")
_VALUE = re.compile(r"(\w+)\[(.*?)\]\.(\w+)")
_TRACE = "run.jsonl"
_LESSON_HELP = "Number of the lesson. Default: all, one after the other."

Language = Literal["en", "zh"]


class _Words(NamedTuple):
    """What the teacher says in one language."""

    asks: str
    goes_on: str
    says: str
    agrees: str
    disagrees: str
    no_letter: str
    no_number: str


_WORDS: dict[Language, _Words] = {
    "en": _Words(
        "Your prediction (Enter skips, q ends): ",
        "Enter continues, p saves the picture, q ends: ",
        "The trace says: **{}**.",
        " You predicted the same.",
        " You predicted {}.",
        "That is not one of {}.",
        "That is not a number.",
    ),
    "zh": _Words(
        "你的预测（回车跳过，q 退出）：",
        "回车继续，p 保存图片，q 退出：",
        "trace 的记录是：**{}**。",
        "与你的预测一致。",
        "你的预测是 {}。",
        "请输入其中一个：{}。",
        "请输入一个数字。",
    ),
}


@dataclass(frozen=True, slots=True)
class Lesson:
    """A lesson as its file has it."""

    number: int
    name: str  # file name
    title: str
    ask: str
    answer: str  # the value of the trace that answers
    step: int  # step that the picture shows
    claims: dict[str, Any]  # values of the trace that the text mentions
    choices: dict[str, tuple[str, str]]  # letter -> value and its words; empty: a number is asked
    question: str
    run: str
    explanation: str
    lang: Language = "en"

    @classmethod
    def read(cls, name: str, text: str) -> "Lesson":
        found = _PART.fullmatch(text)
        assert found is not None, f"{name} has the parts of a lesson"
        head = {"choices": {}, **yaml.safe_load(found[1])}
        return cls(
            number=int(name.partition("-")[0]), name=name, question=found[2], run=found[3], explanation=found[4], **head
        )

    def translated(self, lang: Language, text: str) -> "Lesson":
        """Take title, questions and explanation from the lesson's file of another language."""
        found = _PART.fullmatch(text)
        assert found is not None, f"{self.name} in {lang} has the parts of a translation"
        head = yaml.safe_load(found[1])
        words = head.pop("choices", {})
        choices = {letter: (value, words[letter]) for letter, (value, _) in self.choices.items()}
        return replace(self, choices=choices, question=found[2], explanation=found[4], lang=lang, **head)

    @property
    def task(self) -> str:
        """The first part as Markdown: what is to be predicted."""
        choices = "".join(f"- {letter}) {words}\n" for letter, (_, words) in self.choices.items())
        return f"# {self.number}. {self.title}\n\n{self.question}\n**{self.ask}**\n{chr(10) * bool(choices)}{choices}"

    def in_words(self, value: Any) -> str:
        return next(
            (f"{letter}) {words}" for letter, (each, words) in self.choices.items() if each == value), str(value)
        )

    def predicted(self, typed: str) -> Any:
        """What a learner typed as a value. None: it is no prediction."""
        if self.choices:
            return self.choices.get(typed.lower(), (None,))[0]
        return int(typed) if typed.isdecimal() else None


def lessons(lang: Language = "en") -> list[Lesson]:
    """All lessons, in order."""
    folder = files("pagedcli.assets").joinpath("lessons")
    texts = {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir()}
    found = [Lesson.read(name, text) for name, text in texts.items() if name.count(".") == 1]
    if lang != "en":
        found = [each.translated(lang, texts[f"{Path(each.name).stem}.{lang}.md"]) for each in found]
    return sorted(found, key=lambda lesson: lesson.number)


class LessonFacts:
    """What the trace of a lesson says, by the names of values."""

    def __init__(self, trace: Path) -> None:
        self._rows: dict[str, list[dict[str, Any]]] = {}
        explainer, _ = explain_trace(TraceReader(trace), StepRows(self._add, StepChoice()))
        self._rows["explained"] = [values_of(ExplainedLookup(each, None), "json") for each in explainer.lookups]

    def _add(self, table: str, rows: Iterable[FileRow]) -> None:
        names = [column.key for column in file_columns(table)]
        self._rows.setdefault(table, []).extend(dict(zip(names, row, strict=True)) for row in rows)

    def value(self, name: str) -> Any:
        """Raises: ValueError unless all rows that are selected have one and the same value."""
        parts = _VALUE.fullmatch(name)
        if parts is None:
            raise ValueError(f"{name} does not name a value of a trace")
        wanted = dict(condition.split("=") for condition in parts[2].split(", ") if condition)
        selected = (row for row in self._rows[parts[1]] if all(str(row[key]) == each for key, each in wanted.items()))
        values = {row[parts[3]] for row in selected}
        if len(values) != 1:
            raise ValueError(f"{name} is not one value: {values}")
        return values.pop()


def run_lesson(lesson: Lesson, folder: Path) -> tuple[Path, str]:
    """Write the files of a lesson into a folder and run its commands there. Returns the trace, and what the other
    commands print than the one that records it.

    Raises: PagedcliError if a command fails.
    """
    printed = ""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _FILE.findall(lesson.run):
        (folder / name).write_text(content, encoding="utf-8")
    for program, command in _COMMAND.findall(lesson.run):
        arguments = [*(["-m", "pagedcli"] if program == "pagedcli" else []), *shlex.split(command)]
        records = "--record" in arguments
        arguments = [sys.executable, "-P", *arguments, *(["--overwrite"] if records else [])]
        result = subprocess.run(
            arguments, cwd=folder, capture_output=True, encoding="utf-8", errors="replace", check=False
        )
        if result.returncode:
            raise PagedcliError(f"{program} {command}: {result.stderr.strip()}", hint=f"the files are in {folder}")
        printed += "" if records else result.stdout
    return folder / _TRACE, printed


def learn(
    lesson: Annotated[int | None, typer.Argument(metavar="N", min=0, help=_LESSON_HELP)] = None,
    *,
    picture: Annotated[
        Path | None, option("--picture", metavar="FILE", help="Also draw the picture of lesson N, as .svg or .png.")
    ] = None,
    keep: Annotated[
        Path | None,
        option("--keep", metavar="FOLDER", help="Keep prompts and traces here, in a folder for each lesson."),
    ] = None,
    lang: Annotated[Language, option("--lang", help="Language of the lessons. Default: en.")] = "en",
) -> None:
    """Learn how a paged KV cache works, in eleven lessons on the built-in model.

    Each lesson asks a question. Type your prediction; then the lesson runs, shows the block pool, and checks your
    prediction against the trace. In a pipe it asks nothing and prints question, run and answer as Markdown.

    \b
    Examples:
      pagedcli learn
      pagedcli learn 3
      pagedcli learn --lang zh            (in Chinese)
      pagedcli learn 3 --picture copy.svg
      pagedcli learn 4 --keep lessons     (then: pagedcli trace lessons/4-eviction/run.jsonl)
    """  # fmt: skip
    known = lessons(lang)
    if lesson is not None and lesson >= len(known):
        raise UsageError(f"there is no lesson {lesson}", hint=f"lessons are 0 to {len(known) - 1}")
    if picture is not None and lesson is None:
        raise UsageError(
            "--picture needs the number of a lesson", hint="for example pagedcli learn 3 --picture copy.svg"
        )
    drawing = PictureOptions.of_flags(picture)
    check_files({}, {"--picture": picture}, overwrite=False)
    chosen = known if lesson is None else [known[lesson]]
    teacher = _Teacher(asks=is_interactive())
    with _folder(keep) as folder:
        for place, each in enumerate(chosen):
            trace = teacher.teach(each, folder / Path(each.name).stem)
            if trace is None:
                return
            if drawing is not None:
                draw_run(trace, drawing, StepChoice(each.step, each.step), None, overwrite=False)
            if place + 1 < len(chosen) and not teacher.goes_on(each, trace):
                return


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        yield keep
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


class _Teacher:
    """Shows lessons: in a terminal with questions, elsewhere as Markdown."""

    def __init__(self, *, asks: bool) -> None:
        self._asks = asks
        self._console = Console(width=min(100, Console().width))

    def teach(self, lesson: Lesson, folder: Path) -> Path | None:
        """Teach a lesson. Returns its trace; None: the learner has left."""
        self._show(lesson.task)
        predicted = self._prediction(lesson) if self._asks else None
        if predicted == "q":
            return None
        self._show(lesson.run)
        trace, printed = run_lesson(lesson, folder)
        if printed:
            self._show(f"```text\n{printed}```\n")
        replay = Replay(TraceReader(trace))
        stop = replay.stop_of_step(lesson.step)
        assert stop is not None, "a test runs each lesson"
        state = replay.go(stop).state
        told = caption(state, shown_blocks(state, PrefixLetters())).replace("outlined", "marked with *")
        self._show(f"Step {lesson.step}: {told}\n\n```text\n{pool_text(state)}\n```\n")
        self._show(_verdict(lesson, LessonFacts(trace).value(lesson.answer), predicted))
        result = check_trace(TraceReader(trace))
        checked = f"{plural(result.num_events, 'event')} in {plural(result.num_steps, 'step')}"
        self._show(f"`pagedcli trace {_TRACE} --check`: ok, {checked}.\n")
        self._show(lesson.explanation)
        return trace

    def _prediction(self, lesson: Lesson) -> Any:
        words = _WORDS[lesson.lang]
        while True:
            typed = input(words.asks).strip()
            if typed.lower() in ("", "q"):
                return typed.lower() or None
            predicted = lesson.predicted(typed)
            if predicted is not None:
                return predicted
            print(words.no_letter.format(", ".join(lesson.choices)) if lesson.choices else words.no_number)

    def goes_on(self, lesson: Lesson, trace: Path) -> bool:
        """Whether the learner wants the next lesson."""
        while self._asks:
            typed = input(_WORDS[lesson.lang].goes_on).strip().lower()
            if typed != "p":
                return typed != "q"
            options = PictureOptions.of_flags(Path(f"{Path(lesson.name).stem}.svg"))
            assert options is not None, "a file was named"
            draw_run(trace, options, StepChoice(lesson.step, lesson.step), None, overwrite=True)
        return True

    def _show(self, text: str) -> None:
        text = re.sub(r"<!-- file: (\S+) -->\n", r"`\1`:\n\n", text)
        if not self._asks:
            print(text)
            return
        self._console.print(Markdown(text))
        print()


def _verdict(lesson: Lesson, found: Any, predicted: Any) -> str:
    words = _WORDS[lesson.lang]
    verdict = words.says.format(lesson.in_words(found))
    if predicted is not None:
        verdict += words.agrees if predicted == found else words.disagrees.format(lesson.in_words(predicted))
    return f"{verdict}\n"
