"""An engine with a small model: tokens of prompts, logits of a model over a paged cache, rows of a batch.

Tokens, with the block pool checked after each step:

    path = tiny_model("qwen3", tmp_path)  # of model_zoo: random weights, vocabulary of 320
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    expected = run(make_engine(path), ragged_prompts(8), params)  # [prompt][sample] -> token ids
    assert run(make_engine(path, num_kvcache_blocks=12), ragged_prompts(8), params) == expected

Logits without an engine: sequences own scattered blocks, and what no token was written to is NaN.

    ours = logits_of(path, "cpu", block_size=16, chunk=7)  # of ragged_sequences
    theirs = transformers_logits(path)

`PagedHarness(model, backend, lengths=[20], block_size=4).step([(0, 0, token_ids)])` does one step of it.

Rows of a batch in this process, on the built-in model; a `Harness` serves one run after the other:

    harness = Harness(num_kvcache_blocks=40)
    result, rows = harness.run([{"prompt": "Once"}, b"{broken"])
    assert rows[1]["error"]["code"] == "invalid_json"
    assert harness.rows([{"prompt": "Once"}])[0]["text"] == rows[0]["text"]  # without what differs in equal runs

A row of texts without an engine, and a model that says what it is asked to:

    row = row_of(Tokenizer(with_tokens(folder, ["<call>"])), "Hi\\n", "<call>{}", tools=tools)
    folder = chain_model(folder, ["The", " dog", " sat"])  # each word follows the one before it
"""

import functools
import io
import itertools
import json
import random
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import transformers
from harness.core import finish
from model_zoo import load_model
from safetensors.torch import load_file, save_file

from pagedcli.attention.base import AttentionSpec, LateTokens, PagedBatch
from pagedcli.attention.select import load_backend
from pagedcli.batch.columns import Columns
from pagedcli.batch.journal import journal_path
from pagedcli.batch.lines import Line, LineSource
from pagedcli.batch.prompts import BatchOptions
from pagedcli.batch.requests import BatchRow, RowPrompt
from pagedcli.batch.rows import RowWriter
from pagedcli.batch.run import BatchRun
from pagedcli.batch.sinks import StreamSink
from pagedcli.batch.stats import Endings
from pagedcli.batch.tokenizer import StopCheckers, Tokenizer
from pagedcli.config import Config, EngineConfig, RunConfig
from pagedcli.core.requests import FinishedRequest, RequestMetrics
from pagedcli.core.sequence import SampleOutput
from pagedcli.errors import BackendError
from pagedcli.models.base import cache_shape
from pagedcli.models.hub import resolve_model
from pagedcli.models.reading import read_spec
from pagedcli.models.spec import layer_groups
from pagedcli.planning.decide import decide
from pagedcli.planning.machine import this_machine
from pagedcli.runner.device_state import state_pools
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams


class FirstEight:
    """A guide that allows eight tokens."""

    allowed_tokens = b"\xff" + bytes(39)

    def accept(self, token_id):
        pass

    @classmethod
    def find_allowed(cls, guides):
        return [False] * len(guides)


def ragged_prompts(num_prompts=16, vocab_size=320, seed=0):
    """Prompts of 1 to 60 tokens; half of them share a prefix of 24."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, vocab_size) for _ in range(24)]
    prompts = [[rng.randrange(3, vocab_size) for _ in range(rng.randint(1, 36))] for _ in range(num_prompts)]
    return [shared + prompt if i % 2 else prompt for i, prompt in enumerate(prompts)]


def outputs_of(engine, prompts, params, **request):
    """The outputs of all prompts, in order; `params` is one for all or a list."""
    params = params if isinstance(params, list) else [params] * len(prompts)
    for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(i), prompt, param, **request)
    outputs = finish(engine)
    return [outputs[str(i)] for i in range(len(prompts))]


def run(engine, prompts, params):
    """Token ids of all samples of all prompts, in order; `params` is one for all or a list."""
    return [[sample.token_ids for sample in output.samples] for output in outputs_of(engine, prompts, params)]


def make_engine(path, *, emit=None, trace_tokens=False, clock_ns=time.perf_counter_ns, **config):
    config = EngineConfig(model=str(path), device="cpu", **{"dtype": "float32", "max_num_seqs": 16, **config})
    return LLMEngine(config, emit=emit, trace_tokens=trace_tokens, clock_ns=clock_ns)


def planned_and_made(path, **config):
    """What is decided from a model's config.json alone, and the engine."""
    config = EngineConfig(model=str(path), device="cpu", **{"num_kvcache_blocks": 8, **config})
    return decide(config, read_spec(path), this_machine()), LLMEngine(config)


def worker_processes(engine):
    """The processes of the other ranks of its group."""
    return [worker.process for worker in engine._group._ranks.workers]


class PagedHarness:
    """A pool in which sequences own scattered blocks; every slot that no token was written to holds NaN."""

    def __init__(self, model, backend, *, lengths, block_size, dtype=torch.float32):
        self.model = model
        self.block_size = block_size
        groups = layer_groups(model.attention_layers)
        widths = [-(-length // block_size) for length in lengths]
        num_blocks = sum(widths) * len(groups)
        owned = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).int().split(widths * len(groups))
        # entries past a sequence's blocks are undefined: a backend that follows one leaves the cache
        self.tables = torch.full((len(groups), len(lengths), max(widths)), 2**31 - 1, dtype=torch.int32)
        for row, blocks in zip(self.tables.flatten(0, 1), owned, strict=True):
            row[: len(blocks)] = blocks
        self.table = self.tables[0]
        kv_dtype = getattr(backend, "_kv_dtype", dtype)
        nothing = -1 if kv_dtype == torch.int8 else float("nan")  # scales of such bytes are no numbers, too
        self.kv_cache = torch.full(cache_shape(model, backend, num_blocks, block_size), nothing, dtype=kv_dtype)
        # a sequence has two slots of state: each step reads the one that the step before wrote, and writes the other
        self.states = state_pools(model, 2 * len(lengths), dtype, self.kv_cache.device)
        for pool in itertools.chain.from_iterable(self.states):
            pool.fill_(float("nan"))
        self.num_steps = [0] * len(lengths)

    @torch.inference_mode()
    def step(self, work, rows=None):
        """Logits [tokens of the sequence, V] per sequence; `work` lists (sequence, start, token ids). With `rows` those
        of these new tokens alone, together."""
        wanted = None if rows is None else np.array(rows, dtype=np.int64)
        spans = [(row, start, start + len(ids)) for row, start, ids in work]
        counts = [end - start for _, start, end in spans]
        positions = torch.cat([torch.arange(start, end) for _, start, end in spans])
        rows = torch.repeat_interleave(torch.tensor([row for row, _, _ in spans]), torch.tensor(counts))
        blocks = self.tables[:, rows, positions // self.block_size].long()
        slots = (blocks * self.block_size + positions % self.block_size).int()
        cu_q = [0, *torch.tensor(counts).cumsum(0).tolist()]
        ends = [end for _, _, end in spans]
        batch, *others = (
            PagedBatch(
                cu_q=torch.tensor(cu_q, dtype=torch.int32),
                num_tokens=torch.tensor(ends, dtype=torch.int32),
                block_table=table[[row for row, _, _ in spans]],
                slots=of_group,
                max_new=max(counts),
                max_total=max(ends),
                cu_q_host=cu_q,
                num_tokens_host=ends,
                late=LateTokens.of(
                    np.array(cu_q, dtype=np.int32), wanted, lambda arrays: list(map(torch.from_numpy, arrays))
                ),
            )
            for table, of_group in zip(self.tables, slots, strict=True)
        )
        batch.others, batch.states = tuple(others), self.states
        if self.states:
            batch.state_reads, batch.state_writes = self._state_slots([row for row, _, _ in spans])
        ids = torch.tensor([token for _, _, ids in work for token in ids])
        hidden = self.model.forward(ids, positions, batch, self.kv_cache)
        logits = self.model.compute_logits(hidden)
        return logits.split(counts) if wanted is None else logits

    def _state_slots(self, rows):
        reads = [2 * row + self.num_steps[row] % 2 if self.num_steps[row] else -1 for row in rows]
        for row in rows:
            self.num_steps[row] += 1
        writes = [2 * row + self.num_steps[row] % 2 for row in rows]
        return torch.tensor(reads, dtype=torch.int32), torch.tensor(writes, dtype=torch.int32)


def loaded(path, backend="cpu", *, dtype=torch.float32, block_size=4, max_model_len=256, read=read_spec, **options):
    """A model and its attention backend; the test is skipped, with the reason, where the backend cannot run."""
    spec, device = read(path), torch.device("cpu")
    sizes = {"num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim}
    try:
        layers = frozenset(spec.attention_layers)
        chosen = load_backend(backend, AttentionSpec(device, dtype, block_size, **sizes, layers=layers))
    except BackendError as error:
        pytest.skip(error.message)
    options |= {"dtype": dtype, "device": device, "max_model_len": max_model_len}
    return load_model(path, spec, backend=chosen, **options), chosen


def paged_logits(model, backend, sequences, *, num_prompt, block_size, chunk, dtype=torch.float32):
    """Logits [len, V] of every sequence: prompts in chunks of at most `chunk` tokens side by side (None: whole), then
    the rest token by token."""
    harness = PagedHarness(model, backend, lengths=[len(s) for s in sequences], block_size=block_size, dtype=dtype)
    done = [0] * len(sequences)
    logits = [[] for _ in sequences]
    while any(count < len(sequence) for count, sequence in zip(done, sequences, strict=True)):
        work = []
        for row, sequence in enumerate(sequences):
            start, prompt = done[row], num_prompt[row]
            if start == len(sequence):
                continue
            end = min(prompt, start + (chunk or prompt)) if start < prompt else start + 1
            work.append((row, start, sequence[start:end]))
            done[row] = end
        for (row, _, _), part in zip(work, harness.step(work), strict=True):
            logits[row].append(part)
    return [torch.cat(parts) for parts in logits]


def assert_same_logits(actual, expected, atol=1e-4):
    """And the same likeliest tokens."""
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def ragged_sequences(vocab_size=320, seed=0):
    """Six sequences whose prompts are 1 to 90 tokens long, each followed by 5 tokens to decode."""
    generator = torch.Generator().manual_seed(seed)
    num_prompt = [1, 3, 8, 16, 17, 90]
    sequences = [torch.randint(3, vocab_size, (n + 5,), generator=generator).tolist() for n in num_prompt]
    return sequences, num_prompt


def logits_of(path, backend="cpu", *, block_size=4, chunk=7, dtype=torch.float32, **options):
    """Logits of ragged_sequences by the model in a folder or file."""
    model, chosen = loaded(path, backend, dtype=dtype, block_size=block_size, **options)
    sequences, num_prompt = ragged_sequences()
    sizes = {"num_prompt": num_prompt, "block_size": block_size, "chunk": chunk, "dtype": dtype}
    return paged_logits(model, chosen, sequences, **sizes)


def transformers_logits(path, sequences=None, *, dtype=torch.float32):
    """The same logits from transformers, one sequence at a time without a cache; once for a folder as it is."""
    state = tuple((file.name, file.stat().st_mtime_ns) for file in sorted(Path(path).iterdir()))
    return _transformers_logits(path, state, tuple(map(tuple, sequences or ragged_sequences()[0])), dtype)


@functools.cache
@torch.inference_mode()
def _transformers_logits(path, _, sequences, dtype):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
    return [model(input_ids=torch.tensor([s]), use_cache=False).logits[0] for s in sequences]


def transformers_tokens(path, prompts, num_new):
    """Greedy tokens of transformers, prompts left-padded into one batch."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    model.generation_config.eos_token_id = None
    out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=num_new, pad_token_id=0)
    return [[row] for row in out[:, longest:].tolist()]


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

    def abort_all(self):
        """What a run that was stopped has left in the engine."""
        for request_id in list(self.engine._requests):
            self.engine.abort(request_id)

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


def comparable_rows(path):
    """The rows of a file without the fields in which equal runs may differ."""
    return [without_run_dependent_fields(json.loads(line)) for line in path.read_text().splitlines()]


def without_run_dependent_fields(row):
    """When the run began and what the cache held: these two may differ."""
    body = (row.get("response") or {}).get("body", row)
    body.pop("created", None)
    if body.get("usage"):
        del body["usage"]["prompt_tokens_details"]
    return row


def original(tokenizer):
    """The tokenizer of transformers in one of ours."""
    return tokenizer._hf


def with_tokens(folder, tokens, *, special=False, template=None):
    """The built-in tokenizer with more tokens, in a folder of its own."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(BUILTIN)
    added = [transformers.AddedToken(token, special=special, normalized=False) for token in tokens]
    tokenizer.add_tokens(added, special_tokens=special)
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def row_of(tokenizer, prompt, *outputs, stop=None, has_marks=True, tools=None, shape="plain", ended=None, **columns):
    """The chat row of texts with their marks, counted in `ended`. `stop`: as if this string had ended each."""
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
    writer = RowWriter(tokenizer, "m", "key", 1, Columns(**columns), ended or Endings())
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
