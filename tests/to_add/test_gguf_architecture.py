"""To add an architecture of GGUF files whose model is a known family, touch its entry in gguf/architectures.py."""

import pytest
from gguf_files import gguf, gguf_twins
from harness.engine import make_engine, ragged_prompts, run
from model_zoo import cached_model

from pagedcli.errors import ModelError
from pagedcli.models.gguf.architectures import ARCHITECTURES, Architecture
from pagedcli.models.reading import read_spec
from pagedcli.sampling_params import SamplingParams


@pytest.fixture
def files(tmp_path, tmp_path_factory, monkeypatch):
    """A file of the new architecture, and the folder with its numbers."""
    monkeypatch.setitem(gguf.MODEL_ARCH_NAMES, gguf.MODEL_ARCH.QWEN3, "lucky")
    return gguf_twins(cached_model("qwen3", tmp_path_factory), tmp_path)


def test_without_its_entry_it_is_refused_with_those_that_run(files):
    with pytest.raises(ModelError, match=r"general\.architecture is 'lucky'; from GGUF files these run: llama, "):
        read_spec(files[0])


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_its_file_gives_the_tokens_of_the_folder(files, backend, monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "lucky", Architecture(family="qwen3"))
    prompts, params = ragged_prompts(4), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    found = [run(make_engine(path, attention_backend=backend), prompts, params) for path in files]
    assert found[0] == found[1]
