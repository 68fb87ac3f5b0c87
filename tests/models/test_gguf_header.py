"""Damaged and hostile GGUF files: a clear error that names the file, and neither much memory nor time."""

import os
import random
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
from effort import Effort
from gguf_files import gguf_twins, split
from model_zoo import cached_model

from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.errors import ModelError
from pagedcli.models.gguf.description import describe
from pagedcli.models.gguf.header import Header, TensorInfo, read_header
from pagedcli.models.gguf.types import TYPES
from pagedcli.models.loading import weight_format
from pagedcli.models.parameters import decoder_parameters
from pagedcli.models.reading import read_spec
from pagedcli.models.weights import open_weights

MOST_BYTES, MOST_PIECES = 64 << 20, 500


def with_tokenizer(writer):
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(chr(0x4E00 + i) for i in range(317))])
    writer.add_token_scores([-float(i) for i in range(320)])
    writer.add_token_types([2, 3, 3] + [1] * 317)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    path, _ = gguf_twins(cached_model("llama", tmp_path_factory), folder, extra=with_tokenizer)
    return path.read_bytes()


def everything(path):
    """All that is read of a file."""
    spec = read_spec(path)
    parameters = decoder_parameters(spec, weight_format(None, spec))
    open_weights(path, "auto", 0, spec).load(
        parameters, ignored=frozenset(), dtype=torch.float32, device=torch.device("cpu")
    )
    Tokenizer(path)


def test_a_header_is_read_once_until_the_file_changes(good, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(good)
    assert read_header(path).metadata is not read_header(path).metadata  # it may change again within its time
    os.utime(path, (0, 0))
    first = read_header(path)
    assert read_header(path).metadata is first.metadata
    assert read_header(path).tensors is first.tensors
    path.write_bytes(good.replace(b"llama.block_count", b"llama.block_cound"))
    os.utime(path, (1, 1))
    assert "llama.block_count" in first.metadata
    assert "llama.block_count" not in read_header(path).metadata


def test_mutated_files_are_read_or_refused_with_an_error_of_ours(good, tmp_path):
    path, rng, num_refused = tmp_path / "model.gguf", random.Random(0), 0
    header_bytes = good.index(b"token_embd.weight") + 2000
    for _ in range(120):
        content = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(4, header_bytes)
            content[place] = rng.choice((0, 1, 255, 127, rng.randrange(256)))
        path.write_bytes(content[: rng.choice((len(content), len(content), rng.randrange(len(content))))])
        with Effort() as spent:
            try:
                everything(path)
            except ModelError as error:
                num_refused += "model.gguf" in error.message
        assert spent.pieces < MOST_PIECES
    assert num_refused > 40


def header(*, version=3, num_tensors=0, num_keys=0, body=b""):
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + body


def text(value):
    return struct.pack("<Q", len(value)) + value


def tensor(name=b"t", shape=(32,), kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


HUGE = 2**62
HOSTILE = {
    "no tensors in a big-endian file": (header(version=0x03000000), "big-endian"),
    "a version of the future": (header(version=9), "version 9"),
    "more tensors than bytes": (header(num_tensors=HUGE), "tensors, allowed"),
    "more keys than bytes": (header(num_keys=HUGE), "keys, allowed"),
    "an endless string": (header(num_keys=1, body=struct.pack("<Q", HUGE)), "cut short"),
    "an endless array": (header(num_keys=1, body=text(b"a") + struct.pack("<IIQ", 9, 4, HUGE)), "at most"),
    "many strings": (header(num_keys=1, body=text(b"a") + struct.pack("<IIQ", 9, 8, 2**21)), "cut short"),
    "nested arrays": (header(num_keys=1, body=text(b"a") + struct.pack("<IIQ", 9, 9, 1)), "array of type 9"),
    "a type of value that is none": (header(num_keys=1, body=text(b"a") + struct.pack("<I", 77)), "type 77"),
    "a key twice": (header(num_keys=2, body=(text(b"a") + struct.pack("<IB", 0, 1)) * 2), "two values"),
    "a tensor twice": (header(num_tensors=2, body=tensor() * 2 + bytes(999)), "two tensors"),
    "too many dimensions": (header(num_tensors=1, body=tensor(shape=(1,) * 9)), "9 dimensions"),
    "a tensor beyond the file": (header(num_tensors=1, body=tensor(offset=HUGE)), "the file has"),
    "a tensor larger than the file": (header(num_tensors=1, body=tensor(shape=(HUGE, HUGE))), "the file has"),
    "an empty tensor": (header(num_tensors=1, body=tensor(shape=(0, 32))), "should have 0 bytes"),
    "rows of half a block": (header(num_tensors=1, body=tensor(shape=(100,), kind=12)), "whole blocks of Q4_K"),
    "1-bit weights": (header(num_tensors=1, body=tensor(shape=(256,), kind=41)), "is Q1_0"),
    "an unknown type": (header(num_tensors=1, body=tensor(kind=999)), "type 999"),
    "an alignment that is none": (
        header(num_keys=1, body=text(b"general.alignment") + struct.pack("<II", 4, 3)),
        "not a power of two",
    ),
    "an alignment of less than a number": (
        header(num_keys=1, body=text(b"general.alignment") + struct.pack("<II", 4, 2)),
        "not a power of two from 8 on",
    ),
    "a tensor between two numbers": (header(num_tensors=1, body=tensor(offset=33) + bytes(999)), "begins at 33, not"),
    "a split with a huge number of files": (
        header(num_keys=1, body=text(b"split.count") + struct.pack("<II", 4, 2**31)),
        "split.count",
    ),
    "no architecture": (header(), "general.architecture"),
    "nothing": (b"GGUF", "cut short"),
}


@pytest.mark.parametrize(("content", "what"), HOSTILE.values(), ids=HOSTILE)
def test_what_lies_is_refused_in_little_memory_and_time(content, what, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    with Effort() as spent, pytest.raises(ModelError, match=what) as error:
        read_spec(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "model.gguf" in error.value.message
    assert peak < MOST_BYTES
    assert spent.pieces < MOST_PIECES


def test_a_header_of_a_gigabyte_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(header(num_keys=1, body=text(b"a") + struct.pack("<IQ", 8, 2**30)))
    with path.open("r+b") as file:
        file.truncate(2**31)  # sparse
    with pytest.raises(ModelError, match="its header has more than"):
        read_header(path)


def test_a_missing_tensor_and_one_that_no_model_has_are_named(tmp_path_factory, tmp_path):
    path, _ = gguf_twins(cached_model("llama", tmp_path_factory), tmp_path)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"blk.1.ffn_down.weight", b"blk.1.ffn_dawn.weight"))
    with pytest.raises(ModelError, match=r"'blk.1.ffn_down.weight' is missing"):
        everything(path)
    path.write_bytes(content.replace(b"llama", b"llamo"))
    with pytest.raises(ModelError, match=r"general.architecture is 'llamo'; from GGUF files these run: llama, qwen2"):
        everything(path)


@pytest.mark.parametrize("num_layers", [0, -1, 2**12 + 1, 2**63])
@pytest.mark.parametrize("architecture", ["llama", "gemma4", "lfm2", "qwen35"])
def test_a_number_of_layers_that_no_model_has_is_refused(architecture, num_layers):
    table = TensorInfo("token_embd.weight", TYPES[0], (8, 8), Path("model.gguf"), 0, 256)
    fields = {
        "block_count": num_layers, "feed_forward_length": [8], "embedding_length": 8, "context_length": 8,
        "attention.head_count": 1, "attention.head_count_kv": [1], "attention.key_length": 8,
        "ssm.time_step_rank": 1, "ssm.inner_size": 8, "ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.group_count": 1,
        "shortconv.l_cache": 3,
    }  # fmt: skip
    metadata = {f"{architecture}.{name}": value for name, value in fields.items()}
    header = Header(Path("model.gguf"), metadata | {"general.architecture": architecture}, {table.name: table})
    with pytest.raises(ModelError, match=r"block_count: .* layers, allowed: 1 to 4,096"):
        describe(header)


def test_a_part_that_is_a_fifo_is_refused(good, tmp_path):
    (tmp_path / "whole.gguf").write_bytes(good)
    parts = split(tmp_path / "whole.gguf", tmp_path / "parts", 2)
    parts[1].unlink()
    os.mkfifo(parts[1])
    with pytest.raises(ModelError, match=r"00002-of-00002\.gguf is a FIFO, not a file"):
        read_header(parts[0])


def test_a_sparse_file_larger_than_memory_is_read(good, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(good)
    os.truncate(path, 2**43)
    everything(path)


@pytest.mark.parametrize(
    ("kinds", "what"), [([5] * 320, "unused"), ([2, 5, 5] + [1] * 317, None)], ids=["all", "ends of a text"]
)
def test_unused_tokens_are_no_ends_of_a_text(kinds, what, tmp_path_factory, tmp_path):
    def extra(writer):
        with_tokenizer(writer)
        writer.kv_data[0].pop("tokenizer.ggml.token_type")
        writer.add_token_types(kinds)

    path, _ = gguf_twins(cached_model("llama", tmp_path_factory), tmp_path, extra=extra)
    if what is None:
        assert Tokenizer(path).encode(chr(0x4E00)) == [0, 3]  # a space, which has no token, and the character
    else:
        with pytest.raises(ModelError, match=what):
            Tokenizer(path)


def test_a_chat_template_that_is_no_text_is_refused(tmp_path_factory, tmp_path):
    def extra(writer):
        with_tokenizer(writer)
        writer.add_array("tokenizer.chat_template", [5, 6])

    path, _ = gguf_twins(cached_model("llama", tmp_path_factory), tmp_path, extra=extra)
    with pytest.raises(ModelError, match=r"tokenizer\.chat_template is \[5, 6\], not a text"):
        Tokenizer(path)
