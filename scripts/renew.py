"""Renews what the code makes of docs and configs: python scripts/renew.py [--write] [NAME ...]

Without --write it says what is out of date. The names are those of WRITTEN; `models` asks the installed transformers
(some 20 s). In a document a table follows the line `<!-- table: name -->` and is what the function of that name gives.
Tests compare all of them. scripts/questions.py and scripts/pictures.py renew what takes runs.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import yaml

from pagedcli.cli.learn import Language, Lesson, lessons
from pagedcli.config import Config
from pagedcli.config_keys import ConfigKey, keys_of
from pagedcli.models.families import registry
from pagedcli.models.family import Llama
from pagedcli.show.drawing import Area, Drawn, Shape, box, draw, line, text
from pagedcli.views.step_rows import TABLES, file_columns

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
Files = Iterator[tuple[Path, str]]  # the files with what they should hold

# ---------------------------------------------------------------------- configs/default.yaml

CONFIG_HEADER = """\
# Every key with its default, made by scripts/renew.py. Copy what you want to change.
#
#   pagedcli generate prompts.jsonl -C configs/default.yaml
#
# Precedence: default < this file < flag. Most keys are also flags: max_num_seqs is --max-num-seqs.
# `pagedcli generate --show-config -C FILE` prints what is in effect and where each value comes from.
"""
_COLUMN = 34  # of the comments


def config() -> Files:
    lines = [CONFIG_HEADER]
    for section, values in msgspec.structs.asdict(Config()).items():
        lines.append(f"{section}:")
        panel = None
        keys = keys_of(type(values))
        for name, (type_, declared) in keys.items():
            if declared.panel != panel and len({each.panel for _, each in keys.values()}) > 1:
                lines.append(f"  # ---- {declared.panel}")
            panel = declared.panel
            value = yaml.safe_dump(getattr(values, name)).splitlines()[0]
            lines.append(f"  {name}: {value}".ljust(_COLUMN - 1) + f" # {_meaning(type_, declared)}")
        lines.append("")
    yield ROOT / "configs" / "default.yaml", "\n".join(lines[:-1]) + "\n"


def _meaning(type_: Any, declared: ConfigKey) -> str:
    """The description, the values or the range, and what null stands for."""
    text = declared.description
    if get_origin(type_) is Literal:
        text += f" ({', '.join(get_args(type_))})"
    elif declared.names or declared.at_most is not None:
        text += f" ({declared.allowed})"
    return text if declared.default is None else f"{text}; null: {declared.default}"


# ---------------------------------------------------------------------- defaults of the families' config.json

_USUAL_THETA, _MARK = 10000.0, 12345.0


def families() -> Files:
    """The defaults of the installed transformers' config classes, as far as a family's class does not say them."""
    from transformers import CONFIG_MAPPING

    native = {name: family.config for name, family in registry.FAMILIES.items() if family.text is None}
    found = {name: _defaults(CONFIG_MAPPING[name], kind) for name, kind in native.items() if name in CONFIG_MAPPING}
    lines = [f"{json.dumps(name)}: {json.dumps(values)}" for name, values in found.items()]
    yield Path(registry.__file__).with_name("defaults.json"), "{\n" + ",\n".join(lines) + "\n}\n"


def _defaults(theirs: Any, ours: type[Llama]) -> dict[str, Any]:
    given = {ours.renamed.get(each.name, each.name): each.default for each in fields(theirs)}
    if isinstance(theirs.default_theta, float) and theirs.default_theta != _USUAL_THETA:
        given["rope_theta"] = theirs.default_theta
    said = getattr(theirs(rope_theta=_MARK), "rope_parameters", None) or {}
    given |= {"rope_parameters": _rope(said), "partial_rotary_factor": said.get("partial_rotary_factor")}
    of_llama = {each.name: each.default for each in fields(Llama)}
    found = {}
    for each in fields(ours):
        is_own = each.name in of_llama and each.default != of_llama[each.name]
        default = given.get(each.name, MISSING)
        if not is_own and default is not MISSING and default != each.default:
            found[each.name] = default
    return found


def _rope(said: dict[str, Any]) -> dict[str, Any] | None:
    """The rope_parameters of a config class by itself, without a theta that config.json may name; None: plain ones."""
    forms = [form for form in said.values() if isinstance(form, dict)]
    is_plain = all(form.get("rope_type", "default") == "default" for form in forms or [said])
    if is_plain and all(form.get("partial_rotary_factor", 1.0) == 1.0 for form in forms):
        return None
    return {name: value for name, value in said.items() if value != _MARK}


# ---------------------------------------------------------------------- tables in documents

# a table is fenced, or ends with a line `<!-- end -->`
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n(?:```text\n)?)(.*?)(\n(?:```|<!-- end -->))", re.DOTALL)
_TYPES = {"ints": "list of int", "texts": "list of text"}


def tables_in(document: str) -> dict[str, str]:
    """Name and text of each table in the document."""
    return {match[2]: match[3] for match in _TABLE.finditer(document)}


def with_tables(path: Path, tables: Mapping[str, Callable[[], str]]) -> Files:
    yield path, _TABLE.sub(lambda match: match[1] + tables[match[2]]() + match[4], path.read_text(encoding="utf-8"))


def columns_of(table: str) -> str:
    """The columns of a file of --dump-kv, in Markdown."""
    rows = [f"| `{each.key}` | {_TYPES.get(each.kind, each.kind)} | {each.meaning} |" for each in file_columns(table)]
    return "\n".join(["| column | type | meaning |", "|---|---|---|", *rows])


def dump_kv() -> Files:
    return with_tables(DOCS / "look-inside.md", {name: partial(columns_of, name) for name in TABLES})


def kv_cache() -> Files:
    for folder in (DOCS, DOCS / "zh"):
        yield from with_tables(folder / "kv-cache.md", import_module("doc_tables").TABLES)


def models() -> Files:
    return with_tables(DOCS / "models.md", import_module("model_tables").TABLES)


# ---------------------------------------------------------------------- docs/learn

INDEX: dict[Language, str] = {"en": """\
# How a paged KV cache works, in eleven lessons

`pagedcli learn` teaches these lessons in a terminal: it asks for a prediction, runs the command, shows the block pool,
and the trace of the run says whether you were right. Nothing is downloaded. Here they are to be read; all commands can
be run as they stand, in a folder with the file that is shown. `pagedcli learn 3 --picture copy.svg` also
[draws the pool](../look-inside.md#pictures-of-a-run).

""", "zh": """\
# 分页 KV 缓存的工作原理：十一节课

`pagedcli learn --lang zh` 在终端里讲授这些课程：先请你预测，再运行命令、显示块池，然后由这次运行的 trace \
告诉你预测得对不对。不需要下载任何东西。这里是可供阅读的版本；把文中的文件放进一个文件夹，所有命令都可以原样运行。\
`pagedcli learn 3 --picture copy.svg` 还会[画出块池](../../look-inside.md#pictures-of-a-run)。

"""}  # fmt: skip
LEARN: dict[Language, Path] = {"en": DOCS / "learn", "zh": DOCS / "zh" / "learn"}


def index(lang: Language) -> str:
    """The page that lists the lessons."""
    return INDEX[lang] + "".join(f"{each.number}. [{each.title}]({each.name})\n" for each in lessons(lang))


def without_printed(page: str) -> str:
    """The page of a lesson without what its commands print, which differs from machine to machine."""
    return re.sub(r"(?<=```\n\n)```text\n.*?```\n", "", page, flags=re.DOTALL)


def _page(lesson: Lesson) -> str:
    """What the command prints of a lesson."""
    command = [sys.executable, "-m", "pagedcli", "learn", str(lesson.number), "--lang", lesson.lang]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout


def learn() -> Files:
    for lang, folder in LEARN.items():
        yield folder / "README.md", index(lang)
        for lesson in lessons(lang):
            yield folder / lesson.name, _page(lesson)


# ---------------------------------------------------------------------- docs/pictures/path.svg

# Chains of files: each with what it does, and a name that it and the next one use. The second and third begin at a file
# of the first: see BRANCHES. tests/test_architecture.py holds them against the code.
PATHS: list[list[tuple[str, str, str]]] = [
    [
        ("batch/lines.py", "reads the input line by line", "Line"),
        ("batch/prompts.py", "parses, checks, makes token ids, admits", "BatchRow"),
        ("batch/run.py", "keeps rows at hand, hands them in", "add_request"),
        ("core/engine_core.py", "queues a sequence per sample", "Sequence"),
        ("core/scheduler.py", "chooses sequences and their tokens", "ScheduledStep"),
        ("core/step_input.py", "makes arrays: token ids, slots, tables", "StepInput"),
        ("runner/model_runner.py", "runs the model over the paged cache", "SamplingInput"),
        ("runner/sampler.py", "chooses the next tokens", "StepTokens"),
        ("core/engine_core.py", "appends them, finishes sequences", "FinishedRequest"),
        ("batch/run.py", "puts the answers together", "BatchRow"),
        ("batch/rows.py", "makes the row of journal and output", ""),
    ],
    [
        ("runner/device_state.py", "holds cache tensor and block tables", "PagedBatch"),
        ("attention/base.py", "writes K and V, attends over blocks", ""),
    ],
    [
        ("core/cache.py", "looks prefixes up, takes room", "PrefixHit"),
        ("core/block_manager.py", "changes blocks, says each change", "BlocksAllocated"),
        ("trace/state.py", "folds events: the pool again", "PoolState"),
        ("views/moment.py", "keeps what a moment shows", "Moment"),
        ("show/step_tables.py", "prints the tables of a step", ""),
    ],
]
BRANCHES = [("core/scheduler.py", "PrefixHit", 2), ("runner/model_runner.py", "DeviceState", 1)]  # file, name, chain


def path() -> Files:
    """The path of a request through files and records."""
    rows = [file for file, *_ in PATHS[0]]
    starts = {chain: rows.index(file) for file, _, chain in BRANCHES}

    def body(area: Area) -> Drawn:
        assert area.height is not None, "a slide has one"
        parts, wide, pitch = list[str](), area.width * 0.26, area.height / len(rows)
        gap = (area.width - 3 * wide) / 2
        for chain, files in enumerate(PATHS):
            x = area.x + chain * (wide + gap)
            for row, (file, does, name) in enumerate(files, starts.get(chain, 0)):
                y = area.y + row * pitch
                parts.append(box(x, y, wide, pitch * 0.7, "empty"))
                parts.append(text(x + 8, y + pitch * 0.31, file, "strong", area.font * 0.78))
                parts.append(text(x + 8, y + pitch * 0.58, does, "ink", area.font * 0.7))
                if name:
                    parts.append(text(x + 20, y + pitch * 0.92, f"\u2193 {name}", "muted", area.font * 0.72))
        for file, name, chain in BRANCHES:
            y, end = area.y + (rows.index(file) + 0.35) * pitch, area.x + chain * (wide + gap)
            parts.append(line(area.x + wide, y, end, y, "edge"))
            parts.append(text(area.x + wide + 10, y - 5, f"{name} \u2192", "muted", area.font * 0.72))
        return parts, area.height

    caption = (
        "Each box is a file of src/pagedcli, with what it hands to the next one. On the left a row's way to its answer,"
        " in the middle the device, on the right the cache, whose every change is an event that all views fold."
    )
    picture = draw("The path of a request", caption, body, Shape.SLIDE)
    yield DOCS / "pictures" / "path.svg", picture.svg()


WRITTEN: dict[str, Callable[[], Files]] = {
    each.__name__: each for each in (config, families, dump_kv, kv_cache, models, learn, path)
}


def main(arguments: list[str]) -> None:
    for name in [each for each in arguments if each != "--write"] or WRITTEN:
        for file, content in WRITTEN[name]():
            is_new = not file.exists() or without_printed(file.read_text(encoding="utf-8")) != without_printed(content)
            if is_new and "--write" in arguments:
                file.write_text(content, encoding="utf-8")
            state = ("renewed" if "--write" in arguments else "out of date") if is_new else "up to date"
            print(f"{file.relative_to(ROOT)}: {state}")


if __name__ == "__main__":
    main(sys.argv[1:])
