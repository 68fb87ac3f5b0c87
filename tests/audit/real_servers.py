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

import numpy as np
import pytest
from conftest import shared_data


def command_in(variable):
    """The program named by an environment variable; the test is skipped, with the reason, where there is none."""
    path = os.environ.get(variable)
    if path is None or not Path(path).exists():
        pytest.skip(f"{variable} does not name a program on this machine")
    return path


def write_gguf(path):
    """The stories260k model as GGUF."""
    gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
    from safetensors.numpy import load_file

    folder = shared_data("stories260k")
    config = json.loads((folder / "config.json").read_text())
    pieces = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("stories260k")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("llama")
    names = sorted(pieces, key=pieces.get)
    writer.add_token_list(names)
    writer.add_token_scores([-float(number) for number in range(len(names))])
    types = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    types += [gguf.TokenType.BYTE if name.startswith("<0x") else gguf.TokenType.NORMAL for name in names[3:]]
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)

    def interleaved(weight, count):  # llama.cpp rotates neighbours, Hugging Face halves
        return weight.reshape(count, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)

    for name, weight in load_file(folder / "model.safetensors").items():
        weight = weight.astype(np.float32)
        if "q_proj" in name:
            weight = interleaved(weight, heads)
        if "k_proj" in name:
            weight = interleaved(weight, kv_heads)
        writer.add_tensor(_gguf_name(name), np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name):
    for old, new in (
        ("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("model.layers.", "blk."),
        ("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm"), ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"), ("self_attn.v_proj", "attn_v"), ("self_attn.o_proj", "attn_output"),
        ("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down"), ("lm_head", "output"),
    ):  # fmt: skip
        name = name.replace(old, new)
    return name


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
