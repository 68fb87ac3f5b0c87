"""A figure that several commands print is the same in all of them, and what the run itself found."""

import json
import random
import shutil

import planted_prompts as planted
import pytest
from cli_harness import pagedcli
from model_zoo import tiny_model

from pagedcli.models.hub import resolve_model

MAKERS = (
    *(planted.clock, planted.identifier, planted.language, planted.question_first, planted.documents, planted.blank),
    *(planted.templates, planted.salts, planted.unique, planted.shared_system, planted.grown_chats, planted.one_salt),
)
SCARCE = ("--num-kvcache-blocks", "14", "--max-num-seqs", "8")
TIGHT = ("--num-kvcache-blocks", "40", "--max-num-seqs", "4")
WIDE = ("--num-kvcache-blocks", "400", "--max-num-seqs", "8", "--block-size", "8")


def of_planted(make):
    made = make(random.Random(make.__name__), 12)
    file = getattr(made, "file", made)
    texts = [" ".join(text.split()[-60:]) for text in file.texts]  # the last words of long prompts are enough
    return [{"prompt": text, "cache_salt": salt} for text, salt in zip(texts, file.salts, strict=True)]


def some(num, **fields):
    draw = random.Random(num)
    heads = [planted.words(draw, 30) for _ in range(3)]
    return [{"prompt": f"{heads[n % 3]} {planted.words(draw, 4 + n)}", **fields} for n in range(num)]


def of_ids(num):
    draw = random.Random(num)
    heads = [[draw.randrange(5, 90) for _ in range(30)] for _ in range(3)]
    return [{"prompt": heads[n % 3] + [draw.randrange(5, 90) for _ in range(4 + n)]} for n in range(num)]


FILES = {make.__name__: (None, of_planted(make), WIDE if place % 2 else TIGHT) for place, make in enumerate(MAKERS)} | {
    "two samples": (None, some(8, n=2, seed=1), TIGHT),
    "many samples": (None, some(4, n=6, seed=2), WIDE),
    "salted": (None, [row | {"cache_salt": f"s{n % 2}"} for n, row in enumerate(some(10))], TIGHT),
    "without caching": (None, some(9), (*TIGHT, "--no-enable-prefix-caching")),
    "fifo": (None, some(14), (*TIGHT, "--eviction", "fifo")),
    "next use": (None, some(14), (*TIGHT, "--eviction", "next-use")),
    "sorted": (None, some(14), (*TIGHT, "--reorder", "prefix")),
    "windows": ("gemma3", of_ids(10), ("--num-kvcache-blocks", "90", "--max-num-seqs", "3")),
    "states": ("lfm2", of_ids(8), ("--num-kvcache-blocks", "60", "--max-num-seqs", "3")),
    "preempted": (None, some(10), (*SCARCE, "--max-num-batched-tokens", "64")),
    "largest preempted": (None, some(10), (*SCARCE, "--preemption-policy", "largest")),
}


def model_of(family, folder):
    """A random model that has as many tokens as the built-in one, with its tokenizer."""
    builtin = resolve_model("builtin")
    vocab_size = json.loads((builtin / "config.json").read_text())["vocab_size"]
    tiny_model(family, folder, vocab_size=vocab_size)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(builtin / name, folder)
    return folder


def document(*arguments):
    return json.loads(pagedcli(*arguments, "--format", "json").stdout)


@pytest.mark.quick(*("clock", "documents", "salts", "grown_chats", "two samples", "many samples", "salted"),
                   *("without caching", "next use", "sorted", "windows", "states", "preempted"))  # fmt: skip
@pytest.mark.parametrize("name", FILES)
def test_every_command_says_what_the_run_found(name, tmp_path, tmp_path_factory):
    family, rows, flags = FILES[name]
    model = () if family is None else ("-m", model_of(family, tmp_path_factory.mktemp(family)))
    file, trace, out = tmp_path / "in.jsonl", tmp_path / "run.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps(row | {"max_tokens": 3, "ignore_eos": True}) + "\n" for row in rows))
    pagedcli(
        "generate", file, *model, *flags, "-o", out, "--output-token-ids", "--record", trace, "--record-tokens",
        "--summary-json", tmp_path / "summary.json",
    )  # fmt: skip
    run = json.loads((tmp_path / "summary.json").read_text())
    plan = document("plan", file, *model, *flags, "--no-calibrate", "--outputs", out)
    explained = document("explain", trace)
    simulated = document("simulate", trace)
    checked = document("trace", trace, "--check")
    compared = document("diff", trace, trace)
    [pool] = simulated["pools"]
    told = plan["forecast"]
    figures = {
        "prompt tokens": (run["prompt_tokens"], told["prompt_tokens"], simulated["num_prompt_tokens"]),
        "cached tokens": (run["cached_tokens"], told["cached_tokens"], pool["num_cached_tokens"]),
        "hit rate": (run["hit_rate"], told["hit_rate"], pool["hit_rate_tokens"], compared["after"]["hit_rate"]),
        "unlimited": (run["cache"]["ideal_hit_rate"], explained["ideal_hit_rate"]),
        "generated": (run["generated_tokens"], told["generated_tokens"]),
        "computed": (run["computed_tokens"], told["computed_tokens"], compared["before"]["computed_tokens"]),
        "preemptions": (run["preemptions"], told["preemptions"], pool["num_preemptions"]),
        "blocks": (run["kv_blocks"], plan["num_kvcache_blocks"], pool["pool_blocks"], checked["blocks"]["total"]),
        "peak": (run["kv_blocks_peak"], told["kv_blocks_peak"]),
        "steps": (run["steps"], told["steps"], checked["num_steps"]),
        "longest shared": [each["longest_shared_prefix_tokens"] for each in (run["cache"], explained, plan)],
        "enough": (plan["enough"]["num_blocks"], simulated["enough"]["num_blocks"]),
        "cures": ([each["text"] for each in run["cures"]], [each["text"] for each in explained["cures"]]),
    }
    if name == "without caching":
        del figures["longest shared"]  # a run counts no prefixes then
    different = {what: values for what, values in figures.items() if any(each != values[0] for each in values)}
    assert different == {}
    assert all(each is not None for values in figures.values() for each in values)
    assert explained["hit_rate"] == run["hit_rate"]
    assert compared["causes"] == []
