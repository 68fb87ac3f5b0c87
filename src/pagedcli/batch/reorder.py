"""A window of waiting requests, sorted so that those with a common prefix follow each other and hit the prefix cache.
Used by batch.run. The output keeps its order.
"""

from pagedcli.batch.intake import Prepared
from pagedcli.batch.lines import Line
from pagedcli.core.prefixes import WINDOW_ROWS, WINDOW_TOKENS


class PrefixWindow:
    """Requests in the order of their tokens. One window is drained while the next fills: at most two are in memory, and
    a request waits for at most one window."""

    def __init__(self, *, max_rows: int = WINDOW_ROWS, max_tokens: int = WINDOW_TOKENS) -> None:
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._filling: list[tuple[Line, Prepared]] = []
        self._num_tokens = 0  # of the window being filled
        self._sorted: list[tuple[Line, Prepared]] = []  # last one first

    def __len__(self) -> int:
        return len(self._filling) + len(self._sorted)

    @property
    def full(self) -> bool:
        """Whether a request must be taken before another can be added."""
        return len(self._filling) >= self._max_rows or self._num_tokens >= self._max_tokens

    def add(self, line: Line, request: Prepared) -> None:
        self._filling.append((line, request))
        self._num_tokens += sum(len(prompt.token_ids) for prompt in request.prompts)

    def take(self, *, partial: bool) -> tuple[Line, Prepared] | None:
        """The next request; None while a window fills. `partial`: no more input for now, so it need not be full."""
        if not self._sorted and self._filling and (self.full or partial):
            self._sorted, self._filling, self._num_tokens = self._filling, [], 0
            self._sorted.sort(key=_prefix_order, reverse=True)
        return self._sorted.pop() if self._sorted else None


def _prefix_order(item: tuple[Line, Prepared]) -> tuple[str, list[int]]:
    """Only requests of one salt share blocks; of several prompts the first one counts."""
    _, request = item
    return request.cache_salt or "", request.prompts[0].token_ids
