"""An audit from the survey to the verdicts, and what of it is kept when it is stopped early."""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pagedcli.audit.client import Client, LimitReached
from pagedcli.audit.compare import Noise
from pagedcli.audit.plan import CHECKS, Probe, ProbePrompts, Target, plan
from pagedcli.audit.restart import Memory, planned_probes, recalled_probes, remember, remembered_asks
from pagedcli.audit.shrink import Case, failing_length, failing_outcomes, fails, make_case, save_case, shrink
from pagedcli.audit.survey import WORDS, Survey
from pagedcli.audit.verdicts import Evidence, Status, Verdict, count_pairs, judge
from pagedcli.printable import plural
from pagedcli.process import interrupts_raised
from pagedcli.remote import RefusedError, ServerError

_MOST_FAILURES = 3  # probes in a row without an answer end the audit
_MOST_CONFIRMED = 6  # further probes of a length at which few pairs differ
_MOST_TIMED = 40  # further times to the first token, while they are not clear
_MOST_SHRUNK = 4  # checks
_REPLAYS = 4
EXIT_FAULT, EXIT_UNKNOWN = 1, 3
ASSUMED_UNIT = 16  # tokens, before they are measured
_STOPPED = "the audit was stopped before"


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for."""

    model: str | None = None
    checks: Sequence[str] = tuple(CHECKS)
    seed: int | None = None  # seed of the prompts; None: random, as a cache remembers those of an earlier run
    concurrency: int = 8
    folder: Path | None = None  # folder for failing pairs; None: none is written
    remembers: bool = False  # answers to compare with after a restart
    memory: Memory | None = None  # what an earlier audit remembered


@dataclass(slots=True)
class Audit:
    """One run. After an exception or an interrupt, `evidence` has what is known so far."""

    client: Client
    options: Options
    progress: Callable[[str], None] = lambda text: None
    evidence: Evidence | None = None
    files: list[Path] = field(default_factory=list)
    memory: Memory | None = None  # what was remembered
    seconds: float = 0.0
    _num_failures: int = 0

    async def run(self) -> None:
        """Ask, then shrink what fails. Raises: ServerError, UsageError, LimitReached if the survey fails."""
        options, seed = self.options, secrets.randbits(60) if self.options.seed is None else self.options.seed
        self.progress("what the server offers")
        survey, budget = Survey(self.client, options.concurrency), self.client.budget
        await survey.find_all(options.model, seed)
        self.evidence = evidence = Evidence(survey, options.checks, memory=options.memory)
        num_surveyed = budget.num_requests
        try:
            if options.memory is not None:
                for i, probe in enumerate(recalled_probes(options.memory, survey.runner, survey.target)):
                    self.progress(f"remembered prompts, {i + 1} of {len(options.memory.prompts)}")
                    evidence.recalled.append(await survey.runner.run(probe))
            if options.remembers:  # first: the other probes evict them, and they must last then, too
                self.progress("prompts to remember")
                self.memory = await remember(survey.runner, remembered_asks(ProbePrompts(survey.target, seed + 6)))
            num_restart = budget.num_requests - num_surveyed
            probes = plan(
                ProbePrompts(survey.target, seed + 3), checks=options.checks,
                max_requests=budget.max_requests - num_restart, max_tokens=budget.max_tokens - budget.num_tokens,
            )  # fmt: skip
            evidence.not_run = dict.fromkeys((probe.check for probe in probes), _STOPPED)
            await self._send(evidence, probes)
            await self._confirm(evidence, ProbePrompts(survey.target, seed + 4))
            await self._shrink(evidence, seed + 5)
        except LimitReached as limit:
            for check, why in evidence.not_run.items():
                if why == _STOPPED:
                    evidence.not_run[check] = str(limit)

    async def _send(self, evidence: Evidence, probes: Sequence[Probe]) -> None:
        last = {probe.check: i for i, probe in enumerate(probes)}
        for i, probe in enumerate(probes):
            if evidence.not_run.get(probe.check, _STOPPED) == _STOPPED:
                self.progress(f"{probe.check}, {i + 1} of {len(probes)} probes")
                if await self._send_one(evidence, probe) and last[probe.check] == i:
                    del evidence.not_run[probe.check]

    async def _send_one(self, evidence: Evidence, probe: Probe) -> bool:
        try:
            evidence.outcomes.append(await evidence.survey.runner.run(probe))
        except ServerError as error:
            evidence.not_run[probe.check] = error.message
            self._num_failures += not isinstance(error, RefusedError)
            if self._num_failures >= _MOST_FAILURES:
                raise LimitReached(f"the server stopped answering: {error.message}") from error
            return False
        self._num_failures = 0
        return True

    async def _confirm(self, evidence: Evidence, prompts: ProbePrompts) -> None:
        """Where a few pairs differ by little, more of the same length tell a fault from noise."""
        for check in dict.fromkeys(outcome.probe.check for outcome in evidence.outcomes):
            noise = evidence.noise()
            counted = count_pairs(evidence.of(check), noise)
            if check == "speed":
                await self._time_again(evidence, prompts)
            if check in ("noise", "evict") or not counted.different or counted.is_fault(noise):
                continue
            length = counted.different[0][0].probe.length
            for i in range(_MOST_CONFIRMED):
                self.progress(f"{check} again, {i + 1} of {_MOST_CONFIRMED}")
                await self._send_one(evidence, CHECKS[check].build(prompts, length))

    async def _time_again(self, evidence: Evidence, prompts: ProbePrompts) -> None:
        """More times until they are clear, with at most half of what is left of the limits."""
        budget = self.client.budget
        most_requests = (budget.num_requests + budget.max_requests) // 2
        most_tokens = (budget.num_tokens + budget.max_tokens) // 2
        for i in range(_MOST_TIMED):
            probe = CHECKS["speed"].build(prompts, prompts.target.long)
            timed = [each.status for each in judge(evidence) if each.check in ("speed", "tenants")]
            num_requests, num_tokens = budget.num_requests + len(probe.steps), budget.num_tokens + probe.num_tokens()
            if Status.UNKNOWN not in timed or num_requests > most_requests or num_tokens > most_tokens:
                return
            self.progress(f"speed again, {i + 1} of at most {_MOST_TIMED}")
            await self._send_one(evidence, probe)

    async def _shrink(self, evidence: Evidence, seed: int) -> None:
        runner, noise, target = evidence.survey.runner, evidence.noise(), evidence.target
        verdicts = {verdict.check for verdict in judge(evidence) if verdict.status is Status.FAULT}
        failing = failing_outcomes(evidence.outcomes, noise, target.unit)
        chosen = [outcome for check, outcome in failing.items() if check in verdicts or "law" in verdicts]
        limit: LimitReached | None = None
        for outcome in chosen[:_MOST_SHRUNK]:
            found, check = outcome, outcome.probe.check
            if limit is None:
                self.progress(f"{check}: a shorter prompt that fails")
                try:
                    found = await shrink(runner, target, outcome, noise, seed)
                except (LimitReached, ServerError) as error:
                    limit = LimitReached(str(error))
            words = f"; shortest failing prompt: {plural(failing_length(found, noise), 'token')}"
            if self.options.folder is not None:
                case = make_case(found, outcome, target, noise, runner)
                path = save_case(case, self.options.folder, outcome.number)
                self.files.append(path)
                words += f", in {path.name}"
            evidence.cases[check if check in verdicts else "law"] = words
        if limit is not None:
            raise limit

    def verdicts(self) -> list[Verdict]:
        return [] if self.evidence is None else judge(self.evidence)


def planned(
    checks: Sequence[str],
    memory: Memory | None,
    max_requests: int,
    max_tokens: int,
    *,
    remembers: bool,
    concurrency: int,
) -> list[Probe]:
    """What an audit would send after its survey, if the server has blocks of ASSUMED_UNIT tokens and salts."""
    target = Target(len(WORDS), unit=ASSUMED_UNIT, isolates=True, bypass="salt", concurrency=concurrency)
    around = planned_probes(ProbePrompts(target, 0), memory, remembers=remembers)
    max_requests -= sum(len(probe.asks()) for probe in around)
    max_tokens -= sum(probe.num_tokens() for probe in around)
    return [*around, *plan(ProbePrompts(target, 0), checks=checks, max_requests=max_requests, max_tokens=max_tokens)]


def exit_code(verdicts: Sequence[Verdict]) -> int:
    """1 if anything is wrong, 3 if something could not be determined, else 0."""
    if any(verdict.status is Status.FAULT for verdict in verdicts):
        return EXIT_FAULT
    return EXIT_UNKNOWN if not verdicts or any(each.status is Status.UNKNOWN for each in verdicts) else 0


def send_again(client: Client, case: Case, *, model: str | None, concurrency: int) -> tuple[int, int, float]:
    """Send a failing pair again, with fresh prompts: how many of how many probes fail, and the largest distance.

    Raises: ServerError, UsageError.
    """

    async def run() -> tuple[int, int, float]:
        async with client:
            return await _send_again(client, case, model, concurrency)

    try:
        return asyncio.run(run())
    except LimitReached as limit:
        raise ServerError(str(limit), hint="allow more") from limit


async def _send_again(client: Client, case: Case, model: str | None, concurrency: int) -> tuple[int, int, float]:
    survey = Survey(client, concurrency)
    await survey.find_words(model)
    runner = survey.runner
    runner.endpoint = replace(runner.endpoint, bypass=case.bypass)
    target = replace(survey.target, unit=case.unit, smallest=case.smallest, bypass=case.bypass, isolates=case.isolates)
    noise = Noise(0, 0, case.distance, case.tolerance)
    prompts, num_failing, distances = ProbePrompts(target, secrets.randbits(60)), 0, [0.0]
    for _ in range(_REPLAYS):
        outcome = await runner.run(case.probe(prompts))
        num_failing += fails(outcome, noise, case.unit)
        distances += [found.distance or 0.0 for _, found in outcome.compared()]
    return num_failing, _REPLAYS, max(distances)


def run_to_end(audit: Audit) -> bool:
    """Run an audit with its own event loop. Returns whether it was interrupted. Raises: ServerError, UsageError."""

    async def run() -> None:
        async with audit.client:
            await audit.run()

    start_s = time.monotonic()
    try:
        with interrupts_raised():
            asyncio.run(run())
    except KeyboardInterrupt:
        return True
    except LimitReached as limit:
        why = f"{limit} before the first measurements of the server were complete"
        raise ServerError(why, hint="raise the limit") from limit
    finally:
        audit.seconds = time.monotonic() - start_s
    return False
