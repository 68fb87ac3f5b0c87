"""`plan --tune` and `generate --tune`: the fastest settings for a file, found in the simulator, as YAML."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import yaml

from pagedcli.cli.options import FLAGS
from pagedcli.config import EngineConfig, LoadedConfig
from pagedcli.errors import ConfigError, UsageError
from pagedcli.planning.step_time import Calibrations, StepTime
from pagedcli.printable import percent_text, plural
from pagedcli.show.terminal import say
from pagedcli.simulation.advice import ADVICE_S, WORTH_SAYING, OtherKV, Subject, Tuned, advise, tune
from pagedcli.simulation.forecast import Forecast

if TYPE_CHECKING:
    from pagedcli.core.plan import Plan
    from pagedcli.models.spec import ModelSpec

TimeOf = Callable[[EngineConfig, "Plan"], tuple[StepTime | None, str]]
"""Times the steps of an engine, or says why not."""

_TUNE_S = 60.0  # seconds of trials
_KEY_OF = {"--" + key.split(".")[1].replace("_", "-"): key for key in FLAGS}


def other_kv(loaded: LoadedConfig, spec: "ModelSpec", time_of: TimeOf) -> OtherKV | None:
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


def with_smaller_blocks(
    subject: Subject, base: Forecast, loaded: LoadedConfig, spec: "ModelSpec", time_of: TimeOf
) -> Subject:
    """Steps with the largest smaller blocks that would save work are timed, too: they are slower. `base`: the run as it
    is."""
    from pagedcli.planning.decide import decide
    from pagedcli.planning.machine import this_machine

    if (timed := subject.timed) is None:
        return subject
    for size in subject.smaller_blocks:
        if size in timed.by_block_size:
            continue
        as_fast = replace(subject, timed=Calibrations(timed.own, {size: timed.own}))
        trials = advise(as_fast, base=base, budget_s=ADVICE_S, kinds=("block size",)).trials
        if not trials or trials[0].gain < WORTH_SAYING:
            continue
        say(f"blocks of {plural(size, 'token')} would save work if steps were as fast with them:")
        engine = msgspec.structs.replace(loaded.config.engine, block_size=size)
        found, _ = time_of(engine, decide(engine, spec, this_machine()))
        if found is not None:
            return replace(subject, timed=Calibrations(timed.own, {**timed.by_block_size, size: found}))
    return subject


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
