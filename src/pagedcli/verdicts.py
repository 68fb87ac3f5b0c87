"""A verdict: what was found about a run or a file, how much it is, and what to do. The first paragraph of every command
that judges one is the list of its verdicts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pagedcli.printable import capitalized, percent_text, plural

MOST_SAID = 3
_MOST_REASON = 300  # characters of why a row failed, which may have a number of thousands of digits; the row has all


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A finding, its size and what to do about it."""

    finding: str  # a sentence that begins small and has no end
    measure: str  # what the size is a share of: `hits`, of the prompt tokens, or `time`
    now: float | None = None  # None: `after` is a saving
    after: float | None = None  # None: nobody knows
    low: float | None = None  # lower end of `after`; None: it is exact
    to_do: str | None = None  # None: nothing
    certainty: str  # the source of the size
    not_looked_at: str | None = None

    def size(self) -> str:
        """`hits 0.0 % -> 90.1 %`, or `hits 0.0 % -> at least 89.7 %`."""
        if self.after is None:
            return ""
        after = percent_text(self.after) if self.low is None else f"at least {percent_text(self.low)}"
        if self.now is None:
            return f"{after} less {self.measure}"
        return f"{self.measure} {percent_text(self.now)} -> {after}"

    def text(self) -> str:
        """The finding, and in the same paragraph what to do."""
        return capitalized(self.words())

    def words(self) -> str:
        """The same, to continue a sentence."""
        said = self.finding
        if self.to_do is not None:
            said += f"; {self.to_do}"
        if size := self.size():
            said += f": {size}"
        left = f" Not looked at: {self.not_looked_at}." if self.not_looked_at is not None else ""
        return f"{said} ({self.certainty}).{left}"


def cut_reason(reason: str) -> str:
    """Why a row failed, not longer than one reads."""
    return reason if len(reason) <= _MOST_REASON else reason[:_MOST_REASON] + "…"


def refused_verdict(num_refused: int, num_rows: int, line: int, reason: str, *, has_run: bool) -> Verdict:
    """How many rows failed, or would fail, with the first one: its line and why."""
    verb, certainty = ("failed", "counted") if has_run else ("would fail", "checked as a run does")
    finding = f"{num_refused:,} of {plural(num_rows, 'row')} {verb}, the first in line {line:,}: {cut_reason(reason)}"
    return Verdict(finding=finding, measure="rows", certainty=certainty)


def paragraph(verdicts: Sequence[Verdict]) -> list[str]:
    """The verdicts in words, the first as it is and each other one after `Also,`."""
    first, others = verdicts[:1], verdicts[1:MOST_SAID]
    return [*(each.text() for each in first), *(f"Also, {each.words()}" for each in others)]
