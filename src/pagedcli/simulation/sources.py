"""Opens the input of `simulate`: traces of others, prompt files, recorded runs, KV events, found by their content.

Prompt files are tokenized as a run would, with output lengths from elsewhere.
"""

import random
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import msgspec
from msgspec import UNSET

import pagedcli.events as ev
from pagedcli.batch.delimited import delimited_format
from pagedcli.batch.prompts import Prompts
from pagedcli.batch.requests import BatchRow
from pagedcli.batch.rows import NOT_A_ROW, WrittenRow, why_not_a_row
from pagedcli.errors import RequestError, TraceError, UsageError
from pagedcli.kvevents.capture import CaptureReader, is_capture_line, stored_runs
from pagedcli.printable import plural
from pagedcli.simulation.formats import FORMATS, TraceLines, find_format, format_names, read_traces
from pagedcli.simulation.requests import (
    MAX_TOKENS,
    Chains,
    Request,
    Requests,
    RowOutput,
    largest_output,
    request_of,
    work_of,
)
from pagedcli.trace.dispatch import View
from pagedcli.trace.files import TraceReader
from pagedcli.trace.fold import fold
from pagedcli.trace.state import PoolState


def read_recorded_run(path: Path, *views: View, chains: Chains | None = None) -> tuple[Requests, PoolState]:
    """The requests of a recorded run, and the pool at its end; `views` see all events, too. `chains`: see
    RecordedRequests. Raises: UsageError or TraceError."""
    reader, view = TraceReader(path), RecordedRequests(chains)
    state = fold(reader, view, *views)
    workload = view.finish()
    workload.notes += reader.notes
    if not workload.requests:
        raise UsageError(f"{path}: no request finished in this run")
    return workload, state


class RecordedRequests(View):
    """Collects the requests of a recorded run, in order of arrival. With recorded tokens they are exact; without, the
    hashes of their blocks stand for them. Two runs that are compared share `chains`: salts are numbered in each run as
    they appear, so that only hashes tell whether two are the same."""

    def __init__(self, chains: Chains | None = None) -> None:
        self.workload = Requests(format="pagedcli")
        self._chains = Chains() if chains is None else chains
        self._is_compared = chains is not None
        self._part = ""  # a resumed run numbers its salts anew
        self._by_id: dict[str, Request] = {}
        self._links = _Links()
        self._ends: dict[int, int | None] = {}  # seq_id -> hash of the last full block in its table
        self._outputs: dict[int, array[int]] = {}  # seq_id -> tokens
        # request id -> sample -> tokens of finished sequences, and whether they stopped by themselves
        self._samples: dict[str, dict[int, tuple[array[int], bool]]] = {}
        self._now_ns = 0  # 0: no step has started, and requests come with the first one

    def on_engine_started(self, event: ev.EngineStarted, state: PoolState) -> None:
        if event.part > 1:
            self._part = f" of part {event.part}"

    def on_step_started(self, event: ev.StepStarted, state: PoolState) -> None:
        if not self._now_ns:
            for request in self.workload.requests:
                request.arrival_s = event.time_ns / 1e9
        self._now_ns = event.time_ns

    def on_request_added(self, event: ev.RequestAdded, state: PoolState) -> None:
        tokens = array("q", event.token_ids or ())
        is_unknown = event.salted and (event.salt is UNSET or self._is_compared)
        if event.token_ids is None or is_unknown:
            self.workload.hash_size = state.block_size
        self._outputs[event.seq_id] = array("q")
        if event.sample_index:
            if (first := self._by_id.get(event.request_id)) is None:
                raise TraceError(f"sample {event.sample_index} of request {event.request_id!r} comes without sample 0")
            if first.continuations is None:
                first.num_samples += 1
            else:
                first.continuations[event.sample_index - 1 : event.sample_index] = [_continuation(event)]
            return
        self.workload.num_left_out += event.beam_width is not None
        request = Request(
            event.request_id,
            self._now_ns / 1e9,
            event.num_prompt_tokens,
            None,
            token_ids=tokens,
            max_new_tokens=event.max_new_tokens,
            cache_salt=None if event.salt is UNSET else f"{event.salt}{self._part}",
            row_id=event.row_id,
        )
        self._by_id[event.request_id] = request
        if event.num_context_tokens is not UNSET:
            # a context has at least two: continuations of one token leave no event
            is_single = event.num_prompt_tokens > event.num_context_tokens
            request.continuations = [_continuation(event)] if is_single else [[0], [0]]
        if event.beam_width is None:
            self.workload.requests.append(request)

    def on_prefix_looked_up(self, event: ev.PrefixLookedUp, state: PoolState) -> None:
        if event.reason != "continued":
            self._ends[event.seq_id] = None

    def on_blocks_reused(self, event: ev.BlocksReused, state: PoolState) -> None:
        if event.block_ids and (block_id := event.block_ids[-1]) is not None:
            self._ends[event.seq_id] = state.hashes[block_id]

    def on_sequence_forked(self, event: ev.SequenceForked, state: PoolState) -> None:
        self._ends[event.seq_id] = self._ends.get(event.parent_seq_id)

    def on_blocks_restored(self, event: ev.BlocksRestored, state: PoolState) -> None:
        self._links.add(None, event.hashes)

    def on_blocks_filled(self, event: ev.BlocksFilled, state: PoolState) -> None:
        self._ends[event.seq_id] = self._links.add(self._ends.get(event.seq_id), event.hashes)

    def on_draft_checked(self, event: ev.DraftChecked, state: PoolState) -> None:
        self._outputs[event.seq_id].extend(event.token_ids or ())

    def on_tokens_sampled(self, event: ev.TokensSampled, state: PoolState) -> None:
        for seq_id, token_id in zip(event.seq_ids, event.token_ids or (), strict=False):
            self._outputs[seq_id].append(token_id)

    def on_request_finished(self, event: ev.RequestFinished, state: PoolState) -> None:
        seq = state.seq(event.seq_id)
        if seq is None:
            return
        request = self._by_id[seq.request_id]
        request.num_output_tokens = max(1, event.num_output_tokens)
        if seq.sample_index and request.continuations is not None:
            del self._outputs[event.seq_id]
            self._ends.pop(event.seq_id, None)
            return
        sample = (self._outputs.pop(event.seq_id), event.reason == "stop")
        self._samples.setdefault(seq.request_id, {})[seq.sample_index] = sample
        num_spans = request.num_prompt_tokens // state.block_size
        hashes = self._links.chain(self._ends.pop(event.seq_id, None), num_spans * state.num_groups)
        request.hashes = self._chains.numbers(hashes[state.num_groups - 1 :: state.num_groups])

    def finish(self) -> Requests:
        """The requests that finished, with their outputs."""
        workload = self.workload
        if num := workload.num_left_out:
            workload.notes.append(f"{plural(num, 'beam search')}, which simulate does not model: left out")
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
        if workload.hash_size is not None:
            for request in finished:
                request.token_ids = request.output_ids = request.stopped = None
            workload.notes.append("the run was recorded without tokens: outputs are never found in the cache")
        workload.finish()
        return workload


def _continuation(event: ev.RequestAdded) -> list[int]:
    """As many tokens as the sequence scores; the last one, which is not computed, makes no difference."""
    assert event.num_context_tokens is not UNSET, "it scores a continuation"
    unknown = [0] * event.num_prompt_tokens
    return [*(event.token_ids or unknown)[event.num_context_tokens :], 0]


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


def read_kv_events(path: Path) -> Requests:
    """The blocks that another engine stored, each run of blocks as one request.

    KV events contain no hits: what is looked up are blocks that the engine computed, and a hit is a block that it
    computed before. Raises: UsageError or TraceError.
    """
    workload, chains = Requests(format="kv-events"), Chains()
    reader = CaptureReader(path)
    known: dict[tuple[int, str | None, int | str | bytes], int] = {}
    for run, time_s, source in stored_runs(reader):
        if not run.hashes:
            continue
        if workload.hash_size not in (None, run.block_size):
            workload.add_bad(
                reader.place, f"blocks of {plural(run.block_size, 'token')}, earlier ones have {workload.hash_size}"
            )
            continue
        workload.hash_size = run.block_size
        group = f"{run.group} {run.lora}"
        after = -1 if run.parent is None else known.get((source, group, run.parent), -1)
        if after < 0:
            after = chains.numbers([f"{source} {group} {run.parent!r}"])[0]
        hashes = chains.numbers([str(each) for each in run.hashes], after=after)
        known |= {(source, group, each): number for each, number in zip(run.hashes, hashes, strict=True)}
        num_tokens = len(hashes) * run.block_size
        workload.requests.append(Request(str(len(workload.requests)), time_s, num_tokens, 1, hashes))
    if not workload.requests:
        raise UsageError(f"{path}: no block was stored in this recording")
    workload.notes += reader.notes
    workload.notes.append(
        "KV events contain no hits: each block that the engine computed counts as looked up, and as a hit if it was"
        " computed before"
    )
    workload.finish()
    return workload


_SPAN = 64  # rows that follow each other, as they may have a beginning in common


def _span(row: int) -> int:
    return row // _SPAN


def _row_of(request: Request) -> int:
    return int(request.request_id.partition("/")[0])


def _one_span_of(every: int, requests: list[Request]) -> tuple[list[Request], float]:
    """The requests in one of `every` spans, and their work."""
    found = [request for request in requests if _span(_row_of(request)) % every == 0]
    return found, sum(map(work_of, found))


class PromptRequests:
    """Collects the requests of a prompt file's rows, with the outputs of an earlier run where it has them.

    Of more than `most_tokens` tokens of work only spans of rows from all over the file are kept, each as far from the
    next: at least half as much. `left_out` is the work of the others.
    """

    def __init__(
        self,
        name: str,
        outputs: "dict[int, RowOutput] | None" = None,
        *,
        expected_tokens: int | None = None,
        most_tokens: float = float("inf"),
    ) -> None:
        """`expected_tokens`: tokens after which each request ends by itself; None: as many as it may generate."""
        self.workload = Requests(format="prompts")
        self.left_out = 0.0  # work of requests that were not kept, see requests.work_of
        self.num_beam_searches = 0  # rows, which are not modelled
        self._name = name
        self._outputs = outputs
        self._expected_tokens = expected_tokens
        self._most_tokens = most_tokens
        self.work = 0.0  # work of requests that were kept
        self._every = 1  # one span of this many is kept
        self._num_without = 0  # rows without an output in the earlier run

    def add(self, row: BatchRow, max_tokens: list[int]) -> None:
        """Add a row, with the number of tokens that each of its prompts may generate."""
        line, outputs = row.line, self._outputs
        if any(prompt.params.beam_width is not None for prompt in row.prompts):
            self.num_beam_searches += 1
            self.workload.add_bad(f"{self._name}:{line.number}", "beam search, which simulate does not model")
            return
        output = None if outputs is None else outputs.get(line.index)
        self._num_without += outputs is not None and output is None
        share = None if output is None else output.shares(len(row.prompts))
        is_kept = _span(line.index) % self._every == 0
        for place, prompt in enumerate(row.prompts):
            request_id = f"{line.index}/{place}" if place else str(line.index)
            own = None if share is None else share[place]
            request = request_of(request_id, prompt, row.cache_salt, max_tokens[place], own, with_tokens=is_kept)
            request.row_id = None if row.id is None else str(row.id)
            if self._expected_tokens is not None and prompt.scored is None:
                request.num_output_tokens = min(self._expected_tokens, largest_output(request))
            if is_kept:
                self.work += work_of(request)
                self.workload.requests.append(request)
            else:
                self.left_out += work_of(request)
        while self.work > self._most_tokens and _span(line.index) >= self._every:  # two spans stay
            self._every *= 2
            self.workload.requests, work = _one_span_of(self._every, self.workload.requests)
            self.left_out += self.work - work
            self.work = work

    def part(self, most_tokens: float) -> tuple[Requests, float]:
        """Spans of the requests, of about so much work, and the work of the others."""
        every, found, work = self._every, self.workload.requests, self.work
        while work > most_tokens and _span(_row_of(found[-1])) >= every:
            every *= 2
            found, work = _one_span_of(every, found)
        return replace(self.workload, requests=found), self.work - work + self.left_out

    def refuse(self, row: BatchRow, error: RequestError) -> None:
        self.workload.add_bad(f"{self._name}:{row.line.number}", error.message)

    def finish(self) -> Requests:
        """The workload. Raises: UsageError if it is empty."""
        workload = self.workload
        if not workload.requests:
            raise UsageError(f"{self._name} has no valid row{workload.first_bad}")
        if self._num_without:
            workload.notes.append(
                f"no output in the earlier run for {plural(self._num_without, 'row')}: simulated up to max_tokens"
            )
        return workload


def read_prompts(name: str, prompts: Prompts, outputs: "dict[int, RowOutput] | None" = None) -> Requests:
    """The rows of a prompt file. A row that a run would refuse is a bad line. Without `outputs` each row generates its
    max_tokens. Raises: UsageError if there is none."""
    found = PromptRequests(name, outputs)
    for row, max_tokens in prompts.admitted():
        if isinstance(max_tokens, RequestError):
            found.refuse(row, max_tokens)
        else:
            found.add(row, max_tokens)
    return found.finish()


def read_outputs(name: str) -> dict[int, RowOutput]:
    """The outputs of an earlier `generate` run, by row: their lengths, and their tokens with --output-token-ids.

    Raises: UsageError or TraceError.
    """
    found: dict[int, RowOutput] = {}
    lines = TraceLines(name, "output")
    for line in lines:
        if not line.strip():
            continue
        try:
            row = WrittenRow.of(line)
            num_tokens = 0 if row.usage is None else int(row.usage["completion_tokens"])
        except NOT_A_ROW as error:
            why = why_not_a_row(error)
            raise TraceError(f"{lines.path}:{lines.line_number}: not an output row of generate: {why}") from error
        if row.usage is not None and row.index is not None:
            ids = [sample.token_ids for sample in row.samples if sample.token_ids]
            stopped = [sample.finish_reason == "stop" for sample in row.samples]
            found[row.index] = RowOutput(num_tokens, ids, stopped)
    if not found:
        raise UsageError(f"{name} has no row with an index and usage", hint="use the output of an earlier generate run")
    return found


def set_output_lengths(workload: Requests, text: str) -> None:
    """Replace all output lengths: '128', or '64-256' for uniform random ones (always the same). Raises: UsageError."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match is not None else (0, 0)
    if not 1 <= first <= last <= MAX_TOKENS:
        raise UsageError(f"--output-tokens is {text!r}", hint="a number such as 128, or a range such as 64-256")
    draw = random.Random(0)
    for request in workload.requests:
        request.num_output_tokens = draw.randint(first, last)
        request.max_new_tokens = request.output_ids = request.stopped = None


_LINES_TRIED = 20  # the first ones may be broken


def read_workload(
    names: Sequence[str],
    read_prompts: Callable[[str], Requests],
    *,
    format_name: str | None = None,
    hash_size: int | None = None,
) -> tuple[Requests, PoolState | None]:
    """The requests of the files, and for a recorded run the pool at its end.

    Raises: UsageError or TraceError.
    """
    if format_name is not None and format_name not in format_names():
        raise UsageError(f"unknown trace format {format_name!r}", hint=f"known: {', '.join(format_names())}")
    found = format_name or _format_of(names[0])
    if found in FORMATS:
        return read_traces(names, found, hash_size), None
    if len(names) > 1:
        raise UsageError(f"{found}: one file at a time, got {len(names)}")
    if found == "pagedcli":
        return read_recorded_run(Path(names[0]))
    return (read_kv_events(Path(names[0])) if found == "kv-events" else read_prompts(names[0])), None


def _format_of(name: str) -> str:
    """The format of a file, by its first lines. What is no known trace is read as prompts, which has its own errors."""
    if name == "-" or Path(name).is_dir() or name.endswith(".parquet") or delimited_format(name):
        return "prompts"
    for line in islice(TraceLines(name), _LINES_TRIED):
        line = line.strip().removeprefix(b"\xef\xbb\xbf")
        try:
            document = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        if isinstance(document, dict) and document.get("event") == "engine_started":
            return "pagedcli"
        if is_capture_line(line):
            return "kv-events"
        if (found := find_format(document)) is not None:
            return found
    return "prompts"
