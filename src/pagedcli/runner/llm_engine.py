"""The engine core over a model: loads the model of a configuration, and creates its executor."""

import time
from collections.abc import Callable
from dataclasses import replace

from pagedcli.config import EngineConfig
from pagedcli.core.engine_core import EngineCore
from pagedcli.core.store import StoreFacts
from pagedcli.events import Emit
from pagedcli.process import Closes
from pagedcli.runner.loading import load_engine
from pagedcli.runner.store import open_store
from pagedcli.runner.tensor_parallel import WorkerGroup


class LLMEngine(EngineCore, Closes):
    """A model ready to serve requests. See EngineCore.

    `with_store`: use the prefix store of the configuration. Measurements do not: it would hide what they measure.
    Raises:  ConfigError, ModelError, BackendError; UsageError for a store.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        emit: Emit | None = None,
        trace_tokens: bool = False,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        with_store: bool = False,
    ) -> None:
        self.config = config
        self._group = WorkerGroup(config) if config.tensor_parallel_size > 1 else None
        loaded = self._group.load() if self._group is not None else load_engine(config)
        self.decision, self.spec = loaded.decision, loaded.decision.spec
        self.model, self.model_path = loaded.model, loaded.model_path
        self.runner = loaded.runner
        executor = self._group or self.runner
        plan = loaded.plan
        if emit is not None:  # so that a recording knows how long other steps would take
            plan = replace(plan, step_times=loaded.decision.time_key.file_name)
        super().__init__(plan, executor, emit=emit, trace_tokens=trace_tokens, clock_ns=clock_ns)
        if with_store:
            self.cache.store = open_store(config, loaded.decision, loaded.model_path, loaded.runner)

    def close(self) -> None:
        """Stop the processes of a tensor-parallel group, and write what waits for the prefix store; the engine is
        unusable afterwards. May be called twice."""
        self.close_store()
        if self._group is not None:
            self._group.close()

    def close_store(self) -> StoreFacts | None:
        """Write what waits for the prefix store, and use it no longer. Returns what the run did with it."""
        store, self.cache.store = self.cache.store, None
        if store is None:
            return None
        store.close(self.stats.seconds_per_token)
        return store.facts
