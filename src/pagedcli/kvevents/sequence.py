"""Detects gaps, repetitions, restarts and a late start from the numbers of a stream's messages."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["next", "first", "gap", "repeated", "restarted"]


@dataclass(slots=True)
class SequenceCheck:
    """Follows one publisher. `next_seq` is the number expected next, None before the first message."""

    next_seq: int | None = None
    first_seq: int | None = None  # of the current publisher; anything earlier is unknown
    last_time_s: float = -1.0  # of the publisher's clock
    num_gaps: int = 0
    num_missed: int = 0  # messages
    num_repeated: int = 0  # messages, ignored
    num_restarts: int = 0

    def judge(self, seq: int, time_s: float | None) -> Verdict:
        """Classify a message by its number. Changes nothing.

        A lower number than expected with a later time comes from a restarted publisher; otherwise it is a message
        that was received before, as replays send them.
        """
        if self.next_seq is None:
            return "first"
        if seq == self.next_seq:
            return "next"
        if seq > self.next_seq:
            return "gap"
        return "restarted" if time_s is not None and time_s > self.last_time_s else "repeated"

    def missing_before(self, seq: int, time_s: float | None) -> int | None:
        """The first message missing before this one; None if nothing is missing."""
        verdict = self.judge(seq, time_s)
        if verdict == "gap":
            return self.next_seq
        return 0 if seq and verdict in ("first", "restarted") else None

    def take(self, first: int, last: int, time_s: float | None) -> Verdict:
        """Count a message with these numbers, which are equal if messages, not events, are numbered."""
        verdict = self.judge(first, time_s)
        if verdict == "repeated":
            self.num_repeated += 1
            return verdict
        if verdict == "gap":
            assert self.next_seq is not None
            self.num_gaps += 1
            self.num_missed += first - self.next_seq
        elif verdict != "next":
            self.num_restarts += verdict == "restarted"
            self.first_seq = first
        self.next_seq = last + 1
        if time_s is not None:
            self.last_time_s = time_s
        return verdict
