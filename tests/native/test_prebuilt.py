"""Libraries that a wheel brings along: the right one for a processor, and never another version's."""

import platform
import shutil
import subprocess
import sys

import pytest
from conftest import forget_library, needs_compiler

from pagedcli.errors import BackendError
from pagedcli.native import build, load_library, prebuilt

ZEN4 = frozenset(next(each.needs for each in prebuilt.TARGETS if each.name == "avx512-bf16"))


@pytest.fixture
def processor(monkeypatch):
    def pretend(flags, machine="x86_64", system="linux"):
        monkeypatch.setattr(prebuilt, "processor_flags", lambda: frozenset(flags))
        monkeypatch.setattr(platform, "machine", lambda: machine)
        monkeypatch.setattr(sys, "platform", system)

    return pretend


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """A folder of libraries, one for each target, that do next to nothing; no compiler is on the path."""
    source = tmp_path / "small.cpp"
    names = ["native_read_all", "native_has_tiles", "native_may_use_tiles", "native_bf16_path", "native_int8_path"]
    source.write_text("".join(f'extern "C" long {name}() {{ return 0; }}\n' for name in names))
    folder = tmp_path / "libraries"
    folder.mkdir()
    subprocess.run(["c++", "-shared", "-fPIC", "-o", tmp_path / "small.so", source], check=True)
    for target in prebuilt.TARGETS:
        shutil.copy(tmp_path / "small.so", folder / target.file_name)
    monkeypatch.setattr(prebuilt, "LIBRARIES", folder)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "/nowhere/g++")
    forget_library()
    yield folder
    forget_library()


@pytest.mark.parametrize("target", prebuilt.TARGETS, ids=lambda target: target.name)
def test_a_processor_gets_the_best_library_and_none_that_needs_more_than_it_has(processor, target):
    processor(target.needs, target.machine, target.system)
    assert prebuilt.runnable() is target
    for missing in target.needs:
        processor(set(target.needs) - {missing}, target.machine, target.system)
        found = prebuilt.runnable()
        assert found is None or missing not in found.needs


def test_a_processor_or_system_without_a_library_gets_none(processor):
    processor({"sse2"})
    assert prebuilt.runnable() is None
    processor(ZEN4, "riscv64")
    assert prebuilt.runnable() is None
    processor(ZEN4, system="win32")
    assert prebuilt.runnable() is None


@pytest.mark.parametrize("target", prebuilt.TARGETS, ids=lambda target: target.name)
def test_what_the_compiler_may_use_is_what_the_processor_is_asked_for(target):
    named = {part.replace("_", "") for part in target.cpu.split("+")[1:]}
    asked = {{"asimddp": "dotprod"}.get(need, need).replace("_", "") for need in target.needs}
    assert named <= asked


@needs_compiler
def test_an_installed_library_is_loaded_without_a_compiler_or_a_cache(installed, processor, tmp_path):
    processor(ZEN4)
    library = load_library()
    assert library.notes == ()
    assert library.origin == "avx512-bf16, installed with the package (tiles needs amx_tile, amx_bf16, amx_int8)"
    assert build.instructions(library).endswith("avx512-bf16 library")
    assert not (tmp_path / "cache").exists()


@needs_compiler
def test_a_library_of_other_sources_is_never_loaded(installed, processor):
    processor(ZEN4)
    [path] = installed.glob("avx512-bf16-*.so")
    path.rename(installed / "avx512-bf16-0123456789ab.so")
    with pytest.raises(BackendError, match="compiler of \\$CXX does not exist"):
        load_library()


@needs_compiler
def test_an_installed_library_that_cannot_be_loaded_is_told_with_a_way_on(installed, processor):
    """As on a file system that is mounted noexec."""
    processor(ZEN4)
    [path] = installed.glob("avx512-bf16-*.so")
    path.write_bytes(b"no library")
    with pytest.raises(BackendError, match="cannot be loaded") as caught:
        load_library()
    assert "PAGEDCLI_NATIVE=build" in caught.value.hint


@needs_compiler
def test_a_build_can_be_asked_for_and_other_values_are_refused(installed, processor, monkeypatch):
    processor(ZEN4)
    monkeypatch.setenv(build.NATIVE, "build")
    with pytest.raises(BackendError, match="compiler of \\$CXX does not exist"):
        load_library()
    forget_library()
    monkeypatch.setenv(build.NATIVE, "installed")
    with pytest.raises(BackendError, match="PAGEDCLI_NATIVE is 'installed'") as caught:
        load_library()
    assert "avx512-bf16, avx512-vnni, avx512, avx2-vnni, avx2" in caught.value.hint


@needs_compiler
def test_a_library_can_be_asked_for_by_name_if_the_processor_can_run_it(installed, processor, monkeypatch):
    processor(ZEN4)
    best = build.library_key()
    monkeypatch.setenv(build.NATIVE, "avx2")
    assert load_library().origin == "avx2, installed with the package (asked for)"
    assert build.library_key() != best
    (installed / next(each for each in prebuilt.TARGETS if each.name == "avx512").file_name).unlink()
    for name, reason in (("tiles", "has no amx_tile, amx_bf16, amx_int8"), ("avx512", "brought no avx512 library")):
        monkeypatch.setenv(build.NATIVE, name)
        forget_library()
        with pytest.raises(BackendError, match=reason):
            load_library()


def test_what_is_compiled_says_why_no_library_serves(installed, processor):
    shutil.rmtree(installed)
    processor(ZEN4)
    assert prebuilt.library() == "this installation brought no avx512-bf16 library"
    processor({"sse2"})
    assert prebuilt.library() == "no wheel has kernels for this processor"


@needs_compiler
def test_kept_measurements_are_those_of_one_library(installed, processor, monkeypatch):
    processor(ZEN4)
    key = build.library_key()
    processor(set(ZEN4) - {"avx512_bf16"})
    assert build.library_key() != key
    processor(ZEN4)
    assert build.library_key() == key
    monkeypatch.setattr(build, "source_digest", lambda: "0" * 12)
    assert build.library_key() != key
