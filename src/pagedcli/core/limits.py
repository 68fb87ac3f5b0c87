"""What requests, steps and the cache of an engine must fit into: one record for admission, scheduler, step builder,
runner, simulations and the laws of traces. Made by planning.decide; needs no torch.
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from pagedcli.config import EngineConfig, PreemptionPolicy
from pagedcli.core.budget import StepShape
from pagedcli.core.groups import TableShape
from pagedcli.errors import ConfigError
from pagedcli.events import CacheGroup, EngineStarted, Eviction

NO_LIMIT = 2**62  # stands for a limit that is not known
# default tokens per step, where no GPU is known, and on a CPU: more do not help it
STEP_TOKENS, CPU_STEP_TOKENS = 2048, 512
MOST_DRAFTED = 8  # guessed tokens of one sequence in a step, see core.drafts


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of an engine, and how it decides within them. None: not known, or none.

    Fields have the names of the configuration and of EngineStarted.
    """

    max_model_len: int = NO_LIMIT  # tokens of a request, prompt and output together
    max_num_seqs: int = NO_LIMIT  # sequences that run at once
    max_num_batched_tokens: int = NO_LIMIT  # tokens of a step
    chunked_prefill_size: int | None = None  # tokens of one prompt per step; None: as many as fit in the step
    min_prefill_tokens: int = 0  # fewer prompt tokens wait to start in a step of decodes, not for long; 0: none
    block_size: int = 16  # tokens
    num_blocks: int | None = None  # pool size; None: not measured yet
    groups: tuple[CacheGroup, ...] = (CacheGroup(),)  # layers that share the pool, see core.groups
    num_state_slots: int | None = None  # recurrent state, see core.states; None: there are none, or not known
    state_bytes: int = 0  # bytes per slot, over all layers with a state
    checkpoints: str = "branches"  # policy for snapshots of state, see core.snapshots
    vocab_size: int | None = None
    has_head: bool = True  # the model has an output layer, without which it only makes vectors
    enable_prefix_caching: bool = True
    eviction: Eviction = "lru"
    preemption_policy: PreemptionPolicy = "last"

    def __post_init__(self) -> None:
        for name, limit in self.of_step.items():
            if limit < 1:
                raise ConfigError(f"{name} is {limit}, must be at least 1")

    @classmethod
    def of(cls, source: EngineConfig | EngineStarted, **changes: Any) -> "Limits":
        """What a configuration or the first event of a trace says, with changes. Of a configuration, max_model_len and
        max_num_batched_tokens have to be among the changes if they are left to the engine."""
        known = {item.name: getattr(source, item.name) for item in fields(cls) if hasattr(source, item.name)}
        return cls(**{**known, **changes})

    @property
    def of_step(self) -> dict[str, int]:
        """What the sequences of a step must fit into, each with one token, by configuration key."""
        return {"max_num_seqs": self.max_num_seqs, "max_num_batched_tokens": self.max_num_batched_tokens}

    @property
    def has_states(self) -> bool:
        """Whether the model has layers with recurrent state."""
        return self.num_state_slots is not None or self.state_bytes > 0

    @property
    def chunk_size(self) -> int:
        """Most tokens of one sequence in a step."""
        return self.chunked_prefill_size or self.max_num_batched_tokens

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each group of layers."""
        return self.tables.windows

    @cached_property  # each row asks
    def tables(self) -> TableShape:
        """The block tables of a sequence."""
        return TableShape.of(self.block_size, self.groups)

    @property
    def table_dimensions(self) -> tuple[int, int]:
        """Rows and columns of the block tables of all running sequences."""
        return self.max_num_seqs, self.tables.num_entries(self.max_model_len)

    @property
    def most_sampled(self) -> int:
        """Most tokens that a step samples: one per sequence, and where few run those after guessed ones."""
        return max(self.max_num_seqs, 1 + MOST_DRAFTED)

    @property
    def max_in_work(self) -> int:
        """Requests to have ready: a step may finish all that run, and as many more can start at once."""
        return 2 * self.max_num_seqs

    @property
    def largest_step(self) -> StepShape:
        """The step that sets the activation peak."""
        return StepShape.largest(self.max_num_batched_tokens, self.max_num_seqs, self.max_model_len)

    def with_pool(
        self, num_blocks: int, num_seqs: int | None = None, *, num_state_slots: int | None = None
    ) -> "Limits":
        """These limits with a pool and a number of sequences. By default there is a slot of state for each sequence."""
        if self.has_states and num_state_slots is None:
            num_state_slots = num_seqs or 1
        num_seqs = num_seqs or self.max_num_seqs
        return replace(self, num_blocks=num_blocks, max_num_seqs=num_seqs, num_state_slots=num_state_slots)
