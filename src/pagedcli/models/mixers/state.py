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


def conv_and_matrix(kernel: int, channels: int, matrix: tuple[int, ...]) -> tuple[StateTensor, ...]:
    """What a recurrence behind a convolution keeps: its last inputs, and a matrix per head, [H, N, P] in float32."""
    return StateTensor("conv", (kernel - 1, channels)), StateTensor("matrix", matrix, "float32")
