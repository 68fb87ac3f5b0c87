"""`plan --tune` and `generate --tune`: the fastest settings for a file, found in the simulator, as YAML."""

from typing import Any

import yaml

from pagedcli.cli.options import FLAGS
from pagedcli.config import LoadedConfig
from pagedcli.errors import UsageError
from pagedcli.printable import percent_text
from pagedcli.show.terminal import say
from pagedcli.simulation.advice import Subject, Tuned, tune

_TUNE_S = 60.0  # seconds of trials
_KEY_OF = {"--" + key.split(".")[1].replace("_", "-"): key for key in FLAGS}


def print_tuned(subject: Subject, loaded: LoadedConfig) -> None:
    """Print the best settings on stdout, and on stderr what they gain."""
    print(as_yaml(changed_keys(tuned_settings(subject, loaded))), end="")


def tuned_settings(subject: Subject, loaded: LoadedConfig) -> Tuned:
    """Search, and say what was found. Settings that were given stay as they are. Raises: UsageError."""
    given = frozenset(flag for flag, key in _KEY_OF.items() if key in loaded.sources)
    found = tune(subject, fixed=given, budget_s=_TUNE_S)
    if found is None:
        raise UsageError(f"--tune: to simulate this file takes over {_TUNE_S:.0f} s", hint="try it on a part: --limit")
    unit = "time" if found.advice.by_time else "computed tokens"
    gain = f"{percent_text(found.gain)} less {unit} expected" if found.changes else "no other setting is faster"
    say(f"tuned: {gain}")
    return found


def changed_keys(found: Tuned) -> dict[str, Any]:
    """The configuration keys that change, with their values."""
    return {_KEY_OF[flag]: int(value) if value.isdecimal() else value or True for flag, value in found.changes.items()}


def as_yaml(keys: dict[str, Any]) -> str:
    """A configuration file."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in sorted(keys.items()):
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    return yaml.safe_dump(sections, sort_keys=False) if sections else "# no other setting is faster\n"
