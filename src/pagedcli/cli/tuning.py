"""`plan --tune` and `generate --tune`: the fastest settings for a file, found in the simulator, as YAML."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import yaml

from pagedcli.cli.options import FLAGS
from pagedcli.config import EngineConfig, LoadedConfig
from pagedcli.errors import ConfigError, UsageError
from pagedcli.printable import percent_text
from pagedcli.show.terminal import say
from pagedcli.simulation.advice import OtherKV, Subject, Tuned, tune
from pagedcli.simulation.forecast import Forecast

if TYPE_CHECKING:
    from pagedcli.core.plan import Plan
    from pagedcli.models.spec import ModelSpec
    from pagedcli.planning.step_time import StepTime

_TUNE_S = 60.0  # seconds of trials
_KEY_OF = {"--" + key.split(".")[1].replace("_", "-"): key for key in FLAGS}


def other_kv(
    loaded: LoadedConfig, spec: "ModelSpec", time_of: "Callable[[EngineConfig, Plan], tuple[StepTime | None, str]]"
) -> OtherKV | None:
    """The smaller type of the KV cache that this machine has, unless one is given; `time_of` times its steps."""
    from pagedcli.planning.decide import decide
    from pagedcli.planning.machine import this_machine

    if loaded.config.engine.kv_cache_dtype != "auto" or "engine.kv_cache_dtype" in loaded.sources:
        return None
    machine, reasons = this_machine(), []
    for name in ("int8", "fp8"):  # of a CPU, and of a GPU
        engine = msgspec.structs.replace(loaded.config.engine, kv_cache_dtype=name)
        try:
            plan = decide(engine, spec, machine)
        except ConfigError as error:
            reasons.append(error.message)
        else:
            return OtherKV(name, plan.block_bytes, time_of(engine, plan)[0])
    say(f"note: no smaller type of the KV cache: {'; '.join(reasons)}")
    return None


def print_tuned(subject: Subject, base: Forecast, loaded: LoadedConfig) -> None:
    """Print the best settings on stdout, and on stderr what they gain."""
    print(as_yaml(changed_keys(tuned_settings(subject, base, loaded))), end="")


def tuned_settings(subject: Subject, base: Forecast, loaded: LoadedConfig) -> Tuned:
    """Search, and say what was found. `base`: the run as it is. Settings that were given stay as they are.

    Raises: UsageError.
    """
    given = frozenset(flag for flag, key in _KEY_OF.items() if key in loaded.sources)
    found = tune(subject, base=base, fixed=given, budget_s=_TUNE_S)
    if found is None:
        raise UsageError(f"--tune: to simulate this file takes over {_TUNE_S:.0f} s", hint="try it on a part: --limit")
    unit = "time" if found.advice.by_time else "computed tokens"
    gain = f"{percent_text(found.gain)} less {unit} expected" if found.changes else "no other setting is faster"
    say(f"tuned: {gain}")
    if (name := found.changes.get("--kv-cache-dtype")) is not None:
        say(f"note: a KV cache of {name} rounds differently: some tokens may differ")
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
