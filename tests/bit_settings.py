"""Settings under which the tests marked `bits` run once more: PAGEDCLI_SETTING=NAME, all of them by `make test-matrix`.

A setting changes every engine that a test makes, and nothing else: what it serves stays that of the test, and its pool
keeps its size in tokens. An engine that refuses the setting runs without it, with a warning that says why; snapshots
are for models with recurrent state, and the tests of others are skipped. Tests run on one thread anyway.
"""

import functools
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

VARIABLE = "PAGEDCLI_SETTING"
ROOMY_TOKENS = 16_384  # of a pool that a test leaves to the defaults


@dataclass(frozen=True, slots=True)
class Setting:
    """What changes."""

    keys: dict[str, Any] = field(default_factory=dict)  # of the engine's configuration
    num_threads: int = 1
    preempts_every: int | None = None  # steps, after which the youngest sequence is preempted if there are several
    is_of_states: bool = False


SETTINGS = {
    "blocks-of-1": Setting({"block_size": 1}),
    "preemption": Setting(preempts_every=2),
    "no-cache": Setting({"enable_prefix_caching": False}),
    "two-threads": Setting(num_threads=2),
    "checkpoints": Setting({"checkpoints": "1"}, is_of_states=True),
    "store": Setting({"prefix_store": "of this session"}),
}


def by_default(happens: bool) -> bool:
    """Whether something happens that the pool and the cache of a test bring about; under a setting it need not."""
    return happens or VARIABLE in os.environ


@contextmanager
def applied(setting: Setting, folder: Path) -> Iterator[None]:
    """Every engine runs under a setting; a store is in the folder."""
    from pagedcli import content_files
    from pagedcli.core.scheduler import Scheduler
    from pagedcli.runner.llm_engine import LLMEngine
    from pagedcli.trace.check import QueueLaws

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LLMEngine, "__init__", _started_under(LLMEngine.__init__, setting, folder))
        if setting.preempts_every is not None:
            # a preemption is for a sequence that needs a block; a forced one need not be
            patch.setattr(QueueLaws, "before_request_preempted", lambda *_: None)
            patch.setattr(Scheduler, "_schedule_running", _preempting(Scheduler._schedule_running, setting))
        if "prefix_store" in setting.keys:
            patch.setattr(content_files, "cache_home", lambda: folder)
        yield


def changed(config: Any, setting: Setting, folder: Path) -> Any:
    """An engine's configuration under a setting."""
    keys = dict(setting.keys)
    if "block_size" in keys and config.kv_cache_memory is None:
        given = config.num_kvcache_blocks
        num_tokens = ROOMY_TOKENS if given is None else given * config.block_size
        keys["num_kvcache_blocks"] = num_tokens // keys["block_size"]
    if "prefix_store" in keys:
        keys["prefix_store"] = config.prefix_store or str(folder / "store")
    return msgspec.structs.replace(config, **keys)


def _started_under(start: Any, setting: Setting, folder: Path) -> Any:
    from pagedcli.errors import BackendError, ConfigError

    @functools.wraps(start)
    def start_under(engine: Any, config: Any, **options: Any) -> None:
        has_store = {"with_store": True} if "prefix_store" in setting.keys else {}
        try:
            start(engine, changed(config, setting, folder), **options | has_store)
        except (BackendError, ConfigError) as error:
            if setting.is_of_states and "no layers with recurrent state" in error.message:
                pytest.skip(error.message)
            warnings.warn(f"an engine runs without the setting: {error.message}", stacklevel=2)
            start(engine, config, **options)

    return start_under


def _preempting(schedule_running: Any, setting: Setting) -> Any:
    def schedule_after_preempting(scheduler: Any, work: Any) -> int:
        if scheduler.running and scheduler._facts.num_steps % setting.preempts_every == 0:
            oldest = scheduler.running[0]
            victim = scheduler._victim(oldest, 1, work)
            if victim is not None and not any(each.is_unread for each in victim.group or [victim]):
                scheduler._preempt(victim, oldest, work)
        return schedule_running(scheduler, work)

    return schedule_after_preempting


if __name__ == "__main__":
    print(*SETTINGS)
