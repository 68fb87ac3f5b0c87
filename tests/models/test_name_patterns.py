"""The patterns by which quantized checkpoints name layers: as Python's, but none takes long."""

import re

import pytest
from effort import Effort

from pagedcli.errors import ModelError
from pagedcli.models.quantization import read_quantization
from pagedcli.models.stored_quantization import name_pattern

NAMES = ["", "lm_head", "model.layers.0.mlp.gate_proj", "model.layers.17.self_attn.q_proj", "model.layers.3.mlp.gate"]
NAMES += [
    "model.layers.21.mlp.experts.5.down_proj",
    "visual.blocks.2.attn.qkv",
    "xlm_head",
    "model_layers_0_mlp_up_proj",
]


@pytest.mark.parametrize(
    "pattern",
    [
        r".*down_proj",
        r".*mlp.gate$",
        r"lm_head",
        r"^model\.layers\.(0|1|2[0-9])\.mlp\..*",
        r"model\.layers\.\d+\.(?:mlp\.(gate|up)_proj|self_attn\.[qkv]_proj)$",
        r".*\.(18|21)\..*(gate|down).*",
        r"(.*lm_head|visual.*)$",
        r"model.layers.[^0]+?.self_attn.(q|k)_proj",
        r"",
        r"(model|(visual)?)\.?(layers|blocks)*",
        r"(a|b|)*(x?lm)+_head|^$",
        r".+proj$|$",
        r"x^|model\-",
        r"[-\w.]+[\]ab]?\d\.attn",
    ],
)
def test_patterns_match_as_python_matches_them(pattern):
    for name in NAMES:
        assert (name_pattern(pattern).match(name) is not None) == (re.match(pattern, name) is not None), name


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (r"(?!model)", "invalid perl operator: (?!"),
        (r"(?<=a)b", "invalid perl operator: (?<="),
        (r"(a)\1", r"invalid escape sequence: \1"),
        (r"\d{1,9999999}", "invalid repetition size"),
        (r"((a{1,99}){1,99}){1,99}", "invalid repetition size"),
        (r"(\w{500}|\pL{500}){2}", "pattern too large"),
        (r"a)", "unexpected )"),
        (r"(a", "missing )"),
        (r"*a", "no argument for repetition operator"),
        (r"[z-a]", "invalid character class range"),
        ("a" * 3000, "longer than 2,000 characters"),
    ],
)
def test_other_patterns_are_refused_by_name(pattern, words, tmp_path):
    with pytest.raises(ValueError, match=re.escape(words)):
        name_pattern(pattern)
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4, "dynamic": {f"-:{pattern}": {}}}}
    with pytest.raises(ModelError, match="has a pattern that is not supported"):
        read_quantization(config, tmp_path)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", ".*.*.*.*.*.*.*.*b", "(a*)*(a*)*$b", ".*a" + "." * 100])
def test_no_pattern_takes_long(pattern):
    with Effort() as spent:
        matcher = name_pattern(pattern)
        for length in range(200, 260):
            matcher.match("a" * length + "c")
    assert spent.pieces < 100
