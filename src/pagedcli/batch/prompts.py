"""From an input to prompts: opens stdin, a JSONL or Parquet file or a folder of either, and turns each line into a
request for the engine: parsed, tokenized, with its final sampling parameters.

Used by batch.run, and by commands and simulations that read a file without running it. An invalid line becomes a
Refused; core.admission then decides whether a Prepared fits.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from pagedcli.batch.columns import Columns, names_of
from pagedcli.batch.grammar import Grammars, check_grammar
from pagedcli.batch.lines import Line, LineSource
from pagedcli.batch.parquet import ParquetSource, is_parquet
from pagedcli.batch.repeats import request_key
from pagedcli.batch.requests import (
    BatchRequest,
    Message,
    RequestParser,
    RowHead,
    check_head,
    decode_line,
    read_head,
    request_of,
    with_system_prompt,
)
from pagedcli.batch.stats import SeenIds
from pagedcli.batch.tokenizer import NO_TOOLS, Tokenizer
from pagedcli.config import Config, EngineConfig, LoadedConfig
from pagedcli.core.admission import admit
from pagedcli.core.limits import NO_LIMIT, Limits
from pagedcli.errors import RequestError, UsageError
from pagedcli.models.spec import ModelSpec
from pagedcli.sampling_params import SamplingParams, seed_for

_JSONL_ENDINGS = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")


def open_source(name: str, columns: Columns | None = None) -> LineSource:
    """The rows of an input, with the columns that its requests and rows need. Raises: UsageError if it cannot be
    read."""
    columns = columns or Columns()
    path = Path(name)
    if name == "-":
        return LineSource(name)
    if path.is_dir():
        return _open_folder(path, columns)
    return ParquetSource(name, columns=columns) if is_parquet(path) else LineSource(name)


class KeptColumns:
    """Checks the columns to be copied against those that an input has, which a file shows only as it is read.

    `in_rows`: they become fields of the rows, and must not have the names of others.
    Raises: UsageError, here if the columns are known already, and in `check`.
    """

    def __init__(self, source: LineSource, columns: Columns, *, in_rows: bool = True) -> None:
        self._columns = columns
        self._in_rows = in_rows
        self._names: set[str] = set()
        self._is_looking = columns.copies
        if isinstance(source, ParquetSource):
            self._names = set(source.schema.names)
        elif source.is_live:
            self._names = set(columns.keep)  # all that is known of an input that can be read only once
        if columns.copies and self._names:
            self.check()

    def add(self, content: bytes | None) -> None:
        """Look at a line, until all columns are found."""
        if self._is_looking:
            self._names |= names_of(content)
            self._is_looking = self._columns.keep_all or not self._names.issuperset(self._columns.keep)

    def check(self) -> None:
        """Every line has been looked at."""
        self._is_looking = False
        self._columns.check_found(self._names)
        if self._in_rows and self._columns.copies:
            self._columns.check_free(self._names)


class FolderSource(LineSource):
    """The rows of all files in the order of their names, numbered continuously."""

    def __init__(self, name: str, paths: list[Path]) -> None:
        self.name = name
        self._sources = [LineSource(str(path)) for path in paths]

    def _lines(self) -> Iterator[Line]:
        index = number = 0
        for source in self._sources:
            line = None
            for line in source:
                yield replace(line, index=index + line.index, number=number + line.number)
            if line is not None:
                index, number = index + line.index + 1, number + line.number


def _open_folder(folder: Path, columns: Columns) -> LineSource:
    names = sorted(os.listdir(folder))
    tables = [folder / name for name in names if is_parquet(Path(name))]
    files = [folder / name for name in names if name.endswith(_JSONL_ENDINGS)]
    if tables and files:
        raise UsageError(f"{folder} contains both Parquet and JSONL files", hint="use a folder with files of one kind")
    if not tables and not files:
        raise UsageError(f"{folder} contains no Parquet or JSONL files", hint="known: *.parquet, *.jsonl, *.jsonl.gz")
    return ParquetSource(str(folder), tables, columns) if tables else FolderSource(str(folder), files)


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Settings for the lines of a run."""

    defaults: SamplingParams
    max_tokens_given: bool = False  # set by a flag: then it is not lowered to what fits
    seed: int = 0  # for requests without one
    system_prompt: str | None = None  # also turns plain text prompts into chats
    tools: list[dict[str, Any]] | None = None  # of chats without their own; the same
    strict: bool = False  # unknown fields are errors
    deduplicate: bool = False  # rows with equal answers are computed once
    limit: int | None = None  # rows of the input
    max_errors: int | None = None  # stop at this many error rows, without those of a resumed journal
    shard: tuple[int, int] = (0, 1)  # (i, n): of the input rows only those whose index % n is i
    reorder: Literal["none", "prefix"] = "none"  # prefix: requests with a common prefix are started one after another
    read_ahead: int | None = None  # prompt tokens in work (see batch.run); None: see batch.run.read_ahead
    columns: Columns = field(default_factory=Columns)
    cache_namespace: str | None = None  # requests share cached blocks only within it; begins their ids
    check_ids: bool = True  # False: the lines are part of an input whose ids have been checked


def batch_options(loaded: LoadedConfig, columns: Columns, *, shard: tuple[int, int] = (0, 1)) -> BatchOptions:
    config = loaded.config
    return BatchOptions(
        defaults=config.sampling,
        max_tokens_given=loaded.sources.get("sampling.max_tokens", "").startswith("--"),
        seed=config.engine.seed,
        system_prompt=config.run.system_prompt,
        tools=config.run.tools,
        strict=config.run.strict,
        deduplicate=config.run.deduplicate,
        limit=config.run.limit,
        max_errors=config.run.max_errors,
        shard=shard,
        reorder=config.run.reorder,
        read_ahead=config.run.read_ahead,
        columns=columns,
    )


def open_tokenizer(config: Config, folder: Path) -> Tokenizer:
    """The tokenizer of a model's folder, with the run's chat template, which must show the run's tools.

    Raises: ModelError, UsageError.
    """
    run, engine = config.run, config.engine
    tokenizer = Tokenizer(folder, chat_template=run.chat_template, trust_remote_code=engine.trust_remote_code)
    if run.tools and not tokenizer.shows_tools:
        raise UsageError(
            f"--tools: {NO_TOOLS}", hint="give a template that shows tools with --chat-template, or leave out --tools"
        )
    return tokenizer


def check_response_format(defaults: SamplingParams) -> None:
    """Raises: UsageError for a --response-format that no row could use."""
    if defaults.response_format is None:
        return
    try:
        check_grammar(defaults)
    except RequestError as error:
        raise UsageError(f"--response-format: {error.message}", hint="correct the schema") from error


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """One prompt of a line."""

    token_ids: list[int]
    params: SamplingParams
    is_chat: bool = False  # the chat template has written it
    is_text: bool = False  # it has been tokenized


@dataclass(frozen=True, slots=True)
class Prepared:
    """The request of a line, ready for the engine."""

    line: Line
    head: RowHead
    prompts: list[PreparedPrompt]  # mostly one
    cache_salt: str | None


@dataclass(frozen=True, slots=True)
class Refused:
    """A line that gives an error row."""

    line: Line
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
            return None if done else Refused(line, head, error)
        prepared = [
            PreparedPrompt(
                ids,
                self._final_params(request, len(ids), line.index, place),
                is_chat,
                is_text=is_chat or isinstance(request.prompts[place], str),
            )
            for place, (ids, is_chat) in enumerate(prompts)
        ]
        salt = request.cache_salt
        namespace = self._options.cache_namespace
        return Prepared(line, head, prepared, salt if namespace is None else f"{namespace} {salt or ''}")

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

    def _encode(self, request: BatchRequest) -> list[tuple[list[int], bool]]:
        """Token ids of each prompt, and whether it is a chat: the run's system prompt and tools turn texts into chats.

        Raises: RequestError.
        """
        if request.messages is not None:
            return [(self._encode_chat(request, request.messages), True)]
        makes_chats = self._options.system_prompt is not None or bool(self._options.tools and request.tools is None)
        encoded = []
        for prompt in request.prompts:
            if not isinstance(prompt, str):
                encoded.append((prompt, False))
            elif makes_chats:
                encoded.append((self._encode_chat(request, [{"role": "user", "content": prompt}]), True))
            else:
                encoded.append((self._tokenizer.encode_within(prompt, self._limits.max_model_len), False))
        return encoded

    def _encode_chat(self, request: BatchRequest, messages: list[Message]) -> list[int]:
        messages = with_system_prompt(messages, self._options.system_prompt)
        tools = self._options.tools if request.tools is None else request.tools
        if tools and not self._tokenizer.shows_tools:
            raise RequestError("unsupported_parameter", f"{NO_TOOLS}; leave 'tools' out")
        arguments = {"tools": tools, **request.chat_template_kwargs} if tools else request.chat_template_kwargs
        text = self._tokenizer.render_chat(messages, arguments)
        # the template has already written the special tokens
        return self._tokenizer.encode_within(text, self._limits.max_model_len, add_special_tokens=False)


class Prompts:
    """The requests of the lines of an input, in their order, each made when it is asked for.

    `holds` says of an index and a digest whether the row is done already, `limits` what prompts must fit into.
    """

    def __init__(
        self,
        lines: Iterable[Line | None],
        tokenizer: Tokenizer,
        options: BatchOptions,
        limits: Limits,
        *,
        holds: Callable[[int, int], bool] = lambda index, line_digest: False,
        observe: Callable[[Line], None] = lambda line: None,
    ) -> None:
        """`observe` is called with each line up to the limit, also with those of other shards."""
        self.tokenizer = tokenizer
        self.num_rows = 0  # so far, with those of other shards
        self.num_copied = 0  # so far, with the answers of an earlier one (see `admitted`)
        self._lines = lines
        self._options = options
        self._limits = limits
        self._holds = holds
        self._observe = observe
        self._intake = Intake(tokenizer, options, limits)

    @property
    def ignored(self) -> dict[str, int]:
        """Fields without effect -> lines."""
        return dict(self._intake.parser.ignored)

    def __iter__(self) -> Iterator[Prepared | Refused | Line | None]:
        """A Line is one whose row is done already; None: no line has come yet. Raises: PagedcliError."""
        limit, (place, num_shards) = self._options.limit, self._options.shard
        for line in self._lines:
            if line is None:
                yield None
                continue
            if limit is not None and line.index >= limit:
                return
            self.num_rows += 1
            self._observe(line)
            if line.index % num_shards == place:
                yield self._intake.prepare(line, done=self._holds(line.index, line.digest)) or line

    def admitted(self, grammars: Grammars | None = None) -> Iterator[tuple[Prepared, list[int]] | Refused]:
        """The same without an engine: with the number of tokens that each prompt may generate, and what the engine
        would refuse as Refused. One that only does not fit into the pool comes a second time, as if it did. With
        `deduplicate` rows with the answers of an earlier one are left out.

        `grammars` compiles those of the prompts; None: they are not checked.
        """
        seen: set[bytes] = set()
        for taken in self:
            if isinstance(taken, Refused):
                yield taken
            if not isinstance(taken, Prepared):
                continue
            if self._options.deduplicate:
                key = request_key(taken)
                if key in seen:
                    self.num_copied += 1
                    continue
                seen.add(key)
            try:
                if grammars is not None:
                    grammars.guides(taken.prompts[0].params)  # the line's
                num_new_tokens = [admit(self._limits, prompt.token_ids, prompt.params) for prompt in taken.prompts]
            except RequestError as error:
                yield Refused(taken.line, taken.head, error)
                if error.code != "kv_cache_exceeded":
                    continue
                num_new_tokens = [prompt.params.max_tokens or 1 for prompt in taken.prompts]
            yield taken, num_new_tokens


def open_prompts(loaded: LoadedConfig, input_name: str, folder: Path, limits: Limits) -> Prompts:
    """The prompts of an input for a command that does not run them. Raises: UsageError, ModelError."""
    columns = Columns.of(loaded.config.run)
    lines = open_source(input_name, columns)
    kept = KeptColumns(lines, columns)

    def looked_at() -> Iterator[Line]:
        for line in lines:
            kept.add(line.content)
            yield line
        kept.check()

    tokenizer = open_tokenizer(loaded.config, folder)
    return Prompts(looked_at() if columns.copies else lines, tokenizer, batch_options(loaded, columns), limits)


def limits_without_pool(engine: EngineConfig, spec: ModelSpec | None) -> Limits:
    """What a request must fit into where the pool is not known; nor the model's length if `spec` is None."""
    from pagedcli.planning.decide import resolve_max_model_len  # loads torch

    return Limits.of(
        engine,
        max_model_len=NO_LIMIT if spec is None else resolve_max_model_len(engine, spec),
        max_num_batched_tokens=engine.max_num_batched_tokens or NO_LIMIT,
        vocab_size=None if spec is None else spec.vocab_size,
    )
