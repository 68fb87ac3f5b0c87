"""The Chinese pages have the commands, numbers and names of the English ones."""

import re
from collections import Counter
from pathlib import Path

import pytest

from pagedcli.cli.learn import lessons

ROOT = Path(__file__).resolve().parents[1]
LESSONS = ROOT / "src" / "pagedcli" / "assets" / "lessons"
PAGES = [
    ("README.md", "README.zh-CN.md"),
    ("docs/kv-cache.md", "docs/zh/kv-cache.md"),
    *((f"docs/learn/{each.name}", f"docs/zh/learn/{each.name}") for each in lessons()),
]
_BLOCK = re.compile(r"```\w+\n.*?```", re.DOTALL)
_NAME = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\]\((\S+?)\)")
_NUMBER = re.compile(r"\d(?:[\d,.]*\d)?")


def text(path):
    return (ROOT / path).read_text(encoding="utf-8")


def facts(page):
    """The code blocks of a page, and how often it has each name in code marks and each number."""
    prose = _LINK.sub("]", _BLOCK.sub("", page))
    return {
        "code": _BLOCK.findall(page),
        "names": Counter(" ".join(name.split()) for name in _NAME.findall(prose)),
        "numbers": Counter(_NUMBER.findall(_NAME.sub("", prose))),
    }


@pytest.mark.parametrize(("english", "chinese"), PAGES, ids=[chinese for _, chinese in PAGES])
def test_a_chinese_page_has_the_commands_numbers_and_names_of_the_english_one(english, chinese):
    assert facts(text(chinese)) == facts(text(english))


@pytest.mark.parametrize(("english", "chinese"), PAGES[:2])
def test_each_page_leads_to_the_other_and_every_link_to_a_file(english, chinese):
    for path, other in ((english, chinese), (chinese, english)):
        page = ROOT / path
        targets = [page.parent / link.partition("#")[0] for link in _LINK.findall(text(path)) if "://" not in link]
        assert targets[0].resolve() == ROOT / other
        assert all(target.exists() for target in targets)


def test_every_lesson_has_its_text_in_both_languages():
    assert len(list(LESSONS.glob("*.zh.md"))) == len(lessons("zh")) == len(lessons())
    for english, chinese in zip(lessons(), lessons("zh"), strict=True):
        for name in ("title", "ask", "question", "explanation"):
            assert re.search("[\u4e00-\u9fff]", getattr(chinese, name)), f"{name} of {chinese.name} is not Chinese"
            assert facts(getattr(chinese, name)) == facts(getattr(english, name))
