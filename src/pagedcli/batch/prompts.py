"""From an input to prompts: opens stdin, a JSONL, CSV or Parquet file, or a folder of one kind, and makes each line a
request for the engine: parsed, tokenized, with its final sampling parameters.

Used by batch.run, and by commands and simulations that read a file without running it. An invalid line becomes a row
with an error; core.admission then decides whether another one fits.
"""

import copy
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec

from pagedcli.batch.columns import SCORES, Columns, names_of
from pagedcli.batch.decisions import ANSWERS, Asked, option_tokens
from pagedcli.batch.delimited import DelimitedSource, delimited_format
from pagedcli.batch.embeddings import EMBEDDING, Embedder
from pagedcli.batch.grammar import Grammars, check_grammar
from pagedcli.batch.lines import PACKED_ENDINGS, Line, LineSource
from pagedcli.batch.parquet import ParquetSource, is_parquet
from pagedcli.batch.repeats import request_key
from pagedcli.batch.requests import BatchRow, RequestParser, RowPrompt, decode_line, request_of, with_system_prompt
from pagedcli.batch.scoring import ScoredTokens
from pagedcli.batch.stats import SeenIds
from pagedcli.batch.tokenizer import NO_TOOLS, Tokenizer
from pagedcli.buckets import files_of, is_url
from pagedcli.config import Config, EngineConfig, LoadedConfig, RunConfig
from pagedcli.config_keys import flag_name
from pagedcli.core.admission import admit, admit_scores, room_for
from pagedcli.core.limits import NO_LIMIT, Limits
from pagedcli.core.scoring import POOLED
from pagedcli.errors import RequestError, UsageError
from pagedcli.models.lengths import resolve_max_model_len
from pagedcli.models.spec import ModelSpec
from pagedcli.sampling_params import SamplingParams, seed_for

_JSONL_ENDINGS = tuple(kind + packed for kind in (".jsonl", ".ndjson") for packed in ("", *PACKED_ENDINGS))


def open_source(name: str, columns: Columns | None = None) -> LineSource:
    """The rows of an input, with the columns that its requests and rows need. Raises: UsageError if it cannot be
    read."""
    columns = columns or Columns()
    path, given = Path(name), columns.input_format
    if is_url(name) and (found := files_of(name)) is not None:
        return _open_files(name, found, columns)
    if path.is_dir():
        return _open_files(name, [str(path / each) for each in sorted(os.listdir(path))], columns)
    kind = delimited_format(name) if given == "auto" else given
    if kind in ("csv", "tsv"):
        return DelimitedSource(name, columns, kind)
    return ParquetSource(name, columns=columns) if given == "auto" and is_parquet(path) else LineSource(name)


class KeptColumns:
    """Checks the columns to be copied against those that an input has, which a file shows only as it is read.

    `in_rows`: they become fields of the rows, and must not have the names of others.
    Raises: UsageError, here if the columns are known already, and in `check`.
    """

    def __init__(self, source: LineSource, columns: Columns, *, in_rows: bool = True) -> None:
        known = columns.keep if source.names is None and source.is_live else source.names  # live: read only once
        self._columns = columns
        self._in_rows = in_rows
        self._names = set(known or ())
        self._is_looking = columns.copies
        self.notes: list[str] = []  # about columns that have another name in the rows
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
            self.notes = self._columns.renamed(self._names)


class FolderSource(LineSource):
    """The rows of all files in the order of their names, numbered continuously."""

    def __init__(self, name: str, sources: list[LineSource]) -> None:
        self.name = name
        self._sources = sources
        if any(source.names is not None for source in sources):
            self.names = list(dict.fromkeys(name for source in sources for name in source.names or ()))

    def _lines(self) -> Iterator[Line]:
        index = number = 0
        for source in self._sources:
            before = number
            for line in source:
                number = before + line.number
                yield msgspec.structs.replace(line, index=index, number=number)
                index += 1


def _open_files(folder: str, names: list[str], columns: Columns) -> LineSource:
    """The rows of a folder, or of the files that a pattern matches."""
    tables = [name for name in names if is_parquet(Path(name))]
    files = [name for name in names if name.lower().endswith(_JSONL_ENDINGS)]
    delimited = [name for name in names if delimited_format(name)]
    found = [kind for kind, paths in (("Parquet", tables), ("JSONL", files), ("CSV", delimited)) if paths]
    if len(found) > 1:
        raise UsageError(
            f"{folder} contains both {' and '.join(found)} files", hint="use a folder with files of one kind"
        )
    if not found:
        raise UsageError(
            f"{folder} contains no Parquet, JSONL or CSV files",
            hint="known: *.parquet, *.jsonl, *.csv, *.tsv, the last three also .gz or .zst",
        )
    if tables:
        return ParquetSource(folder, tables, columns)
    return FolderSource(folder, [open_source(name, columns) for name in files + delimited])


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Settings for the lines of a run."""

    config: Config
    columns: Columns = field(default_factory=Columns)
    max_tokens_given: bool = False  # whether a flag gives it; then it is not lowered to what fits
    shard: tuple[int, int] = (0, 1)  # (i, n): of the input rows only those whose index % n is i
    cache_namespace: str | None = None  # requests share cached blocks only within it; begins their ids
    no_scores: str | None = None  # why rows cannot be scored
    check_ids: bool = True  # False: the lines are part of an input whose ids have been checked

    @property
    def run(self) -> RunConfig:
        return self.config.run

    def with_run(self, **changes: Any) -> "BatchOptions":
        """Copy the options with changed keys of the section `run`."""
        run = msgspec.structs.replace(self.config.run, **changes)
        return replace(self, config=msgspec.structs.replace(self.config, run=run))


def batch_options(loaded: LoadedConfig, columns: Columns, *, shard: tuple[int, int] = (0, 1)) -> BatchOptions:
    given = loaded.sources.get("sampling.max_tokens", "").startswith("--")
    return BatchOptions(loaded.config, columns, max_tokens_given=given, shard=shard)


def open_tokenizer(config: Config, folder: Path) -> Tokenizer:
    """The tokenizer of a model's folder, with the run's chat template, which must show the run's tools.

    Raises: ModelError, UsageError.
    """
    run, engine = config.run, config.engine
    tokenizer = Tokenizer(folder, chat_template=run.chat_template, trust_remote_code=engine.trust_remote_code)
    if run.embed:  # a checkpoint that makes no vectors is refused before it is loaded
        Embedder.of(engine, tokenizer)
    if run.tools and not tokenizer.shows_tools:
        raise UsageError(
            f"--tools: {NO_TOOLS}", hint="give a template that shows tools with --chat-template, or leave out --tools"
        )
    return tokenizer


def check_defaults(defaults: SamplingParams) -> None:
    """Raises: UsageError for a --regex, --response-format or structured_outputs that no row could use."""
    names = ("regex", "response_format", "structured_outputs")
    name = next((name for name in names if getattr(defaults, name) is not None), "")
    try:
        check_grammar(defaults)
    except RequestError as error:
        flag = name if name == "structured_outputs" else flag_name(name)
        raise UsageError(
            f"{flag}: {error.message}", hint=f"correct the {error.code.removeprefix('invalid_')}"
        ) from error


NO_SCORES = "tables of a distributed run have no columns for scores; write JSONL, or run without Ray"
_MOST_OPTIONS = 1000  # lists of options whose tokens are kept: most rows have the same
_TOGETHER = 256  # rows that commands which only read a file tokenize together


class Prompts:
    """The rows of an input, in their order, each parsed and tokenized when it is asked for.

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
        self.num_rows = 0  # rows so far, those of other shards included
        self.num_deduplicated = 0  # rows so far that an equal one answers (see `admitted`)
        self._lines = lines
        self._options = options
        self._limits = limits
        self._holds = holds
        self._observe = observe
        self._parser = RequestParser(options.config.sampling, options.run)
        self._embedder = lru_cache(1)(partial(Embedder.of, options.config.engine, tokenizer))
        self._option_tokens = lru_cache(_MOST_OPTIONS)(partial(option_tokens, tokenizer))
        self._seen_ids = SeenIds()
        self._draws = True  # whether prompts need seeds
        self._most_together = 1  # rows that are tokenized together, by all processors; the first ones sooner

    @property
    def ignored(self) -> dict[str, int]:
        """Fields without effect -> lines."""
        return dict(self._parser.ignored)

    @property
    def first_ignored(self) -> dict[str, int]:
        """Fields without effect -> number of the first line."""
        return self._parser.first_lines

    def __iter__(self) -> Iterator[BatchRow | None]:
        """None: no line has come yet. Raises: PagedcliError."""
        limit, (place, num_shards) = self._options.run.limit, self._options.shard
        parsed: list[BatchRow] = []
        num_together = 1
        for line in self._lines:
            if line is not None and limit is not None and line.index >= limit:
                break
            if line is not None:
                self.num_rows += 1
                self._observe(line)
                if line.index % num_shards == place:
                    parsed.append(self._parse(line))
            if line is None or len(parsed) >= num_together:
                yield from self._with_tokens(parsed)
                parsed, num_together = [], min(2 * num_together, self._most_together)
            if line is None:
                yield None
        yield from self._with_tokens(parsed)

    def admitted(self, grammars: Grammars | None = None) -> Iterator[tuple[BatchRow, list[int] | RequestError]]:
        """Read the rows without an engine: each with the number of tokens that each prompt may generate, or why a run
        would refuse it. A row rejected only for pool size is yielded again as if it fit. With `deduplicate`, rows that
        get the answers of an earlier one are left out.

        `grammars` compiles those of the prompts; None: they are not checked.
        """
        seen: set[bytes] = set()
        self._draws = self._options.run.deduplicate  # Rows that draw differently are not equal.
        self._most_together = _TOGETHER
        for row in self:
            if row is None:
                continue
            if row.error is not None:
                yield row, row.error
                continue
            if self._options.run.deduplicate:
                key = request_key(row)
                if key in seen:
                    self.num_deduplicated += 1
                    continue
                seen.add(key)
            if (wanted := row.prompts[0].embedding) is not None and wanted.pooling == "mean":
                row.cache_salt = f"{row.line.index} {row.cache_salt or ''}"  # the engine computes all of its tokens
            try:
                if grammars is not None:
                    grammars.guides(row.prompts[0].params)  # the line's
                num_new_tokens = [self._admit(prompt) for prompt in row.prompts]
            except RequestError as error:
                yield row, error
                if error.code != "kv_cache_exceeded":
                    continue
                num_new_tokens = [prompt.params.max_tokens or 1 for prompt in row.prompts]
            yield row, num_new_tokens

    def _admit(self, prompt: RowPrompt) -> int:
        """How many tokens a prompt may generate. Raises: RequestError."""
        if prompt.scored is None:
            return admit(self._limits, prompt.token_ids, prompt.params)
        admit_scores(self._limits, prompt.token_ids, prompt.scored.continuations)
        return 0

    def _parse(self, line: Line) -> BatchRow:
        """A row with its prompts, whose texts are not tokenized; only its id is remembered if it is done."""
        row, columns = BatchRow(line), self._options.columns
        is_done = self._holds(line.index, line.digest)
        try:
            document = decode_line(line.content)
            wrong = row.read_head(document, columns)
            if self._options.check_ids and row.id is not None and not self._seen_ids.add(row.id):
                raise RequestError("duplicate_id", f"an earlier line has the same id {row.id!r}")
            if not is_done:
                if wrong is not None:
                    raise wrong
                self._parser.parse(request_of(document, columns), row)
                self._prepare(row)
        except RequestError as error:
            row.error, row.prompts = None if is_done else error, []
        return row

    def _prepare(self, row: BatchRow) -> None:
        """Add the run's settings to what a line asks for: chats become texts, and what is scored tokens.

        Raises: RequestError.
        """
        if (namespace := self._options.cache_namespace) is not None:
            row.cache_salt = f"{namespace} {row.cache_salt or ''}"
        for prompt in row.prompts:
            self._write_chat(prompt)
            prompt.lowers_max_tokens = prompt.lowers_max_tokens and not self._options.max_tokens_given
            if prompt.asked is not None:
                self._check_scored(row)
                self._ask(prompt, prompt.asked)
            if prompt.embedding is not None:
                self._check_scored(row)
                prompt.embedding = self._embedder().complete(prompt.embedding)
                prompt.scored = ScoredTokens([], POOLED, [], with_tokens=False)
                prompt.text = prompt.text and (prompt.embedding.instruction or "") + prompt.text
            if prompt.scoring is not None:
                self._check_scored(row)
                given = prompt.token_ids if prompt.text is None else prompt.text
                prompt.scored = prompt.scoring.tokens(
                    self.tokenizer, given, self._limits.max_model_len, is_chat=prompt.is_chat
                )
                prompt.text, prompt.token_ids = None, prompt.scored.context

    def _ask(self, prompt: RowPrompt, asked: Asked) -> None:
        """Add the question to a text or tokens, and to any prompt the tokens of its options. Raises: RequestError."""
        shared, found = self._option_tokens(asked.scored, are_letters=asked.are_letters, is_chat=prompt.is_chat)
        prompt.scored = ScoredTokens(shared, found, [], with_tokens=False)
        if prompt.text is None:
            question = self.tokenizer.encode(asked.plain_text, add_special_tokens=False)
            prompt.token_ids = [*prompt.token_ids, *question, *shared]
        elif not prompt.is_chat:
            prompt.text += asked.plain_text

    def _write_chat(self, prompt: RowPrompt) -> None:
        """Write the text of a chat; the run's system prompt and tools turn a text into one. Raises: RequestError."""
        run, messages, tools = self._options.run, prompt.messages, prompt.tools
        makes_chat = run.system_prompt is not None or bool(run.tools and tools is None)
        scores_itself = prompt.embedding or (prompt.scoring is not None and prompt.scoring.continuations is None)
        if messages is None and prompt.text is not None and makes_chat and not scores_itself:
            messages = [{"role": "user", "content": prompt.text}]
        if messages is None:
            prompt.tools = None
            return
        if prompt.asked is not None:
            messages = prompt.asked.in_chat(messages)
        prompt.tools = tools = run.tools if tools is None else tools
        if tools and not self.tokenizer.shows_tools:
            raise RequestError("unsupported_parameter", f"{NO_TOOLS}; leave 'tools' out")
        arguments = {"tools": tools, **prompt.template_kwargs} if tools else prompt.template_kwargs
        prompt.text = self.tokenizer.render_chat(with_system_prompt(messages, run.system_prompt), arguments)
        prompt.is_chat, prompt.messages = True, None

    def _check_scored(self, row: BatchRow) -> None:
        """Raises: RequestError if the row cannot have scores."""
        columns, others = self._options.columns, set(row.kept)
        adds = SCORES if row.prompts[0].embedding is None else frozenset((EMBEDDING,))
        if self._options.no_scores is not None and EMBEDDING not in adds & columns.decided:
            raise RequestError("unsupported_parameter", self._options.no_scores)
        if questions := {each.asked.question for each in row.prompts if each.asked is not None}:
            names = (name for each in questions for name in each.columns if columns.kind != "jsonl")
            adds, others = frozenset((ANSWERS, *names)), others | (columns.reserved - columns.decided)
        if taken := sorted(adds & others):
            raise RequestError("reserved_column", f"the column {taken[0]!r} cannot be kept in a row with scores")

    def _with_tokens(self, rows: list[BatchRow]) -> Iterator[BatchRow]:
        """The rows with the tokens of their texts, or with the error of one that cannot be tokenized."""
        encoded: dict[bool, Iterator[list[int] | RequestError]] = {}
        for is_chat in (False, True):  # a chat template has already written the special tokens
            texts = [
                each.text for row in rows for each in row.prompts if each.is_chat is is_chat and each.text is not None
            ]
            found = self.tokenizer.encode_all(texts, self._limits.max_model_len, add_special_tokens=not is_chat)
            encoded[is_chat] = iter(found)
        for row in rows:
            for place, prompt in enumerate(row.prompts):
                ids = prompt.token_ids if prompt.text is None else next(encoded[prompt.is_chat])
                if isinstance(ids, RequestError):
                    row.error = row.error or ids
                elif prompt.scored is not None:
                    prompt.token_ids = ids if prompt.text is None else [*ids, *prompt.scored.context]
                else:
                    prompt.token_ids = ids
                    prompt.params = self._final_params(prompt, row.line.index, place)
            if row.error is not None:
                row.prompts = []
            yield row

    def _final_params(self, prompt: RowPrompt, index: int, place: int) -> SamplingParams:
        """The parameters of a line's prompt, with a seed of its own and the default max_tokens lowered to what fits."""
        params, limits = prompt.params, self._limits
        changes: dict[str, int] = {}
        if params.seed is None and self._draws:
            # made of the row's index and the prompt's place in it: a resumed run draws the same
            seed = seed_for(self._options.config.engine.seed, index)
            changes["seed"] = seed_for(seed, place) if place else seed
        if params.max_tokens is not None and prompt.lowers_max_tokens:
            room = room_for(limits, len(prompt.token_ids), params.beam_width or 1)
            if max(params.min_tokens, 1) <= room < params.max_tokens:
                changes["max_tokens"] = room
        prompt.lowers_max_tokens = "max_tokens" in changes
        params = copy.copy(params) if changes else params
        for name, value in changes.items():  # they are in range: checking all fields again takes as long as parsing
            msgspec.structs.force_setattr(params, name, value)
        return params


def open_prompts(
    loaded: LoadedConfig,
    input_name: str,
    folder: Path,
    limits: Limits,
    *,
    lines: Iterable[Line] | None = None,
    tokenizer: Tokenizer | None = None,
    observe: Callable[[Line], None] = lambda line: None,
) -> Prompts:
    """The prompts of an input, or of only these of its lines, for a command that does not run them. `tokenizer`: the
    folder's, if it is loaded. Raises: UsageError, ModelError."""
    columns = Columns.of(loaded.config.run)
    tokenizer = tokenizer or open_tokenizer(loaded.config, folder)
    options = batch_options(loaded, columns)
    if lines is not None:
        return Prompts(lines, tokenizer, options, limits, observe=observe)
    source = open_source(input_name, columns)
    kept = KeptColumns(source, columns)

    def looked_at() -> Iterator[Line]:
        for line in source:
            kept.add(line.content)
            yield line
        kept.check()

    return Prompts(looked_at() if columns.copies else source, tokenizer, options, limits, observe=observe)


def limits_without_pool(engine: EngineConfig, spec: ModelSpec | None) -> Limits:
    """What a request must fit into where the pool is not known; nor the model's length if `spec` is None."""
    return Limits.of(
        engine,
        max_model_len=NO_LIMIT if spec is None else resolve_max_model_len(engine, spec),
        max_num_batched_tokens=engine.max_num_batched_tokens or NO_LIMIT,
        vocab_size=None if spec is None else spec.vocab_size,
    )
