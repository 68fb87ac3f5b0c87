"""Prompt files as traces: every row tokenized as a run would, with output lengths from elsewhere."""

import random
import re
from array import array
from dataclasses import dataclass

import msgspec

from pagedcli.batch.prompts import PreparedPrompt, Prompts, Refused
from pagedcli.errors import TraceError, UsageError
from pagedcli.printable import plural
from pagedcli.simulation.reading import TraceLines
from pagedcli.simulation.requests import MAX_TOKENS, TraceRequest, Workload


def read_prompts(name: str, prompts: Prompts, outputs: "dict[int, RowOutput] | None" = None) -> Workload:
    """The rows of a prompt file. A row that a run would refuse is a bad line. Without `outputs` each row generates its
    max_tokens."""
    workload = Workload(format="prompts")
    for found in prompts.admitted():
        if isinstance(found, Refused):
            workload.add_bad(f"{name}:{found.line.number}", found.error.message)
            continue
        taken, max_tokens = found
        line = taken.line
        if any(prompt.params.beam_width is not None for prompt in taken.prompts):
            workload.add_bad(f"{name}:{line.number}", "beam search, which simulate does not model")
            continue
        output = None if outputs is None else outputs.get(line.index)
        share = None if output is None else output.shares(len(taken.prompts))
        for place, prompt in enumerate(taken.prompts):
            request_id = f"{line.index}/{place}" if place else str(line.index)
            own = None if share is None else share[place]
            workload.requests.append(_request(request_id, prompt, taken.cache_salt, max_tokens[place], own))
    if not workload.requests:
        first = f" ({workload.bad_lines[0].place}: {workload.bad_lines[0].reason})" if workload.bad_lines else ""
        raise UsageError(f"{name} has no valid row{first}")
    indices = (int(row.request_id.split("/")[0]) for row in workload.requests)
    if outputs is not None and (missing := sum(index not in outputs for index in indices)):
        workload.notes.append(f"no output in the earlier run for {plural(missing, 'row')}: simulated up to max_tokens")
    return workload


def _request(
    request_id: str, prompt: PreparedPrompt, cache_salt: str | None, max_tokens: int, output: "RowOutput | None"
) -> TraceRequest:
    num_samples = prompt.params.n
    request = TraceRequest(
        request_id,
        None,
        len(prompt.token_ids),
        max_tokens,
        token_ids=array("q", prompt.token_ids),
        max_new_tokens=max_tokens,
        num_samples=num_samples,
        cache_salt=cache_salt,
    )
    if output is not None:
        request.num_output_tokens = min(max(1, output.num_tokens // num_samples), max_tokens)
        if len(output.token_ids) == num_samples:
            request.output_ids = [array("q", ids) for ids in output.token_ids]
            request.stopped = output.stopped
    return request


@dataclass(frozen=True, slots=True)
class RowOutput:
    """What an earlier run generated for a row, or for one of its prompts."""

    num_tokens: int  # of all samples
    token_ids: list[list[int]]  # of each sample, if the rows have them
    stopped: list[bool]  # whether each sample stopped by itself

    def shares(self, num_prompts: int) -> "list[RowOutput]":
        """The outputs of each prompt of the row: samples are listed prompt after prompt."""
        each = len(self.stopped) // num_prompts
        spans = [slice(place * each, (place + 1) * each) for place in range(num_prompts)]
        return [RowOutput(self.num_tokens // num_prompts, self.token_ids[span], self.stopped[span]) for span in spans]


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Sample(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Row(_Sample):
    index: int | None = None
    usage: _Usage | None = None
    outputs: list[_Sample] | None = None


def read_outputs(name: str) -> dict[int, RowOutput]:
    """The outputs of an earlier `generate` run, by row: their lengths, and their tokens with --output-token-ids.

    Raises: UsageError or TraceError.
    """
    found: dict[int, RowOutput] = {}
    lines = TraceLines(name)
    for line in lines:
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=_Row)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TraceError(f"{lines.path}:{lines.line_number}: not an output row of generate: {error}") from error
        if row.usage is not None and row.index is not None:
            samples = [row] if row.outputs is None else row.outputs
            ids = [sample.token_ids for sample in samples if sample.token_ids]
            stopped = [sample.finish_reason == "stop" for sample in samples]
            found[row.index] = RowOutput(row.usage.completion_tokens, ids, stopped)
    if not found:
        raise UsageError(f"{name} has no row with an index and usage", hint="use the output of an earlier generate run")
    return found


def set_output_lengths(workload: Workload, text: str) -> None:
    """Replace all output lengths: '128', or '64-256' for uniform random ones (always the same). Raises: UsageError."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match is not None else (0, 0)
    if not 1 <= first <= last <= MAX_TOKENS:
        raise UsageError(f"--output-tokens is {text!r}", hint="a number such as 128, or a range such as 64-256")
    draw = random.Random(0)
    for request in workload.requests:
        request.num_output_tokens = draw.randint(first, last)
        request.max_new_tokens = request.output_ids = request.stopped = None
