"""What the stages of gpu_check.py share: sizes, timing, models, engines and prompts."""

import gc
import json
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

# the checkout itself, installed or not
sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("src", "tests")]

T = TypeVar("T")
Row = dict[str, Any]
Result = tuple[bool, str]  # whether it passed, and one line


class Rows(list[Row]):
    """The rows of a stage. Each is written to a file as it comes, so that a stage that is stopped keeps what it has."""

    def __init__(self, path: Path | None = None) -> None:
        super().__init__()
        self._path = path

    def append(self, row: Row) -> None:
        super().append(row)
        self.write(row)

    def write(self, document: Row) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(document) + "\n")


QWEN3_06B: Row = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True, slots=True)
class Scale:
    """How large everything is: real on a GPU, tiny in a dry run on a CPU."""

    device: str
    dtypes: tuple[torch.dtype, ...]
    copy_bytes: int
    gemm_size: int
    model: Row
    decode_shapes: tuple[tuple[int, int], ...]  # (sequences, tokens of context)
    prefill_tokens: tuple[int, ...]
    block_sizes: tuple[int, ...]
    num_prompts: int  # requests of the workload
    lengths: tuple[int, int]  # tokens of its prompts and outputs
    engine: Row  # limits of the workload's engine
    batch: int  # sequences of a full batch
    part: tuple[int, int] = (0, 1)  # part of the cases of a stage to run, and the number of parts

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def mine(self, cases: Iterable[T]) -> list[T]:
        """The cases of this part."""
        return list(cases)[self.part[0] :: self.part[1]]


GPU = Scale(
    device="cuda",
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    copy_bytes=2**31,
    gemm_size=8192,
    model=QWEN3_06B,
    decode_shapes=((1, 4096), (16, 4096), (64, 1024), (256, 600), (256, 2048)),
    prefill_tokens=(512, 2048, 8192),
    block_sizes=(16, 256),
    num_prompts=256,
    lengths=(100, 1024),
    engine={"max_model_len": 4096, "max_num_seqs": 256, "max_num_batched_tokens": 16384},
    batch=256,
)
TINY = Scale(
    device="cpu",
    dtypes=(torch.float32,),
    copy_bytes=2**22,
    gemm_size=128,
    model={
        **QWEN3_06B, "vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
        "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
    },
    decode_shapes=((2, 40),),
    prefill_tokens=(20,),
    block_sizes=(16,),
    num_prompts=3,
    lengths=(4, 9),
    engine={"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_kvcache_blocks": 16},
    batch=3,
)  # fmt: skip


# ---------------------------------------------------------------------- timing


def synchronize(scale: Scale) -> None:
    if scale.on_gpu:
        torch.cuda.synchronize()


def best_seconds(call: Callable[[], Any], scale: Scale, *, repeats: int = 20, graphed: bool = True) -> float:
    """The best of several calls, each with a cold L2 cache. On a GPU the call is captured once and replayed, so that no
    host time is in it; `graphed` False: it cannot be captured."""
    call()
    if scale.on_gpu and graphed:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        call = graph.replay
    flush = torch.empty(2**28 if scale.on_gpu else 1, dtype=torch.uint8, device=scale.device)
    best = float("inf")
    for _ in range(repeats if scale.on_gpu else 2):
        flush.zero_()
        if scale.on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            best = min(best, start.elapsed_time(end) / 1e3)
        else:
            begin = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - begin)
    return best


def copy_bandwidth(scale: Scale) -> float:
    """10^9 bytes per second, read and written."""
    source = torch.empty(scale.copy_bytes, dtype=torch.uint8, device=scale.device)
    target = torch.empty_like(source)
    # a captured copy is left to the copy engines, which are slower than kernels
    return 2 * scale.copy_bytes / best_seconds(lambda: target.copy_(source), scale, graphed=False) / 1e9


def gemm_rate(scale: Scale) -> float:
    """10^12 FLOP per second of a large square product in the first dtype."""
    size = scale.gemm_size
    a, b = (torch.randn(size, size, device=scale.device).to(scale.dtypes[0]) for _ in range(2))
    return 2 * size**3 / best_seconds(lambda: a @ b, scale) / 1e12


# ---------------------------------------------------------------------- engines


def free_memory(scale: Scale) -> None:
    """After the last engine was dropped: references in circles must not keep its memory."""
    gc.collect()
    if scale.on_gpu:
        torch.cuda.empty_cache()


def make_model(folder: Path, config: Row) -> Path:
    """A model folder without weights, for `load_format: dummy`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def make_engine(scale: Scale, folder: Path, *, model: Row | None = None, **options: Any) -> Any:
    """An engine of random weights: of `model`, or of the scale's."""
    from pagedcli.config import EngineConfig
    from pagedcli.runner.llm_engine import LLMEngine

    path = make_model(folder, model or scale.model)
    config = {"model": str(path), "load_format": "dummy", "device": scale.device, **scale.engine}
    return LLMEngine(EngineConfig(**{**config, **options}))


def generate(engine: Any, prompts: list[list[int]], params: list[Any]) -> list[list[int]]:
    """Output tokens by prompt."""
    for number, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(number), prompt, each)
    outputs: dict[str, list[int]] = {}
    while len(outputs) < len(prompts):
        for output in engine.step():
            outputs[output.request_id] = output.samples[0].token_ids
    return [outputs[str(number)] for number in range(len(prompts))]


def nano_workload(scale: Scale) -> tuple[list[list[int]], list[Any]]:
    """nano-vllm's bench.py: seed(0), the prompts first, then the lengths of the outputs."""
    from pagedcli.sampling_params import SamplingParams

    random.seed(0)
    low, high = scale.lengths
    top_id = min(10000, scale.model["vocab_size"] - 1)
    prompts = [[random.randint(0, top_id) for _ in range(random.randint(low, high))] for _ in range(scale.num_prompts)]
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=random.randint(low, high))
        for _ in range(scale.num_prompts)
    ]
    return prompts, params


def problem_of(error: Exception) -> str:
    """The first line of an error, whose traceback goes to stderr."""
    traceback.print_exception(error)
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def ragged_prompts(count: int) -> list[list[int]]:
    """Prompts of 1 to 60 tokens; half of them share a prefix of 24."""
    rng = random.Random(0)
    shared = [rng.randrange(3, 320) for _ in range(24)]
    prompts = [[rng.randrange(3, 320) for _ in range(rng.randint(1, 36))] for _ in range(count)]
    return [shared + prompt if i % 2 else prompt for i, prompt in enumerate(prompts)]
