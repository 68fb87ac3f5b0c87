"""Check what `make wheels` left in dist/: names and metadata, contents, licences, that no library has an instruction
that a processor may lack on which it is loaded, and that each wheel of this machine runs without a compiler.

    python scripts/check_release.py DIST

The dependencies come from the environment that runs this script. Needs objdump; libraries for macOS are not
disassembled. Exits with 1 and the first finding.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pagedcli
from pagedcli.native.prebuilt import TARGETS, Instructions

MOST_BYTES = 25_000_000  # of one wheel
TAGS = {"linux": "manylinux_2_28", "darwin": "macosx_11_0"}
OBJDUMP = {"x86_64": ("objdump", "x86_64-linux-gnu-objdump"), "aarch64": ("aarch64-linux-gnu-objdump", "objdump")}
# A processor's features (one of them is enough), and the instructions that need them.
INSTRUCTIONS = {
    "x86_64": {
        ("avx2",): r"%ymm",
        ("avx512f",): r"%zmm|%k[1-7]|%[xy]mm(1[6-9]|2\d|3[01])",
        ("avx512_vnni", "avx_vnni"): r"\t(\{vex\} )?vpdp(bus|wss)",
        ("avx512_bf16",): r"\tvdpbf16ps|\tvcvtne2?ps2bf16",
        ("amx_tile",): r"\ttile|\tldtilecfg",
        ("amx_bf16",): r"\ttdpbf16",
        ("amx_int8",): r"\ttdpb[su]",
        (
            "no target",
        ): r"\t(tdpfp16|v(add|mul|fmadd\d+)[ps]h |vpopcnt|vpdpb(ss|su|uu)|v?gf2p8|vp(compress|expand)[bw])",
    },
    "aarch64": {
        ("asimddp",): r"\t[su]dot\t",
        ("bf16",): r"\tbf(dot|mmla|mlal|cvt)",
        ("i8mm",): r"\t(u|s|us)mmla|\tusdot",
        ("no target",): r"\tz\d|\tptrue|\tfmlal",
    },
}
PROGRAM = "from pagedcli.native import load_library; print(load_library().origin)"


def require(holds: object, finding: str) -> None:
    if not holds:
        sys.exit(f"not ready: {finding}")


def check_metadata(about: Message, name: str) -> None:
    require(about["Version"] == pagedcli.__version__, f"{name} has version {about['Version']}")
    require(about["License-Expression"] == "Apache-2.0", f"{name} has no licence expression")
    require("](docs/" not in str(about.get_payload()) or not about.get_all("Project-URL"), f"{name}: relative links")


def check_wheel(path: Path) -> None:
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        check_metadata(message_from_bytes(wheel.read(metadata)), path.name)
        stray = [name for name in names if not name.startswith(("pagedcli/", "pagedcli-"))]
        require(not stray, f"{path.name} holds {stray}")
        require(any(name.endswith("licenses/LICENSE") for name in names), f"{path.name} has no licence")
    require(path.stat().st_size <= MOST_BYTES, f"{path.name} is larger than {MOST_BYTES / 1e6:.0f} MB")
    expected = {
        f"pagedcli/native/libraries/{target.file_name}"
        for target in TARGETS
        if path.stem.endswith(f"{TAGS[target.system]}_{target.machine}")
    }
    found = {name for name in names if name.startswith("pagedcli/native/libraries/")}
    require(found == expected, f"{path.name} has the libraries {sorted(found)}, not {sorted(expected)}")


def check_instructions(target: Instructions, library: Path) -> str:
    """The library has instructions for all that its target needs, and none for anything else. Returns a note."""
    commands = OBJDUMP.get(target.machine, ())
    objdump = next((found for name in commands if (found := shutil.which(name))), None)
    if objdump is None:
        return f"{target.name}: not disassembled"
    command = [objdump, "-d", "--no-show-raw-insn", library]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:  # many know only their own machine's instructions
        return f"{target.name}: not disassembled, as {objdump} does not know {target.machine}"
    listing = done.stdout
    num_instructions = listing.count("\n")
    for features, pattern in INSTRUCTIONS[target.machine].items():
        found = re.search(f"^.*(?:{pattern}).*$", listing, re.MULTILINE)
        if features == ("i8mm",) and "i8mm" in target.needs:
            continue  # the compiler may use it, and no kernel does
        if set(features) & set(target.needs):
            require(found, f"{target.name} makes no use of {features[0]} in {num_instructions:,} instructions")
        else:
            require(not found, f"{target.name} needs {' or '.join(features)}: {found and found[0].strip()}")
    return f"{target.name}: {num_instructions:,} instructions, none beyond those of its target"


def check_libraries(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as wheel:
        for target in TARGETS:
            name = f"pagedcli/native/libraries/{target.file_name}"
            if name in wheel.namelist():
                print(check_instructions(target, Path(wheel.extract(name, folder))))


def check_sdist(path: Path) -> None:
    with tarfile.open(path) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    for wanted in ("LICENSE", "README.md", "src/pagedcli/native/decoder.cpp", "src/pagedcli/py.typed"):
        require(wanted in names, f"{path.name} has no {wanted}")


def check_install(path: Path) -> None:
    """Installed alone, without a compiler on the path: its kernels are loaded, and a row comes out."""
    with tempfile.TemporaryDirectory(prefix="a folder with spaces ") as folder:
        home = Path(folder)
        venv.create(home / "env", symlinks=True)
        python = home / "env" / "bin" / "python"
        site = next((home / "env" / "lib").glob("python3*/site-packages"))
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(site)
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        bare = {"HOME": str(home), "PATH": str(home)}
        origin = subprocess.run([python, "-c", PROGRAM], env=bare, capture_output=True, text=True, check=False)
        require("installed with the package" in origin.stdout, f"{path.name}: {origin.stdout}{origin.stderr}")
        command = [python, "-m", "pagedcli", "generate", "-", "--max-tokens", "8"]
        prompt = '{"prompt": "Once upon a time"}\n'
        row = subprocess.run(command, env=bare, input=prompt, capture_output=True, text=True, check=False)
        require(row.returncode == 0 and '"error":null' in row.stdout, f"{path.name}: {row.stderr}")
        print(f"{path.name}: {origin.stdout.strip()}; a row without a compiler: ok")


def main() -> None:
    dist = Path(sys.argv[1])
    wheels, sdists = sorted(dist.glob("*.whl")), sorted(dist.glob("*.tar.gz"))
    require(wheels and len(sdists) == 1, f"{dist} holds {sorted(os.listdir(dist))}; run: make wheels")
    for path in wheels:
        check_wheel(path)
        check_libraries(path)
    check_sdist(sdists[0])
    for path in wheels:
        if path.stem.endswith(f"{TAGS.get(sys.platform)}_{platform.machine()}"):
            check_install(path)
    print(f"{len(wheels)} wheels and the sdist of {pagedcli.__version__}: ready")


if __name__ == "__main__":
    main()
