"""The defaults of config.json's fields for each native family: python scripts/family_defaults.py --write

They are those of the installed transformers' config classes, as far as a family's class in models/families does not say
them itself. tests/models/test_spec.py compares them.
"""

import json
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

import pagedcli.models.families.registry as registry
from pagedcli.models.family import Llama

DOCUMENT = Path(registry.__file__).with_name("defaults.json")
_USUAL_THETA = 10000.0


def defaults() -> dict[str, dict[str, Any]]:
    """Defaults by model_type."""
    native = {name: family.config for name, family in registry.FAMILIES.items() if family.text is None}
    return {name: _of(CONFIG_MAPPING[name], kind) for name, kind in native.items() if name in CONFIG_MAPPING}


def _of(theirs: Any, ours: type[Llama]) -> dict[str, Any]:
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


def text() -> str:
    """The file: a line for each family."""
    lines = [f"{json.dumps(name)}: {json.dumps(found)}" for name, found in defaults().items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    DOCUMENT.write_text(text(), encoding="utf-8")
