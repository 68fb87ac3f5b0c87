"""What kernels of layers read of a model: its recurrences and its routers, as data. Free of torch."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class StateHeads:
    """The heads of a recurrence, and how its inputs lie in a projected row."""

    corrects: ClassVar[bool]  # a gated delta rule; False: a selective scan
    by_channel: ClassVar[bool] = False  # each channel of a key is forgotten at a rate of its own
    num_heads: int  # H, heads of v or x, and of the result
    num_key_heads: int  # heads of k and q, or of B and C; each serves neighbouring heads, if not `tiled`
    key_dim: int  # N
    value_dim: int  # P
    interleaved: bool = False  # key head by key head: q, k, v, z; and b, a
    tiled: bool = False  # a key head serves every num_key_heads-th head, as in llama.cpp's files
    correction: float = 1.0  # factor of a delta rule's correction; 2: a state may also turn around
    limits: tuple[float, float] = (0.0, 0.0)  # smallest and largest step of a selective scan

    @property
    def inner(self) -> int:
        """Width of v or x, and of the result."""
        return self.num_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Columns of q, k and v, or of x, B and C."""
        return 2 * self.num_key_heads * self.key_dim + self.inner

    @property
    def values_per_key(self) -> int:
        """Columns of v that a key head serves."""
        return self.num_heads // self.num_key_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router picks experts and weights them."""

    num_per_token: int  # experts that each token goes to
    renormalize: bool  # the picked scores are divided by their sum
    sigmoid: bool = False  # scores are sigmoids of the router's logits instead of their softmax
    scale: float = 1.0  # factor of the picked scores
    least_sum: float = 0.0  # number added to their sum before they are divided by it
    # groups that experts form, how many of them stay for a token, and how many of a group's best scores count for it
    groups: tuple[int, int, int] | None = None
    # each picked expert is weighted among those left whose logits are at most so much smaller, as a share; 0: among all
    nearness: float = 0.0
