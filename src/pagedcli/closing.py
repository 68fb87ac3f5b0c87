"""What is closed at the end of a `with` block."""

from abc import ABC, abstractmethod
from typing import Self


class Closes(ABC):
    """An object that a `with` block closes at its end."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Release what it holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
