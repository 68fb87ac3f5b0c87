"""Rows with vectors: those of transformers, the same bits in any company, in all files, and refused by name."""

import base64
import json

import numpy as np
import pytest
import torch
import transformers
from cli_harness import pagedcli, rows_of, with_keys, write_rows
from harness.engine import BUILTIN, Harness, transformers_logits
from model_zoo import tiny_model

from pagedcli.batch.columns import Columns
from pagedcli.batch.embeddings import Embedder
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.cli.verify import EXIT_DIFFERENT
from pagedcli.config import EngineConfig, load_config
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
END, MODULES = "<|endoftext|>", {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
CASES = {
    "qwen3": None,
    "mistral": {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False},
    "gemma": {"pooling_mode": "lasttoken"},
}


def embedder(folder, family="qwen3", pooling=None, *, modules=MODULES, ends=False):
    """A model without an output layer, with the files of sentence-transformers, or a tokenizer that ends each text."""
    tiny_model(family, folder, vocab_size=1024)
    transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).save_pretrained(folder)
    tokenizer = json.loads((BUILTIN / "tokenizer.json").read_text())
    if ends:
        tokenizer["post_processor"]["single"].append({"SpecialToken": {"id": END, "type_id": 0}})
        tokenizer["post_processor"]["special_tokens"] = {END: {"id": END, "ids": [0], "tokens": [END]}}
    kinds = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in modules.items()]
    own = {"modules": kinds, "1_Pooling/config": pooling} if pooling else {}
    (folder / "1_Pooling").mkdir()
    for name, content in {"tokenizer": tokenizer, "config_sentence_transformers": {"prompts": PROMPTS}, **own}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text((BUILTIN / "tokenizer_config.json").read_text())
    return folder


def vectors(harness, rows=ROWS):
    return {row["id"]: row["embedding"] for row in harness.rows(rows)}


@pytest.mark.bits
@pytest.mark.parametrize("family", CASES)
def test_vectors_are_those_of_transformers_with_the_same_bits_in_any_company(family, tmp_path):
    folder = embedder(tmp_path / family, family, CASES[family], ends=family == "qwen3")
    harness, model = Harness(model=str(folder)), transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    found = vectors(harness)
    for row in ROWS:
        text, instruction = row["embed"], row.get("instruction", "")
        instruction = PROMPTS.get(instruction, instruction)
        ids = text if isinstance(text, list) else harness.tokenizer.encode(instruction + text)
        with torch.inference_mode():
            states = model(torch.tensor([ids])).last_hidden_state[0].double()
        wanted = (states.mean(0) if family == "mistral" else states[-1])[: row.get("dimensions")]
        assert found[row["id"]] == pytest.approx((wanted / wanted.norm()).tolist(), abs=1e-5)
    tight = Harness(model=str(folder), num_kvcache_blocks=110, max_num_seqs=2, max_num_batched_tokens=7)
    assert vectors(tight, ROWS[::-1]) == vectors(tight) == vectors(harness) == found
    for row in ROWS:
        assert vectors(tight, [row]) == {row["id"]: found[row["id"]]}
    [generates] = harness.rows([{"prompt": "Hi"}])
    assert (generates["error"] or {}).get("code") == (None if family == "gemma" else "no_output_layer")


@pytest.fixture(scope="module")
def last(tmp_path_factory):
    return Harness(model=str(embedder(tmp_path_factory.mktemp("last"), pooling=CASES["gemma"])))


def test_openai_lines_give_openai_rows(last):
    bodies = [{"input": ["The dog", "The cat"]}, {"input": [5, 6, 7], "encoding_format": "base64", "dimensions": 4}]
    lines = [{"custom_id": str(i), "url": "/v1/embeddings", "body": {"model": "m"} | b} for i, b in enumerate(bodies)]
    two, one = (row["response"]["body"] for row in last.rows(lines))
    plain = vectors(last, [{"id": 0, "embed": "The dog"}, {"id": 1, "embed": "The cat"}, ROWS[3] | {"dimensions": 4}])
    assert (two["object"], two["data"][1]) == ("list", {"object": "embedding", "index": 1, "embedding": plain[1]})
    assert base64.b64decode(one["data"][0]["embedding"]) == np.array(plain["tokens"], "<f4").tobytes()
    assert max(map(len, map(str, plain[0]))) < 16  # the shortest form


def test_vectors_resume_and_are_in_tables_and_recordings(tmp_path, last):
    lines = [json.dumps({"text": f"{i} {STORY}", "label": i}) for i in (1, 2, 3, 3)]
    source = write_rows(tmp_path / "in.jsonl", [*lines[:2], "{broken", *lines[2:]])
    flags = f"-m {last.tokenizer.folder} --embed --field text --instruction query --dimensions 16 --keep label"
    flags = f"{flags} --block-size 4 --num-kvcache-blocks 200 --max-num-seqs 1 --deduplicate".split()
    out, run, parquet, changed = (tmp_path / name for name in ("o.jsonl", "run.jsonl", "o.parquet", "changed.jsonl"))
    pagedcli("generate", source, "-o", out, *flags, "--record", run, "--verify", 2, expect=3)
    pagedcli("generate", source, "-o", tmp_path / "p.jsonl", *flags, "--max-errors", 1, expect=1)
    pagedcli("generate", source, "-o", tmp_path / "p.jsonl", *flags, "--resume", expect=3)
    pagedcli("verify", out, tmp_path / "p.jsonl")
    pagedcli("generate", source, "-o", out, *flags, *with_keys(tmp_path, engine__pooling="mean"), "--resume", expect=2)
    pagedcli("trace", run, "--check")
    plan = json.loads(pagedcli("plan", source, *flags, "--format", "json", expect=3).stdout)
    assert plan["scores"]["num_rows"] == 3
    a, b, _, c, same = rows_of(out)
    assert [row["usage"]["prompt_tokens_details"]["cached_tokens"] > 8 for row in (a, b, c)] == [False, True, True]
    assert c["embedding"] == same["embedding"]
    pagedcli("generate", source, "-o", tmp_path / "o.csv", *flags, expect=3)
    pagedcli("verify", out, tmp_path / "o.csv")
    write_rows(changed, [a | {"embedding": [1.0] + 15 * [0.0]}, *rows_of(out)[1:]])
    assert "the smallest cosine is" in pagedcli("verify", out, changed, expect=EXIT_DIFFERENT).stdout
    pq = pytest.importorskip("pyarrow.parquet")
    pagedcli("generate", source, "-o", parquet, *flags, expect=3)
    assert str(pq.read_schema(parquet).field("embedding").type) == "fixed_size_list<element: float>[16]"
    pagedcli("verify", out, parquet)


@pytest.mark.parametrize(("fields", "what"), [
    ({"questions": {}}, "generates nothing"),
    ({"prompt": "x"}, "its text in 'embed' alone"),
    ({"embed": ["a", "b"]}, "has one prompt"),
    ({"dimensions": 65}, "vectors have 64"),
    ({"encoding_format": "hex"}, "Invalid enum value 'hex'"),
    ({"instruction": "querry"}, "no name in the checkpoint: 'query', 'document'"),
    ({"embedding": 1}, "cannot be kept"),
])  # fmt: skip
def test_what_cannot_be_embedded_is_an_error_row(last, fields, what):
    [row] = last.rows([{"embed": "The dog"} | fields], columns=Columns(keep=("embedding",) * ("embedding" in fields)))
    assert what in row["error"]["message"]


@pytest.mark.parametrize(("pooling", "modules", "what"), [
    ({"pooling_mode": "mean"}, MODULES | {"2_Dense": "Dense"}, "models.Dense is not supported"),
    ({"pooling_mode_cls_token": True}, MODULES, "pooling by cls_token"),
    ({"pooling_mode": "mean", "include_prompt": False}, MODULES, "mean without the instruction"),
    (None, MODULES, "pooling: last, or mean, under engine:"),
])  # fmt: skip
def test_checkpoints_that_make_other_vectors_are_refused_by_name(tmp_path, pooling, modules, what):
    folder = embedder(tmp_path, pooling=pooling, modules=modules)
    with pytest.raises(ModelError) as found:
        Embedder.of(EngineConfig(), Tokenizer(folder))
    assert what in f"{found.value.message} {found.value.hint}"


def test_a_reranker_decides_between_yes_and_no_after_the_text_of_its_card(tmp_path):
    example = BUILTIN.parents[3] / "examples" / "rerank"
    flags = ("-C", example / "reranker.yaml", "--dtype", "float32", "-o", tmp_path / "o.jsonl")
    pagedcli("generate", example / "pairs.jsonl", *flags)
    [pair, *_], [row, *_] = rows_of(example / "pairs.jsonl"), rows_of(tmp_path / "o.jsonl")
    text = load_config(example / "reranker.yaml", {}).config.run.template.format(**pair)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    context, *both = (Tokenizer(BUILTIN).encode(text.rstrip() + end) for end in ("", "\n\nyes", "\n\nno"))
    for score, ids, logits in zip(row["scores"], both, transformers_logits(BUILTIN, both), strict=True):
        chosen = logits.log_softmax(-1)[range(len(context) - 1, len(ids) - 1), ids[len(context) :]]
        assert score["logprob"] == pytest.approx(float(chosen.sum()), abs=1e-3)
