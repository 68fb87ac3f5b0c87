"""A batch run in this process, on the built-in model: lines in, rows out."""

import io
import json

import msgspec

from pagedcli.batch.columns import Columns
from pagedcli.batch.journal import journal_path
from pagedcli.batch.lines import LineSource
from pagedcli.batch.prompts import BatchOptions
from pagedcli.batch.rows import RowWriter
from pagedcli.batch.run import BatchRun
from pagedcli.batch.sinks import StreamSink
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.config import Config, EngineConfig, RunConfig
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams

DEFAULTS = SamplingParams(temperature=0.0, max_tokens=8)


def batch_options(columns, *, defaults=DEFAULTS, seed=0, **options):
    keys = {name: options.pop(name) for name in RunConfig.__struct_fields__ if name in options}
    config = Config(engine=EngineConfig(seed=seed), sampling=defaults, run=RunConfig(**keys))
    return BatchOptions(config, columns, **options)


class Harness:
    """An engine with a small pool, used for one run after the other."""

    def __init__(self, **engine):
        settings = {"dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 200, "max_num_seqs": 4}
        self.engine = LLMEngine(EngineConfig(**(settings | engine)))
        self.tokenizer = Tokenizer(self.engine.model_path)

    def run(self, lines, *, sink=None, output_token_ids=False, columns=None, run=None, **options):
        """The result and the rows of a run. `lines`: bytes or what JSON makes of them; or an iterator of Line.

        `run`: further keywords of BatchRun; `options`: keys of `run:`, `defaults`, fields of BatchOptions.
        """
        stream = io.BytesIO()
        columns = columns or Columns(token_ids=output_token_ids)
        result = BatchRun(
            self.engine,
            self.tokenizer,
            MemorySource(lines) if isinstance(lines, list) else lines,
            sink or StreamSink(stream, order="input"),
            RowWriter(self.tokenizer, "demo", "key", 1, columns),
            batch_options(columns, **options),
            **(run or {}),
        ).run()
        return result, [json.loads(row) for row in stream.getvalue().splitlines()]

    def rows(self, lines, **options):
        """The rows without the fields in which equal runs may differ."""
        return [without_run_dependent_fields(row) for row in self.run(lines, **options)[1]]


def encode(lines):
    return b"".join((line if isinstance(line, bytes) else msgspec.json.encode(line)) + b"\n" for line in lines)


class MemorySource(LineSource):
    """Lines from memory."""

    def __init__(self, lines):
        self.name, self._content = "memory", encode(lines)

    def _open(self):
        return io.BytesIO(self._content)


def is_complete(output):
    """Whether a run has finished its output, so that nothing is left to resume."""
    return output.exists() and not journal_path(output).exists()


def without_run_dependent_fields(row):
    """When the run began and what the cache held: these two may differ."""
    body = (row.get("response") or {}).get("body", row)
    body.pop("created", None)
    if body.get("usage"):
        del body["usage"]["prompt_tokens_details"]
    return row
