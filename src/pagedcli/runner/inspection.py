"""What this machine is and what its kernels use of it, as rows for `doctor`. Imports torch."""

import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import torch

from pagedcli import __version__
from pagedcli.errors import BackendError
from pagedcli.native import load_library, processor
from pagedcli.native.build import find_compiler
from pagedcli.native.paths import BF16_PATHS, INT8_PATHS, NAMES, Path, bf16_path, int8_path, measure_peaks
from pagedcli.native.system import usable_cores
from pagedcli.planning.machine import host_memory, unseen_gpu
from pagedcli.records import RIGHT, Bytes, count

_PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "numpy", "msgspec"),
    *("triton", "flash-attn", "ziglang"),
)
_FLAGS = {"fma", "avx2", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx_vnni"}  # x86
_FLAGS |= {"asimd", "asimdhp", "bf16", "i8mm", "sve", "sme"}  # Arm


@dataclass(frozen=True, slots=True)
class Version:
    """What is installed."""

    what: str
    version: str


@dataclass(frozen=True, slots=True)
class Device:
    """A processor or GPU."""

    device: str
    total_bytes: Annotated[Bytes, "memory"]
    free_bytes: Annotated[Bytes, "free"]
    detail: Annotated[str, "what it is"]


@dataclass(frozen=True, slots=True)
class CpuPath:
    """The instructions of a native matrix product."""

    dtype: Annotated[str, "operand type"]
    path: str
    used: Annotated[bool, lambda used: "yes" if used else "", RIGHT]
    gflop_per_s: Annotated[float, "peak, GFLOP/s", count]


def versions() -> list[Version]:
    """The installed packages and the compiler."""
    try:
        compiler = " ".join(find_compiler().command)
    except BackendError as error:
        compiler = error.message
    return [
        Version("pagedcli", __version__),
        Version("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        *(Version(name, _version(name)) for name in _PACKAGES),
        Version("CUDA of torch", torch.version.cuda or "none (CPU-only build)"),
        Version("C++ compiler", compiler),
    ]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def devices() -> tuple[list[Device], list[str]]:
    """The processor and GPUs, and notes: why there is no GPU, and the processor's instructions."""
    total, available = host_memory()
    threads = f"{usable_cores()} cores, threads: {torch.get_num_threads()}, {torch.backends.cpu.get_cpu_capability()}"
    rows = [Device("cpu", total, available, f"{processor.processor_name()}, {threads}")]
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        detail = f"{about.name}, compute capability {about.major}.{about.minor}, {about.multi_processor_count} SMs"
        rows.append(Device(f"cuda:{index}", total, free, detail))
    return rows, [*([] if len(rows) > 1 else [f"no CUDA GPU: {_why_no_gpu()}"]), *instruction_notes()]


def cpu_paths() -> tuple[list[CpuPath], list[str]]:
    """The instructions that the native CPU kernels use, with their peak compared with the processor's others; or why
    there are no such kernels."""
    try:
        functions = load_library().functions
    except BackendError as error:
        return [], [error.message]
    used = (("bfloat16", BF16_PATHS, bf16_path(functions)), ("int8", INT8_PATHS, int8_path(functions)))
    return [
        CpuPath(dtype, NAMES[peak.path], peak.path is path, peak.flop_per_s / 1e9)
        for dtype, paths, path in used
        for peak in measure_peaks(functions, paths, torch.get_num_threads())
    ], []


def instruction_notes() -> list[str]:
    """The instructions that the native kernels use, and the others that the processor has."""
    flags = processor.processor_flags()
    found = sorted(flag for flag in flags if flag.startswith("amx") or flag in _FLAGS)
    notes = [f"matrix instructions of the processor: {', '.join(found) or 'none known'}"]
    try:
        library = load_library()
    except BackendError:
        return notes
    bf16, int8 = bf16_path(library.functions), int8_path(library.functions)
    names = f"bfloat16 by {NAMES[bf16]}, int8 by {NAMES[int8]}, other types by float32 multiply-adds"
    unused: list[str] = [flag for flag in ("avx512_fp16", "amx_fp16") if flag in flags]
    unused += ["amx_bf16"] if bf16 != Path.BF16_TILES and "amx_bf16" in flags else []
    unused += ["amx_int8"] if int8 != Path.INT8_TILES and "amx_int8" in flags else []
    kernels = f"native kernels: {names}; not used: {', '.join(unused) or 'none of those above'}"
    return [*notes, f"native library: {library.origin}", kernels]


def _why_no_gpu() -> str:
    if (reason := unseen_gpu()) is not None:
        return reason
    return "this is a CPU-only build of torch" if torch.version.cuda is None else "no NVIDIA driver is loaded"
