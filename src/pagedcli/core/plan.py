"""The plan of an engine: everything that was decided before its first step. Read by EngineCore and by all reports.

Made by planning.decide. Needs no torch: devices and dtypes are names, and simulations make plans without a model.
"""

import time
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import UNSET

from pagedcli import __version__
from pagedcli.core.budget import Terms
from pagedcli.core.limits import Limits
from pagedcli.events import SCHEMA_VERSION, EngineStarted, Event, Speculation, StateSlotsMade

Kernels = Literal["cpu", "triton", "torch"]  # linear layers: our C++ ones, our Triton ones or torch's


@dataclass(frozen=True, slots=True)
class Pool:
    """The KV blocks, and slots of recurrent state, that an engine gets."""

    num_blocks: int  # 0: none fits
    reason: str  # reason for this number
    hint: str | None = None  # next action if there are none
    num_state_slots: int | None = None  # None: the model has no recurrent state

    def state_bytes(self, limits: Limits) -> int:
        """Bytes of all slots of recurrent state."""
        return (self.num_state_slots or 0) * limits.state_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What this machine will do with an EngineConfig. The last four fields are known once the model is loaded."""

    limits: Limits  # num_blocks is known once the model is loaded
    model: str
    device: str = "none"  # cpu or cuda:N
    dtype: str = "none"  # weights and activations
    kv_dtype: str = "none"  # KV cache
    backend: str = "none"  # attention backend
    refused: tuple[str, ...] = ()  # why faster backends were not chosen, one line each
    decoder: str = "none"  # see models.loading
    weights: str | None = None  # how those of linear layers are quantized
    kernels: Kernels = "torch"  # linear layers
    in_one_call: bool = False  # the native library runs a whole step
    block_bytes: int = 0  # the most that a group of limits.groups takes
    runs_ahead: bool = False  # each step is launched before the tokens of the last one are read
    speculation: Speculation = "off"  # how next tokens are guessed, see core.drafts
    no_drafts: str | None = None  # why none are, where the configuration asks for it
    graph_sizes: tuple[int, ...] = ()  # batch sizes with a CUDA graph
    no_graphs: str | None = None  # why there are none
    notes: tuple[str, ...] = ()  # further notes for the user
    eos_token_ids: frozenset[int] = frozenset()
    seed: int = 0  # default for requests without a seed
    pool: Pool | None = None  # predicted before the model is loaded, then measured; None: not predicted, or simulated
    weight_bytes: int = 0
    memory: Terms | None = None  # None: not measured
    kv_scales: tuple[float, float] | None = None  # scales of K and of V in an fp8 cache
    step_times: str | None = None  # the calibration of its steps, see planning.step_time; only where events are read

    @property
    def on_cpu(self) -> bool:
        return self.device.startswith("cpu")

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in the KV cache, as long as no window has passed it."""
        return self.block_bytes * len(self.limits.groups) // self.limits.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, once it is known."""
        assert self.limits.num_blocks is not None, "the pool is sized once the model is loaded"
        return self.limits.num_blocks


def started(plan: Plan) -> list[Event]:
    """The first events of an engine with this plan."""
    limits = plan.limits
    events: list[Event] = [
        EngineStarted(
            schema_version=SCHEMA_VERSION,
            pagedcli_version=__version__,
            time_ns=time.time_ns(),
            **_event_fields(plan),
            **_event_fields(limits),
            kinds=("state",) if limits.has_states else UNSET,
        )
    ]
    if limits.num_state_slots:
        events.append(StateSlotsMade(limits.num_state_slots, limits.state_bytes, limits.checkpoints))
    return events


def _event_fields(record: Plan | Limits) -> dict[str, Any]:
    """The fields that the event has, too."""
    names = [name for name in record.__dataclass_fields__ if name in EngineStarted.__struct_fields__]
    return {name: getattr(record, name) for name in names}
