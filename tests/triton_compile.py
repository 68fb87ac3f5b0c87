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
        self.ptx = compiled.asm["ptx"]
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
