"""What a step asks of a GPU and of the host, without a GPU: python scripts/step_costs.py [--tokenizer DIR]

Kernels, operations of torch and uploads of a decode step, by kind of request and per layer of each family, counted on
the pretended GPU of the tests; processor time of the host for the attention of one layer, with kernels compiled and
launched through a driver that is not there; and with --tokenizer, the folder of a tokenizer, the time for the masks of
256 rows with a JSON schema. The numbers are those of docs/performance.md.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("src", "tests")]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer"},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
NUM_GUIDED, NUM_STEPS = 256, 65


def microseconds(call: Callable[[], Any], repeats: int = 500) -> float:
    """Processor time of a call, the best of five means."""
    call()
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        for _ in range(repeats):
            call()
        best = min(best, (time.process_time() - start) / repeats)
    return best * 1e6


def counts() -> None:
    """Of every kind of request and every family; needs triton's interpreter."""
    import pytest
    from decode_counts import FAMILIES, KINDS, counts_of_a_family, counts_of_a_step
    from model_zoo import tiny_model
    from pretend_cuda import PretendGpu

    def make(family: str, **sizes: Any) -> Path:
        path = Path(folder) / f"{family}-{sizes['num_hidden_layers']}"
        return path if path.exists() else tiny_model(family, path, **sizes)

    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
        PretendGpu(runs_kernels=False).install(patch) as gpu,
    ):
        print("four rows, two layers of Qwen3: kernels, operations, uploads, steps ahead")
        for kind in KINDS:
            print(f"  {kind}: {list(counts_of_a_step(gpu, make('qwen3', num_hidden_layers=2), kind).values())}")
        print("kernels and operations of a layer and of the rest, uploads")
        for family in FAMILIES:
            print(f"  {family}: {counts_of_a_family(gpu, make, family)}")


def attention_time() -> None:
    """Of a layer of 16 heads over 8, head size 128, block size 16."""
    import pytest
    import torch
    from attention_cases import make_batch
    from fake_driver import FakeDriver

    from pagedcli.attention.base import AttentionSpec
    from pagedcli.attention.layer import AttentionLayer
    from pagedcli.attention.triton_paged import TritonAttention

    def by_triton(kernel: Any, grid: Any, arguments: Any, constants: Any, **options: int) -> None:
        kernel[grid](*arguments, **constants, **options)

    spec = AttentionSpec(torch.device("cpu"), torch.bfloat16, 16, 16, 8, 128)
    layer = AttentionLayer(scale=0.1)
    print("attention of one layer, us of the host: launched by the project, by triton")
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        FakeDriver().install(patch)
        for name, lengths in {"decode": [(600, 1)] * 4, "with a prompt": [(600, 1)] * 4 + [(300, 300)]}.items():
            times = []
            for launch in (None, by_triton):
                backend = TritonAttention(spec)
                backend._launch = launch or backend._launch  # type: ignore[assignment]
                num_tokens = sum(new for _, new in lengths)
                table = torch.zeros(len(lengths), 40, dtype=torch.int32)
                batch = make_batch(lengths, table, [-1] * num_tokens, "cpu")
                kv = tuple(torch.empty(backend.kv_shape(1, 16, 8, 128), dtype=spec.dtype) for _ in "kv")
                q = torch.empty(num_tokens, 16, 128, dtype=spec.dtype)
                backend.prepare(batch)
                times.append(microseconds(partial(backend.attend, q, kv, batch, layer)))  # type: ignore[arg-type]
            print(f"  {name}: {times[0]:.0f}, {times[1]:.0f}")


def mask_time(folder: Path) -> None:
    """Of the rows with a grammar of a step: all at once, and one after the other."""
    import numpy as np

    from pagedcli.batch.grammar import GrammarGuide, Grammars
    from pagedcli.batch.tokenizer import Tokenizer
    from pagedcli.sampling_params import SamplingParams, StructuredOutputsParams

    vocab_size, rng = 151_936, random.Random(0)
    grammars = Grammars(Tokenizer(folder), end_token_ids=[151_643], vocab_size=vocab_size)
    make = grammars.guides(SamplingParams(structured_outputs=StructuredOutputsParams(json=SCHEMA)))
    assert make is not None, "a schema is a grammar"
    for name, at_once in {"all at once": True, "one after the other": False}.items():
        guides, used = [make() for _ in range(NUM_GUIDED)], 0.0
        for _ in range(NUM_STEPS):
            allowed = [np.unpackbits(np.frombuffer(g.allowed_tokens, np.uint8), bitorder="little") for g in guides]
            chosen = [int(rng.choice(np.flatnonzero(each)[:500])) for each in allowed]
            start = time.process_time()
            for guide, token_id in zip(guides, chosen, strict=True):
                guide.accept(token_id)
            complete = GrammarGuide.find_allowed(guides) if at_once else [
                GrammarGuide.find_allowed([guide])[0] for guide in guides
            ]  # fmt: skip
            used += time.process_time() - start
            guides = [make() if ended else guide for guide, ended in zip(guides, complete, strict=True)]
        print(f"masks of {NUM_GUIDED} rows, {name}: {1e3 * used / NUM_STEPS:.1f} ms of processor time per step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="the masks of its vocabulary are timed")
    parser.add_argument("--counts", action="store_true", help=argparse.SUPPRESS)  # in triton's interpreter
    args = parser.parse_args()
    if args.counts:
        counts()
        return
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, __file__, "--counts"], env=environment, check=True)
    attention_time()
    if args.tokenizer is not None:
        mask_time(args.tokenizer)


if __name__ == "__main__":
    main()
