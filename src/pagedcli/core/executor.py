"""The protocol of what runs the engine core's steps: arrays go in, token ids come out.

ModelRunner runs a model on one device, WorkerGroup on several; a simulation computes nothing. Needs no torch.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol

from pagedcli.core.beams import Candidates
from pagedcli.core.prompt_rows import PromptLogprobs
from pagedcli.core.sampling_input import SamplingInput
from pagedcli.core.sequence import TokenLogprobs
from pagedcli.core.step_input import StepInput


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of one step, on the host."""

    token_ids: Items[int | None]  # [R]; None: the row's logits are NaN
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)  # row -> log-probabilities, where requested
    prompt_logprobs: Items[PromptLogprobs] = ()
    candidates: Mapping[int, Candidates] = field(default_factory=dict)  # row -> next tokens of a beam


class LaunchedStep(Protocol):
    """A step that may still be running."""

    def read(self) -> StepTokens:
        """Wait for the tokens."""
        ...


class Executor(Protocol):
    """Runs steps in the order in which they are launched."""

    def launch(self, step: StepInput, sampling: SamplingInput) -> LaunchedStep:
        """Start a step without waiting for its tokens. Where `step.source_rows` says so, its input ids are the tokens
        of the step launched before, which may not have been read."""
        ...
