"""docs/questions.md: each command prints the lines that it shows, but for times."""

import re

import pytest
import questions

DOCUMENT = questions.DOCUMENT.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("questions")
    with questions.in_folder(made):
        questions.make_files(made)
    return made


def test_the_page_has_the_25_questions():
    assert len(questions.QUESTIONS) + len(questions.OTHERS) == 25
    asked = re.findall(r"^## (.+)$", DOCUMENT, re.MULTILINE)
    assert asked == [*(each.text for each in questions.QUESTIONS), *questions.OTHERS]


@pytest.mark.slow  # it records runs and, for questions about time, measures this machine
@pytest.mark.parametrize("question", questions.QUESTIONS, ids=lambda each: each.text[:40])
def test_a_command_prints_what_the_page_shows(folder, question):
    with questions.in_folder(folder):
        lines = questions.first_lines(question)
    if question.is_timed:  # times, and how sure they are, may differ
        assert f"$ pagedcli {question.command}\n{re.split(r'[:0-9]', lines[0])[0]}" in DOCUMENT
        return
    section = questions.section(question, lines)
    assert questions.without_times(section) in questions.without_times(DOCUMENT), "python scripts/questions.py --write"
