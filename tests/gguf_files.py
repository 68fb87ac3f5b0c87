"""GGUF files of tiny models, written by the gguf package, each with its twin: the same numbers as safetensors.

Names, metadata and the order of rows follow llama.cpp's conversion, apart from the code under test.
"""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

gguf = pytest.importorskip("gguf")

ARCHITECTURES = {
    "llama": "LLAMA",
    "mistral": "LLAMA",
    "mixtral": "LLAMA",
    "qwen2": "QWEN2",
    "qwen3": "QWEN3",
    "qwen2_moe": "QWEN2MOE",
    "qwen3_moe": "QWEN3MOE",
    "gemma2": "GEMMA2",
    "gemma3_text": "GEMMA3",
    "phi3": "PHI3",
    "granite": "GRANITE",
    "olmo2": "OLMO2",
    "olmoe": "OLMOE",
    "smollm3": "SMOLLM3",
    "gpt_oss": "GPT_OSS",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2MOE",
}


def random_blocks(kind, rows, columns, rng, spread=0.05):
    """The bytes of `rows` random rows of a type, with numbers of about `spread`."""
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (rows, columns // block, num_bytes), dtype=np.uint8)
    if kind.name == "MXFP4":
        raw[..., 0] = rng.integers(121, 125, raw.shape[:-1])
        return raw.reshape(rows, -1)
    if kind.name == "NVFP4":
        raw[..., :4] = rng.integers(6, 14, (*raw.shape[:-1], 4))
        return raw.reshape(rows, -1)
    if kind.name == "IQ1_M":  # a scale of 2^-7, in four halves of bytes
        raw[..., 49::2] = raw[..., 49::2] & 15 | (np.array([0, 0, 0, 2], np.uint8) << 4)
        return raw.reshape(rows, -1)
    # float16 scales of a block: their places, and the largest number in steps of them
    places, most = {
        "Q8_0": ((0,), 128), "Q4_0": ((0,), 8), "Q4_1": ((0, 2), 15), "Q5_0": ((0,), 16), "Q5_1": ((0, 2), 31),
        "Q2_K": ((80, 82), 45), "Q3_K": ((108,), 128), "Q4_K": ((0, 2), 63 * 15), "Q5_K": ((0, 2), 63 * 31),
        "Q6_K": ((208,), 128 * 32), "IQ4_NL": ((0,), 128), "IQ4_XS": ((0,), 32 * 128),
        "IQ2_XXS": ((0,), 166), "IQ2_XS": ((0,), 166), "IQ2_S": ((0,), 166), "IQ3_XXS": ((0,), 480),
        "IQ3_S": ((0,), 465), "IQ1_S": ((0,), 17), "TQ1_0": ((52,), 1), "TQ2_0": ((64,), 1),
    }[kind.name]  # fmt: skip
    for number, place in enumerate(places):
        scales = (rng.random(raw.shape[:-1]) + 0.5) * 3 * spread / most
        if number:
            scales *= most / 2 / (64 if kind.name in ("Q4_K", "Q5_K") else 16 if kind.name == "Q2_K" else -1)
        raw[..., place : place + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def reordered(values, heads):
    """Rows as llama's files have them: both halves of a head in turn."""
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def in_order(values, heads):
    return values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def llama3_divisors(config):
    """What the conversion writes in place of the parameters of Llama 3.1's rotary embedding."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    plain = config["rope_parameters"]["rope_theta"] ** -(torch.arange(0, head_dim, 2).float() / head_dim)
    made, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.for_model(**config), "cpu")
    return (plain / made).numpy()


class _Writer:
    def __init__(self, path, config):
        self.config, self.model_type = config, config["model_type"]
        self.arch = getattr(gguf.MODEL_ARCH, ARCHITECTURES[self.model_type])
        self.names = gguf.get_tensor_name_map(self.arch, config["num_hidden_layers"])
        self.writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[self.arch])

    def name(self, name):
        name = name.replace(".sinks", ".sinks.weight").replace(".expert_bias", ".expert_bias.bias")
        if self.model_type == "lfm2_moe":
            name = re.sub(r"model\.(?=.*experts\.w)", "", name)
        found = self.names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        return found

    def tensors(self, values):
        """The checkpoint's tensors, of which experts that it stacks are named one by one."""
        for name, tensor in values.items():
            if self.model_type == "gpt_oss" and ".experts." in name:
                for number, own in enumerate(tensor):
                    kind, _, suffix = name.partition(".experts.")[2].partition("_proj")
                    suffix = "bias" if suffix else "weight"
                    parts = {kind: own.T if suffix == "weight" else own}
                    if kind == "gate_up":
                        parts = {"gate": parts[kind][::2], "up": parts[kind][1::2]}
                    for part, each in parts.items():
                        yield f"{name.partition('.experts.')[0]}.experts.{number}.{part}_proj.{suffix}", each
            else:
                yield name, tensor

    def heads(self, name):
        """Heads of q or k whose rows are stored in another order."""
        if self.arch.name not in ("LLAMA", "GRANITE", "SMOLLM3"):
            return None
        if ".q_proj." in name:
            return self.config["num_attention_heads"]
        return self.config["num_key_value_heads"] if ".k_proj." in name else None


def gguf_twins(source, folder, *, type_of=lambda name: "F32", extra=lambda writer: None, name="model.gguf", seed=1):
    """Writes folder/`name` and folder/plain from the model at `source`: with weights of the types that `type_of` names
    by the file's names, and the same numbers in float32. Returns both paths."""
    from gguf_conversions import Conversion

    folder.mkdir(parents=True, exist_ok=True)
    path, plain = folder / name, folder / "plain"
    config = json.loads((source / "config.json").read_text())
    writer, rng = _Writer(path, config), np.random.default_rng(seed)
    conversion = Conversion(source, writer.arch)
    conversion.describe(writer.writer)
    for name, values in conversion.frequencies().items():
        writer.writer.add_tensor(name, values)
    extra(writer.writer)
    stored, twins, experts = {}, {}, {}
    for hf_name, tensor in writer.tensors(load_file(source / "model.safetensors")):
        if (found := re.fullmatch(r"(.*experts)\.(\d+)\.(.*)", hf_name)) is not None:
            experts.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = hf_name
        values, heads = tensor.float().numpy(), writer.heads(hf_name)
        file_name = writer.name(re.sub(r"experts\.\d+\.", "experts.", hf_name))
        kind = gguf.GGMLQuantizationType[type_of(file_name)] if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        if writer.model_type.startswith("gemma") and hf_name.endswith("norm.weight"):
            values = values + 1
        if heads is not None:
            values = reordered(values, heads)
        try:
            raw = gguf.quantize(values, kind)
        except NotImplementedError:  # the package quantizes to few types, but reads all
            raw = random_blocks(kind, *values.shape, rng)
        numbers = gguf.dequantize(raw, kind)
        if heads is not None:
            numbers = in_order(numbers, heads)
        if writer.model_type.startswith("gemma") and hf_name.endswith("norm.weight"):
            numbers = numbers - 1
        stored[hf_name], twins[hf_name] = (file_name, raw, kind), torch.from_numpy(np.ascontiguousarray(numbers))
    for numbered in experts.values():
        parts = [stored.pop(numbered[i]) for i in range(len(numbered))]
        stored[numbered[0]] = (parts[0][0], np.stack([raw for _, raw, _ in parts]), parts[0][2])
    for file_name, raw, kind in stored.values():
        if file_name.startswith("blk") and "shexp" in file_name and raw.shape[0] == 1:
            raw = raw[0]  # as converted: one row is a vector
        if "shortconv.conv" in file_name and raw.ndim == 3:
            raw = raw.squeeze(1)
        writer.writer.add_tensor(file_name, raw, raw_dtype=None if raw.dtype == np.float32 else kind)
    writer.writer.write_header_to_file()
    writer.writer.write_kv_data_to_file()
    writer.writer.write_tensors_to_file()
    writer.writer.close()
    shutil.copytree(source, plain, dirs_exist_ok=True)
    save_file(twins, plain / "model.safetensors", metadata={"format": "pt"})
    return path, plain


def split(path, folder, count):
    """The parts of a split model, made of a file: the first has all metadata."""
    folder.mkdir()
    reader = gguf.GGUFReader(path)
    paths = [folder / f"model-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    for number, part in enumerate(paths):
        writer = gguf.GGUFWriter(part, reader.fields["general.architecture"].contents())
        for field in reader.fields.values() if number == 0 else ():
            if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                sub_type = field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub_type)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths
