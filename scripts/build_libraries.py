"""Compile the native kernels for the wheels: one library for each set of instructions of a platform.

    python scripts/build_libraries.py FOLDER --platform linux-x86_64 [--only avx2 ...]

Needs the package `ziglang`, whose clang compiles for every platform on any of them (about two minutes of one core for
each library). `make wheels` calls it. The same sources and compiler give the same bytes.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from pagedcli.native.build import FLAGS, Compiler, compile_sources
from pagedcli.native.prebuilt import TARGETS, Instructions, source_digest

TIMEOUT_S = 3600  # the first link for a target compiles zig's C++ library, for minutes on a busy machine
# The oldest C library of manylinux_2_28, and of macOS 11.
TRIPLES = {"linux": "{machine}-linux-gnu.2.28", "darwin": "aarch64-macos.11.0"}


def flags(target: Instructions) -> tuple[str, ...]:
    triple = TRIPLES[target.system].format(machine=target.machine)
    # no debug information, which would hold this machine's paths
    return (*FLAGS, "-target", triple, f"-mcpu={target.cpu}", "-g0", "-s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    platforms = sorted({f"{target.system}-{target.machine}" for target in TARGETS})
    parser.add_argument("--platform", choices=platforms, required=True)
    parser.add_argument("--only", nargs="*", help="names of targets")
    parser.add_argument("--compiler", default=sys.executable, help="the Python that has ziglang")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    compiler = Compiler((arguments.compiler, "-P", "-m", "ziglang", "c++"), "ziglang")
    for target in TARGETS:
        wanted = arguments.only is None or target.name in arguments.only
        if f"{target.system}-{target.machine}" != arguments.platform or not wanted:
            continue
        made = arguments.folder / target.file_name
        if not made.is_file():
            with tempfile.TemporaryDirectory() as scratch:
                library = compile_sources(compiler, flags(target), Path(scratch) / made.name, timeout_s=TIMEOUT_S)
                source_digest.cache_clear()
                if made.name != target.file_name:
                    sys.exit("the sources changed while they were compiled: run it again")
                shutil.copyfile(library, made)
        print(f"{made} {made.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
