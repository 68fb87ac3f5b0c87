"""Tiny checkpoints in every format that others quantize to, each with its twin of dequantized float32 weights.

The packings are written from the formats' descriptions, apart from the code under test; compressed-tensors' own library
checks them where it is installed.
"""

import json
import shutil

import torch
from model_zoo import tiny_model
from safetensors.torch import load_file, save_file

from pagedcli.layers.quantized import E2M1, E2M1_ZERO, CodedWeight

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", ".w1", ".w2", ".w3")
LAYERS += ("in_proj_qkv", "in_proj_z", ".in_proj", "out_proj")  # of layers with a state


def quantized_twins(source, folder, quantize, quantization_config):
    """Writes folder/packed and folder/plain from the model at `source`; quantize(weight, generator) gives a module's
    stored tensors and its dequantized weight; there may be one for each end of the modules' names, of the output layer
    only then. Returns both paths.
    """
    packed, plain = folder / "packed", folder / "plain"
    for path in (packed, plain):
        shutil.copytree(source, path)
    tensors, stored, widened = load_file(source / "model.safetensors"), {}, {}
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        by_name = quantize if isinstance(quantize, dict) else {"": quantize}
        if (module.endswith(LAYERS) or module in by_name) and name.endswith(".weight"):
            own = next(each for end, each in by_name.items() if module.endswith(end))
            parts, widened[name] = own(tensor, generator)
            stored |= {f"{module}.{suffix}": part.contiguous() for suffix, part in parts.items()}
        else:
            stored[name] = widened[name] = tensor
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    save_file(widened, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": quantization_config}))
    return packed, plain


def words_of(numbers, bits, order=None):
    """int32 words of the numbers in the last dimension, lowest bits first; `order`: which number each place holds."""
    per_word = 32 // bits
    groups = numbers.long().unflatten(-1, (-1, per_word))
    if order is not None:
        groups = groups[..., list(order)]
    words = (groups << (torch.arange(per_word) * bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def random_codes(weight, bits, group_size, generator, symmetric=False):
    """codes [out, in], scales [out, groups] in float16 and zeros [out, groups] of about the size of the weight."""
    out, num_in = weight.shape
    shape = (out, -(-num_in // (group_size or num_in)))
    codes = torch.randint(0, 1 << bits, weight.shape, generator=generator)
    scales = (torch.rand(shape, generator=generator) + 0.5) * 0.2 * 3.5 / (1 << bits)
    middle = 1 << (bits - 1)
    zeros = torch.full(shape, middle)
    if not symmetric:
        zeros += torch.randint(-middle // 2, middle // 2, shape, generator=generator)
    return codes, scales.half(), zeros


def dequantized(codes, scales, zeros, groups):
    return (codes - zeros[:, groups]).float() * scales.float()[:, groups]


def gptq(bits=4, group_size=32, *, act_order=False, version=1, symmetric=False, bias=False):
    """A quantize function and the quantization_config of GPTQ."""

    def quantize(weight, generator):
        codes, scales, zeros = random_codes(weight, bits, group_size, generator, symmetric)
        num_in = weight.shape[1]
        groups = torch.arange(num_in) // (group_size or num_in)
        if act_order:  # the same of modules with the same input
            groups = groups[torch.randperm(num_in, generator=torch.Generator().manual_seed(num_in))]
        stored = {
            "qweight": words_of(codes, bits).T,
            "qzeros": words_of(zeros.T - (2 - version), bits),
            "scales": scales.T,
            "g_idx": groups.to(torch.int32),
        }
        if bias:
            stored["bias"] = torch.zeros(weight.shape[0])
        return stored, dequantized(codes, scales, zeros, groups)

    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size or -1, "desc_act": act_order}
    config |= {"sym": symmetric, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
    return quantize, config


def awq(group_size=32):
    def quantize(weight, generator):
        codes, scales, zeros = random_codes(weight, 4, group_size, generator)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        stored = {
            "qweight": words_of(codes.T, 4, order),
            "qzeros": words_of(zeros.T, 4, order),
            "scales": scales.T,
        }
        return stored, dequantized(codes, scales, zeros, torch.arange(weight.shape[1]) // group_size)

    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm", "zero_point": True}
    return quantize, {**config, "modules_to_not_convert": ["lm_head"]}


def compressed(form, weights, *, inputs=None):
    """compressed-tensors' config; `weights` are its QuantizationArgs."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }
    return {**config, "config_groups": {"group_0": group}}


def pack_quantized(bits=4, group_size=32, *, symmetric=True):
    def quantize(weight, generator):
        codes, scales, zeros = random_codes(weight, bits, group_size, generator, symmetric)
        scales = scales.bfloat16()
        stored = {
            "weight_packed": words_of(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            stored["weight_zero_point"] = words_of(zeros.T, bits).T
        groups = torch.arange(weight.shape[1]) // (group_size or weight.shape[1])
        return stored, dequantized(codes, scales, zeros, groups)

    strategy = "channel" if group_size is None else "group"
    args = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group_size}
    return quantize, compressed("pack-quantized", args)


def int_quantized(*, symmetric=True, per_tensor=False):
    def quantize(weight, generator):
        codes, scales, zeros = random_codes(weight, 8, None, generator, symmetric)
        if per_tensor:
            scales, zeros = scales[:1, 0], zeros[:1, 0]
        stored = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
        if not symmetric:
            stored["weight_zero_point"] = (zeros - 128).to(torch.int8)
        return stored, (codes - zeros).float() * scales.float()

    args = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": "tensor" if per_tensor else "channel"}
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    return quantize, compressed("int-quantized", args, inputs=inputs)


def auto_round(packing="auto_round:auto_gptq"):
    """AutoRound's config of what equals GPTQ's packing, or AWQ's."""
    quantize, config = awq() if packing.endswith("awq") else gptq(version=1 if packing.endswith("auto_gptq") else 2)
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": config["quant_method"] == "awq"}
    config |= {"data_type": "int", "packing_format": packing, "block_name_to_quantize": "model.layers"}
    return quantize, config


def mixed(first, second, ends):
    """compressed-tensors' config of two formats; `second` is that of modules whose names have these ends."""
    groups = {}
    for place, (_, config) in enumerate((first, second)):
        [group] = config["config_groups"].values()
        targets = [f"re:.*{end}$" for end in ends] if place else ["Linear"]
        groups[f"group_{place}"] = {**group, "format": config["format"], "targets": targets}
    formats = {**dict.fromkeys(ends, second[0]), "": first[0]}
    return formats, {**first[1], "format": "mixed-precision", "config_groups": groups}


def float8(granularity, *, by_compressed_tensors=False):
    """FP8 with scales per "tensor", "channel" or "block" of 32 x 32."""

    def quantize(weight, generator):
        numbers = (weight * 300).to(torch.float8_e4m3fn)
        out, num_in = weight.shape
        shape = {"tensor": (1,), "channel": (out, 1), "block": (-(-out // 32), -(-num_in // 32))}[granularity]
        scales = (torch.rand(shape, generator=generator) + 0.5) / 300
        spread = scales
        if granularity == "block":
            spread = scales.repeat_interleave(32, 0)[:out].repeat_interleave(32, 1)[:, :num_in]
        if granularity == "tensor" and not by_compressed_tensors:
            scales = scales[0]
        is_inverse = granularity == "block" and not by_compressed_tensors
        stored = {"weight": numbers, "weight_scale_inv" if is_inverse else "weight_scale": scales}
        if not by_compressed_tensors and granularity == "tensor":
            stored["input_scale"] = torch.tensor(0.5)
        return stored, numbers.float() * spread

    if by_compressed_tensors:
        args = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": granularity}
        if granularity == "block":
            args["block_structure"] = [32, 32]
        return quantize, compressed("float-quantized", args)
    config = {
        "quant_method": "fbgemm_fp8" if granularity == "channel" else "fp8",
        "modules_to_not_convert": ["lm_head"],
    }
    return quantize, {**config, "weight_block_size": [32, 32]} if granularity == "block" else config


# by the four bits of e2m1: the sign, two bits of exponent, one of mantissa
E2M1_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def random_mxfp4(generator, *shape):
    """Numbers [..., groups, 16] and exponents [..., groups] as gpt-oss stores them."""
    blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(115, 123, shape, dtype=torch.uint8, generator=generator)


def numbers_of(blocks, scales):
    """The numbers [..., in] that they stand for."""
    pairs = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).long()
    return (E2M1_VALUES[pairs] * 2.0 ** (scales[..., None].float() - 127)).flatten(-2)


def mxfp4_twins(folder):
    """A gpt-oss model with MXFP4 experts, and the same numbers unquantized: (plain, packed)."""
    generator = torch.Generator().manual_seed(0)
    plain = tiny_model("gpt_oss", folder / "plain")
    packed = shutil.copytree(plain, folder / "packed")
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, columns, rows = tensor.shape
        blocks, scales = random_mxfp4(generator, experts, rows, columns // 32)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        tensors[name] = numbers_of(blocks, scales).transpose(1, 2).contiguous()
        del stored[name]
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (packed / "config.json").write_text(json.dumps(config))
    return plain, packed


def mxfp8():
    """e4m3 in groups of 32 that share a power of 2."""

    def quantize(weight, generator):
        exponents = torch.randint(110, 118, (len(weight), weight.shape[1] // 32), generator=generator)
        scales = (2.0 ** (exponents - 127)).repeat_interleave(32, 1)
        numbers = (weight / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": numbers, "weight_scale": exponents.to(torch.uint8)}, numbers.float() * scales

    args = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    return quantize, compressed("mxfp8-quantized", args)


def nvfp4(*, by_compressed_tensors=False):
    """e2m1 in groups of 16, which share an e4m3 number; ModelOpt's configuration or that of compressed-tensors."""

    def quantize(weight, generator):
        out, num_in = weight.shape
        blocks = torch.randint(256, (out, num_in // 2), dtype=torch.uint8, generator=generator)
        scales = (torch.rand((out, num_in // 16), generator=generator) * 400).to(torch.float8_e4m3fn)
        overall = torch.rand(1, generator=generator) * 0.0002 + 0.0001
        numbers = E2M1_VALUES[torch.stack((blocks & 15, blocks >> 4), -1).flatten(1).long()]
        if by_compressed_tensors:
            overall = 1 / overall
            spread = scales.float() / overall
            names = "weight_packed", "weight_global_scale", "input_global_scale"
        else:
            spread = scales.float() * overall
            names, overall = ("weight", "weight_scale_2", "input_scale"), overall[0]
        stored = dict(zip(names, (blocks, overall, torch.tensor([0.5])), strict=True)) | {"weight_scale": scales}
        return stored, numbers * spread.repeat_interleave(16, 1)

    if by_compressed_tensors:
        args = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
        return quantize, compressed("nvfp4-pack-quantized", args, inputs={**args, "dynamic": "local"})
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    return quantize, {**config, "ignore": ["lm_head", "model.visual*"]}


def modelopt_mixed(modules):
    """As most are published: these modules of attention, by name, in FP8, MLPs and the output layer in NVFP4, with
    activations that are not rounded, and scales of the KV cache."""
    (four_bits, content), (eight_bits, _) = nvfp4(), float8("tensor")
    in_fp8 = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj")
    others = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    names = (*modules, *(f"model.layers.{i}.mlp" for i in range(4)), "lm_head")
    layers = {name: {"quant_algo": "FP8"} if name.endswith(in_fp8) else others for name in names}
    content = {**content, "quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": ["mtp*"]}
    return {**dict.fromkeys(in_fp8, eight_bits), "lm_head": four_bits, "": four_bits}, content


FORMATS = {
    "gptq": gptq(),
    "gptq-8bit": gptq(8, 64),
    "gptq-act-order": gptq(act_order=True),
    "gptq-v2": gptq(4, None, version=2),
    "gptq-bias": gptq(4, 16, symmetric=True, bias=True),
    "awq": awq(),
    "pack-int4": pack_quantized(),
    "pack-int4-asymmetric": pack_quantized(symmetric=False),
    "pack-int8": pack_quantized(8, None),
    "pack-int8-asymmetric": pack_quantized(8, 32, symmetric=False),
    "int8": int_quantized(),
    "int8-asymmetric": int_quantized(symmetric=False),
    "int8-tensor": int_quantized(per_tensor=True),
    "fp8-tensor": float8("tensor"),
    "fp8-channel": float8("channel"),
    "fp8-block": float8("block"),
    "fp8-block-compressed": float8("block", by_compressed_tensors=True),
    "fp8-channel-compressed": float8("channel", by_compressed_tensors=True),
    "mxfp8": mxfp8(),
    "nvfp4": nvfp4(by_compressed_tensors=True),
    "nvfp4-modelopt": nvfp4(),
    "auto-round-gptq": auto_round(),
    "auto-round-gptq-v2": auto_round("auto_round"),
    "auto-round-awq": auto_round("auto_round:auto_awq"),
    "nvfp4-by-name": modelopt_mixed([f"model.layers.{i}.self_attn.{part}_proj" for i in (0, 1) for part in "qkvo"]),
    "mixed-bits": mixed(pack_quantized(), pack_quantized(8, None), ["down_proj"]),
    "mixed-fp8": mixed(pack_quantized(), float8("channel", by_compressed_tensors=True), ["q_proj", "k_proj", "v_proj"]),
}


def random_weight(
    out, columns, *, bits=4, group_size=32, scales=torch.float16, ordered=True, symmetric=False, levels=(), seed=0
):
    """Random numbers in groups, as the kernels pack them; `levels` is empty or E2M1."""
    generator = torch.Generator().manual_seed(seed)
    shape = (out, -(-columns // group_size))
    groups = None
    if not ordered:
        groups = (torch.arange(columns) // group_size)[torch.randperm(columns, generator=generator)]
    zeros = torch.randint(1 << bits, shape, generator=generator)
    return CodedWeight(
        source=torch.randint(1 << bits, (out, columns), generator=generator).to(torch.uint8),
        bits=bits,
        scales=(torch.rand(shape, generator=generator) + 0.5).to(scales),
        zeros=torch.full(shape, E2M1_ZERO if levels else 1 << bits - 1, dtype=torch.uint8)
        if symmetric or levels
        else zeros.to(torch.uint8),
        group_size=group_size,
        groups=groups,
        levels=levels,
    )


def random_float8(out, columns, group_size, *, seed=0):
    """Random FP8 numbers of all sizes with scales per group."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(256, (out, columns), generator=generator).to(torch.uint8)
    numbers = torch.where(numbers & 127 == 127, 0, numbers).view(torch.float8_e4m3fn)
    scales = torch.rand((out, -(-columns // group_size)), generator=generator) + 0.5
    return CodedWeight(numbers, 8, scales / 100, 0, group_size)


def random_nvfp4(out, columns, *, seed=0):
    """Random numbers of NVFP4 with all of e4m3's scales, the smallest included, and a step for each 256 inputs."""
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randint(127, (out, -(-columns // 16)), generator=generator).to(torch.uint8)
    factors = factors.view(torch.float8_e4m3fn)
    steps = torch.rand((out, -(-columns // 256)), generator=generator) + 0.5
    scales = factors.float() * steps.repeat_interleave(16, 1)[:, : factors.shape[1]]
    codes = torch.randint(16, (out, columns), generator=generator).to(torch.uint8)
    return CodedWeight(codes, 4, scales, E2M1_ZERO, 16, levels=E2M1, steps=steps, factors=factors)


def exact_activations(tokens, columns):
    """Activations that rounding to 8 bits leaves as they are, whichever of them share a scale."""
    return 127.0 * torch.randint(-1, 2, (tokens, columns), generator=torch.Generator().manual_seed(tokens))


def rounded_by_32(x):
    """Activations as the native kernels round them: each 32 in whole steps of their largest magnitude / 127."""
    groups = [(group, group.abs().amax(-1, keepdim=True) / 127) for group in x.split(32, dim=-1)]
    return torch.cat([torch.nan_to_num(group / step).round() * step for group, step in groups], dim=-1)
