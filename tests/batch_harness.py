"""A batch run in this process, on the built-in model: lines in, rows out."""

import io
import json

import msgspec
import torch
import transformers
from safetensors.torch import load_file, save_file

from pagedcli.batch.columns import Columns
from pagedcli.batch.journal import journal_path
from pagedcli.batch.lines import Line, LineSource
from pagedcli.batch.prompts import BatchOptions
from pagedcli.batch.requests import BatchRow, RowPrompt
from pagedcli.batch.rows import RowWriter
from pagedcli.batch.run import BatchRun
from pagedcli.batch.sinks import StreamSink
from pagedcli.batch.tokenizer import StopCheckers, Tokenizer
from pagedcli.config import Config, EngineConfig, RunConfig
from pagedcli.core.requests import FinishedRequest, RequestMetrics
from pagedcli.core.sequence import SampleOutput
from pagedcli.models.hub import resolve_model
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams

BUILTIN = resolve_model("builtin")
DEFAULTS = SamplingParams(temperature=0.0, max_tokens=8)


def batch_options(columns, *, defaults=DEFAULTS, seed=0, **options):
    keys = {name: options.pop(name) for name in RunConfig.__struct_fields__ if name in options}
    config = Config(engine=EngineConfig(seed=seed), sampling=defaults, run=RunConfig(**keys))
    return BatchOptions(config, columns, **options)


class Harness:
    """An engine with a small pool, used for one run after the other."""

    def __init__(self, **engine):
        settings = {"dtype": "float32", "block_size": 4, "num_kvcache_blocks": 200, "max_num_seqs": 4}
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


def with_tokens(folder, tokens, *, special=False, template=None):
    """The built-in tokenizer with more tokens, in a folder of its own."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(BUILTIN)
    added = [transformers.AddedToken(token, special=special, normalized=False) for token in tokens]
    tokenizer.add_tokens(added, special_tokens=special)
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def row_of(tokenizer, prompt, *outputs, stop=None, has_marks=True, tools=None, shape="plain", **columns):
    """The chat row of texts with their marks. `stop`: as if this string had ended each."""
    prompt_ids, samples, texts = tokenizer.encode(prompt), [], []
    for index, output in enumerate(outputs):
        ids = tokenizer.encode(output)
        text = tokenizer.decode_output(prompt_ids, ids)
        if stop is not None:
            checkers = StopCheckers(tokenizer, prompt_ids, SamplingParams(stop=[stop]))
            check, kept = checkers(), []
            for token_id in ids:
                kept.append(token_id)
                if check(token_id) is not None:
                    break
            ids, text = kept, checkers.text(0, kept)
        samples.append(SampleOutput(index, ids, "stop", None, None))
        texts.append(text)
    output = FinishedRequest("0", prompt_ids, 0, samples, RequestMetrics(0, 0, None, 0, 0, 0))
    writer = RowWriter(tokenizer, "m", "key", 1, Columns(**columns))
    prompt_of_row = RowPrompt(prompt_ids, SamplingParams(), is_chat=has_marks, tools=tools, output=output, texts=texts)
    return json.loads(writer.encode_success(BatchRow(Line(0, 1, b"", 0), shape=shape), [prompt_of_row]))


def chain_model(folder, *chains):
    """A model, in the folder of its tokenizer, whose next token depends on the last one alone: the words of each chain,
    then the end."""
    tokenizer = Tokenizer(folder)
    chains = [[id_ for text in words for id_ in tokenizer.encode(text)] for words in chains]
    words = [token_id for chain in chains for token_id in chain]
    assert len(set(words)) == len(words)
    size = len(transformers.AutoTokenizer.from_pretrained(folder))
    config = transformers.LlamaConfig(
        vocab_size=size, hidden_size=256, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=256, eos_token_id=0, bos_token_id=1, head_dim=16,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name].zero_()
    tensors["model.embed_tokens.weight"] = embedding = torch.randn(size, 256)
    tensors["lm_head.weight"] = head = torch.zeros(size, 256)
    for this, following in (pair for chain in chains for pair in zip(chain, [*chain[1:], 0], strict=True)):
        head[following] += embedding[this]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
