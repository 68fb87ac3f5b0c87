"""configs/default.yaml, made from the configuration structs: python scripts/default_config.py [--write]"""

import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import yaml

from pagedcli.config import Config
from pagedcli.config_keys import Key, keys_of

PATH = Path(__file__).resolve().parents[1] / "configs" / "default.yaml"
HEADER = """\
# Every key with its default, made by scripts/default_config.py. Copy what you want to change.
#
#   pagedcli generate prompts.jsonl -C configs/default.yaml
#
# Precedence: default < this file < flag. Most keys are also flags: max_num_seqs is --max-num-seqs.
# `pagedcli generate --show-config -C FILE` prints what is in effect and where each value comes from.
"""
_COLUMN = 34  # of the comments


def default_config() -> str:
    """The text of the file."""
    lines = [HEADER]
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
    return "\n".join(lines[:-1]) + "\n"


def _meaning(type_: Any, declared: Key) -> str:
    """The description, the values or the range, and what null stands for."""
    text = declared.description
    if get_origin(type_) is Literal:
        text += f" ({', '.join(get_args(type_))})"
    elif declared.names or declared.at_most is not None:
        text += f" ({declared.allowed})"
    return text if declared.default is None else f"{text}; null: {declared.default}"


def main() -> None:
    if "--write" in sys.argv:
        PATH.write_text(default_config(), encoding="utf-8")
    print("up to date" if PATH.read_text(encoding="utf-8") == default_config() else "out of date: run with --write")


if __name__ == "__main__":
    main()
