"""Memory that the system refuses: one error with the size, and a hint that says what lowers it."""

import errno
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest

from pagedcli.answers.fits import fits, would_fit
from pagedcli.config import EngineConfig
from pagedcli.errors import shortage
from pagedcli.models.hub import model_folder
from pagedcli.models.reading import read_spec
from pagedcli.planning.decide import decide
from pagedcli.planning.machine import described_host

REFUSALS = [
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1073741824 bytes"), "1.00 GiB"),
    (RuntimeError("unable to mmap 2147483648 bytes from file </m>: Cannot allocate memory (12)"), "2.00 GiB"),
    (MemoryError("Unable to allocate 512. MiB for an array with shape (64,)"), "512 MiB"),
    (MemoryError(), ""),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), ""),
    (ImportError("libtorch_cpu.so: failed to map segment from shared object"), ""),
    (RuntimeError("can't start new thread"), ""),
    (RuntimeError("std::bad_alloc"), ""),
]  # fmt: skip


@pytest.mark.parametrize(("error", "size"), REFUSALS, ids=lambda each: type(each).__name__)
def test_every_form_of_refused_memory_is_recognized(error, size):
    found = shortage(error, "the weights", "use --quantization int8")
    assert found is not None
    assert found.message.startswith("not enough memory for the weights")
    assert size in found.message
    assert "--quantization int8" in found.hint


def test_other_errors_are_not_taken_for_refused_memory():
    assert shortage(RuntimeError("shapes differ")) is None
    assert shortage(OSError(errno.ENOSPC, "No space left on device")) is None


def limited(mebibytes, *arguments, folder):
    """The command in a process of its own that has so much address space."""
    (folder / "in.jsonl").write_text('{"prompt": "Once"}\n')
    text = f"ulimit -v {mebibytes << 10}; exec {sys.executable} -m pagedcli {shlex.join(arguments)}"
    result = subprocess.run(["sh", "-c", text], cwd=folder, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2, result.stderr
    return result.stderr


@pytest.mark.quick("generate in.jsonl")
@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited on Linux only")
@pytest.mark.parametrize(
    "command", ["generate in.jsonl", "trace in.jsonl", "plan in.jsonl", "profile-memory", "bench", "doctor"]
)
def test_too_little_memory_for_torch_is_one_error(command, tmp_path):
    error, hint = limited(400, *command.split(), folder=tmp_path).splitlines()
    assert error.startswith("error: not enough memory to load torch and a model: they take ")
    assert "ulimit -v 400 MiB leaves " in error
    assert hint == "hint: raise ulimit -v"


def test_where_nothing_fits_into_the_limit_it_is_named(monkeypatch):
    engine = EngineConfig(device="cpu")
    elsewhere = decide(engine, read_spec(model_folder(engine)), described_host(2**20))
    here = replace(elsewhere, machine=replace(elsewhere.machine, is_here=True))
    monkeypatch.setattr("pagedcli.answers.fits.address_space", lambda: (900 << 20, 0))
    assert would_fit(fits(here)).endswith("; ulimit -v 900.00 MiB leaves 0 B of address space: raise it")
    assert "ulimit" not in would_fit(fits(elsewhere))


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited on Linux only")
def test_a_cache_larger_than_the_limit_is_refused_with_its_size(tmp_path):
    flags = "--device", "cpu", "--kv-cache-memory", "64GiB", "-o", "out.jsonl"
    stderr = limited(8 << 10, "generate", "in.jsonl", *flags, folder=tmp_path)
    assert "asks for a KV cache of 64.00 GiB" in stderr
    assert "hint: lower --kv-cache-memory" in stderr
    assert not (tmp_path / "out.jsonl").exists()
