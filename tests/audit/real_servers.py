"""Tiny models for real servers, and the servers themselves, as far as this machine has them.

PAGEDCLI_LLAMA_SERVER is the path of llama-server, PAGEDCLI_LLAMA_PYTHON a Python with llama-cpp-python[server], and
PAGEDCLI_VLLM_PYTHON a Python with vLLM for CPUs.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import shared_data


def command_in(variable):
    """The program named by an environment variable; the test is skipped, with the reason, where there is none."""
    path = os.environ.get(variable)
    if path is None or not Path(path).exists():
        pytest.skip(f"{variable} does not name a program on this machine")
    return path


def write_gguf(folder):
    """The stories260k model as a GGUF file in the folder. Returns its path."""
    from gguf_files import gguf, gguf_twins

    source = shared_data("stories260k")
    config = json.loads((source / "config.json").read_text())
    pieces = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    names, kinds = sorted(pieces, key=pieces.get), gguf.TokenType
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL]
    types += [kinds.BYTE if name.startswith("<0x") else kinds.NORMAL for name in names[3:]]

    def extra(writer):
        writer.add_rope_dimension_count(config["head_dim"])
        writer.add_vocab_size(config["vocab_size"])
        writer.add_tokenizer_model("llama")
        writer.add_token_list(names)
        writer.add_token_scores([-float(number) for number in range(len(names))])
        writer.add_token_types(types)
        writer.add_unk_token_id(0)

    return gguf_twins(source, folder, extra=extra)[0]


def write_qwen(folder):
    """A Qwen3 with random weights in bfloat16, and the tokenizer of Qwen2."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151936, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, tie_word_embeddings=True, max_position_embeddings=2048,
        initializer_range=0.08, eos_token_id=151645, bos_token_id=151643,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for file in shared_data("qwen2_tokenizer").iterdir():
        if not file.name.startswith("LICENSE"):
            shutil.copy(file, folder / file.name)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def running(command, port, *, log, wait_s, env=None):
    """The address of a server that a command starts; the server is stopped at the end."""
    url = f"http://127.0.0.1:{port}/v1"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True, env={**os.environ, **(env or {})}
        )
    try:
        deadline_s = time.monotonic() + wait_s
        while True:
            try:
                with urllib.request.urlopen(f"{url}/models", timeout=2):
                    break
            except OSError:
                assert process.poll() is None, f"the server ended: {log.read_text(errors='replace')[-2000:]}"
                assert time.monotonic() < deadline_s, f"not ready: {log.read_text(errors='replace')[-2000:]}"
                time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
