"""What a layer with a state of fixed size keeps of each sequence. Free of torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor that a layer keeps per sequence; all of a sequence's states are one slot."""

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None  # None: that of the activations

    def num_bytes(self, itemsize: int) -> int:
        """Its size; itemsize is that of the activations."""
        size = 4 if self.dtype == "float32" else itemsize
        for length in self.shape:
            size *= length
        return size
