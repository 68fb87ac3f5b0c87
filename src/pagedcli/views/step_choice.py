"""Which steps of a run to show."""

from dataclasses import dataclass

from pagedcli.errors import UsageError


@dataclass(frozen=True, slots=True)
class StepChoice:
    """Which steps to show: from `first` to `last` (None: the end), and of these every n-th."""

    first: int = 0
    last: int | None = None
    every: int = 1

    @classmethod
    def parse(cls, text: str | None, every: int = 1) -> "StepChoice":
        """`100-120`, `100-` or `100`; None: all. Raises: UsageError."""
        if text is None:
            return cls(every=every)
        first, dash, last = text.partition("-")
        if not first.isdecimal() or not (last.isdecimal() or last == "") or int(last or first) < int(first):
            raise UsageError(f"--steps is {text!r}, but must be A-B", hint="for example 100-120, 100- or 100")
        end = int(last) if last else None if dash else int(first)
        return cls(int(first), end, every)

    def has(self, step: int) -> bool:
        """Whether it is in the range."""
        return self.first <= step and (self.last is None or step <= self.last)

    def shows(self, step: int) -> bool:
        return self.has(step) and (step - self.first) % self.every == 0

    def is_over(self, step: int) -> bool:
        """Whether no later step is in the range."""
        return self.last is not None and step >= self.last
