"""Output rows, for finished requests and for lines that could not be served.

Used by batch.run. A plain line gives a plain row; an OpenAI batch line gives a row with exactly OpenAI's fields.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from pagedcli.batch.requests import RowHead
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.errors import RequestError

if TYPE_CHECKING:
    from pagedcli.engine.outputs import RequestOutput, SampleOutput

SampleText = Callable[[int, list[int]], str]  # sample index, its token ids


@dataclass(frozen=True, slots=True)
class RowWriter:
    """Encodes rows as JSON. `run_key` and `created_s` determine ids and times, which a resumed run repeats."""

    tokenizer: Tokenizer
    model: str  # as the user named it
    run_key: str
    created_s: int  # Unix time of the run's first start
    output_token_ids: bool = False

    def encode_success(self, head: RowHead, output: "RequestOutput", sample_text: SampleText) -> bytes:
        """The row of a finished request."""
        usage: dict[str, Any] = _usage(output)
        if head.shape == "plain":
            return msgspec.json.encode(self._plain_row(head, output, sample_text, usage))
        key = self._id(head)
        chat = head.shape == "chat.completion"
        body = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{key}",
            "object": head.shape,
            "created": self.created_s,
            "model": self.model,
            "choices": [
                (self._chat_choice if chat else self._completion_choice)(
                    sample, sample_text(sample.index, sample.token_ids)
                )
                for sample in output.samples
            ],
            "usage": usage,
        }
        response = {"status_code": 200, "request_id": f"req_{key}", "body": body}
        row = {"id": f"batch_req_{key}", "custom_id": head.id, "response": response, "error": None}
        return msgspec.json.encode(row)

    def encode_error(self, head: RowHead, error: RequestError) -> bytes:
        """The row of a line that could not be served."""
        what = {"code": error.code, "message": error.message, "line": head.line_number}
        if head.shape == "plain":
            row = {
                "index": head.index,
                "id": head.id,
                "text": None,
                "finish_reason": None,
                "usage": None,
                "error": what,
            }
        else:
            row = {"id": f"batch_req_{self._id(head)}", "custom_id": head.id, "response": None, "error": what}
        return msgspec.json.encode(row)

    def _id(self, head: RowHead) -> str:
        return xxhash.xxh3_128_hexdigest(f"{self.run_key}:{head.index}".encode())

    # ------------------------------------------------------------------ plain

    def _plain_row(
        self, head: RowHead, output: "RequestOutput", sample_text: SampleText, usage: dict[str, Any]
    ) -> dict[str, Any]:
        samples = [self._plain_sample(sample, sample_text(sample.index, sample.token_ids)) for sample in output.samples]
        row: dict[str, Any] = {"index": head.index, "id": head.id}
        if len(samples) == 1:
            row |= samples[0]
        else:
            row["outputs"] = [{"index": place, **sample} for place, sample in enumerate(samples)]
        return row | {"usage": usage, "error": None}

    def _plain_sample(self, sample: "SampleOutput", text: str) -> dict[str, Any]:
        fields: dict[str, Any] = {"text": text, "finish_reason": sample.finish_reason}
        if self.output_token_ids:
            fields["token_ids"] = sample.token_ids
        if sample.logprobs is not None:
            fields["logprobs"] = self._chat_logprobs(sample)
        return fields

    # ------------------------------------------------------------------ OpenAI

    def _chat_choice(self, sample: "SampleOutput", text: str) -> dict[str, Any]:
        logprobs = None
        if sample.logprobs is not None:
            logprobs = {"content": self._chat_logprobs(sample), "refusal": None}
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._choice(sample, {"index": sample.index, "message": message, "logprobs": logprobs})

    def _completion_choice(self, sample: "SampleOutput", text: str) -> dict[str, Any]:
        logprobs = self._completion_logprobs(sample) if sample.logprobs is not None else None
        return self._choice(sample, {"index": sample.index, "text": text, "logprobs": logprobs})

    def _choice(self, sample: "SampleOutput", choice: dict[str, Any]) -> dict[str, Any]:
        choice["finish_reason"] = sample.finish_reason
        if self.output_token_ids:
            choice["token_ids"] = sample.token_ids
        return choice

    def _chat_logprobs(self, sample: "SampleOutput") -> list[dict[str, Any]]:
        return [
            self._logprob(position.token_id, position.logprob)
            | {"top_logprobs": [self._logprob(token_id, logprob) for token_id, logprob in position.top]}
            for position in sample.logprobs or ()
        ]

    def _logprob(self, token_id: int, logprob: float) -> dict[str, Any]:
        token = self.tokenizer.token_bytes(token_id)
        return {
            "token": token.decode("utf-8", errors="replace"),
            "logprob": _json_logprob(logprob),
            "bytes": list(token),
        }

    def _completion_logprobs(self, sample: "SampleOutput") -> dict[str, Any]:
        text_of, offset = self.tokenizer.token_text, 0
        fields: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for position in sample.logprobs or ():
            text = text_of(position.token_id)
            fields["text_offset"].append(offset)
            fields["tokens"].append(text)
            fields["token_logprobs"].append(_json_logprob(position.logprob))
            ranked = [*position.top, (position.token_id, position.logprob)]
            fields["top_logprobs"].append({text_of(token_id): _json_logprob(value) for token_id, value in ranked})
            offset += len(text)
        return fields


def _usage(output: "RequestOutput") -> dict[str, Any]:
    num_prompt = len(output.prompt_token_ids)
    num_output = sum(len(sample.token_ids) for sample in output.samples)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        # depends on what ran before: the only number in which a resumed run may differ
        "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
    }


def _json_logprob(logprob: float) -> float:
    """JSON cannot represent -inf; OpenAI writes -9999.0 for an impossible token."""
    return max(logprob, -9999.0)
