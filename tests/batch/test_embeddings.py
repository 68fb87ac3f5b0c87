"""Rows with vectors: those of transformers, the same bits in any company, in all files, and refused by name."""

import base64
import json

import numpy as np
import pytest
import torch
import transformers
from cli_harness import pagedcli, rows_of, write_rows
from harness.engine import BUILTIN, Harness
from model_zoo import tiny_model

from pagedcli.batch.columns import Columns
from pagedcli.batch.embeddings import Embedder, Embedding
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.cli.verify import EXIT_DIFFERENT
from pagedcli.config import EngineConfig
from pagedcli.errors import ModelError

STORY = "Once upon a time there was a little dog who liked to play in the park. "
PROMPTS = {"query": "Instruct: find what answers the query\nQuery:", "document": ""}
ROWS = [
    {"id": "text", "embed": STORY},
    {"id": "query", "embed": "The dog", "instruction": "query"},
    {"id": "long", "embed": STORY * 5, "instruction": "query"},
    {"id": "tokens", "embed": [5, 6, 7]},
    {"id": "own", "embed": "The dog", "instruction": "Find: ", "dimensions": 8},
]
MODULES = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]


def embedder(folder, family="qwen3", *, pooling=None, modules=MODULES, ends=False):
    """A model without an output layer in a folder of sentence-transformers; `ends`: its tokenizer ends each text."""
    tiny_model(family, folder, vocab_size=1024)
    transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).save_pretrained(folder)
    tokenizer = json.loads((BUILTIN / "tokenizer.json").read_text())
    if ends:
        end = "<|endoftext|>"
        tokenizer["post_processor"]["single"].append({"SpecialToken": {"id": end, "type_id": 0}})
        tokenizer["post_processor"]["special_tokens"] = {end: {"id": end, "ids": [0], "tokens": [end]}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text((BUILTIN / "tokenizer_config.json").read_text())
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
    if pooling is not None:
        kinds = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in modules]
        (folder / "modules.json").write_text(json.dumps(kinds))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


CASES = {
    "qwen3": {"ends": True},
    "mistral": {"pooling": {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}},
    "gemma": {"pooling": {"pooling_mode": "lasttoken"}},
}


@pytest.fixture(scope="module", params=CASES)
def folder(request, tmp_path_factory):
    return embedder(tmp_path_factory.mktemp(request.param), request.param, **CASES[request.param])


def vectors(harness, rows=ROWS, **options):
    return {row["id"]: row["embedding"] for row in harness.rows(rows, **options)}


@pytest.mark.bits
def test_vectors_are_those_of_transformers_with_the_same_bits_in_any_company(folder):
    harness, model = Harness(model=str(folder)), transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    found = vectors(harness)
    for row in ROWS:
        instruction = PROMPTS.get(row.get("instruction"), row.get("instruction", ""))
        ids = row["embed"]
        ids = ids if isinstance(ids, list) else harness.tokenizer.encode(instruction + ids)
        with torch.inference_mode():
            states = model(torch.tensor([ids])).last_hidden_state[0].double()
        wanted = (states.mean(0) if "mistral" in str(folder) else states[-1])[: row.get("dimensions")]
        assert found[row["id"]] == pytest.approx((wanted / wanted.norm()).tolist(), abs=1e-5)
    tight = Harness(model=str(folder), num_kvcache_blocks=110, max_num_seqs=2, max_num_batched_tokens=7)
    assert vectors(tight, ROWS[::-1]) == vectors(tight) == vectors(harness) == found
    for row in ROWS:
        assert vectors(tight, [row]) == {row["id"]: found[row["id"]]}
    [generates] = harness.rows([{"prompt": "Hi"}])
    assert (generates["error"] or {}).get("code") == (None if "gemma" in str(folder) else "no_output_layer")


@pytest.fixture(scope="module")
def last(tmp_path_factory):
    return Harness(model=str(embedder(tmp_path_factory.mktemp("last"), **CASES["gemma"])))


def test_openai_lines_give_openai_rows(last):
    def line(index, **body):
        return {"custom_id": str(index), "method": "POST", "url": "/v1/embeddings", "body": {"model": "m", **body}}

    bodies = [{"input": ["The dog", "The cat"]}, {"input": [5, 6, 7], "encoding_format": "base64", "dimensions": 4}]
    two, one = (row["response"]["body"] for row in last.rows([line(i, **body) for i, body in enumerate(bodies)]))
    assert (two["object"], [each["index"] for each in two["data"]]) == ("list", [0, 1])
    plain = vectors(last, [{"id": 0, "embed": "The dog"}, {"id": 1, "embed": "The cat"}, ROWS[3] | {"dimensions": 4}])
    assert [each["embedding"] for each in two["data"]] == [plain[0], plain[1]]
    numbers = np.frombuffer(base64.b64decode(one["data"][0]["embedding"]), "<f4")
    assert (numbers == np.float32(plain["tokens"])).all()
    assert np.float32(plain[0]).astype("U").tolist() == [str(np.float32(each)) for each in plain[0]]


def test_vectors_are_found_in_the_cache_once_and_in_tables(tmp_path, last):
    rows = [{"text": f"{i} {STORY}", "label": i} for i in (1, 2, 3, 3)]
    folder, source = last.tokenizer.folder, write_rows(tmp_path / "in.jsonl", rows)
    flags = (
        "-m",
        folder,
        "--embed",
        "--field",
        "text",
        "--instruction",
        "query",
        "--dimensions",
        16,
        "--keep",
        "label",
    )
    flags += ("--block-size", 4, "--num-kvcache-blocks", 200, "--deduplicate")
    out, run = tmp_path / "o.jsonl", tmp_path / "run.jsonl"
    pagedcli("generate", source, "-o", out, *flags, "--record", run, "--verify", 2)
    pagedcli("generate", source, "-o", out, *flags, "--resume")
    pagedcli("generate", source, "-o", out, *flags[:-1], "--pooling", "mean", "--resume", expect=2)
    pagedcli("trace", run, "--check")
    plan = json.loads(pagedcli("plan", source, *flags, "--format", "json").stdout)
    assert plan["scores"]["num_rows"] == 3
    found = rows_of(out)
    assert [row["usage"]["prompt_tokens_details"]["cached_tokens"] > 8 for row in found] == [False, True, True, True]
    assert found[2]["embedding"] == found[3]["embedding"]
    pagedcli("generate", source, "-o", tmp_path / "o.csv", *flags)
    pagedcli("verify", out, tmp_path / "o.csv", "--by-order")
    assert "earlier outputs" in pagedcli("generate", source, "-o", tmp_path / "p.jsonl", *flags, "--reuse", out).stderr
    pq = pytest.importorskip("pyarrow.parquet")
    pagedcli("generate", source, "-o", tmp_path / "o.parquet", *flags)
    assert str(pq.read_schema(tmp_path / "o.parquet").field("embedding").type) == "fixed_size_list<element: float>[16]"
    pagedcli("verify", out, tmp_path / "o.parquet", "--by-order")
    changed = write_rows(tmp_path / "q.jsonl", [found[0] | {"embedding": [1.0] + 15 * [0.0]}, *found[1:]])
    assert "the smallest cosine is" in pagedcli("verify", out, changed, expect=EXIT_DIFFERENT).stdout


@pytest.mark.parametrize(("fields", "what"), [
    ({"n": 2}, "generates nothing"),
    ({"questions": {}}, "generates nothing"),
    ({"prompt": "x"}, "its text in 'embed' alone"),
    ({"embed": ["a", "b"]}, "has one prompt"),
    ({"dimensions": 0}, "`int` >= 1"),
    ({"dimensions": 65}, "vectors have 64"),
    ({"encoding_format": "hex"}, "Invalid enum value 'hex'"),
    ({"instruction": "querry"}, "no name in the checkpoint: 'query', 'document'"),
    ({"embedding": 1}, "cannot be kept"),
])  # fmt: skip
def test_what_cannot_be_embedded_is_an_error_row(last, fields, what):
    [row] = last.rows([{"embed": "The dog"} | fields], columns=Columns(keep=("embedding",) * ("embedding" in fields)))
    assert what in row["error"]["message"]


def test_checkpoints_that_make_other_vectors_are_refused_by_name(tmp_path):
    dense, cls = [*MODULES, ("2_Dense", "Dense")], {"pooling_mode_cls_token": True}
    for number, (what, settings) in enumerate({
        "a module Dense": {"pooling": {"pooling_mode": "mean"}, "modules": dense},
        "pooling by cls_token": {"pooling": cls},
        "mean without the instruction": {"pooling": {"pooling_mode": "mean", "include_prompt": False}},
        "--pooling last or --pooling mean": {},
    }.items()):  # fmt: skip
        folder = embedder(tmp_path / str(number), **settings)
        with pytest.raises(ModelError) as found:
            Embedder.of(EngineConfig(), Tokenizer(folder))
        assert what in f"{found.value.message} {found.value.hint}"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    assert "later ones" in pagedcli("generate", "-m", folder, "Hi there", "--pooling", "mean", expect=2).stderr


def test_numbers_are_short_and_exact():
    state = np.float64(np.float32([3.1, -1e-9, 7.7777]))
    numbers = Embedding().encoded([state])
    wanted = (state / np.sqrt((state * state).sum())).astype(np.float32)
    assert np.float32(numbers).tolist() == wanted.tolist()
    assert max(map(len, map(str, numbers))) < 16
