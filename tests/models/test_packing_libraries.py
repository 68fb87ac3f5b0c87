"""Bytes made by the libraries that define GPTQ, AWQ and AutoRound checkpoints, and their own reading of these bytes.

The libraries bring CUDA packages and pins of their own, so they are no test dependencies: each test skips without its
library. They pass with gptqmodel 7.7.0, autoawq 0.2.9 and auto-round 0.16.1, installed with `pip install --no-deps`.
"""

from pathlib import Path

import pytest
import torch
from quantized_zoo import dequantized, random_codes

from pagedcli.models.quantization import read_quantization

SHAPE = 96, 128


def numbers(bits, *, act_order=False, symmetric=False):
    """A linear layer whose weights are codes of groups of 32; scales and zero points [out, groups], group of inputs."""
    generator = torch.Generator().manual_seed(bits)
    codes, scales, zeros = random_codes(torch.empty(SHAPE), bits, 32, generator, symmetric)
    groups = torch.arange(SHAPE[1]) // 32
    if act_order:
        groups = groups[torch.randperm(SHAPE[1], generator=generator)]
    linear = torch.nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    linear.weight.data = dequantized(codes, scales, zeros, groups)
    return linear, scales.float(), zeros.float(), groups


def read(stored, config):
    """The weight in float32 that we read from stored tensors, by the config that goes with them."""
    quantization = read_quantization({"quantization_config": config}, Path("config.json"))
    layer_format = quantization.of("model.layers.0.mlp.up_proj")
    return layer_format.linear([stored], None, torch.float32, "torch")(torch.eye(SHAPE[1])).T


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("act_order", [False, True])
def test_bytes_of_gptqmodel(bits, form, act_order, monkeypatch):
    gptqmodel = pytest.importorskip("gptqmodel")
    monkeypatch.setenv("GPTQMODEL_DISABLE_PACK_EXT", "1")  # it compiles C++ for a minute
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    config = gptqmodel.QuantizeConfig(bits=bits, group_size=32, desc_act=act_order, sym=False, format=form)
    linear, scales, zeros, groups = numbers(bits, act_order=act_order)
    sizes = {"in_features": SHAPE[1], "out_features": SHAPE[0]}
    packed = TorchLinear(bits=bits, group_size=32, sym=False, desc_act=act_order, **sizes)
    packed.pack_block(linear, scales, zeros, groups.to(torch.int32))
    packed.post_init()
    exact = packed.dequantize_weight().T.float()
    if form == "gptq":
        convert_gptq_v2_to_v1_format_module(packed, config)
    stored = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    torch.testing.assert_close(read(stored, config.to_dict()), exact, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(exact, linear.weight.data, rtol=1e-3, atol=1e-5)


def test_bytes_of_autoawq():
    pytest.importorskip("awq")
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    linear, scales, zeros, _ = numbers(4)
    packed = WQLinear_GEMM.from_linear(linear, 4, 32, scales=scales.T, zeros=zeros.T)
    stored = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}
    exact = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, 32).T.float()
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    torch.testing.assert_close(read(stored, config), exact, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(exact, linear.weight.data, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("packing", "module"), [("auto_round", "qlinear_torch"), ("auto_round:auto_gptq", "qlinear_torch_zp")]
)
def test_bytes_of_auto_round(bits, packing, module):
    pytest.importorskip("auto_round")
    from importlib import import_module

    is_symmetric = packing == "auto_round"  # what the library writes this packing for
    linear, scales, zeros, _ = numbers(bits, symmetric=is_symmetric)
    packed = import_module(f"auto_round_extension.torch.{module}").QuantLinear(bits, 32, SHAPE[1], SHAPE[0], False)
    packed.pack(linear, scales, int(zeros[0, 0]) if is_symmetric else zeros)
    stored = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}
    exact = packed(torch.eye(SHAPE[1], dtype=torch.float16)).T.float()
    config = {
        "quant_method": "auto-round",
        "bits": bits,
        "group_size": 32,
        "sym": is_symmetric,
        "packing_format": packing,
    }
    torch.testing.assert_close(read(stored, config), exact, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(exact, linear.weight.data, rtol=1e-3, atol=1e-5)


def test_bytes_of_compressed_tensors_in_nvfp4():
    """To the last bit, as its own reading."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    generator = torch.Generator().manual_seed(0)
    weight, overall = torch.randn(SHAPE, generator=generator), torch.tensor([1000.0 / 3])
    scales = (weight.unflatten(1, (-1, 16)).abs().amax(-1) / 6 * overall).to(torch.float8_e4m3fn)
    settings = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**settings))
    given = {"weight": weight, "weight_scale": scales.float(), "weight_global_scale": overall}
    stored = NVFP4PackedCompressor.compress(given, scheme)
    exact = NVFP4PackedCompressor.decompress(stored, scheme)["weight"]
    group = {"targets": ["Linear"], "weights": settings, "input_activations": None}
    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"]}
    actual = read(stored, {**config, "config_groups": {"group_0": group}})
    assert torch.equal(actual.to(exact.dtype), exact), exact.dtype
    torch.testing.assert_close(actual, weight, rtol=0.3, atol=0.3)
