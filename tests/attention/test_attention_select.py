"""Which backend runs, and why not the others."""

import pytest
import torch

from pagedcli.attention import cpu, select
from pagedcli.attention.select import BACKEND_NAMES, REGISTRY, available_backends, select_backend
from pagedcli.errors import BackendError

SPEC = {
    "device": torch.device("cpu"),
    "dtype": torch.float32,
    "block_size": 16,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 64,
}


@pytest.fixture
def no_compiler(monkeypatch):
    def refuse():
        raise BackendError("no C++ compiler found", hint="install g++")

    monkeypatch.setattr(cpu, "load_library", refuse)


def test_auto_without_a_compiler_takes_the_torch_path_and_says_why(no_compiler):
    selection = select_backend("auto", **SPEC)
    assert selection.backend.name == "sdpa"
    assert selection.refused == ("cpu: no C++ compiler found",)


def test_named_backend_that_cannot_run_is_an_error_with_reason_and_hint(no_compiler):
    with pytest.raises(BackendError, match="'cpu' cannot run here: no C\\+\\+ compiler found") as caught:
        select_backend("cpu", **SPEC)
    assert caught.value.hint == "install g++"


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(BackendError, match="unknown attention backend 'cuda'") as caught:
        select_backend("cuda", **SPEC)
    assert all(name in caught.value.hint for name in BACKEND_NAMES)


def test_every_backend_is_tried_and_reported():
    found = dict(available_backends(**SPEC))
    assert list(found) == [entry.name for entry in REGISTRY]
    assert found["reference"] is None
    assert found["sdpa"] is None
    if not torch.cuda.is_available():
        for name in ("varlen", "flash"):
            assert "CUDA" in found[name]


@pytest.mark.parametrize("name", [entry.name for entry in REGISTRY])
def test_backend_carries_the_name_it_is_chosen_by(name):
    try:
        backend = select_backend(name, **SPEC).backend
    except BackendError as error:
        pytest.skip(error.message)
    assert backend.name == name


def test_dtype_that_a_backend_lacks_is_refused_with_the_list():
    with pytest.raises(BackendError, match="dtype float64 is not one of bfloat16, float16, float32"):
        select_backend("cpu", **{**SPEC, "dtype": torch.float64})
    assert select_backend("auto", **{**SPEC, "dtype": torch.float64}).backend.name == "sdpa"


def test_block_size_that_breaks_a_multiple_is_refused_with_the_next_one():
    class Coarse:
        name = "coarse"
        block_size_multiple = 256
        dtypes = frozenset({torch.float32})

    with pytest.raises(BackendError, match="block_size is 300, not a multiple of 256") as caught:
        select.check_spec(Coarse(), select.AttentionSpec(**{**SPEC, "block_size": 300}))
    assert "block_size: 512" in caught.value.hint


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(BackendError, match="num_heads is 7"):
        select_backend("auto", **{**SPEC, "num_heads": 7})
