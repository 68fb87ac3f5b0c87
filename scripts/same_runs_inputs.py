"""Input files and tiny models of same_runs.py: the same in every recording."""

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[1]
VLLM_EVENTS = Path("shared", "data", "vllm_events", "events.jsonl")  # in a folder above the project

_STORY = "Once upon a time there was a {} who lived in a {} and "
_ANIMALS = ("fox", "bear", "mouse", "owl")
_PLACES = ("wood", "barn", "hole")


def write_lines(path: Path, rows: list[Any]) -> None:
    """Rows as JSON lines; a text is written as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def shared_rows() -> list[Any]:
    """24 prompts with shared beginnings, of several lengths; two long ones."""
    beginnings = [_STORY.format(animal, _PLACES[n % 3]) * 4 for n, animal in enumerate(_ANIMALS)]
    rows: list[Any] = [
        {"id": f"r{n}", "prompt": beginnings[n * 7 % 4] + "so " * (n % 5) + str(n), "max_tokens": 4 + n * 5 % 28}
        for n in range(24)
    ]
    rows[9]["cache_salt"] = "pepper"
    return [*rows, {"id": "long", "prompt": "".join(beginnings) * 2, "max_tokens": 6}, {"prompt": beginnings[0]}]


def story_rows() -> list[Any]:
    """Six of these prompts, which leave the number of tokens to generate to the flags."""
    return [{"id": row["id"], "prompt": row["prompt"]} for row in shared_rows()[:6]]


def sample_rows() -> list[Any]:
    """Several samples, beams, and settings of sampling."""
    prompt = "The fox and the bear"
    return [
        {"id": "n3", "prompt": prompt, "n": 3, "temperature": 0.9, "seed": 3, "max_tokens": 20},
        {"id": "beams", "prompt": "Q: Who are you?\nA:", "beam_width": 4, "n": 2, "max_tokens": 16},
        {"id": "beams-long", "prompt": _STORY.format("fox", "wood") * 3, "beam_width": 3, "n": 3, "max_tokens": 24,
         "length_penalty": 0.8},
        {"id": "top", "prompt": prompt, "temperature": 0.8, "top_p": 0.9, "top_k": 20, "max_tokens": 20},
        {"id": "min-p", "prompt": prompt, "temperature": 1.2, "min_p": 0.1, "seed": 11, "max_tokens": 20},
        {"id": "penalties", "prompt": prompt, "presence_penalty": 0.5, "frequency_penalty": 0.3,
         "repetition_penalty": 1.2, "max_tokens": 20},
        {"id": "stop", "prompt": "Once upon a time", "stop": [".", "mouse"], "max_tokens": 40},
        {"id": "bias", "prompt": "Once upon a time", "logit_bias": {"300": 5, "301": -100}, "max_tokens": 12},
        {"id": "two", "prompt": ["The owl", "The frog"], "n": 2, "temperature": 0.5, "max_tokens": 8},
        {"id": "ids", "prompt": [300, 301, 302, 303], "max_tokens": 8, "min_tokens": 4, "stop_token_ids": [400]},
        {"id": "logprobs", "prompt": prompt, "logprobs": 3, "max_tokens": 8},
        {"id": "prompt-logprobs", "prompt": _STORY.format("owl", "barn"), "prompt_logprobs": 2, "max_tokens": 4},
    ]  # fmt: skip


def structured_rows() -> list[Any]:
    """Every kind of structured output."""
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
              "required": ["name", "age"], "additionalProperties": False}  # fmt: skip
    named = {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema}}
    return [
        {"id": "regex", "prompt": "The code is", "regex": "[0-9]{4}-[a-f]{2}", "max_tokens": 24},
        {"id": "choice", "prompt": "Yes or no?", "structured_outputs": {"choice": ["yes", "no", "maybe"]}},
        {"id": "json", "prompt": "An animal:", "structured_outputs": {"json": schema}, "max_tokens": 60},
        {"id": "format", "prompt": "An animal:", "response_format": named, "max_tokens": 60},
        {"id": "object", "prompt": "Data:", "response_format": {"type": "json_object"}, "max_tokens": 24},
        {"id": "grammar", "prompt": "Sum:", "structured_outputs": {"grammar": 'start: /[0-9]+/ "+" /[0-9]+/'},
         "max_tokens": 12},
        {"id": "guided", "prompt": "Sum:", "guided_regex": "a{2,5}b", "n": 2, "temperature": 1.0, "max_tokens": 12},
        {"id": "bad-regex", "prompt": "Sum:", "regex": "(", "max_tokens": 12},
    ]  # fmt: skip


def bad_rows() -> list[Any]:
    """Rows that cannot be served, after some good ones and between others."""
    first = [{"id": f"first-{n}", "prompt": f"The {animal}", "max_tokens": 5 + n} for n, animal in enumerate(_ANIMALS)]
    return [
        *first,
        {"id": "good-1", "prompt": "Once upon a time", "max_tokens": 6},
        "{not json",
        {"id": "empty"},
        {"id": "good-2", "prompt": "The fox", "max_tokens": 12, "unknown_field": 1},
        {"id": "too-long", "prompt": [300] * 3000},
        {"id": "bad-value", "prompt": "The fox", "temperature": -1},
        {"id": "large", "prompt": [301] * 900, "max_tokens": 10},
        {"id": "good-3", "prompt": "The bear", "max_tokens": 9},
        {"id": "good-3", "prompt": "The same id", "max_tokens": 3},
    ]


def column_rows() -> list[Any]:
    """Lines with names of their own."""
    return [
        {"qid": n, "question": f"Q: What does the {animal} eat?\nA:", "label": label, "meta": {"n": n}}
        for n, (animal, label) in enumerate(zip(_ANIMALS, ("a", 1, None, [2]), strict=True))
    ]


def window_rows() -> list[Any]:
    """Token ids, shorter and longer than the window of 24; some share a beginning."""
    shared = [5 + n * 13 % 290 for n in range(40)]
    tails = [[3 + (n * 31 + length) % 300 for n in range(length)] for length in (5, 24, 25, 70, 9, 31)]
    return [{"prompt": prompt, "max_tokens": 20} for prompt in (*tails[:4], shared + tails[4], shared + tails[5])]


def mooncake_rows() -> list[Any]:
    """Requests in Mooncake's format: chains of hashes that share beginnings."""
    rows = []
    for n in range(60):
        chain = [100 * (n % 7) + k for k in range(2 + n % 5)] + [10_000 + 10 * n + k for k in range(n % 3)]
        rows.append({"timestamp": n * 400, "input_length": 512 * len(chain) - n % 300, "output_length": 20 + n % 50,
                     "hash_ids": chain})  # fmt: skip
    return rows


def kv_event_rows() -> list[Any]:
    """Messages as vLLM sends them: blocks stored, removed, stored again, a gap in the numbers, and a clearing."""

    def stored(*hashes: int, parent: int | None = None) -> dict[str, Any]:
        tokens = [token for name in hashes for token in (300 + name, 301 + name)]
        return {"type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": parent, "token_ids": tokens,
                "block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None}  # fmt: skip

    def removed(*hashes: int) -> dict[str, Any]:
        return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}

    batches: list[tuple[int, list[dict[str, Any]]]] = [
        (0, [stored(1, 2, 3)]), (1, [stored(4, parent=2), stored(9)]), (2, [removed(3, 9)]), (3, [stored(3, parent=2)]),
        (4, [removed(4), stored(5, 6, parent=3)]), (6, [stored(9)]), (7, [removed(6), removed(5)]),
        (8, [stored(5, parent=3), stored(7, 8)]), (9, [{"type": "AllBlocksCleared"}]), (10, [stored(1, 2)]),
    ]  # fmt: skip
    rows = []
    for number, events in batches:
        payload = msgspec.msgpack.encode([float(number), events, 0])
        frames = [base64.b64encode(frame).decode() for frame in (b"kv", number.to_bytes(8, "big"), payload)]
        rows.append({"t": float(number), "frames": frames})
    return rows


def write_parquet(path: Path) -> None:
    """The lines of column_rows, with texts only where the types differ."""
    import pyarrow as pa
    from pyarrow import parquet

    rows = [{**row, "label": str(row["label"])} for row in column_rows()]
    parquet.write_table(pa.Table.from_pylist(rows), path)


def write_inputs(folder: Path) -> None:
    """All input files, the same in every recording."""
    folder.mkdir()
    for example in sorted(each for each in (ROOT / "examples").iterdir() if each.is_file()):
        shutil.copy(example, folder / example.name)
    makers: dict[str, Callable[[], list[Any]]] = {
        "shared": shared_rows, "stories": story_rows, "samples": sample_rows, "structured": structured_rows,
        "bad": bad_rows, "columns": column_rows, "windows": window_rows, "mooncake": mooncake_rows,
        "kv_events": kv_event_rows,
    }  # fmt: skip
    for name, rows in makers.items():
        write_lines(folder / f"{name}.jsonl", rows())
    write_lines(folder / "windows_bad.jsonl", [*window_rows(), {"prompt": [5] * 400}])
    (folder / "async.yaml").write_text("engine: {async_scheduling: true}\n")
    (folder / "read_ahead.yaml").write_text("run: {read_ahead: 3000}\n")
    (folder / "pool.yaml").write_text("engine:\n  block_size: 8\n  num_kvcache_blocks: 80\nrun:\n  strict: true\n")
    try:
        write_parquet(folder / "columns.parquet")
    except ImportError:
        print("runs with Parquet: skipped, pyarrow is not installed")
    vllm_events = next((above / VLLM_EVENTS for above in ROOT.parents if (above / VLLM_EVENTS).exists()), None)
    if vllm_events is None:
        print(f"run vllm_recording: skipped, there is no {VLLM_EVENTS} in a folder above {ROOT}")
    else:
        shutil.copyfile(vllm_events, folder / "vllm.jsonl")


# name -> (class of the config in transformers, what differs from _TINY); seeded random weights
_TINY = {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1,
         "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "windows": ("Gemma3TextConfig", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 24,
                                     "num_hidden_layers": 3, "sliding_window_pattern": 3}),
    "all_windows": ("MistralConfig", {"head_dim": 32, "sliding_window": 24}),
    "experts": ("Qwen3MoeConfig", {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
                                   "head_dim": 32, "norm_topk_prob": True}),
    "large_vocabulary": ("LlamaConfig", {"vocab_size": 10_240}),
    "fallback": ("Starcoder2Config", {"sliding_window": None}),
}  # fmt: skip


def write_models(folder: Path) -> None:
    """The built-in model as a folder, and tiny models of other families with its tokenizer."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    demo = next((ROOT / "src" / "pagedcli").glob("**/demo/tokenizer.json")).parent
    shutil.copytree(demo, folder / "demo", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for name, (class_name, differences) in MODELS.items():
        config = getattr(transformers, class_name)(**{**_TINY, **differences})
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator) * (0.2 if parameter.dim() > 1 else 0.1)
                parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
        model.save_pretrained(folder / name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(demo / file, folder / name / file)
