"""Drives a CausalLM over a paged cache without the engine: ragged prompts, in chunks, then token by token."""

import functools
import itertools
from pathlib import Path

import numpy as np
import torch

from pagedcli.attention.base import LateTokens, PagedBatch
from pagedcli.models.base import cache_shape
from pagedcli.models.spec import layer_groups
from pagedcli.runner.device_state import state_pools


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


def ragged_sequences(vocab_size=320, seed=0):
    """Six sequences whose prompts are 1 to 90 tokens long, each followed by 5 tokens to decode."""
    generator = torch.Generator().manual_seed(seed)
    num_prompt = [1, 3, 8, 16, 17, 90]
    sequences = [torch.randint(3, vocab_size, (n + 5,), generator=generator).tolist() for n in num_prompt]
    return sequences, num_prompt


def transformers_logits(path, sequences, *, dtype=torch.float32):
    """The same logits from transformers, one sequence at a time without a cache; once for a folder as it is."""
    state = tuple((file.name, file.stat().st_mtime_ns) for file in sorted(Path(path).iterdir()))
    return _transformers_logits(path, state, tuple(map(tuple, sequences)), dtype)


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
