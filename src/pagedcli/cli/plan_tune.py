"""`plan --tune`: the settings that make a file faster, found in the simulator and by runs in turns, as YAML."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import yaml

from pagedcli import runner
from pagedcli.answers.cures import LEAST_TIMED_S, Tuned, tune
from pagedcli.answers.settings import ORDER, POOL, Changes, Subject, flags_of
from pagedcli.answers.time import Forecast, in_prefix_order
from pagedcli.answers.turns import Turns, in_turns, pass_s
from pagedcli.config import EngineConfig, LoadedConfig
from pagedcli.errors import PagedcliError, UsageError
from pagedcli.printable import percent_text, plural
from pagedcli.sampling_params import SamplingParams
from pagedcli.show.terminal import ProgressLine, say
from pagedcli.simulation.requests import Request, largest_output, work_of

_TUNE_S = 60.0  # seconds of trials in the simulator, and of runs in turns


def time_in_turns(
    loaded: LoadedConfig, subject: Subject, run_s: float, before: Changes, after: Changes, budget_s: float
) -> Turns | None:
    """Time the first rows of a file with the changes before and after, in turns, for up to budget_s seconds; None,
    after saying why, if the engines do not start. `run_s`: the predicted time of the whole file."""
    both = [{POOL: subject.num_blocks, **each} for each in (before, after)]
    most = (sum(map(work_of, subject.workload.requests)) + subject.left_out) * min(1.0, pass_s(budget_s) / run_s)
    sample = list[Request]()
    while len(sample) < len(subject.workload.requests) and most > 0:
        sample.append(subject.workload.requests[len(sample)])
        most -= work_of(sample[-1])
    orders = [in_prefix_order(sample) if each.get(ORDER) == "prefix" else sample for each in both]
    flags = " ".join(flags_of({key: value for key, value in after.items() if before.get(key) != value}))
    say(f"timing {flags} and the current settings in turns, on {plural(len(sample), 'prompt')}")
    progress = ProgressLine(line_every_s=5.0)
    try:
        configs = [_engine_config(loaded.config.engine, each) for each in both]
        with runner.LLMEngine(configs[0]) as one, runner.LLMEngine(configs[1]) as other:

            def serve(which: int, number: int) -> float:
                progress.show(lambda _: f"timing: pass {number + 1}")
                return _serve((one, other)[which], orders[which], number)

            found = in_turns(serve, budget_s)
    except PagedcliError as error:
        say(f"not timed: {error.message}")
        return None
    finally:
        progress.close()
    say(f"{flags}: {found.text}, by {plural(len(found.after_s), 'pass')} each")
    return found


def _engine_config(engine: EngineConfig, changes: Changes) -> EngineConfig:
    names = {key.partition(".")[2]: value for key, value in changes.items() if key.startswith("engine.")}
    return msgspec.structs.replace(engine, **names)


def _serve(engine: "runner.LLMEngine", requests: Sequence[Request], number: int) -> float:
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


def tuned_settings(subject: Subject, base: Forecast, loaded: LoadedConfig) -> str:
    """The settings that make a file faster, as a configuration file that begins with what they gain. `base`: the run as
    it is. Settings that were given stay as they are. Raises: UsageError."""
    timing = partial(time_in_turns, loaded, subject, base.seconds or 0.0)
    found = tune(subject, timing, base=base, fixed=frozenset(loaded.sources), budget_s=_TUNE_S)
    if found is None:
        raise UsageError(f"--tune: simulating this file takes over {_TUNE_S:.0f} s", hint="try a part of it: --limit")
    if not found.is_timed:
        is_short = subject.step_time is not None
        why = f"a run under {LEAST_TIMED_S:.0f} s is too short" if is_short else "there is no calibration"
        say(f"note: nothing was timed: {why}")
    return "".join(f"# {line}\n" for line in _gains(found)) + _yaml(found.changes)


def _gains(found: Tuned) -> list[str]:
    """What each change gains, and what it costs."""
    gains = []
    if found.exact is not None:
        saved = f"{percent_text(found.exact.gain)} fewer tokens to compute (exact by simulation)"
        gains.append((found.exact.setting, saved))
    if found.timed is not None and found.turns is not None:
        gains.append((found.timed, f"{percent_text(found.turns.gain)} less time (timed in turns)"))
    said = [f"{text} with {each.text}" + (f"; {each.cost}" if each.cost else "") for each, text in gains]
    return said or ["no setting change is sure to be faster"]


def _yaml(keys: Changes) -> str:
    sections: dict[str, dict[str, Any]] = {}
    for key, value in sorted(keys.items()):
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    return yaml.safe_dump(sections, sort_keys=False) if sections else ""
