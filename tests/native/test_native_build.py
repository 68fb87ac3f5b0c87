"""The C++ library: found, built, kept and loaded safely, and right on processors other than this one."""

import logging
import os
import stat
import subprocess
import sys
import tempfile
import time

import pytest
import torch
from attention_cases import Case, fill_cache, run
from conftest import forget_library, needs_compiler
from power_loss import left_behind

from pagedcli.attention import cpu
from pagedcli.attention.base import AttentionSpec
from pagedcli.errors import BackendError
from pagedcli.native import build, load_library


@pytest.fixture
def fresh_outcome(monkeypatch):
    """The loader keeps its answer for the process; forget it before and after. It builds, whatever is installed."""
    monkeypatch.setenv(build.NATIVE, "build")
    forget_library()
    yield
    forget_library()


def test_no_compiler_is_a_reason_with_a_way_out(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setitem(sys.modules, "ziglang", None)
    with pytest.raises(BackendError, match="no C\\+\\+ compiler found") as caught:
        build.find_compiler()
    assert "pagedcli[native]" in caught.value.hint


def test_the_compiler_of_a_package_is_not_taken_from_the_current_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    metadata = tmp_path / "packages" / "ziglang-1.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Name: ziglang\nVersion: 1\n")
    (tmp_path / "packages" / "ziglang.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "packages")
    command = build.find_compiler().command
    (tmp_path / "ziglang.py").write_text("open('ran', 'w')")
    subprocess.run([*command, "--version"], cwd=tmp_path, capture_output=True, check=False)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("is_kept", "words"), [(True, "once on this machine"), (False, "again in each process")])
def test_a_build_is_reported_before_and_after(tmp_path, caplog, is_kept, words):
    compiler = tmp_path / "quick++"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; : > "$2"\n')
    compiler.chmod(0o755)
    caplog.set_level(logging.INFO, "pagedcli")
    build.build(build.Compiler((str(compiler),), "1"), tmp_path / "made.so", is_kept=is_kept)
    before, after = caplog.messages
    assert words in before
    assert before.startswith("compiling the native CPU kernels with")
    assert after.startswith("compiled the native CPU kernels in 0.")


def test_named_compiler_that_is_missing_is_not_replaced_by_another(monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++ -O0")
    with pytest.raises(BackendError, match="/nowhere/g\\+\\+"):
        build.find_compiler()


def test_failing_compiler_is_a_reason_with_its_error_line(monkeypatch, tmp_path, fresh_outcome):
    compiler = tmp_path / "broken++"
    compiler.write_text(
        "#!/bin/sh\necho 'In file included from x:' >&2\necho 'x.cpp:1: error: no such thing' >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):  # the answer is kept
        with pytest.raises(BackendError, match="error: no such thing"):
            load_library()
    assert [path.name for path in (tmp_path / "pagedcli" / "native").iterdir()] == [], "no half-built file is left"


def test_cache_directory_is_private(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory, notes = build.cache_directory()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert notes == ()
    directory.chmod(0o777)
    with pytest.raises(BackendError, match="can be written by others"):
        build.cache_directory()


@pytest.fixture
def quick(tmp_path):
    """A compiler that makes a small library at once, whatever it is given."""
    source = tmp_path / "small.cpp"
    names = ["native_read_all", "native_has_tiles", "native_may_use_tiles", "native_bf16_path"]
    source.write_text("".join(f'extern "C" long {name}() {{ return 0; }}\n' for name in names))
    subprocess.run(["c++", "-shared", "-fPIC", "-o", tmp_path / "small.so", source], check=True)
    compiler = tmp_path / "quick++"
    compiler.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; cp {tmp_path}/small.so "$2"\n')
    compiler.chmod(0o755)
    return compiler


@pytest.fixture
def cache(monkeypatch, tmp_path, quick, fresh_outcome):
    """The cache's folder, after the first build."""
    monkeypatch.setenv("CXX", str(quick))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert load_library().notes[-1].startswith("compiled")
    forget_library()
    return tmp_path / "cache" / "pagedcli" / "native"


def replace(path, content):
    """As a new file: this process has loaded the old one, and would end if it shrank."""
    path.rename(path.parent.parent / path.name)
    path.write_bytes(content)


@needs_compiler
@pytest.mark.parametrize(
    ("suffix", "damage"),
    [
        ("so", lambda path: replace(path, path.read_bytes()[:5000])),
        ("so", lambda path: replace(path, b"")),
        ("so", lambda path: path.unlink()),
        ("sha256", lambda path: path.write_bytes(b"\xff")),
        ("sha256", lambda path: path.unlink()),
        ("so", lambda path: (path.unlink(), os.mkfifo(path))),
        ("sha256", lambda path: (path.unlink(), os.mkfifo(path))),
    ],
    ids=["truncated", "empty", "gone", "another digest", "no digest", "a pipe", "a pipe as digest"],
)
def test_a_damaged_library_in_the_cache_is_built_again(cache, suffix, damage):
    (made,) = cache.glob("*.so")
    whole = made.read_bytes()
    damage(made.with_suffix(f".{suffix}"))
    assert load_library().notes[-1].startswith("compiled")
    assert made.read_bytes() == whole
    forget_library()
    assert load_library().notes == ()


@needs_compiler
def test_a_killed_build_leaves_nothing_that_the_next_one_does_not_remove(monkeypatch, tmp_path, quick, fresh_outcome):
    slow = tmp_path / "slow++"
    slow.write_text('#!/bin/sh\n: > "$TMPDIR/temporary"\nsleep 3\n')
    slow.chmod(0o755)
    folder = tmp_path / "cache" / "pagedcli" / "native"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "CXX": str(slow)}
    program = "from pagedcli.native import load_library; load_library()"
    process = subprocess.Popen([sys.executable, "-c", program], env=environment)
    while not list(folder.glob("building-*/temporary")):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    monkeypatch.setenv("CXX", str(quick))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    load_library()
    assert sorted(path.suffix for path in folder.iterdir()) == [".sha256", ".so"]


@needs_compiler
def test_after_a_power_cut_a_library_is_whole_or_compiled_again(tmp_path, quick):
    compiler, made = build.Compiler((str(quick),), "a compiler"), (tmp_path / "small.so").read_bytes()
    folder, num_whole = tmp_path / "kept", 0
    folder.mkdir()
    path = folder / "kernels.so"
    for _ in left_behind(folder, lambda: build.build(compiler, path)):
        num_whole += build.is_whole(path)
        if not build.is_whole(path):
            build._build_alone(compiler, path, is_kept=True)
        assert path.read_bytes() == made
        assert build.is_whole(path)
    assert num_whole > 0


def test_an_unwritable_cache_leaves_nothing_in_the_temporary_folder(monkeypatch, tmp_path, quick, fresh_outcome):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CXX", str(quick))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    first, second = load_library().notes
    assert "is not writable" in first
    assert second.endswith("(not kept)")
    assert list(temporary.iterdir()) == []


def test_key_depends_on_compiler_flags_and_processor(monkeypatch):
    compiler = build.Compiler(("c++",), "12.2")
    key = build.build_key(compiler)
    assert build.build_key(build.Compiler(("c++",), "13.1")) != key
    for name, value in (("compile_flags", ("-O0",)), ("processor_features", "another machine")):
        with monkeypatch.context() as patch:
            patch.setattr(build, name, lambda value=value: value)
            assert build.build_key(compiler) != key
    assert build.build_key(compiler) == key


@needs_compiler
@pytest.mark.slow
def test_two_processes_may_build_at_once(tmp_path):
    program = "from pagedcli.native import load_library; print(load_library().notes)"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    notes = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert any("compiled" in note for note in notes)
    assert len(list((tmp_path / "pagedcli" / "native").iterdir())) == 2, "the library and its digest"
    again = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert again.stdout.strip() == "()", "the third process finds it built"


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_finite_value_passes_unchanged(library, dtype):
    """A sequence of one token returns its V: all 65536 bit patterns go through write, load, sum and rounding."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).view(1024, 1, 64)
    values = torch.where(values.isfinite(), values, 0)
    for block_size in (1, 16):
        case = Case([(1, 1)] * 1024, block_size, 1, 1, 64, dtype)
        spec = AttentionSpec(torch.device("cpu"), dtype, block_size, 1, 1, 64)
        case.v = values
        result = run(cpu.CpuAttention(spec, library), case)
        # a subnormal may count as zero: AVX512-BF16 flushes them
        smallest = torch.finfo(dtype).tiny if dtype == torch.bfloat16 else 0
        assert torch.equal(result, torch.where(values.abs().float() < smallest, torch.zeros_like(values), values)) or (
            torch.equal(result, values)
        )


@needs_compiler
def test_block_id_outside_the_cache_is_an_error_not_a_crash():
    spec = AttentionSpec(torch.device("cpu"), torch.float32, 16, 4, 2, 64)
    backend = cpu.CpuAttention(spec, load_library())
    case = Case([(20, 1)], 16, 4, 2, 64, torch.float32)
    k_cache, v_cache, batch = fill_cache(backend, case)
    for bad in (-1, k_cache.shape[0]):
        batch.block_table[0, 1] = bad
        with pytest.raises(BackendError, match="block table"):
            backend.attend(case.q[19:], (k_cache, v_cache), batch, case.layer)
    with pytest.raises(BackendError, match="the cache is"):
        backend.attend(case.q[19:], (k_cache[:, :, :8], v_cache[:, :, :8]), batch, case.layer)
