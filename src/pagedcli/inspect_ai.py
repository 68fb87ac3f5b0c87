"""A model of Inspect AI: `inspect eval TASK --model pagedcli/PATH -M key=value`. `key` is a field of EngineConfig, or
chat_template.

Inspect finds this module by its entry point. Requests are rows of one engine in a thread of its own, in OpenAI's form.
"""

import math
import time
from concurrent.futures import Future
from importlib.util import find_spec
from itertools import count
from typing import Any

import msgspec
from anyio import CapacityLimiter, to_thread
from inspect_ai.model import (
    ChatMessage,
    GenerateConfig,
    ModelAPI,
    ModelOutput,
    messages_to_openai,
    model_output_from_openai,
    modelapi,
)
from inspect_ai.tool import ToolChoice, ToolFunction, ToolInfo

from pagedcli.batch.fingerprint import run_key
from pagedcli.batch.lines import Line
from pagedcli.batch.prompts import BatchOptions
from pagedcli.batch.rows import RowWriter
from pagedcli.batch.stream import RowStream
from pagedcli.config import Config
from pagedcli.errors import RequestError, UsageError
from pagedcli.llm_keywords import engine_config

_MAX_TOKENS = 2048  # longest answer if the task says nothing; less where the model's length leaves less
# fields of GenerateConfig with other names here, and those that are named alike
_RENAMED = {"stop_seqs": "stop", "num_choices": "n"}
_SAME = (
    *("max_tokens", "temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty", "logit_bias"),
    *("logprobs", "top_logprobs", "prompt_logprobs", "reasoning_effort"),
)


@modelapi(name="pagedcli")  # type: ignore[untyped-decorator,unused-ignore]  # Inspect is not always installed
class PagedAPI(ModelAPI):  # type: ignore[misc,unused-ignore]
    """An engine that answers chats as they come, all together. Raises: TypeError, UsageError, ModelError."""

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008  # Inspect's own signature
        *,
        chat_template: str | None = None,
        **engine: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config)
        if find_spec("openai") is None:  # the hint of an error is not shown by Inspect
            raise UsageError(
                "Inspect converts chats with openai, which is not installed: pip install 'pagedcli[inspect]'"
            )
        self._stream = _stream(model_name, chat_template, engine)
        self._indexes = count()
        self._waiting = CapacityLimiter(math.inf)  # Inspect itself limits the number of requests

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        """Answer a chat. Raises: RequestError if that is impossible, also for a forced call of a tool."""
        body = {"messages": await messages_to_openai(input), **_parameters(config)}
        if tools:
            forced = "required" if tool_choice == "any" or isinstance(tool_choice, ToolFunction) else tool_choice
            body |= {"tools": [_openai_tool(tool) for tool in tools], "tool_choice": forced}
        index = next(self._indexes)
        request = {"custom_id": str(index), "method": "POST", "url": "/v1/chat/completions", "body": body}
        line = Line(index, index + 1, msgspec.json.encode(request), 0)
        row = await to_thread.run_sync(self._answer, line, limiter=self._waiting, abandon_on_cancel=True)
        if row["error"] is None:
            return await model_output_from_openai(row["response"]["body"])
        if row["error"]["code"] == "context_length_exceeded":
            return ModelOutput.from_content(self.model_name, "", "model_length", row["error"]["message"])
        raise RequestError(row["error"]["code"], row["error"]["message"])

    def _answer(self, line: Line) -> dict[str, Any]:
        """The row of a line; waits for it."""
        answer = _Answer()
        self._stream.submit(line, answer)
        row: dict[str, Any] = msgspec.json.decode(answer.row.result())
        return row

    async def tokenize(self, text: str) -> list[int]:
        return self._stream.rows.tokenizer.encode(text)

    async def count_text_tokens(self, text: str) -> int:
        return len(await self.tokenize(text))

    def max_connections(self) -> int:
        """Enough requests for a full batch."""
        return self._stream.engine.limits.max_num_seqs

    def close(self) -> None:
        """End the engine; requests in work fail."""
        self._stream.stop()
        self._stream.close()


class _Answer:
    """Receives the row of one request."""

    def __init__(self) -> None:
        self.row: Future[bytes] = Future()

    def write(self, index: int, line_digest: int, row: bytes, *, key: bytes | None) -> None:
        self.row.set_result(row)

    def flush(self) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        self.row.set_exception(error)


def _stream(model: str, chat_template: str | None, engine_options: dict[str, Any]) -> RowStream:
    """The engine; loads torch, which other commands of Inspect need not wait for."""
    engine = engine_config(model, engine_options)
    sampling = msgspec.structs.replace(Config().sampling, max_tokens=_MAX_TOKENS)
    return RowStream(
        engine,
        BatchOptions(Config(engine=engine, sampling=sampling)),
        lambda tokenizer: RowWriter(tokenizer, model, run_key({}), int(time.time())),
        chat_template=chat_template,
    )


def _parameters(config: GenerateConfig) -> dict[str, Any]:
    """The fields of a request's body. What the engine does not know is refused there by name."""
    names = {**_RENAMED, **{name: name for name in _SAME}}
    given = {name: value for field, name in names.items() if (value := getattr(config, field)) is not None}
    if (wanted := config.response_schema) is not None:
        schema = wanted.json_schema.model_dump(mode="json", by_alias=True, exclude_none=True)
        given["response_format"] = {"type": "json_schema", "json_schema": {"name": wanted.name, "schema": schema}}
    return given | (config.extra_body or {})


def _openai_tool(tool: ToolInfo) -> dict[str, Any]:
    parameters = tool.parameters.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters},
    }
