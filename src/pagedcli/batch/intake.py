"""Turns a line into a request for the engine: parsed, tokenized, with its final sampling parameters.

Used by batch.run and by commands that check a file without running it. An invalid line becomes a Refused;
engine.admission then decides whether a Prepared fits.
"""

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from pagedcli.batch.chat import Message, with_system_prompt
from pagedcli.batch.columns import Columns
from pagedcli.batch.lines import Line
from pagedcli.batch.requests import BatchRequest, RequestParser, RowHead, check_head, decode_line, read_head, request_of
from pagedcli.batch.stats import SeenIds
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.core.limits import Limits
from pagedcli.errors import RequestError
from pagedcli.sampling_params import SamplingParams, seed_for


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Settings for the lines of a run."""

    defaults: SamplingParams
    max_tokens_given: bool = False  # set by a flag: then it is not lowered to what fits
    seed: int = 0  # for requests without one
    system_prompt: str | None = None  # also turns plain text prompts into chats
    strict: bool = False  # unknown fields are errors
    limit: int | None = None  # rows of the input
    max_errors: int | None = None  # stop at this many error rows, without those of a resumed journal
    shard: tuple[int, int] = (0, 1)  # (i, n): of the input rows only those whose index % n is i
    reorder: Literal["none", "prefix"] = "none"  # prefix: requests with a common prefix are started one after another
    read_ahead: int | None = None  # prompt tokens in work (see batch.run); None: by the eviction policy
    columns: Columns = field(default_factory=Columns)
    apart: str | None = None  # requests of this name share no cached blocks with others; part of their ids
    check_ids: bool = True  # False: the lines are part of an input whose ids have been checked


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """One prompt of a line."""

    token_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Prepared:
    """The request of a line, ready for the engine."""

    head: RowHead
    prompts: list[PreparedPrompt]  # mostly one
    cache_salt: str | None


@dataclass(frozen=True, slots=True)
class Refused:
    """A line that gives an error row."""

    head: RowHead
    error: RequestError


class Intake:
    """Prepares lines one by one; `parser.ignored` counts fields without effect."""

    def __init__(self, tokenizer: Tokenizer, options: BatchOptions, limits: Limits) -> None:
        self.parser = RequestParser(options.defaults, strict=options.strict)
        self._tokenizer = tokenizer
        self._options = options
        self._limits = limits
        self._seen_ids = SeenIds()

    def prepare(self, line: Line, *, done: bool = False) -> Prepared | Refused | None:
        """The request of a line. None for one that is already done: only its id is remembered."""
        head, columns = RowHead(line.index, line.number), self._options.columns
        try:
            document = decode_line(line.content)
            head = read_head(document, line.index, line.number, columns)
            if self._options.check_ids and head.id is not None and not self._seen_ids.add(head.id):
                raise RequestError("duplicate_id", f"an earlier line has the same id {head.id!r}")
            if done:
                return None
            check_head(document, head, columns)
            request = self.parser.parse(request_of(document, columns), head)
            prompts = self._encode(request)
        except RequestError as error:
            return None if done else Refused(head, error)
        prepared = [
            PreparedPrompt(ids, self._final_params(request, len(ids), line.index, place))
            for place, ids in enumerate(prompts)
        ]
        salt = request.cache_salt
        return Prepared(head, prepared, salt if self._options.apart is None else f"{self._options.apart} {salt or ''}")

    def _final_params(self, request: BatchRequest, num_prompt: int, index: int, place: int) -> SamplingParams:
        """The parameters of a line's prompt, with a seed of its own and the default max_tokens lowered to what fits."""
        params, limits = request.params, self._limits
        changes: dict[str, int] = {}
        if params.seed is None:
            # from the row's index and the prompt's place in it: a resumed run draws the same
            seed = seed_for(self._options.seed, index)
            changes["seed"] = seed_for(seed, place) if place else seed
        if params.max_tokens is not None and not (request.max_tokens_given or self._options.max_tokens_given):
            room = limits.room_for(num_prompt, params.beam_width or 1)
            if max(params.min_tokens, 1) <= room < params.max_tokens:
                changes["max_tokens"] = room
        return msgspec.structs.replace(params, **changes) if changes else params

    def _encode(self, request: BatchRequest) -> list[list[int]]:
        """Token ids of each prompt; a system prompt turns text prompts into chats. Raises: RequestError."""
        if request.messages is not None:
            return [self._encode_chat(request, request.messages)]
        return [
            prompt if not isinstance(prompt, str) else self._encode_text(request, prompt) for prompt in request.prompts
        ]

    def _encode_text(self, request: BatchRequest, text: str) -> list[int]:
        if self._options.system_prompt is not None:
            return self._encode_chat(request, [{"role": "user", "content": text}])
        return self._tokenizer.encode_within(text, self._limits.max_model_len)

    def _encode_chat(self, request: BatchRequest, messages: list[Message]) -> list[int]:
        messages = with_system_prompt(messages, self._options.system_prompt)
        text = self._tokenizer.render_chat(messages, request.chat_template_kwargs)
        # the template has already written the special tokens
        return self._tokenizer.encode_within(text, self._limits.max_model_len, add_special_tokens=False)
