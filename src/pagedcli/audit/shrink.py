"""The shortest prompt at which a probe still fails, as a file that `pagedcli audit --replay` sends again.

A cache remembers prompts, so a probe is never sent twice: it is built again with fresh words and the same lengths.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from pagedcli.audit.compare import Noise
from pagedcli.audit.plan import CHECKS, Probe, ProbePrompts, Target
from pagedcli.audit.run import ProbeOutcome, Runner
from pagedcli.errors import UsageError
from pagedcli.files import read_whole, whole_file

FORMAT = "pagedcli-audit-1"
_TRIES = 2  # probes per length; a fault that needs luck shrinks less
_MAX_FILE_BYTES = 4 << 20


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A failing probe: what is needed to build it again, and what was seen."""

    format: str
    check: str
    length: int  # tokens of the prompt, as short as fails
    first_length: int  # tokens of the prompt that failed first
    pressure_tokens: int = 0  # 0 for all checks but `evict`
    unit: int | None
    smallest: int
    bypass: Literal["salt", "cache_prompt"] | None
    isolates: bool | None
    tolerance: float  # difference of log-probabilities
    distance: float | None
    model: str
    requests: list[dict[str, Any]]  # what was sent and received

    def probe(self, prompts: ProbePrompts) -> Probe:
        pressure = (self.pressure_tokens,) if self.check == "evict" else ()
        return CHECKS[self.check].build(prompts, self.length, *pressure)


def fails(outcome: ProbeOutcome, noise: Noise, unit: int | None) -> bool:
    """Whether a probe shows a wrong answer, a wrong count of cached tokens, or a hit of another salt."""
    return (
        any(found.exceeds(noise.tolerance) for pair, found in outcome.compared() if pair.must_agree)
        or (outcome.probe.check == "salts" and outcome.seen[-1].is_hit)
        or any(each.claims_too_much(unit) for each in outcome.seen)
    )


def failing_length(outcome: ProbeOutcome, noise: Noise) -> int:
    """Tokens of the shortest prompt that fails in a failing probe: prompts of `evict` have several lengths."""
    warm = [outcome.seen[pair.warm] for pair, found in outcome.compared() if found.exceeds(noise.tolerance)]
    lengths = [each.num_prompt for each in warm if each.num_prompt is not None]
    return min(lengths, default=outcome.probe.length) if outcome.probe.check == "evict" else outcome.probe.length


async def shrink(runner: Runner, target: Target, failing: ProbeOutcome, noise: Noise, seed: int) -> ProbeOutcome:
    """A failing probe with a shorter prompt, by bisection over the number of blocks with the same rest.

    Not of `evict`: its prompts have one or two blocks anyway, and each attempt would send all of the pressure again.

    Raises: LimitReached, ServerError.
    """
    check, length = failing.probe.check, failing.probe.length
    if check == "evict":
        return failing
    prompts, shortest = ProbePrompts(target, seed), failing
    lengths = [n for n in range(length % target.step, length, target.step) if n >= target.num_extra + 4]
    low, high = 0, len(lengths)  # lengths[high] fails; of high = len(lengths) that is `failing` itself
    while low < high:
        middle = (low + high) // 2
        for _ in range(_TRIES):
            outcome = await runner.run(CHECKS[check].build(prompts, lengths[middle]))
            if fails(outcome, noise, target.unit):
                shortest, high = outcome, middle
                break
        else:
            low = middle + 1
    return shortest


def make_case(found: ProbeOutcome, first: ProbeOutcome, target: Target, noise: Noise, runner: Runner) -> Case:
    worst = max((difference for _, difference in found.compared()), default=None)
    evict_tokens = found.probe.num_tokens() if found.probe.check == "evict" else 0
    return Case(
        format=FORMAT, check=found.probe.check, length=found.probe.length, first_length=first.probe.length,
        pressure_tokens=evict_tokens, unit=target.unit, smallest=target.smallest, bypass=target.bypass,
        isolates=target.isolates, tolerance=noise.tolerance, distance=worst.distance if worst else None,
        model=runner.client.secrets.without(runner.endpoint.model), requests=_requests(found, runner),
    )  # fmt: skip


def _requests(outcome: ProbeOutcome, runner: Runner) -> list[dict[str, Any]]:
    """What was sent and received; of pressure only the sizes."""
    rows = []
    for each in outcome.seen:
        answer, choice = each.answer, each.answer.choices[0]
        row: dict[str, Any] = {
            "num_prompt_tokens": answer.num_prompt, "num_cached_tokens": answer.num_cached,
            "num_shared_tokens": each.num_shared, "alone": each.is_alone,
        }  # fmt: skip
        if each.ask.max_new > 1:
            row |= {
                "prompt": runner.endpoint.text(each.ask.words), "stream": each.ask.stream, "n": each.ask.n,
                "text": choice.text, "tokens": choice.tokens, "logprobs": choice.logprobs,
                "top_logprobs": [dict(top) for top in choice.top],
            }  # fmt: skip
        rows.append(row)
    return rows


def save_case(case: Case, folder: Path, number: int) -> Path:
    """Write audit-<number>.json, or the next number that is free. Raises: OSError."""
    while True:
        path = folder / f"audit-{number}.json"
        with suppress(FileExistsError), whole_file(path, overwrite=False) as file:
            file.write(msgspec.json.format(msgspec.json.encode(case), indent=2) + b"\n")
            return path
        number += 1


def load_case(path: Path) -> Case:
    """Read such a file. Raises: UsageError if it is not one that the audit wrote."""
    try:
        case = msgspec.json.decode(read_whole(path, _MAX_FILE_BYTES), type=Case)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"cannot read {path}: {error}", hint="name a file that pagedcli audit has written") from error
    if case.format != FORMAT or case.check not in CHECKS or not 1 <= case.length < 1 << 20:
        raise UsageError(f"{path} is not a failing pair of pagedcli audit ({FORMAT})")
    return case


def failing_outcomes(outcomes: Sequence[ProbeOutcome], noise: Noise, unit: int | None) -> dict[str, ProbeOutcome]:
    """Per check, the failing probe with the shortest prompt."""
    found: dict[str, ProbeOutcome] = {}
    for outcome in sorted(outcomes, key=lambda each: each.probe.length):
        if fails(outcome, noise, unit):
            found.setdefault(outcome.probe.check, outcome)
    return found
