"""The lessons: what they claim is what their traces say, in a pipe, for a learner who types, and in docs/learn."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import renew
from cli_harness import pagedcli
from quick import slow_but

from pagedcli.cli.learn import Lesson, LessonFacts, lessons, run_lesson

LESSONS, CHINESE = lessons(), lessons("zh")
EACH = pytest.mark.parametrize("lesson", slow_but([LESSONS[7]], LESSONS), ids=lambda lesson: lesson.name)


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """By a lesson: what it prints in a pipe, and its trace."""
    folder, found = tmp_path_factory.mktemp("lessons"), {}

    def learnt(lesson):
        if (key := (lesson.number, lesson.lang)) not in found:
            kept = folder / lesson.lang
            flags = ("--lang", lesson.lang, "--keep", kept, "--picture", folder / f"{lesson.lang}-{lesson.number}.svg")
            found[key] = (pagedcli("learn", lesson.number, *flags).stdout, kept / Path(lesson.name).stem / "run.jsonl")
        return found[key]

    return learnt


@pytest.mark.quick("7-state-snapshots.md")
@EACH
def test_every_claim_and_the_answer_are_those_of_the_trace(taught, lesson):
    printed, trace = taught(lesson)
    evidence = LessonFacts(trace)
    assert lesson.claims
    for name, value in lesson.claims.items():
        assert evidence.value(name) == value, name
    answer = evidence.value(lesson.answer)
    assert f"The trace says: **{lesson.in_words(answer)}**." in printed
    assert (
        lesson.predicted(next((key for key, (each, _) in lesson.choices.items() if each == answer), str(answer)))
        == answer
    )
    if lesson.choices:
        assert answer in [value for value, _ in lesson.choices.values()]
    assert ": ok, " in pagedcli("trace", trace, "--check").stdout


@pytest.mark.quick("7-state-snapshots.md")
@EACH
def test_the_picture_is_of_its_step(taught, lesson):
    svg = ET.parse(taught(lesson)[1].parents[2] / f"en-{lesson.number}.svg").getroot()
    assert svg.find("{http://www.w3.org/2000/svg}title").text == f"KV cache at step {lesson.step}"


@pytest.mark.parametrize(
    "lesson", slow_but((LESSONS[7], CHINESE[5]), LESSONS + CHINESE), ids=lambda each: each.lang + each.name
)
def test_the_page_of_a_lesson_is_what_the_command_prints(taught, lesson):
    page = (renew.LEARN[lesson.lang] / lesson.name).read_text(encoding="utf-8")
    same, printed = map(renew.without_printed, (page, taught(lesson)[0]))
    assert same == printed, "python scripts/renew.py --write learn"


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_index_names_all_lessons(lang):
    assert (renew.LEARN[lang] / "README.md").read_text(encoding="utf-8") == renew.index(lang)


@pytest.mark.long
def test_snapshots_every_sixteen_tokens_find_what_lesson_seven_says(tmp_path):
    lesson = LESSONS[7]
    changed = lesson.run.replace("--checkpoints end", "--checkpoints 16")
    assert changed != lesson.run
    fields = {name: getattr(lesson, name) for name in Lesson.__slots__}
    trace, _ = run_lesson(Lesson(**fields | {"run": changed}), tmp_path)
    assert LessonFacts(trace).value("lookups[request_id=1].tokens_hit") == 32


@pytest.fixture
def at_a_terminal(monkeypatch):
    monkeypatch.setattr("pagedcli.cli.learn.is_interactive", lambda: True)


@pytest.mark.long
@pytest.mark.usefixtures("at_a_terminal")
def test_a_learner_predicts_saves_the_picture_and_leaves(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    printed = pagedcli("learn", stdin="a\n\nmany\n3\np\n\n4\nq\n", columns=100).stdout
    assert "Without a KV cache the last 8 of 1,024 tokens take" in printed
    assert "The trace says: a) 1: the newest one. You predicted the same." in printed
    assert "That is not a number." in printed
    assert "The trace says: 3. You predicted the same." in printed
    assert "The trace says: 4. You predicted the same." in printed
    assert "3. Copy on write" not in printed
    assert [path.name for path in tmp_path.iterdir()] == ["1-block-tables.svg"]


@pytest.mark.quick("zh-*")
@pytest.mark.parametrize(
    ("lang", "said"),
    [("en", ("That is not one of a, b.",
             "The trace says: b) the dog, which arrived last. You predicted a) the fox, which arrived first.")),
     ("zh", ("请输入其中一个：a, b。", "trace 的记录是：b) 小狗（dog），它后到。你的预测是 a) 狐狸（fox），它先到。"))],
)  # fmt: skip
@pytest.mark.usefixtures("at_a_terminal")
def test_a_wrong_letter_is_asked_again_and_a_wrong_prediction_named(lang, said):
    printed = pagedcli("learn", 5, "--lang", lang, stdin="x\nA\n", columns=100).stdout
    assert all(each in printed for each in said)


@pytest.mark.usefixtures("at_a_terminal")
def test_a_learner_may_leave_before_anything_runs(tmp_path):
    pagedcli("learn", 2, "--keep", tmp_path, stdin="q\n")
    assert not list(tmp_path.iterdir())


def test_a_value_that_is_not_one_is_refused(taught):
    evidence = LessonFacts(taught(LESSONS[7])[1])
    for name in ("sequences[].num_blocks.x", "sequences[row_id=nobody].num_blocks", "steps[].step"):
        with pytest.raises(ValueError, match="value"):
            evidence.value(name)
