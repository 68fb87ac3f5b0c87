"""Which backend runs, and why not the others."""

import re
from dataclasses import replace

import pytest
import torch

from pagedcli.attention import select
from pagedcli.attention.base import AttentionSpec, Capabilities
from pagedcli.attention.layer import AttentionLayer
from pagedcli.attention.select import REGISTRY, available_backends, backend_names, select_backend
from pagedcli.errors import BackendError

SPEC = {
    "device": torch.device("cpu"),
    "dtype": torch.float32,
    "block_size": 16,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 64,
}


def test_auto_without_a_compiler_takes_the_torch_path_and_says_why(no_compiler):
    selection = select_backend("auto", **SPEC)
    assert selection.backend.name == "sdpa"
    assert selection.refused == (f"cpu: {no_compiler}",)


def test_named_backend_that_cannot_run_is_an_error_with_reason_and_hint(no_compiler):
    with pytest.raises(BackendError, match=re.escape(f"'cpu' cannot run here: {no_compiler}")) as caught:
        select_backend("cpu", **SPEC)
    assert caught.value.hint == "correct or unset CXX"


def test_a_dtype_that_the_kernels_lack_goes_to_torch():
    assert select_backend("auto", **{**SPEC, "dtype": torch.float64}).backend.name == "sdpa"


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(BackendError, match="unknown attention backend 'cuda'") as caught:
        select_backend("cuda", **SPEC)
    assert all(name in caught.value.hint for name in backend_names())


def test_every_backend_is_tried_and_reported():
    found = dict(available_backends(AttentionSpec(**SPEC)))
    assert list(found) == [entry.name for entry in REGISTRY]
    assert found["reference"] is None
    assert found["sdpa"] is None
    if not torch.cuda.is_available():
        assert "CUDA" in found["flash"]


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(BackendError, match="num_heads is 7"):
        select_backend("auto", **{**SPEC, "num_heads": 7})


PLAIN = AttentionLayer(scale=0.125)


@pytest.mark.parametrize(
    ("lacking", "asked", "reason"),
    [
        ({}, {"head_dim": 60}, "head_dim is 60, not a multiple of 8"),
        ({}, {"head_dim": 264}, "head_dim is 264, more than 256"),
        ({}, {"num_heads": 40}, "10 query heads per key/value head are more than 8"),
        ({}, {"kv_dtype": torch.int8}, "does not support a KV cache of int8"),
        ({"windows": False}, {"layers": frozenset({PLAIN, replace(PLAIN, window=64)})}, "has a window of 64 tokens"),
        ({"soft_cap": False}, {"layers": frozenset({PLAIN, replace(PLAIN, soft_cap=50.0)})}, "scores at 50"),
        ({"negative_scale": False}, {"layers": frozenset({replace(PLAIN, scale=-1.0)})}, "a layer has -1"),
        ({}, {"dtype": torch.float64}, "dtype float64 is not one of float32"),
        ({"block_size_multiple": 256}, {"block_size": 300}, "block_size is 300, not a multiple of 256"),
    ],
)
def test_what_a_backend_lacks_is_refused_with_the_reason(lacking, asked, reason):
    able = Capabilities(
        dtypes=frozenset({torch.float32}),
        head_dim_multiple=8,
        max_head_dim=256,
        max_group=8,
        windows=True,
        soft_cap=True,
    )
    select.check_spec(able, select.AttentionSpec(**{**SPEC, "layers": frozenset({PLAIN})}))
    with pytest.raises(BackendError, match=reason) as caught:
        select.check_spec(replace(able, **lacking), select.AttentionSpec(**{**SPEC, **asked}))
    assert "block_size" not in asked or "block_size: 512" in caught.value.hint


def test_a_layer_that_the_fast_backends_cannot_run_goes_to_one_that_can():
    selection = select_backend("auto", **SPEC, layers=[replace(PLAIN, soft_cap=30.0)])
    assert selection.backend.capabilities.soft_cap
    assert all("does not support soft caps" in reason for reason in selection.refused)
