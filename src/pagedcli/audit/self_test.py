"""Whether the audit can fail: one run against a correct server and one against each planted fault."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pagedcli.audit.audit import Audit, Options, run_to_end
from pagedcli.audit.client import Budget, Client
from pagedcli.audit.faulty import FAULTS, Fault, Settings, serving
from pagedcli.audit.verdicts import Status, Verdict

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
}


@dataclass(frozen=True, slots=True)
class Trial:
    """An audit of one planted server."""

    fault: Fault | None
    faults: tuple[Verdict, ...]  # that were found
    was_interrupted: bool

    @property
    def is_right(self) -> bool:
        """Whether the fault was found by the check that is made for it, or a correct server passed."""
        found = {each.check for each in self.faults}
        return bool(found & FOUND_BY[self.fault]) if self.fault is not None else not found

    @property
    def meaning(self) -> str:
        return "a correct server" if self.fault is None else FAULTS[self.fault]


def trial(settings: Settings, options: Options, progress: Callable[[str], None] = lambda text: None) -> Trial:
    """Audit a planted server with the usual limits."""
    with serving(settings) as server:
        audit = Audit(Client(server.url, Budget(300, 200_000, 280.0)), options, progress)
        was_interrupted = run_to_end(audit)
    faults = tuple(verdict for verdict in audit.verdicts() if verdict.status is Status.FAULT)
    return Trial(settings.fault, faults, was_interrupted)


def trials(progress: Callable[[str], None]) -> Iterator[Trial]:
    """All trials of a self-test."""
    for fault in (None, *FAULTS):
        name = fault or "correct"

        def show(text: str, name: str = name) -> None:
            progress(f"{name}: {text}")

        result = trial(Settings(fault=fault), Options(), show)
        yield result
        if result.was_interrupted:
            return
