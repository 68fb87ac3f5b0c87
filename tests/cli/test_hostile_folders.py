"""Damaged and malicious model folders: `generate` and `profile-memory` end in seconds, with a reason, or run."""

import json
import os
import shutil
import struct
import sys
import time
from pathlib import Path

import pytest
from cli_harness import rows_of

pytestmark = pytest.mark.slow
DEMO = Path(__file__).parents[2] / "src" / "pagedcli" / "assets" / "demo"
ROWS = '{"prompt": "Once upon aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!"}\n{"messages": [{"role": "user", "content": "hi"}]}\n'
FLAGS = ("-o", "out.jsonl", "--max-tokens", "4", "--num-kvcache-blocks", "64")
WEIGHTS, INDEX, TOKENIZER = "model.safetensors", "model.safetensors.index.json", "tokenizer.json"
GENERATION, TEMPLATE = "generation_config.json", "chat_template.jinja"
EMBEDDING = "model.embed_tokens.weight"


def content(name, data):
    """The file has these bytes."""

    def make(folder):
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(data)

    return make


def fields(name, **changes):
    """The JSON file has these fields, and else its own."""
    return lambda folder: content(name, json.dumps(json.loads((DEMO / name).read_text()) | changes).encode())(folder)


def config(**changes):
    return fields("config.json", **changes)


def quantized(**changes):
    return config(quantization_config=changes)


def tensors(header, data=b"", num_bytes=None):
    """A safetensors file with this header, which may claim another length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return content(WEIGHTS, struct.pack("<Q", len(text) if num_bytes is None else num_bytes) + text + data)


def embedding(begin, end, *, shape=(1024, 160), dtype="BF16"):
    return tensors({EMBEDDING: {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}}, b"x" * 100)


def cut(num_bytes):
    return lambda folder: os.truncate(folder / WEIGHTS, num_bytes)


def sparse(folder):
    header = json.dumps({EMBEDDING: {"dtype": "U8", "shape": [2**40], "data_offsets": [0, 2**40]}}).encode()
    tensors(header)(folder)
    os.truncate(folder / WEIGHTS, 8 + len(header) + 2**40)


def many_tensors(folder):
    tensors({f"t{n}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for n in range(400_000)})(folder)


def large_config(folder):
    config(more=["x" * 100] * 100_000)(folder)


def large_vocabulary(folder):
    words = {f"token {number} {'x' * 30}": number for number in range(500_000)}
    content(TOKENIZER, json.dumps({"model": {"vocab": words}}).encode())(folder)


def many_ends(folder):
    content(GENERATION, json.dumps({"eos_token_id": list(range(10**6))}).encode())(folder)


def index(name):
    def make(folder):
        (folder / WEIGHTS).unlink()
        content(INDEX, json.dumps({"weight_map": {EMBEDDING: name}}).encode())(folder)

    return make


def fifo(name):
    def make(folder):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return make


def template_fifo(folder):
    (folder / "additional_chat_templates").mkdir()
    fifo("additional_chat_templates/rag.jinja")(folder)


def link(name, target=None):
    """A link, by default to itself."""

    def make(folder):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target or folder / name)

    return make


def pickle(folder):
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'false'\ntR.")


def template(text):
    return content(TEMPLATE, text.encode())


LOOPS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
TARGETS = {"group_0": {"targets": ["re:(x+x+)+y"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}}
FOLDERS = {
    "no config": content("config.json", b""),
    "config is a list": content("config.json", b"[]"),
    "config is deep": content("config.json", b'{"a":' * 100_000),
    "config is YAML": content("config.json", b"a: &a [x, x]\nb: &b [*a, *a, *a]\nc: [*b, *b, *b]\n"),
    "config is UTF-16": content("config.json", json.dumps({"model_type": "qwen3"}).encode("utf-16")),
    "text_config is deep": config(text_config=json.loads('{"text_config":' * 900 + "{}" + "}" * 900)),
    "config has 10 MB more": large_config,
    "hidden size 0": config(hidden_size=0),
    "hidden size 2 billion": config(hidden_size=2 * 10**9),
    "negative heads": config(num_attention_heads=-4),
    "vocabulary is text": config(vocab_size="1024"),
    "layers are a fraction": config(num_hidden_layers=4.5),
    "thousands of layers": config(num_hidden_layers=4096, layer_types=None),
    "negative length": config(max_position_embeddings=-1),
    "epsilon is NaN": config(rms_norm_eps=float("nan")),
    "infinite rope": config(rope_parameters={"rope_theta": float("inf"), "rope_type": "default"}),
    "dtype unknown": config(dtype="complex999"),
    "type is a path": config(model_type="../../etc"),
    "code in auto_map": config(auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}),
    "architecture is code": config(architectures=["__import__"]),
    "end token is a list of lists": config(eos_token_id=[["a"]]),
    "regex of a format": quantized(quant_method="compressed-tensors", ignore=["re:(a+)+$"], config_groups=TARGETS),
    "regex of GPTQ": quantized(quant_method="gptq", bits=4, group_size=32, dynamic={"-:(.+)+x(.+)+y": {}}),
    "negative bits": quantized(quant_method="gptq", bits=-4, group_size=0),
    "blocks of 0": quantized(quant_method="fp8", weight_block_size=[0, 0]),
    "quantization is text": config(quantization_config="gptq"),
    "weights are empty": content(WEIGHTS, b""),
    "weights are cut": cut(1_000_000),
    "header is cut": cut(200),
    "header claims 2**63 bytes": tensors({}, num_bytes=2**63 - 1),
    "header claims 100 MB": tensors({}, num_bytes=10**8),
    "header is deep": tensors(b'{"a":' * 50_000),
    "offsets beyond the end": embedding(0, 10**15),
    "offsets below 0": embedding(-5, 10),
    "offsets backwards": embedding(100, 0),
    "shape overflows": embedding(0, 100, shape=(2**40, 2**40)),
    "shape is text": embedding(0, 100, shape="no"),
    "element type unknown": embedding(0, 100, dtype="EVIL"),
    "a terabyte": sparse,
    "400,000 tensors": many_tensors,
    "index points outside": index("../../../../etc/passwd"),
    "index points to the root": index("/etc/passwd"),
    "index points to itself": index(INDEX),
    "index names a number": index(5),
    "index names what is missing": index("model-00001-of-00002.safetensors"),
    "index is a list": content(INDEX, b"[1]"),
    "only a pickle": pickle,
    "an additional template is a FIFO": template_fifo,
    **{f"{name} is a FIFO": fifo(name) for name in ("config.json", WEIGHTS, INDEX, TOKENIZER, GENERATION, TEMPLATE)},
    **{f"{name} is a loop": link(name) for name in ("config.json", WEIGHTS, INDEX, TOKENIZER, GENERATION, TEMPLATE)},
    **{f"{name} is a device": link(name, "/dev/zero") for name in ("tokenizer_config.json", GENERATION, TEMPLATE)},
    "tokenizer is a list": content(TOKENIZER, b"[]"),
    "tokenizer is deep": content(TOKENIZER, b'{"a":' * 100_000),
    "tokenizer of 20 MB": large_vocabulary,
    "normalizer backtracks": fields(
        TOKENIZER, normalizer={"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}
    ),
    "splitting backtracks": fields(TOKENIZER, pre_tokenizer=SPLIT | {"pattern": {"Regex": "((.*)*)*x"}}),
    "splitting is no regex": fields(TOKENIZER, pre_tokenizer=SPLIT | {"pattern": {"Regex": "(("}}),
    "tokenizer class is code": fields("tokenizer_config.json", tokenizer_class="os.system"),
    "tokenizer's length is text": fields("tokenizer_config.json", model_max_length="x"),
    "tokenizer's end is a number": fields("tokenizer_config.json", eos_token=7),
    "template loops": template(LOOPS),
    "template is endless": template("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"),
    "template escapes": template("{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    "template is deep": template("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"),
    "template is no text": content(TEMPLATE, b"\xff\xfe\x00"),
    "end tokens are text": content(GENERATION, b'{"eos_token_id": "x"}'),
    "a million end tokens": many_ends,
    "end token over 64 bits": content(GENERATION, b'{"eos_token_id": 99999999999999999999}'),
    "temperature is a word": content(GENERATION, b'{"temperature": "hot", "top_p": [], "do_sample": "maybe"}'),
}


def run_in_child(folder, arguments):
    import torch

    torch.set_num_threads(1)
    os.chdir(folder)
    for number, name in ((1, "stdout.txt"), (2, "stderr.txt")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = ["pagedcli", *arguments]
    from pagedcli.__main__ import run

    run()


@pytest.mark.parametrize("command", [("generate", "in.jsonl", *FLAGS), ("profile-memory",)], ids=lambda each: each[0])
@pytest.mark.parametrize("name", FOLDERS)
def test_a_hostile_folder_is_refused_or_runs_within_ten_seconds(name, command, processes, tmp_path):
    shutil.copytree(DEMO, tmp_path / "model")
    FOLDERS[name](tmp_path / "model")
    (tmp_path / "in.jsonl").write_text(ROWS)
    process = processes.Process(target=run_in_child, args=(tmp_path, [*command, "-m", "model"]))
    start_s = time.monotonic()
    process.start()
    process.join(30)
    process.kill()
    assert time.monotonic() - start_s < 10
    stderr = (tmp_path / "stderr.txt").read_text()
    assert "Traceback" not in stderr
    assert "this is a bug" not in stderr
    if process.exitcode in (1, 2):
        assert "error: " in stderr
    else:
        assert process.exitcode in (0, 3), stderr
    if process.exitcode == 3:
        assert any(row["error"] for row in rows_of(tmp_path / "out.jsonl"))
