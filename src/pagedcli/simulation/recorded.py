"""Recordings as traces: our own runs, and the KV events of other engines."""

from array import array
from pathlib import Path

from pagedcli.errors import UsageError
from pagedcli.events import (
    BlocksFilled,
    BlocksReused,
    EngineStarted,
    PrefixLookedUp,
    RequestAdded,
    RequestFinished,
    SequenceForked,
    StepStarted,
    TokensSampled,
)
from pagedcli.kvevents.capture import CaptureReader, stored_runs
from pagedcli.printable import plural
from pagedcli.simulation.requests import Chains, TraceRequest, Workload
from pagedcli.trace.dispatch import View
from pagedcli.trace.file import TraceReader
from pagedcli.trace.fold import fold
from pagedcli.trace.state import PoolState


def read_recorded_run(path: Path) -> tuple[Workload, EngineStarted]:
    """The requests of a recorded run, and the engine that served them. With recorded tokens they are exact; without,
    the hashes of their blocks stand for them. Raises: UsageError or TraceError."""
    reader = TraceReader(path)
    view = _Requests()
    state = fold(reader, view)
    view.finish()
    workload = view.workload
    workload.notes += reader.notes
    if not workload.requests:
        raise UsageError(f"{path}: no request finished in this run")
    if workload.hash_size is not None:
        for request in workload.requests:
            request.token_ids = request.output_ids = request.stopped = None
        workload.notes.append("the run was recorded without tokens: outputs are never found in the cache")
    workload.finish()
    return workload, state.started


class _Requests(View[PoolState]):
    """Collects the requests, in order of arrival."""

    def __init__(self) -> None:
        self.workload = Workload(format="pagedcli")
        self._chains = Chains()
        self._by_id: dict[str, TraceRequest] = {}
        self._links = _Links()
        self._ends: dict[int, int | None] = {}  # seq_id -> hash of the last full block in its table
        self._num_beam_searches = 0
        self._outputs: dict[int, array[int]] = {}  # seq_id -> tokens
        # request id -> sample -> tokens of finished sequences, and whether they stopped by themselves
        self._samples: dict[str, dict[int, tuple[array[int], bool]]] = {}
        self._now_ns = 0

    def on_step_started(self, event: StepStarted, state: PoolState) -> None:
        self._now_ns = event.time_ns

    def on_request_added(self, event: RequestAdded, state: PoolState) -> None:
        tokens = array("q", event.token_ids or ())
        if event.token_ids is None or event.salted:  # the salt itself is not recorded
            self.workload.hash_size = state.block_size
        self._outputs[event.seq_id] = array("q")
        if event.sample_index:
            self._by_id[event.request_id].num_samples += 1
            return
        self._num_beam_searches += event.beam_width is not None
        request = TraceRequest(
            event.request_id,
            self._now_ns / 1e9,
            event.num_prompt_tokens,
            None,
            token_ids=tokens,
            max_new_tokens=event.max_new_tokens,
        )
        self._by_id[event.request_id] = request
        if event.beam_width is None:
            self.workload.requests.append(request)

    def on_prefix_looked_up(self, event: PrefixLookedUp, state: PoolState) -> None:
        if event.reason != "continued":
            self._ends[event.seq_id] = None

    def on_blocks_reused(self, event: BlocksReused, state: PoolState) -> None:
        if event.block_ids and (block_id := event.block_ids[-1]) is not None:
            self._ends[event.seq_id] = state.hashes[block_id]

    def on_sequence_forked(self, event: SequenceForked, state: PoolState) -> None:
        self._ends[event.seq_id] = self._ends.get(event.parent_seq_id)

    def on_blocks_filled(self, event: BlocksFilled, state: PoolState) -> None:
        self._ends[event.seq_id] = self._links.add(self._ends.get(event.seq_id), event.hashes)

    def on_tokens_sampled(self, event: TokensSampled, state: PoolState) -> None:
        for seq_id, token_id in zip(event.seq_ids, event.token_ids or (), strict=False):
            self._outputs[seq_id].append(token_id)

    def on_request_finished(self, event: RequestFinished, state: PoolState) -> None:
        seq = state.seq(event.seq_id)
        if seq is None:
            return
        request = self._by_id[seq.request_id]
        request.num_output_tokens = max(1, event.num_output_tokens)
        sample = (self._outputs.pop(event.seq_id), event.reason == "stop")
        self._samples.setdefault(seq.request_id, {})[seq.sample_index] = sample
        num_spans = request.num_prompt_tokens // state.block_size
        hashes = self._links.chain(self._ends.pop(event.seq_id, None), num_spans * state.num_groups)
        request.hashes = self._chains.numbers(hashes[state.num_groups - 1 :: state.num_groups])

    def finish(self) -> None:
        """Keep the requests that finished, and give them their outputs."""
        workload = self.workload
        if self._num_beam_searches:
            workload.notes.append(
                f"{plural(self._num_beam_searches, 'beam search')}, which simulate does not model: left out"
            )
        finished = [request for request in workload.requests if request.num_output_tokens is not None]
        if len(finished) < len(workload.requests):
            workload.notes.append(
                f"{plural(len(workload.requests) - len(finished), 'request')} did not finish: left out"
            )
        workload.requests = finished
        for request in finished:
            samples = self._samples[request.request_id]
            if len(samples) == request.num_samples and all(ids for ids, _ in samples.values()):
                request.output_ids = [samples[index][0] for index in sorted(samples)]
                request.stopped = [samples[index][1] for index in sorted(samples)]


class _Links:
    """The hash before each hash: with windows a sequence no longer holds the first blocks of its chain."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[int | None, int]] = {}  # hash -> the one before it, its number in the chain

    def add(self, end: int | None, hashes: tuple[int, ...]) -> int | None:
        """These hashes come after the hash `end`. Returns the last one."""
        for each in hashes:
            number = self._before[end][1] + 1 if end is not None else 0
            self._before.setdefault(each, (end, number))
            end = each
        return end

    def chain(self, end: int | None, num_hashes: int) -> list[int]:
        """The first hashes of the chain that ends with `end`."""
        found: list[int] = []
        while end is not None:
            before, number = self._before[end]
            if number < num_hashes:
                found.append(end)
            end = before
        return found[::-1]


def read_kv_events(path: Path) -> Workload:
    """The blocks that another engine stored, each run of blocks as one request.

    KV events contain no hits: what is looked up are blocks that the engine computed, and a hit is a block that it
    computed before. Raises: UsageError or TraceError.
    """
    workload, chains = Workload(format="kv-events"), Chains()
    reader = CaptureReader(path)
    known: dict[tuple[int, str | None, int | str | bytes], int] = {}
    for run in stored_runs(reader):
        if not run.hashes:
            continue
        if workload.hash_size not in (None, run.block_size):
            workload.add_bad(
                reader.place, f"blocks of {plural(run.block_size, 'token')}, earlier ones have {workload.hash_size}"
            )
            continue
        workload.hash_size = run.block_size
        group = f"{run.group} {run.lora}"
        after = -1 if run.parent is None else known.get((run.source, group, run.parent), -1)
        if after < 0:
            after = chains.numbers([f"{run.source} {group} {run.parent!r}"])[0]
        hashes = chains.numbers([str(each) for each in run.hashes], after=after)
        known |= {(run.source, group, each): number for each, number in zip(run.hashes, hashes, strict=True)}
        num_tokens = len(hashes) * run.block_size
        workload.requests.append(TraceRequest(str(len(workload.requests)), run.time_s, num_tokens, 1, hashes))
    if not workload.requests:
        raise UsageError(f"{path}: no block was stored in this recording")
    workload.notes += reader.notes
    workload.notes.append(
        "KV events contain no hits: looked up are the blocks that the engine computed, and a hit is one computed before"
    )
    workload.finish()
    return workload
