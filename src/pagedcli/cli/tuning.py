"""`plan --tune` and `generate --tune`: the fastest settings for a file, found in the simulator and timed, as YAML; and
runs in turns for `plan --measure`.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import yaml

from pagedcli.config import EngineConfig, LoadedConfig
from pagedcli.errors import ConfigError, PagedcliError, UsageError
from pagedcli.printable import percent_text, plural
from pagedcli.sampling_params import SamplingParams
from pagedcli.show.terminal import ProgressLine, say
from pagedcli.simulation.advice import tune
from pagedcli.simulation.forecast import Forecast, in_prefix_order
from pagedcli.simulation.requests import TraceRequest, largest_output, work_of
from pagedcli.simulation.settings import KV_DTYPE, ORDER, POOL, Changes, SmallerKV, Subject, flags_of
from pagedcli.simulation.turns import Turns, in_turns, keep_turns, pass_s

if TYPE_CHECKING:
    from pagedcli.planning.decision import Decision
    from pagedcli.runner.llm_engine import LLMEngine

_TUNE_S = 60.0  # seconds of trials


def smaller_kv(loaded: LoadedConfig, decision: "Decision") -> SmallerKV | None:
    """The smaller type of the KV cache that this machine has, unless one is given."""
    from pagedcli.planning.decide import decide

    if loaded.config.engine.kv_cache_dtype != "auto" or KV_DTYPE in loaded.sources:
        return None
    reasons = []
    for name in ("int8", "fp8"):  # CPUs have the first, GPUs the second
        try:
            changed = msgspec.structs.replace(decision.config, kv_cache_dtype=name)
            other = decide(changed, decision.spec, decision.machine).plan
        except ConfigError as error:
            reasons.append(error.message)
        else:
            return SmallerKV(name, other.block_bytes, decision.plan.block_bytes)
    say(f"note: no smaller type of the KV cache: {'; '.join(reasons)}")
    return None


def time_in_turns(
    loaded: LoadedConfig, base: Forecast, subject: Subject, changes: Changes, budget_s: float
) -> Turns | None:
    """Time the first rows of a file with and without other settings in turns, for so many seconds at most, and keep
    what that says; None, after saying why, if the engines do not start. `base`: the predicted run without them."""
    from pagedcli.bench.spread import BusyWatch
    from pagedcli.runner.llm_engine import LLMEngine

    pool = {POOL: subject.num_blocks}
    configs = [_engine_config(loaded.config.engine, each) for each in (pool, {**pool, **changes})]
    whole_s = base.seconds or 0.0
    share = min(1.0, pass_s(budget_s) / whole_s) if whole_s else 1.0
    most, sample = share * (sum(map(work_of, subject.workload.requests)) + subject.left_out), list[TraceRequest]()
    while len(sample) < len(subject.workload.requests) and most > 0:
        sample.append(subject.workload.requests[len(sample)])
        most -= work_of(sample[-1])
    orders = [sample, in_prefix_order(sample) if changes.get(ORDER) == "prefix" else sample]
    say(f"timing {' '.join(flags_of(changes))} and the settings of before in turns, on {plural(len(sample), 'prompt')}")
    progress, watch = ProgressLine(line_every_s=5.0), BusyWatch()
    try:
        with LLMEngine(configs[0]) as before, LLMEngine(configs[1]) as after:

            def serve(which: int, number: int) -> float:
                progress.show(lambda _: f"timing: pass {number + 1}")
                return _serve((before, after)[which], orders[which], number)

            found = in_turns(serve, budget_s)
    except PagedcliError as error:
        say(f"not timed: {error.message}")
        return None
    finally:
        progress.close()
    busy = watch.read()
    found = replace(found, busy=0.0 if busy is None else busy.others + busy.steal)
    name = subject.name_of_turns(changes)
    if name is not None:
        keep_turns(name, found)
    say(f"{' '.join(flags_of(changes))}: {found.text}, by {plural(len(found.after_s), 'pass')} each")
    return found


def _engine_config(engine: EngineConfig, changes: Changes) -> EngineConfig:
    names = {key.partition(".")[2]: value for key, value in changes.items() if key.startswith("engine.")}
    return msgspec.structs.replace(engine, **names)


def _serve(engine: "LLMEngine", requests: Sequence[TraceRequest], number: int) -> float:
    """Seconds that requests take. Those of another number share no blocks with them."""
    start_s = time.perf_counter()
    for request in requests:
        assert request.token_ids is not None, "rows of a file have tokens"
        params = SamplingParams(
            n=request.num_samples,
            max_tokens=request.num_output_tokens or largest_output(request),
            temperature=1.0 if request.is_random else 0.0,
            ignore_eos=True,
            seed=0,
        )
        salt = f"{number} {request.cache_salt or ''}"
        engine.add_request(
            request.request_id,
            request.token_ids[: request.num_context_tokens].tolist(),
            params,
            cache_salt=salt,
            continuations=request.continuations,
        )
    while engine.has_unfinished_requests():
        engine.step()
    return time.perf_counter() - start_s


def tuned_settings(subject: Subject, base: Forecast, loaded: LoadedConfig) -> tuple[dict[str, Any], str]:
    """The configuration keys that make a file faster, with their values, and as a configuration file that begins with
    what they gain. `base`: the run as it is. Settings that were given stay as they are.

    Raises: UsageError.
    """
    found = tune(subject, base=base, fixed=frozenset(loaded.sources), budget_s=_TUNE_S)
    if found is None:
        raise UsageError(f"--tune: to simulate this file takes over {_TUNE_S:.0f} s", hint="try it on a part: --limit")
    unit, how = ("less time", "simulated") if found.by_time else ("fewer tokens to compute", "exact by simulation")
    said = f"{percent_text(found.gain)} {unit} ({how if found.turns is None else 'timed in turns'})"
    if (name := found.changes.get(KV_DTYPE)) is not None:
        say(f"note: a KV cache of {name} rounds differently: some tokens may differ")
    said = said if found.changes else "no other setting is sure to be faster"
    return found.changes, f"# {said}\n{_yaml(found.changes)}"


def _yaml(keys: dict[str, Any]) -> str:
    sections: dict[str, dict[str, Any]] = {}
    for key, value in sorted(keys.items()):
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    return yaml.safe_dump(sections, sort_keys=False) if sections else ""
