"""CUDA graphs for pure decode: model, logits and sampler of one step as a single launch, at a few batch sizes.

Used by ModelRunner. A graph replays the same kernels on the same memory, so a step's inputs are copied to fixed places
and its batch is padded to the next captured size (bucket). Only capture needs a GPU; CPU tests run the graph body
eagerly on padded buckets.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagedcli.core.sampling_input import RowSampling, SamplingInput
from pagedcli.core.step_input import StepInput
from pagedcli.errors import ConfigError
from pagedcli.layers.parallel import ParallelContext
from pagedcli.layers.sampling import SamplingLimits, choose_tokens
from pagedcli.models.base import CausalLM
from pagedcli.planning.features import bucket_sizes
from pagedcli.printable import plural
from pagedcli.runner.device_state import DeviceState, packed_size, unpack

GRAPH_TOKENS = 2**21  # cached tokens of a step: bounds attention's work list and its memory for partial results
_WARM_UPS = 2  # runs before a capture, in which kernels are compiled and libraries allocate workspaces


class Inputs(NamedTuple):
    """What a graph reads, one entry per row: arrays on the host or tensors in a bucket's buffer."""

    input_ids: Any  # int64
    source_rows: Any  # int64
    positions: Any  # int64
    slots: Any  # int32, per group of layers
    table_rows: Any  # int64
    num_tokens: Any  # int32
    temperature: Any  # float32
    uniform: Any  # float32
    top_k: Any  # int32
    top_p: Any  # float32
    min_p: Any  # float32
    state_reads: Any  # int32; of models without recurrent state [0], as the next
    state_writes: Any  # int32

    @property
    def limits(self) -> SamplingLimits:
        return SamplingLimits(self.top_k, self.top_p, self.min_p)


@dataclass(slots=True)
class GraphBucket:
    """One batch size: the fixed buffers of its inputs and outputs."""

    num_seqs: int
    buffer: Tensor  # uint8: all inputs, packed
    inputs: Inputs  # views of it
    cu_q: Tensor  # [b+1] int32, one new token each
    graph: "torch.cuda.CUDAGraph | None" = None
    hidden: Tensor | None = None  # [b, E], output of the captured graph: logits would take far more memory


class DecodeGraphs:
    """Runs steps of one new token per sequence.

    With `capture` False the same body runs eagerly, for devices without graphs and for tests.
    """

    def __init__(
        self,
        model: CausalLM,
        state: DeviceState,
        parallel: ParallelContext,
        *,
        max_model_len: int,
        capture: bool,
        sizes: Iterable[int] | None = None,
    ) -> None:
        self._model, self._state, self._parallel = model, state, parallel
        self._max_model_len = max_model_len
        sizes = sorted(sizes if sizes is not None else bucket_sizes(state.tables.shape[0]))
        self._buckets = [self._bucket(size) for size in sizes]
        if capture:
            self._capture_all()

    @property
    def sizes(self) -> list[int]:
        return [bucket.num_seqs for bucket in self._buckets]

    def serves(self, step: StepInput) -> bool:
        """Whether every sequence of the step has one new token, and a bucket and the work list have room for them."""
        if not step.pure_decode or step.num_seqs > self._buckets[-1].num_seqs:
            return False
        return int(step.num_tokens.sum()) <= GRAPH_TOKENS

    def bucket_for(self, num_seqs: int) -> GraphBucket:
        """The smallest bucket with room for that many sequences."""
        return next(bucket for bucket in self._buckets if bucket.num_seqs >= num_seqs)

    def run(self, step: StepInput, sampling: SamplingInput | None) -> Tensor:
        """Hidden states [B, E] of a step, in a buffer that the next run overwrites.

        Changes: the KV cache, the block tables, and last_tokens, which are valid only if sampling.is_plain.
        """
        bucket, num_seqs = self.bucket_for(step.num_seqs), step.num_seqs
        self._state.update_tables(step)
        inputs = _pad(step, sampling, self._padding(bucket.num_seqs))
        self._state.upload.into(bucket.buffer, inputs)
        if bucket.graph is None:
            num_drawn = int(np.count_nonzero(inputs.temperature))
            return self._body(bucket, inputs.num_tokens.tolist(), num_drawn)[:num_seqs]
        bucket.graph.replay()
        assert bucket.hidden is not None, "captured with the graph"
        return bucket.hidden[:num_seqs]

    def _bucket(self, num_seqs: int) -> GraphBucket:
        device = self._state.device
        shapes = self._padding(num_seqs)
        buffer = torch.zeros(packed_size(shapes), dtype=torch.uint8, device=device)
        cu_q = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
        bucket = GraphBucket(num_seqs, buffer, Inputs(*unpack(buffer, shapes)), cu_q)
        self._state.upload.into(buffer, shapes)
        return bucket

    def _padding(self, num_seqs: int) -> Inputs:
        return _padding(num_seqs, self._state.num_groups, self._state.num_state_slots)

    def _body(self, bucket: GraphBucket, num_tokens_host: list[int], num_drawn: int) -> Tensor:
        """The body of a graph. Returns hidden states [b, E]; the tokens go to last_tokens."""
        state, inputs = self._state, bucket.inputs
        max_total = max(num_tokens_host)
        batch = state.batch(
            state.tables_of(inputs.table_rows, max_total),
            inputs.slots,
            max_total=max_total,
            cu_q=bucket.cu_q,
            num_tokens=inputs.num_tokens,
            max_new=1,
            cu_q_host=list(range(bucket.num_seqs + 1)),
            num_tokens_host=num_tokens_host,
            state_reads=inputs.state_reads if state.num_state_slots else None,
            state_writes=inputs.state_writes if state.num_state_slots else None,
        )
        ids = state.resolve_ids(inputs.input_ids, inputs.source_rows)
        hidden = self._model.forward(ids, inputs.positions, batch, state.kv_cache)
        logits = self._model.compute_logits(hidden)
        tokens = choose_tokens(logits, inputs.temperature, inputs.uniform, inputs.limits, num_drawn=num_drawn)
        self._parallel.broadcast(state.last_tokens[: bucket.num_seqs].copy_(tokens))
        return hidden

    @torch.inference_mode()
    def _capture_all(self) -> None:
        """Capture every bucket, largest first: the smaller ones reuse its memory."""
        # torch's own is one per process, on the GPU that was current first, and other graphs share its workspaces
        stream = torch.cuda.Stream(self._state.device)  # type: ignore[no-untyped-call]
        pool = None
        for bucket in reversed(self._buckets):
            try:
                pool = self._capture(bucket, pool, stream)
            except RuntimeError as error:
                reason = str(error).partition("\n")[0]
                raise ConfigError(
                    f"the CUDA graph of {plural(bucket.num_seqs, 'sequence')} was not captured: {reason}",
                    hint="use --enforce-eager, which runs without graphs; PAGEDCLI_DEBUG=1 shows the traceback",
                ) from error
        torch.cuda.synchronize(self._state.device)

    def _capture(self, bucket: GraphBucket, pool: Any, stream: torch.cuda.Stream) -> Any:
        """Capture a bucket into the pool of the earlier ones; returns it."""
        longest = min(self._max_model_len, GRAPH_TOKENS)  # no longer sequence is served by a graph
        lengths = [longest, *[1] * (bucket.num_seqs - 1)]  # room for block tables of any length
        for _ in range(_WARM_UPS):
            self._body(bucket, lengths, bucket.num_seqs)
        torch.cuda.synchronize(self._state.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            bucket.hidden = self._body(bucket, lengths, bucket.num_seqs)
        bucket.graph = graph
        return pool or graph.pool()


def _padding(num_seqs: int, num_groups: int, num_state_slots: int) -> Inputs:
    """Padding rows: one token at position 0, not written to the cache, its result never read. Its state goes to the
    slot after the last one."""
    num_states = num_seqs if num_state_slots else 0
    return Inputs(
        input_ids=np.zeros(num_seqs, dtype=np.int64),
        source_rows=np.full(num_seqs, -1, dtype=np.int64),
        positions=np.zeros(num_seqs, dtype=np.int64),
        slots=np.full((num_groups, num_seqs), -1, dtype=np.int32),
        table_rows=np.zeros(num_seqs, dtype=np.int64),  # any row: all of them have valid block ids
        num_tokens=np.ones(num_seqs, dtype=np.int32),
        **RowSampling.greedy(num_seqs)._asdict(),
        state_reads=np.full(num_states, -1, dtype=np.int32),
        state_writes=np.full(num_states, num_state_slots, dtype=np.int32),
    )


def _pad(step: StepInput, sampling: SamplingInput | None, padded: Inputs) -> Inputs:
    """The inputs of a step, padded to the bucket."""
    rows = {} if sampling is None else sampling.rows._asdict()
    for name, array in padded._asdict().items():
        values = rows.get(name) if name in RowSampling._fields else getattr(step, name)
        if values is not None:
            array[..., : step.num_seqs] = values
    return padded
