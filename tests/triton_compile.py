"""Triton kernels compiled for a GPU that is not here, and what ptxas says of them."""

import re
import subprocess
from types import SimpleNamespace

import torch

# Shared memory that one program may use, in bytes, by compute capability: what the card reports as its opt-in limit.
SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
# Shared memory in bytes, and threads, of a multiprocessor.
MULTIPROCESSORS = {
    number: SimpleNamespace(
        shared_memory_per_multiprocessor=limit + 1024, max_threads_per_multi_processor=2048 if limit > 2**17 else 1536
    )
    for number, limit in SHARED_LIMIT.items()
}
MOST_SPILLS = {("smallest_kept_kernel", 120): 40}  # bytes by kernel and compute capability; 0 for all others
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


class Compiled:
    """One kernel compiled for a GPU that is not here: what ptxas says of it."""

    def __init__(self, function, types, constants, capability, num_warps, tmp_path, num_stages=None):
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
        from triton.compiler import ASTSource

        names = function.arg_names
        specialized = {
            param.name
            for param in function.params
            if not (param.do_not_specialize or param.do_not_specialize_on_alignment)
        }
        aligned = [n for n in types if types[n].startswith("*") or n in ("q_stride", "k_stride", "v_stride")]
        source = ASTSource(
            fn=function,
            signature={name: types.get(name, "constexpr") for name in names},
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned if name in specialized},
        )
        options = {"num_warps": num_warps} | ({} if num_stages is None else {"num_stages": num_stages})
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        self.ptx, self.ttgir = compiled.asm["ptx"], compiled.asm["ttgir"]
        self.name, self.metadata = function.__name__, compiled.metadata
        self.shared_bytes = compiled.metadata.shared
        ptx_file = tmp_path / "kernel.ptx"
        ptx_file.write_text(self.ptx)
        command = [get_ptxas(capability).path, "-v", "--gpu-name", sm_arch_from_capability(capability), str(ptx_file)]
        command += ["-o", str(tmp_path / "kernel.cubin")]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        self.spilled_bytes = sum(int(n) for n in re.findall(r"(\d+) bytes spill", report))
        self.n_regs = int(re.search(r"Used (\d+) registers", report)[1])

    def warps_side_by_side(self, capability):
        """Warps of the kernel that a multiprocessor holds at a time."""
        from pagedcli.attention.triton_launch import programs_per_processor

        return self.metadata.num_warps * programs_per_processor(self, MULTIPROCESSORS[capability])

    def copy_widths(self):
        """Bytes of each asynchronous copy to shared memory."""
        return [int(n, 0) for n in re.findall(r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], (\w+)", self.ptx)]

    def rings(self):
        """Tiles in each ring of asynchronous copies in shared memory."""
        shapes = re.findall(r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x(?!i)", self.ttgir)
        return [int(tiles) for tiles in shapes]


def kernel_constants(dtype, head_dim, group, block_size, capability, *, windowed=False, value_dim=None):
    """Types and constants of a launch as TritonAttention makes it."""
    from pagedcli.attention import triton_paged as paged

    value_dim = value_dim or head_dim
    block_d, block_r = (max(16, 1 << (n - 1).bit_length()) for n in (value_dim, head_dim - value_dim or 1))
    decode, prefill = paged.tile_configs(dtype, block_d, divmod(capability, 10))
    data = f"*{NAMES[dtype]}"
    tensors = dict.fromkeys(("q_ptr", "k_cache_ptr", "v_cache_ptr", "out_ptr"), data) | {"sinks_ptr": "*fp32"}
    lists = dict.fromkeys(("item_seq_ptr", "cu_q_ptr", "num_tokens_ptr", "table_ptr"), "*i32")
    types = {
        **tensors,
        **lists,
        "q_stride": "i32",
        "table_stride": "i32",
        "factor": "fp32",
        "cap": "fp32",
        "window": "i32",
        "v_scale": "fp32",
    }
    constants = {
        "H": 8 * group,
        "G": 8,
        "S": block_size,
        "D": head_dim,
        "DV": value_dim,
        "BLOCK_STRIDE": 8 * block_size * head_dim,
        "BLOCK_D": block_d,
        "BLOCK_R": block_r,
        "UPCAST": False,
        "CAPPED": False,
        "WINDOWED": windowed,
        "SINKS": windowed,
    }
    return decode, prefill, types, constants


def kernel_weight_types(form, capability, data):
    """Types of the arguments that hold a layers.triton_products.KernelWeight; `data` is that of activations."""
    numbers = {"floats": data, "float8": "*fp8e4nv" if capability >= 89 else "*u8"}.get(form, "*i32")
    scales = {"floats": data, "float8": "*fp32"}.get(form, "*fp16")
    return {"numbers_ptr": numbers, "scales_ptr": scales, "zeros_ptr": "*u8" if "codes" in form else numbers}
