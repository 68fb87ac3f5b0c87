"""Reads the two runs that `pagedcli diff` compares: recorded runs, or recordings of KV events, in pairs."""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from pagedcli.core.limits import Limits
from pagedcli.core.plan import Plan
from pagedcli.errors import UsageError
from pagedcli.kvevents.capture import CaptureReader
from pagedcli.kvevents.lookups import Lookups, read_lookups
from pagedcli.printable import plural
from pagedcli.simulation.advice import recorded_plan, timed_of
from pagedcli.simulation.causes import Measures, counts_in
from pagedcli.simulation.difference import Restart, Side
from pagedcli.simulation.requests import Chains, TraceRequest, Workload
from pagedcli.simulation.sources import RecordedRequests
from pagedcli.trace.files import TraceReader
from pagedcli.trace.fold import fold
from pagedcli.views.explain import Decode, Explainer, divergence_text
from pagedcli.views.stats import RunStats

_REQUESTS = ("prompts", "outputs", "order")  # causes that comparing prompts shows
_NO_ENGINE = "KV events show no scheduler"


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Why the lookups of a recorded run ended where they did."""

    explainer: Explainer

    def of_requests(self, decode: Decode | None) -> dict[str, tuple[str, str | None]]:
        """For each request why it found no more, and where it parted from the most similar earlier prompt."""
        found = {}
        for lookup in self.explainer.lookups:
            if lookup.own:
                continue
            words = lookup.why()
            if lookup.evicted_for is not None:
                words += f"; its block went to request {lookup.evicted_for}"
            split = None if lookup.divergence is None else divergence_text(lookup.divergence, decode)
            found[lookup.request_id] = words, split
        return found


def recorded_sides(paths: tuple[Path, Path]) -> tuple[tuple[Side, Side], Outcomes]:
    """Two recorded runs, and why the lookups of the later one hit or missed. Raises: UsageError or TraceError."""
    chains = Chains()
    (before, _), (after, outcomes) = (_recorded_side(path, chains) for path in paths)
    if before.workload.hash_size is not None or after.workload.hash_size is not None:
        _compare_by_hashes(before, after)
    return (before, after), outcomes


def _compare_by_hashes(before: Side, after: Side) -> None:
    """Not all tokens are recorded: the hashes of their blocks stand for the prompts of both runs."""
    sides, found = (before, after), None
    hashed = [side for side in sides if side.limits.enable_prefix_caching]
    if before.limits.block_size != after.limits.block_size:
        found = "blocks of two sizes have different hashes"
    elif len(before.limits.windows) != len(after.limits.windows):
        found = "blocks of other groups of layers have different hashes"
    elif len(hashed) < 2:
        found = "a run without prefix caching has no hashes of blocks"
    if found is not None:
        before.hidden |= dict.fromkeys(_REQUESTS, f"{found}, and a run was recorded without tokens")
    for side in sides:
        side.workload.hash_size = side.limits.block_size
        for request in side.requests:
            request.token_ids = request.output_ids = request.stopped = None
    named = [[(each.label, each.num_prompt_tokens) for each in side.requests] for side in sides]
    if len(hashed) == 1 and named[0] == named[1]:
        for side in sides:
            side.workload.requests = hashed[0].requests
            side.workload.hash_size = hashed[0].workload.hash_size


def _recorded_side(path: Path, chains: Chains) -> tuple[Side, Outcomes]:
    reader, view, stats = TraceReader(path), RecordedRequests(chains), RunStats()
    explainer = Explainer()
    state = fold(reader, view, stats, explainer)
    explainer.finish()
    workload, facts = view.finish(), stats.facts
    workload.notes += reader.notes
    if not workload.requests:
        raise UsageError(f"{path}: no request finished in this run")
    recorded = {
        "hit_rate": Fraction(facts.num_cached_tokens, max(1, facts.num_prompt_tokens)),
        **counts_in(facts),
        "seconds": Fraction(facts.steps_ns, 10**9),
    }
    side = Side(path.name, workload, recorded_plan(state), recorded, step_time=timed_of(state))
    side.from_disk = {
        "hit_rate": Fraction(facts.num_disk_tokens, max(1, facts.num_prompt_tokens)),
        "computed_tokens": -Fraction(sum(lookup.disk_tokens for lookup in explainer.lookups)),
    }
    side.restarts = [Restart(place) for place in view.restarts]
    hits = {lookup.request_id: lookup.tokens_hit for lookup in explainer.lookups if not lookup.own}
    side.hits = {
        place: hits[each.request_id] for place, each in enumerate(workload.requests) if each.request_id in hits
    }
    return side, Outcomes(explainer)


def captured_sides(paths: tuple[Path, Path]) -> tuple[Side, Side]:
    """Two recordings of KV events. Raises: UsageError or TraceError."""
    readers = [CaptureReader(path) for path in paths]
    chains = Chains()
    before, after = (_captured_side(reader, chains) for reader in readers)
    keys = ["tokens" if reader.has_tokens else reader.key for reader in readers]
    if keys[0] != keys[1] or keys[0] is None:
        why = "the recordings have no tokens, and were not made with the same --key"
        before.hidden |= dict.fromkeys([*_REQUESTS, "routing"], why)
    return before, after


def _captured_side(reader: CaptureReader, chains: Chains) -> Side:
    found = read_lookups(reader)
    if not found.requests or found.block_size is None:
        raise UsageError(f"{reader.path}: no block was stored in this recording")
    workload, recorded = _captured_workload(found, chains)
    workload.notes += reader.notes
    workload.notes.append(
        "KV events contain no hits: a request is seen by the blocks that it stored, and what comes before was found"
    )
    if found.num_other_blocks:
        workload.notes.append(
            f"{plural(found.num_other_blocks, 'block')} of other sizes, cache groups or media are left out"
        )
    pool = found.capacity or found.evicting_blocks
    side = Side(reader.path.name, workload, Plan(limits=Limits(block_size=found.block_size, num_blocks=pool), model=""))
    side.recorded, side.scheduled, side.exact_pool = recorded, False, found.capacity is not None
    side.peak_blocks = found.peak_blocks
    side.restarts = [Restart(place, source) for source, place in found.clears]
    side.sources = [request.source for request in found.requests]
    side.hits = {place: request.num_hit * found.block_size for place, request in enumerate(found.requests)}
    side.hidden = dict.fromkeys(("sequences", "checkpoints", "engine", "store"), _NO_ENGINE)
    return side


def _captured_workload(found: Lookups, chains: Chains) -> tuple[Workload, Measures]:
    size, num_hit, num_blocks, num_looked_up = found.block_size or 1, 0, 0, 0
    workload = Workload(format="kv-events", hash_size=size)
    for number, request in enumerate(found.requests):
        hashes = chains.numbers(found.chain(request))
        num_hit += request.num_hit
        num_blocks += len(hashes)
        num_looked_up += request.num_prompt
        num_generated = (len(hashes) - request.num_prompt) * size
        workload.requests.append(
            TraceRequest(str(number), None, request.num_prompt * size, max(1, num_generated), hashes)
        )
    computed = (num_blocks - num_hit) * size
    recorded = {"hit_rate": Fraction(num_hit, num_looked_up), "computed_tokens": Fraction(computed)}
    if found.first_s is not None and found.last_s is not None:
        recorded["seconds"] = Fraction(found.last_s - found.first_s)
    return workload, recorded
