"""What a package index shows and wheels bring: a README whose links lead into the repository, libraries without
instructions that a processor may lack. And one line for skipped tests."""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from pagedcli.native.prebuilt import TARGETS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def script(path="setup.py"):
    spec = importlib.util.spec_from_file_location(f"pagedcli_{Path(path).stem}", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_link_and_picture_leads_to_a_file_of_the_repository():
    text = script().with_absolute_links(README, "https://host/owner/name/", "1.2.3")
    targets = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", text)
    assert len(targets) == len(re.findall(r"\]\(", README))
    own = "https://host/owner/name/{}/v1.2.3/"
    num_pictures = 0
    for is_picture, target in targets:
        view = own.format("raw" if is_picture else "blob")
        assert target.startswith(view), target
        assert (ROOT / target.removeprefix(view).partition("#")[0]).exists(), target
        num_pictures += bool(is_picture)
    assert num_pictures == README.count("![") > 0


def test_links_that_are_absolute_or_within_the_page_stay():
    text = "[a](https://x.org) [b](#part) [c](mailto:x@y.z)"
    assert script().with_absolute_links(text, "https://host/o/n", "1") == text


AVX2 = "vpaddd %ymm0,%ymm0,%ymm0"
AVX512 = f"{AVX2}; vpaddd %zmm0,%zmm0,%zmm0"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="not an x86-64 processor")
@pytest.mark.skipif(shutil.which("objdump") is None or shutil.which("gcc") is None, reason="no gcc or objdump here")
@pytest.mark.parametrize(
    ("name", "instructions", "finding"),
    [
        ("avx2", AVX2, None),
        ("avx2", AVX512, "avx2 needs avx512f: .*vpaddd %zmm0"),
        ("avx2", "vpaddd %ymm0,%ymm0,%ymm17", "avx2 needs avx512f"),
        ("avx2", f"{AVX2}; {{vex}} vpdpbusd %ymm0,%ymm0,%ymm0", "avx2 needs avx512_vnni or avx_vnni"),
        ("avx2-vnni", f"{AVX2}; {{vex}} vpdpbusd %ymm0,%ymm0,%ymm0", None),
        ("avx2", "nop", "avx2 makes no use of avx2"),
        ("avx512", AVX512, None),
        ("avx512", f"{AVX512}; vpdpbusd %zmm0,%zmm0,%zmm0", "avx512 needs avx512_vnni or avx_vnni"),
        ("avx512-vnni", f"{AVX512}; vpdpbusd %zmm0,%zmm0,%zmm0", None),
        ("avx512-vnni", f"{AVX512}; vpdpbusd %zmm0,%zmm0,%zmm0; tilerelease", "avx512-vnni needs amx_tile"),
        ("avx512-vnni", f"{AVX512}; vpdpbusd %zmm0,%zmm0,%zmm0; vaddph %zmm0,%zmm0,%zmm0", "needs no target"),
    ],
)
def test_a_library_with_an_instruction_that_a_processor_may_lack_is_found(name, instructions, finding, tmp_path):
    source, library = tmp_path / "small.s", tmp_path / "small.so"
    source.write_text(f".globl f\nf: {instructions}; ret\n")
    subprocess.run(["gcc", "-shared", "-nostdlib", "-o", library, source], check=True)
    target = next(each for each in TARGETS if each.name == name)
    check = script("scripts/check_release.py").check_instructions
    if finding is None:
        assert check(target, library).startswith(f"{name}: ")
    else:
        with pytest.raises(SystemExit, match=finding):
            check(target, library)


def test_an_sdist_has_the_same_bytes_whenever_it_is_made(tmp_path):
    made = []
    for age_s in (0, 1_000_000):
        folder = tmp_path / str(age_s) / "pagedcli-1"
        folder.mkdir(parents=True)
        for name in ("b.py", "a.py"):
            (folder / name).write_text(name)
            os.utime(folder / name, (age_s, age_s))
        script().write_archive(tmp_path / f"{age_s}.tar.gz", folder, made_s=1_700_000_000)
        made.append((tmp_path / f"{age_s}.tar.gz").read_bytes())
    assert made[0] == made[1]
    with tarfile.open(tmp_path / "0.tar.gz") as archive:
        assert archive.getnames() == ["pagedcli-1", "pagedcli-1/a.py", "pagedcli-1/b.py"]
