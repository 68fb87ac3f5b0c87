"""What README, its Chinese twin and the pages in docs/ say is there: commands, their output, flags, files, figures."""

import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
from cli_harness import pagedcli
from conftest import shared_data
from renew import without_printed
from typer.testing import CliRunner

from pagedcli.cli.learn import lessons
from pagedcli.cli.main import COMMANDS, app
from pagedcli.core.eviction import POLICIES
from pagedcli.simulation.caches import accesses_of, best_hits
from pagedcli.simulation.difference import CAUSES
from pagedcli.simulation.formats import FORMATS, read_traces

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_command_is_named_and_every_named_command_exists():
    named = set(re.findall(r"(?<!from )pagedcli ([a-z][a-z-]+)", README))
    assert set(COMMANDS) <= named
    assert named <= set(COMMANDS)


def test_every_folder_of_the_package_is_in_the_map():
    for folder in (ROOT / "src" / "pagedcli").iterdir():
        if (folder / "__init__.py").exists() and folder.name != "assets":
            assert f"{folder.name}/ " in ARCHITECTURE, f"{folder.name} is missing from the map"


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"(?:docs|configs|examples|scripts)/[\w./-]+\w", README + ARCHITECTURE)))
)
def test_every_file_named_exists(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize("line", sorted(set(re.findall(r"^(?:\$ )?pagedcli ([^#\n]+)", README, re.MULTILINE))))
def test_every_flag_of_an_example_exists(line):
    words = shlex.split(line)
    help_text = CliRunner().invoke(app, [words[0], "--help", "all"]).output
    for flag in (word for word in words[1:] if word.startswith("-") and word != "-"):
        assert re.search(rf"(?<!\S){flag}\b", help_text), f"{flag} is not a flag of pagedcli {words[0]}"


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:\w+/)+\w+\.py)`", ARCHITECTURE))))
def test_every_module_of_the_architecture_page_exists(path):
    assert (ROOT / "src" / "pagedcli" / path).exists() or (ROOT / path).exists()


def test_a_run_shows_the_block_tables_ref_counts_and_hits_that_the_readme_shows(tmp_path, monkeypatch):
    [(command, shown)] = re.findall(r"^\$ (pagedcli generate \S+ .*--dump-kv)\n(.*?)```", README, re.M | re.S)
    monkeypatch.chdir(ROOT)
    words = [str(tmp_path / "out.jsonl") if word == "out.jsonl" else word for word in shlex.split(command)[1:]]
    printed = CliRunner(env={"COLUMNS": "115"}).invoke(app, words, catch_exceptions=False).stdout
    for line in shown.splitlines():
        assert line == "..." or line.rstrip() in [each.rstrip() for each in printed.splitlines()], line
    assert "Prefix hits" in printed


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
    assert facts(without_printed(text(chinese))) == facts(without_printed(text(english)))


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


DOCUMENT = (Path(__file__).resolve().parents[1] / "docs" / "tutorial.md").read_text(encoding="utf-8")
FILES = re.findall(r"<!-- file: (\S+) -->\n```json\n(.*?)```", DOCUMENT, re.DOTALL)
BLOCKS = re.findall(r"```console\n\$ pagedcli ([^\n]+)\n(.*?)```", DOCUMENT, re.DOTALL)


def pattern(shown):
    """A line `...` is any number of lines, and ... within a line any text."""
    lines = [
        r"(?:[^\n]*\n)*?" if line == "..." else ".*".join(map(re.escape, line.split("..."))) + r" *\n"
        for line in shown.splitlines()
    ]
    return re.compile("".join(lines))


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """The output of each command."""
    folder = tmp_path_factory.mktemp("tutorial")
    for name, content in FILES:
        (folder / name).write_text(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return {command: pagedcli(*shlex.split(command), columns=120).output for command, _ in BLOCKS}


def test_twelve_commands_lead_to_the_answer():
    assert len(BLOCKS) == 12
    assert [name for name, _ in FILES] == ["ask.jsonl", "late.jsonl"]


@pytest.mark.slow_cases("generate ask.jsonl -o out.jsonl --max-to*", "plan ask.jsonl --all")
@pytest.mark.parametrize(("command", "shown"), BLOCKS, ids=[command[:40] for command, _ in BLOCKS])
def test_a_command_prints_what_the_tutorial_shows(printed, command, shown):
    assert pattern(shown).fullmatch(printed[command]), f"pagedcli {command} printed\n{printed[command]}\nnot\n{shown}"


PREDICT = (Path(__file__).resolve().parents[1] / "docs" / "predict.md").read_text(encoding="utf-8")
ROW = re.compile(r"^ *([\d,]+) +([\d.]+) % +(\S+) +([\d.]+) % +([\d.]+) % +([\d.]+) % +[\d,]+ +\d+$", re.M)


def test_the_table_of_the_sweep_has_the_bounds_of_the_trace():
    trace = read_traces([str(shared_data("mooncake") / "conversation_trace.jsonl")])
    accesses = accesses_of(trace, 512)
    rows, bounds = ROW.findall(PREDICT), {}
    assert len(rows) == 8
    for pool, share, policy, tokens, _, best in rows:
        num_blocks = int(pool.replace(",", ""))
        if num_blocks not in bounds:
            bounds[num_blocks] = best_hits(accesses, num_blocks)
        hits, total = bounds[num_blocks]
        assert policy in POLICIES
        assert f"{100 * num_blocks / accesses.num_unique:.1f}" == share
        assert f"{100 * hits / total:.1f}" == best
        assert float(tokens) <= float(best)
    assert f"{accesses.num_unique:,}" in PREDICT


@pytest.mark.parametrize("name", [*FORMATS, *POLICIES])
def test_every_format_and_policy_is_on_the_page(name):
    assert name in PREDICT.lower()


LOOK_INSIDE = (Path(__file__).resolve().parents[1] / "docs" / "look-inside.md").read_text(encoding="utf-8")


def test_the_example_is_what_the_command_prints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in re.findall(r"<!-- file: (\S+) -->\n```json\n(.*?)```", LOOK_INSIDE, re.DOTALL):
        (tmp_path / name).write_text(content)
    (console,) = re.findall(r"```console\n(.*?)```", LOOK_INSIDE, re.DOTALL)
    commands = re.findall(r"^\$ pagedcli ([^\n]+)\n(.*?)(?=^\$|\Z)", console, re.DOTALL | re.MULTILINE)
    assert [command.split()[0] for command, _ in commands] == ["generate", "generate", "diff"]
    for command, shown in commands:
        printed = pagedcli(*shlex.split(command), columns=140)
        found = printed.stdout if command.startswith("diff") else printed.output
        assert pattern(shown).fullmatch(found), found


@pytest.mark.parametrize("cause", CAUSES)
def test_every_cause_is_on_the_page(cause):
    assert f"| {CAUSES[cause]} | `{cause}` |" in LOOK_INSIDE
