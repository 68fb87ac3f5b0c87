"""`PagedBatchGenerator`: one engine per actor for `ray.data.Dataset.map_batches`. It needs pyarrow, not Ray itself."""

import asyncio
from concurrent.futures import Future
from itertools import count
from typing import Any

import msgspec
import xxhash

from pagedcli.batch.columns import Columns
from pagedcli.batch.fingerprint import run_key
from pagedcli.batch.lines import Line
from pagedcli.batch.parquet import ANSWER_COLUMNS, answer_schema, cells_of, columns_of, lines_of, require_pyarrow
from pagedcli.batch.prompts import NO_SCORES, BatchOptions
from pagedcli.batch.requests import LINE_FIELDS
from pagedcli.batch.rows import RowWriter, WrittenRow
from pagedcli.batch.stream import RowStream
from pagedcli.config import Config, EngineConfig, RunConfig
from pagedcli.errors import UsageError
from pagedcli.later import pyarrow as pa
from pagedcli.llm_keywords import engine_config
from pagedcli.sampling_params import SamplingParams, seed_for


class PagedBatchGenerator:
    """Answers the rows of a dataset: `dataset.map_batches(PagedBatchGenerator, fn_constructor_kwargs={...}, ...)`.

    Reads the columns `prompt` (text or token ids), `messages` or `body` (an OpenAI request), and any sampling
    parameters given as columns. Adds `text`, `finish_reason`, `usage`, `error` (typed even if no row failed), `outputs`
    (for n > 1), `token_logprobs` and, on request, `token_ids`; other columns are kept unchanged. A row that cannot be
    served has an error; the others are not affected.

    All batches that Ray passes to the actor share one continuous batch of the engine; docs/distributed.md explains how
    many these are. Draws depend on `seed` and the row's content alone, not on its position or its actor.

    `sampling` has the defaults for all rows; further keywords are the fields of EngineConfig.
    Raises: TypeError for an unknown keyword; ConfigError, ModelError.
    """

    def __init__(
        self,
        model: str = EngineConfig().model,
        *,
        sampling: SamplingParams | dict[str, Any] | None = None,
        system_prompt: str | None = None,
        chat_template: str | None = None,
        output_token_ids: bool = False,
        **engine_options: Any,
    ) -> None:
        require_pyarrow()
        config = engine_config(model, engine_options)
        defaults = msgspec.structs.asdict(Config().sampling) | (
            sampling if isinstance(sampling, dict) else msgspec.structs.asdict(sampling or Config().sampling)
        )
        sampled = msgspec.convert(defaults, SamplingParams)
        run = RunConfig(system_prompt=system_prompt)
        options = BatchOptions(Config(engine=config, sampling=sampled, run=run), no_scores=NO_SCORES)
        self._seed = config.seed
        columns = Columns(token_ids=output_token_ids)
        self._indexes = count()
        self._stream = RowStream(
            config,
            options,
            lambda tokenizer: RowWriter(tokenizer, model, run_key({}), 0, columns),
            chat_template=chat_template,
        )
        self._schema = answer_schema(columns, self._stream.marked_columns)

    async def __call__(self, batch: Any) -> Any:
        """A pyarrow.Table of the batch's columns and the answers'. `batch`: a table, or columns by name."""
        table = _table(batch)
        taken = [name for name in table.column_names if name in ANSWER_COLUMNS or name in self._schema.names]
        if taken:
            raise UsageError(f"the dataset has a column {taken[0]!r}, which the output adds", hint="rename it")
        documents = lines_of(table.select([name for name in table.column_names if name in LINE_FIELDS]), Columns())
        lines = [self._line(document) for document in documents]
        pending = _Batch(lines)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._submit, lines, pending)  # blocks while the engine has enough to do
        rows = await asyncio.wrap_future(pending.rows)
        answers = [cells_of(WrittenRow.of(row)) for row in rows]
        for answer in answers:
            if answer["error"] is not None:
                del answer["error"]["line"]  # a row of a dataset has no number
        for field, column in zip(self._schema, columns_of(answers, self._schema), strict=True):
            table = table.append_column(field, column)
        return table

    def close(self) -> None:
        """End the engine's thread once all rows are done."""
        self._stream.close()

    def _line(self, document: dict[str, Any]) -> Line:
        """The row as an input line. Ids stay in the table: a batch that Ray retries repeats them."""
        for name in ("id", "custom_id"):
            document.pop(name, None)
        content = msgspec.json.encode(document)
        document.setdefault("seed", seed_for(self._seed, xxhash.xxh64_intdigest(content)))
        index = next(self._indexes)
        return Line(index, index + 1, msgspec.json.encode(document), 0)

    def _submit(self, lines: list[Line], pending: "_Batch") -> None:
        for line in lines:
            self._stream.submit(line, pending)


class _Batch:
    """Collects the rows of one batch; complete, and in its order, once the last one is done."""

    def __init__(self, lines: list[Line]) -> None:
        self.rows: Future[list[bytes]] = Future()
        self._done: dict[int, bytes] = dict.fromkeys((line.index for line in lines), b"")
        self._num_left = len(lines)
        if not lines:
            self.rows.set_result([])

    def write(self, index: int, line_digest: int, row: bytes, *, key: bytes | None) -> None:
        self._done[index] = row
        self._num_left -= 1

    def flush(self) -> None:
        if not self._num_left and not self.rows.done():
            self.rows.set_result(list(self._done.values()))

    def fail(self, error: BaseException) -> None:
        if not self.rows.done():
            self.rows.set_exception(error)


def _table(batch: Any) -> Any:
    """A batch of any of Ray Data's formats as a pyarrow.Table."""
    if isinstance(batch, pa.Table):
        return batch
    if isinstance(batch, dict):  # numpy
        return pa.table({name: pa.array(values.tolist()) for name, values in batch.items()})
    return pa.Table.from_pandas(batch, preserve_index=False)
