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

_USUAL_THETA = 10000.0


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
    of_llama = {each.name: each.default for each in fields(Llama)}
    found = {}
    for each in fields(ours):
        is_own = each.name in of_llama and each.default != of_llama[each.name]
        default = given.get(each.name, MISSING)
        if not is_own and default is not MISSING and default != each.default:
            found[each.name] = default
    return found


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


WRITTEN: dict[str, Callable[[], Files]] = {
    each.__name__: each for each in (config, families, dump_kv, kv_cache, models, learn)
}


def main(arguments: list[str]) -> None:
    for name in [each for each in arguments if each != "--write"] or WRITTEN:
        for path, text in WRITTEN[name]():
            is_new = not path.exists() or without_printed(path.read_text(encoding="utf-8")) != without_printed(text)
            if is_new and "--write" in arguments:
                path.write_text(text, encoding="utf-8")
            state = ("renewed" if "--write" in arguments else "out of date") if is_new else "up to date"
            print(f"{path.relative_to(ROOT)}: {state}")


if __name__ == "__main__":
    main(sys.argv[1:])
