"""Whether the audit can fail: one run against a correct server and one against each planted fault."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pagedcli.audit.audit import Audit, Options, run_to_end
from pagedcli.audit.client import Budget, Client
from pagedcli.audit.faulty import FAULTS, Fault, Settings, serving
from pagedcli.audit.verdicts import Status

# fault -> the checks of which one has to find it
FOUND_BY: dict[Fault, frozenset[str]] = {
    "stale-block": frozenset({"evict"}),
    "off-by-one": frozenset({"twins", "change", "law"}),
    "full-hit": frozenset({"repeat"}),
    "across-salts": frozenset({"salts"}),
    "wrong-positions": frozenset({"repeat"}),
    "moved-block": frozenset({"moved", "law"}),
    "wrong-row": frozenset({"crowd"}),
    "only-claimed": frozenset({"speed"}),
    "second-hit": frozenset({"repeat"}),
    "long-hit": frozenset({"repeat"}),
    "silent-leak": frozenset({"tenants"}),
}


@dataclass(frozen=True, slots=True)
class FaultTrial:
    """An audit of one planted server."""

    fault: Annotated[str, "server"]
    result: Literal["right", "WRONG"]  # right: the check made for the fault found it, or a correct server passed
    by: Annotated[str | None, "found by"]
    meaning: Annotated[str, "fault"]
    _was_interrupted: bool

    @property
    def was_interrupted(self) -> bool:
        return self._was_interrupted


def trial(settings: Settings, options: Options, progress: Callable[[str], None] = lambda text: None) -> FaultTrial:
    """Audit a planted server with the usual limits."""
    with serving(settings) as server:
        audit = Audit(Client(server.url, Budget(300, 200_000, 280.0)), options, progress)
        was_interrupted = run_to_end(audit)
    fault = settings.fault
    found = dict.fromkeys(verdict.check for verdict in audit.verdicts() if verdict.status is Status.FAULT)
    is_right = not found if fault is None else bool(found.keys() & FOUND_BY[fault])
    meaning = "a correct server" if fault is None else FAULTS[fault]
    return FaultTrial(
        fault or "correct", "right" if is_right else "WRONG", ", ".join(found) or None, meaning, was_interrupted
    )


def trials(progress: Callable[[str], None]) -> Iterator[FaultTrial]:
    """All trials of a self-test."""
    for fault in (None, *FAULTS):
        name = fault or "correct"

        def show(text: str, name: str = name) -> None:
            progress(f"{name}: {text}")

        result = trial(Settings(fault=fault), Options(), show)
        yield result
        if result.was_interrupted:
            return
