"""Output rows, for finished requests and for lines that could not be served: their one writer, for batch.run, and their
one reader, for whoever compares, merges, tabulates or simulates rows.

A plain line gives a plain row; an OpenAI batch line gives a row with exactly OpenAI's fields.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import dropwhile
from typing import Any

import msgspec
import xxhash

from pagedcli.batch.columns import CALLS, DISK, METRICS, REASONING, SCORES, Columns
from pagedcli.batch.decisions import ANSWERS, DECISION, answers_of, cells_of
from pagedcli.batch.embeddings import EMBEDDING, decoded
from pagedcli.batch.reasoning import ReasoningFormat, find_format
from pagedcli.batch.requests import BatchRow, RowPrompt
from pagedcli.batch.scoring import Score, ScoredTokens, best_of
from pagedcli.batch.stats import Endings
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.batch.tool_calls import ToolCall, ToolFormat, find_tool_format
from pagedcli.core.sequence import SampleOutput, TokenLogprobs
from pagedcli.errors import RequestError
from pagedcli.events import TokenId


@dataclass(frozen=True, slots=True)
class _Sample:
    index: int  # place in the row: prompt after prompt, as the completions endpoint numbers them
    output: SampleOutput
    text: str
    reasoning: str | None  # apart from the text; None: the output marks none
    num_reasoning_tokens: int
    calls: list[ToolCall]  # apart from the text, too
    stops: bool  # whether the request has stop strings or stop tokens
    prompt_logprobs: list[TokenLogprobs | None] | None  # logprobs of its prompt, on the first sample alone

    @property
    def ending(self) -> dict[str, Any]:
        """How the sample ended; with stop strings or tokens also the one that ended it. Of a beam also its score."""
        ending: dict[str, Any] = {"finish_reason": self.output.finish_reason}
        if self.output.score is not None:
            ending["beam_score"] = self.output.score
        return ending | {"stop_reason": self.output.stop_reason} if self.stops else ending


@dataclass(frozen=True)
class RowWriter:
    """Encodes rows as JSON. `run_key` and `created_s` determine ids and times, which a resumed run repeats."""

    tokenizer: Tokenizer
    model: str  # the user's name for it
    run_key: str
    created_s: int  # Unix time of the run's first start
    columns: Columns = field(default_factory=Columns)
    ended: Endings = field(default_factory=Endings)  # finish reasons of the rows so far

    @cached_property
    def reasoning(self) -> ReasoningFormat | None:
        """How chats mark reasoning; None: not at all."""
        return find_format(self.tokenizer)

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """How chats mark tool calls; None: not at all."""
        return find_tool_format(self.tokenizer)

    @property
    def marked_columns(self) -> frozenset[str]:
        """Columns about reasoning and tool calls that tables of its rows may have."""
        without = REASONING if self.reasoning is None else frozenset[str]()
        marked = self.columns.marked | (self.columns.decided & {EMBEDDING})
        return marked - without - (CALLS if self.tool_format is None else frozenset())

    def encode_success(self, row: BatchRow, answers: list[RowPrompt]) -> bytes:
        fields = self._success(row, answers, self._samples(answers))
        encoded = msgspec.json.encode(fields)
        self._count(answers, reasons_of(fields), encoded)
        return encoded

    def _count(self, prompts: list[RowPrompt], reasons: list[str], encoded: bytes) -> None:
        """Count how the answers of a row ended."""
        prompt = prompts[0]
        self.ended.reasons.update(reasons)
        if not prompt.params.ignore_eos:
            self.ended.cut_at[None if prompt.lowers_max_tokens else prompt.params.max_tokens] += reasons.count("length")
        if self.tool_format is not None and self.columns.parse_tool_calls and any(each.tools for each in prompts):
            self.ended.tool_rows[b'"tool_calls":[' in encoded] += 1

    def _success(self, row: BatchRow, answers: list[RowPrompt], samples: list[_Sample]) -> dict[str, Any]:
        counts: dict[str, Any] = {"usage": _usage(answers, samples)}
        if self.columns.metrics:
            counts["metrics"] = _metrics(answers)
        if answers[0].asked is not None:
            found = [(each.asked, each.result.scores or ()) for each in answers if each.asked is not None]
            decided = {"finish_reason": DECISION, ANSWERS: answers_of(found)}
            return self._without_text(row) | decided | counts | {"error": None}
        if answers[0].embedding is not None:
            return self._embedding_row(row, answers, counts)
        if answers[0].scored is not None:
            return self._score_row(row, answers[0], answers[0].scored) | counts | {"error": None}
        if row.shape == "plain":
            return self._plain_row(row, samples, counts)
        key = self._id(row)
        chat = row.shape == "chat.completion"
        body = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{key}",
            "object": row.shape,
            "created": self.created_s,
            "model": self.model,
            "choices": [
                self._chat_choice(sample, key) if chat else self._completion_choice(sample) for sample in samples
            ],
            **counts,
        }
        response = {"status_code": 200, "request_id": f"req_{key}", "body": body}
        return self._openai_row(row, response, None)

    def _embedding_row(self, row: BatchRow, answers: list[RowPrompt], counts: dict[str, Any]) -> dict[str, Any]:
        found = ((each.embedding, *(each.result.scores or ())) for each in answers)
        vectors = [embedding.encoded(score.tokens) for embedding, score in found if embedding is not None]
        if row.shape == "plain":
            own = {"finish_reason": EMBEDDING, EMBEDDING: vectors[0]}
            return self._without_text(row) | own | counts | {"error": None}
        data = [{"object": EMBEDDING, "index": index, EMBEDDING: vector} for index, vector in enumerate(vectors)]
        body = {"object": row.shape, "data": data, "model": self.model, **counts}
        response = {"status_code": 200, "request_id": f"req_{self._id(row)}", "body": body}
        return self._openai_row(row, response, None)

    def encode_error(self, row: BatchRow, error: RequestError) -> bytes:
        what = {"code": error.code, "message": error.message, "line": row.line.number}
        if row.shape != "plain":
            return msgspec.json.encode(self._openai_row(row, None, what))
        answer = {self.columns.answer: None, "finish_reason": None, "usage": None, "error": what}
        return msgspec.json.encode({"index": row.line.index, "id": row.id, **row.kept, **answer})

    def encode_known(self, row: BatchRow, known: bytes) -> bytes:
        """A good row that asked for the same, with the index, id and copied columns of this one."""
        fields = msgspec.json.decode(known, type=dict[str, msgspec.Raw])
        self._count(row.prompts, reasons_of(msgspec.json.decode(known)), known)
        if "response" in fields:
            key = msgspec.json.decode(fields["id"], type=str).removeprefix("batch_req_").encode()
            response = msgspec.Raw(bytes(fields["response"]).replace(key, self._id(row).encode()))
            return msgspec.json.encode(self._openai_row(row, response, None))
        answer = dropwhile(lambda field: field[0] not in (self.columns.answer, "outputs"), fields.items())
        return msgspec.json.encode({"index": row.line.index, "id": row.id, **row.kept, **dict(answer)})

    def _openai_row(self, row: BatchRow, response: Any, error: dict[str, Any] | None) -> dict[str, Any]:
        fields = {"id": f"batch_req_{self._id(row)}", "custom_id": row.id, **row.kept}
        return fields | {"response": response, "error": error}

    def _id(self, row: BatchRow) -> str:
        return xxhash.xxh3_128_hexdigest(f"{self.run_key}:{row.line.index}".encode())

    def _samples(self, answers: list[RowPrompt]) -> list[_Sample]:
        samples: list[_Sample] = []
        for answer in answers:
            for place, (output, text) in enumerate(zip(answer.result.samples, answer.texts, strict=True)):
                parts = self._parts(answer, output, text) if answer.has_marks else (text, None, 0, [])
                prompt_logprobs = answer.result.prompt_logprobs if place == 0 else None
                samples.append(_Sample(len(samples), output, *parts, answer.has_stops, prompt_logprobs))
        return samples

    def _parts(self, answer: RowPrompt, output: SampleOutput, text: str) -> tuple[str, str | None, int, list[ToolCall]]:
        """The answer's text, the reasoning, None if there are no marks, the number of its tokens, and the calls."""
        prompt_ids, ids, found = answer.result.prompt_token_ids, output.token_ids, self.reasoning
        form = self.tool_format if answer.tools and self.columns.parse_tool_calls else None
        spans = found.spans(prompt_ids, ids, None if form is None else form.start) if found is not None else None
        outside, calls = [(0, len(ids))] if spans is None else spans.answer, list[ToolCall]()
        if form is not None and answer.tools:
            outside, calls = form.find(prompt_ids, ids, outside, answer.tools)

        def length(end: int) -> int:
            return len(self.tokenizer.decode_output(prompt_ids, ids[:end]))

        rest, reasoning = text, None
        if spans is not None:
            reasoning, rest = spans.texts(text, length)
        if calls:
            pieces = (text[length(start) : length(end)].strip() for start, end in outside if start < end)
            rest = "\n".join(piece for piece in pieces if piece)
        return rest, reasoning, 0 if spans is None else spans.num_reasoning_tokens, calls

    def _reasoning(self, sample: _Sample) -> dict[str, Any]:
        is_kept = sample.reasoning is not None and self.columns.keep_reasoning
        return {"reasoning_content": sample.reasoning} if is_kept else {}

    # ------------------------------------------------------------------ plain

    def _plain_row(self, row: BatchRow, samples: list[_Sample], counts: dict[str, Any]) -> dict[str, Any]:
        fields: dict[str, Any] = {"index": row.line.index, "id": row.id, **row.kept}
        if len(samples) == 1:
            fields |= self._plain_sample(samples[0])
        else:
            fields["outputs"] = [{"index": sample.index, **self._plain_sample(sample)} for sample in samples]
        return fields | counts | {"error": None}

    def _score_row(self, row: BatchRow, answer: RowPrompt, scored: ScoredTokens) -> dict[str, Any]:
        pairs = enumerate(zip(answer.result.scores or (), scored.num_bytes, strict=True))
        scores = [Score.of(index, found, num_bytes) for index, (found, num_bytes) in pairs]
        rows = [msgspec.structs.asdict(score) for score in scores]
        for each in rows:
            each["logprobs"] = list(map(_json_logprob, each["logprobs"]))
            each["logprob"] = sum(each["logprobs"])
            if not scored.with_tokens:
                del each["token_ids"], each["logprobs"]
        return self._without_text(row) | {"finish_reason": "score", "scores": rows, "best": best_of(scores)}

    def _without_text(self, row: BatchRow) -> dict[str, Any]:
        return {"index": row.line.index, "id": row.id, **row.kept, self.columns.answer: None}

    def _plain_sample(self, sample: _Sample) -> dict[str, Any]:
        fields: dict[str, Any] = {self.columns.answer: sample.text, **self._reasoning(sample)}
        if sample.calls:
            fields["tool_calls"] = [call.plain for call in sample.calls]
        fields |= sample.ending
        if self.columns.token_ids:
            fields["token_ids"] = sample.output.token_ids
        if sample.output.logprobs is not None:
            fields["logprobs"] = self._chat_logprobs(sample.output.logprobs)
        return fields | self._prompt_logprobs(sample)

    # ------------------------------------------------------------------ OpenAI

    def _chat_choice(self, sample: _Sample, key: str) -> dict[str, Any]:
        logprobs = None
        if sample.output.logprobs is not None:
            logprobs = {"content": self._chat_logprobs(sample.output.logprobs), "refusal": None}
        message = {"role": "assistant", "content": sample.text, **self._reasoning(sample), "refusal": None}
        if sample.calls:
            calls = [call.openai(f"call_{key}_{sample.index}_{place}") for place, call in enumerate(sample.calls)]
            message |= {"content": sample.text or None, "tool_calls": calls}
        choice = self._choice(sample, {"index": sample.index, "message": message, "logprobs": logprobs})
        is_call = bool(sample.calls) and choice["finish_reason"] == "stop"
        return choice | {"finish_reason": "tool_calls"} if is_call else choice

    def _completion_choice(self, sample: _Sample) -> dict[str, Any]:
        logprobs = self._completion_logprobs(sample.output) if sample.output.logprobs is not None else None
        return self._choice(sample, {"index": sample.index, "text": sample.text, "logprobs": logprobs})

    def _choice(self, sample: _Sample, choice: dict[str, Any]) -> dict[str, Any]:
        choice |= sample.ending
        if self.columns.token_ids:
            choice["token_ids"] = sample.output.token_ids
        return choice | self._prompt_logprobs(sample)

    def _prompt_logprobs(self, sample: _Sample) -> dict[str, Any]:
        if sample.prompt_logprobs is None:
            return {}
        first, *others = sample.prompt_logprobs
        assert first is None, "nothing predicts the first token"
        positions = [each for each in others if each is not None]
        found = self._chat_logprobs(positions)
        for entry, position in zip(found, positions, strict=True):
            token_ids = [position.token_id, *(token_id for token_id, _ in position.top)]
            for each, token_id in zip([entry, *entry["top_logprobs"]], token_ids, strict=True):
                each["token_id"] = token_id
        return {"prompt_logprobs": [None, *found]}

    def _chat_logprobs(self, positions: list[TokenLogprobs]) -> list[dict[str, Any]]:
        return [
            self._logprob(position.token_id, position.logprob)
            | {"top_logprobs": [self._logprob(token_id, logprob) for token_id, logprob in position.top]}
            for position in positions
        ]

    def _logprob(self, token_id: int, logprob: float) -> dict[str, Any]:
        token = self.tokenizer.token_bytes(token_id)
        return {
            "token": token.decode("utf-8", errors="replace"),
            "logprob": _json_logprob(logprob),
            "bytes": list(token),
        }

    def _completion_logprobs(self, sample: SampleOutput) -> dict[str, Any]:
        text_of, offset = self.tokenizer.token_text, 0
        fields: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for position in sample.logprobs or ():
            text = text_of(position.token_id)
            fields["text_offset"].append(offset)
            fields["tokens"].append(text)
            fields["token_logprobs"].append(_json_logprob(position.logprob))
            listed: dict[str, float] = {}
            for token_id, value in [*position.top, (position.token_id, position.logprob)]:
                listed.setdefault(text_of(token_id), _json_logprob(value))  # of equal texts, the likeliest
            fields["top_logprobs"].append(listed)
            offset += len(text)
        return fields


def _usage(answers: list[RowPrompt], samples: list[_Sample]) -> dict[str, Any]:
    num_prompt = sum(len(answer.result.prompt_token_ids) for answer in answers)
    num_output = sum(len(sample.token_ids) for answer in answers for sample in answer.result.samples)
    details = {}
    if any(sample.reasoning is not None for sample in samples):
        num_reasoning = sum(sample.num_reasoning_tokens for sample in samples)
        details = {"completion_tokens_details": {"reasoning_tokens": num_reasoning}}
    found = {"cached_tokens": sum(answer.result.num_cached_tokens for answer in answers)}
    if all(answer.result.num_disk_tokens is not None for answer in answers):
        found["disk_cached_tokens"] = sum(answer.result.num_disk_tokens or 0 for answer in answers)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        # depends on what ran before: the only number in which a resumed run may differ, apart from metrics
        "prompt_tokens_details": found,
        **details,
    }


def _metrics(answers: list[RowPrompt]) -> dict[str, Any]:
    """Latency of a line in seconds, from its arrival in the engine; of several prompts the first and the last count."""
    metrics = [answer.result.metrics for answer in answers]
    tpot_s = [each.tpot_s for each in metrics if each.tpot_s is not None]
    values = (
        min(each.queued_s for each in metrics),
        min(each.ttft_s for each in metrics),
        sum(tpot_s) / len(tpot_s) if tpot_s else None,
        max(each.total_s for each in metrics),
        sum(each.num_preemptions for each in metrics),
        sum(each.num_recomputed_tokens for each in metrics),
    )
    return dict(zip(METRICS, values, strict=True))


def _json_logprob(logprob: float) -> float:
    """JSON cannot represent -inf; OpenAI writes -9999.0 for an impossible token."""
    return max(logprob, -9999.0)


# ---------------------------------------------------------------------- reading rows

NumberedRows = Callable[[], Iterable[tuple[int, bytes]]]  # each row's index and JSON, also a second time
# what Row.of raises for something else than a row
NOT_A_ROW = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError, AttributeError)


def why_not_a_row(error: Exception) -> str:
    """What is wrong with a line. `error`: one of NOT_A_ROW."""
    return f"the field {error} is missing" if isinstance(error, KeyError) else str(error)


class Sample(msgspec.Struct, frozen=True):
    """One answer of a row: a plain row with a single one, an element of its outputs, or an OpenAI choice."""

    index: int  # place in the row
    text: str | None  # None: the row has no field of that name
    reasoning: str | None  # None: none is marked, or it was left out
    finish_reason: str | None
    stop_reason: Any
    beam_score: float | None
    token_ids: list[TokenId] | None
    tool_calls: Any  # a list of calls, in a choice in OpenAI's form
    logprobs: Any  # a list of positions, in a choice within an object
    prompt_logprobs: Any
    embedding: list[float] | None

    @staticmethod
    def values_of(fields: dict[str, Any], answer: str) -> dict[str, Any]:
        """The values of a sample, unchecked."""
        message = fields.get("message", fields)
        return {name: fields.get(name) for name in Sample.__struct_fields__} | {
            "index": fields.get("index", 0),
            "text": message["content"] if "message" in fields else fields.get(answer),
            "reasoning": message.get("reasoning_content", message.get("reasoning")),
            "finish_reason": fields["finish_reason"],
            "tool_calls": message.get("tool_calls"),
            EMBEDDING: decoded(fields[EMBEDDING]) if fields["finish_reason"] == EMBEDDING else None,
        }

    def cells(self, answer: str) -> dict[str, Any]:
        """What it has by column of a table, the text in the column `answer`."""
        cells = msgspec.structs.asdict(self)
        cells |= {"reasoning_content": cells.pop("reasoning"), answer: cells.pop("text")}
        return {name: value for name, value in cells.items() if value is not None}


class WrittenRow(msgspec.Struct, frozen=True):
    """A row, plain or in OpenAI's form."""

    fields: dict[str, Any]  # all fields of the row, copied columns included
    id: str | int | None
    index: int | None  # index of the line in the input; OpenAI's rows have none of their own
    error: dict[str, Any] | None
    usage: dict[str, Any] | None
    metrics: dict[str, Any] | None
    samples: list[Sample]  # none in an error row

    @property
    def answers(self) -> dict[str, dict[str, Any]]:
        """The answers to questions; of another row none. Raises: KeyError if they are in columns of a table."""
        return self.fields[ANSWERS] if any(sample.finish_reason == DECISION for sample in self.samples) else {}

    @classmethod
    def of(cls, content: bytes, answer: str = "text", index: int | None = None) -> "WrittenRow":
        """`answer`: the field of plain rows with the text; `index`: that of the row, if known. Raises: one of
        NOT_A_ROW."""
        fields = msgspec.json.decode(content, type=dict[str, Any])
        body, error, samples = _answers(fields)
        answer = "text" if "response" in fields else answer
        values = {
            "fields": fields,
            "id": fields["custom_id" if "response" in fields else "id"],
            "index": fields.get("index", index),
            "error": error and error.get("error", error),  # vLLM's has one inside
            "usage": body.get("usage"),
            "metrics": body.get("metrics"),
            "samples": [Sample.values_of(sample, answer) for sample in samples],
        }
        return msgspec.convert(values, cls)


def _answers(fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None, list[dict[str, Any]]]:
    """What the row has of usage and answers, its error, and each answer."""
    body = (fields.get("response") or {}).get("body") or fields
    error = fields["error"] or body.get("error")  # OpenAI's failed requests have it in the body
    # a plain row may have a copied column `choices`
    answers = fields.get("outputs") or [fields] if body is fields else body.get("choices") or [body]
    if body is not fields and body.get("object") == "list":  # vectors
        answers = [{**each, "finish_reason": EMBEDDING} for each in body["data"]]
    return body, error, answers if error is None else []


def reasons_of(fields: dict[str, Any]) -> list[str]:
    """Why each answer of a row ended. Raises: one of NOT_A_ROW."""
    return [str(each["finish_reason"]) for each in _answers(fields)[2]]


class RowStatus(msgspec.Struct, frozen=True, gc=False):
    """Id and error of a row, decoded without the rest."""

    id: str | int | None = None
    custom_id: str | int | None = None
    error: dict[str, Any] | None = None

    @property
    def row_id(self) -> str | int | None:
        return self.custom_id if self.custom_id is not None else self.id


def marked_of(rows: NumberedRows, columns: Columns) -> frozenset[str]:
    """The columns about reasoning, tool calls, scores and a prefix store that some row has; tables of other runs have
    none of them."""
    found: set[str] = set()
    for _, row in rows():
        if _ON_DISK in row:
            found |= DISK
        if not any(mark in row for mark in _MARKED):
            continue
        each = WrittenRow.of(row, columns.answer)
        if each.usage and "completion_tokens_details" in each.usage:
            found.add("reasoning_tokens")
            found.update("reasoning_content" for sample in each.samples if sample.reasoning is not None)
        found.update("tool_calls" for sample in each.samples if sample.tool_calls)
        found.update(*(SCORES for sample in each.samples if sample.finish_reason == "score"))
        found.update(EMBEDDING for sample in each.samples if sample.embedding is not None)
        if found >= columns.marked | SCORES | {EMBEDDING}:
            break
    return (columns.marked | SCORES | DISK | {EMBEDDING}) & found


def decided_of(rows: NumberedRows, columns: Columns) -> dict[str, type]:
    """The columns with answers to questions, in the order of their first rows, each with the type of its values."""
    found: dict[str, type] = {}
    for row in (row for _, row in rows() if _DECIDED in row):
        found |= {name: type(cell) for name, cell in cells_of(WrittenRow.of(row, columns.answer).answers).items()}
    return found


_ON_DISK = b'"disk_cached_tokens":'
_MARKED = b'"reasoning_tokens":', b'"tool_calls":[', b'"scores":[', b'"embedding":'
_DECIDED = b'"finish_reason":"decision"'
