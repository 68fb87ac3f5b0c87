"""What layers that keep a state of fixed size, instead of K and V of every token, have in common. Free of torch."""

from abc import ABC, abstractmethod
from typing import ClassVar, Self

from pagedcli.models.mixers.state import StateTensor
from pagedcli.models.tensors import Parameter, Tensors


class RecurrentMixer(ABC):
    """A mixer whose state starts with the last inputs of a convolution."""

    __slots__ = ()
    name: ClassVar[str]
    attends: ClassVar[bool] = False
    keeps: ClassVar[bool] = True  # a state of its own
    kernel: int

    @property
    @abstractmethod
    def inner(self) -> int:
        """Width of what it computes with."""

    @property
    @abstractmethod
    def state(self) -> tuple[StateTensor, ...]:
        """What a sequence keeps."""

    @property
    def grouping(self) -> tuple[int, int]:
        """Heads, and the groups that they form."""
        return 1, 1

    @property
    def shape(self) -> Self:
        """What decides the shapes of its weights."""
        return self

    def split(self, num_ranks: int) -> Self:
        raise AssertionError(f"unsplit_reason refuses {num_ranks} ranks")

    def unsplit_reason(self, tensors: tuple[str, ...]) -> str | None:
        return "keeps states of its sequences"

    @abstractmethod
    def parameters(self, make: Tensors, key: str, layer: str) -> dict[str, Parameter]:
        """Its tensors. `key`: of the layer here, `layer`: in the checkpoint."""

    def unread(self, make: Tensors, layer: str) -> set[str]:
        return set()
