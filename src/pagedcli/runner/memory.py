"""Measures memory: the peak of the largest step, what a GPU leaves for the KV cache, and which processes use it.

Used by LLMEngine before it sizes its KV cache, and by `pagedcli profile-memory`.
"""

import ctypes
import os
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from pagedcli.core.budget import MemoryBudget, MemoryTerms, StepShape
from pagedcli.core.groups import TableShape
from pagedcli.core.plan import Plan
from pagedcli.core.scheduler import ScheduledStep
from pagedcli.core.sequence import Sequence
from pagedcli.layers.sampling import choose_tokens, smallest_kept
from pagedcli.planning.machine import host_memory
from pagedcli.runner.model_runner import ModelRunner, RunnerSpec
from pagedcli.sampling_params import SamplingParams

_PROC = Path("/proc")


def measure_budget(spec: RunnerSpec, utilization: float) -> MemoryBudget | None:
    """The terms of total x utilization - used - peak + current on a CUDA device; None on a CPU, where the pool has a
    fixed size. Runs the largest step that the limits allow, then frees its memory.
    """
    device, limits = spec.device, spec.limits
    if device.type != "cuda":
        return None
    spec.backend.reserve(limits.max_num_seqs, limits.max_model_len)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    current = torch.cuda.memory_allocated(device)
    step = limits.largest_step
    limits = replace(limits, num_blocks=step_blocks(step, limits.tables), max_num_seqs=step.num_seqs)
    runner = ModelRunner(replace(spec, limits=limits))
    taken = measure_step(runner, step)
    assert taken is not None, "a CUDA device reports its memory"
    peak = current + taken
    del runner
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return MemoryBudget(
        total=total,
        utilization=utilization,
        used=total - free,
        peak=peak,
        current=current,
    )


def graph_bytes(spec: RunnerSpec) -> int:
    """Device memory of the graphs: all are captured once on a cache of one block, then dropped."""
    device, runner = spec.device, ModelRunner(replace(spec, limits=replace(spec.limits, num_blocks=1)))
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free_before, _ = torch.cuda.mem_get_info(device)
    runner.make_graphs(capture=True)
    torch.cuda.empty_cache()  # frees the warm-up's memory; the graphs' pool stays
    free_after, _ = torch.cuda.mem_get_info(device)
    del runner
    torch.cuda.empty_cache()
    return max(0, free_before - free_after)


def measure_terms(
    runner: ModelRunner, plan: Plan, step: StepShape, *, mapped_weights: int, expected_activations: int
) -> MemoryTerms:
    """Where the memory of the runner's device goes, with the model loaded.

    On a GPU the terms are those of plan.budget. On a CPU the first step is run and the growth of this process
    measured; the total is that of the host or its cgroup. The terms exclude the KV cache and pages of a mapped
    checkpoint, which the system drops when memory is short; `mapped_weights` is the share of the weights read there.
    `expected_activations` is used where the system does not report memory (see process_memory).
    """
    if plan.budget is not None:
        budget = plan.budget
        others = sum(holder.num_bytes for holder in other_holders(runner.device, limit=None))
        # in a container this process may be listed under another pid
        others = min(others, budget.used - budget.current)
        return MemoryTerms(
            total=budget.total,
            reserve=budget.total - int(budget.total * budget.utilization),
            others=others,
            runtime=budget.used - others - plan.weight_bytes,
            weights=plan.weight_bytes,
            activations=budget.activations,
            graphs=budget.graphs,
        )
    measure_step(runner, StepShape(1, 1))  # threads and libraries start with the first step: that is runtime
    total, available = host_memory()
    resident = max(0, (process_memory() or plan.weight_bytes) - mapped_checkpoint())
    activations = measure_step(runner, step)
    return MemoryTerms(
        total=total,
        others=max(0, total - available - resident),
        runtime=max(0, resident - (plan.weight_bytes - min(mapped_weights, plan.weight_bytes))),
        weights=plan.weight_bytes,
        activations=expected_activations if activations is None else activations,
    )


def step_blocks(step: StepShape, tables: TableShape) -> int:
    """Blocks that the step's sequences take."""
    return sum(tables.num_entries(length) for length in step.lengths)


def measure_step(runner: ModelRunner, step: StepShape) -> int | None:
    """Bytes that a step of new prompts takes on top of weights and cache; None where the system does not report it (a
    CPU outside Linux). Overwrites the first step_blocks blocks of the runner's cache.
    """
    work = _prompts(runner, step)
    runner.kv_cache[:, :, : step_blocks(step, runner.limits.tables)].zero_()  # every slot is owned in this step
    on_cuda = runner.device.type == "cuda"
    before = _reset_cuda_peak(runner.device) if on_cuda else reset_host_peak()
    logits, _ = runner.execute(work)
    _sample_with_most_memory(logits)
    if on_cuda:
        torch.cuda.synchronize(runner.device)
        peak: int | None = torch.cuda.max_memory_allocated(runner.device)
    else:
        peak = host_peak()
    return None if before is None or peak is None else peak - before


@torch.inference_mode()
def _sample_with_most_memory(logits: Tensor) -> None:
    """top-p over equal logits: the worst case of the sort."""
    rows, device = logits.shape[0], logits.device
    temperature, top_p = torch.ones(rows, device=device), torch.full((rows,), 0.95, device=device)
    top_k, min_p = torch.zeros(rows, dtype=torch.int64, device=device), torch.zeros(rows, device=device)
    equal = logits.zero_()
    floor = smallest_kept(equal, temperature, top_k, top_p, min_p, most_k=None, only_min_p=False)
    choose_tokens(equal, temperature, top_p, floor, num_drawn=rows)


def _prompts(runner: ModelRunner, step: StepShape) -> ScheduledStep:
    """A step of new prompts of the same token, in the first blocks of the cache."""
    work, next_block = ScheduledStep(), 0
    for row, length in enumerate(step.lengths):
        seq = Sequence(row, str(row), [0] * length, SamplingParams(), max_new_tokens=1)
        count = runner.limits.tables.num_entries(length)
        seq.row, seq.block_table = row, list(range(next_block, next_block + count))
        next_block += count
        work.seqs.append(seq)
        work.num_new_tokens.append(length)
    return work


def _reset_cuda_peak(device: torch.device) -> int:
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


# ---------------------------------------------------------------------- the host


def reset_host_peak() -> int | None:
    """Reset the high-water mark of this process's resident memory; returns the current bytes, None where Linux's
    /proc is missing."""
    with suppress(OSError, AttributeError):  # glibc keeps freed memory, which would hide later allocations
        ctypes.CDLL(None).malloc_trim(0)
    try:
        (_PROC / "self/clear_refs").write_text("5")  # proc(5): resets VmHWM
    except OSError:
        return None
    return _process_bytes("VmRSS")


def process_memory() -> int | None:
    """Resident bytes of this process; None where not readable."""
    return _process_bytes("VmRSS")


def host_peak() -> int | None:
    """Peak resident bytes of this process since reset_host_peak; None where not readable."""
    return _process_bytes("VmHWM")


def mapped_checkpoint() -> int:
    """Resident bytes of this process that are pages of *.safetensors files; 0 where not readable."""
    try:
        lines = (_PROC / "self/smaps").read_text().splitlines()
    except OSError:
        return 0
    num_bytes, in_checkpoint = 0, False
    for line in lines:
        if "-" in line.split(" ", 1)[0]:  # header line of a mapping: addresses first, file last
            in_checkpoint = line.endswith(".safetensors")
        elif in_checkpoint and line.startswith("Rss:"):
            num_bytes += int(line.split()[1]) * 1024
    return num_bytes


def _process_bytes(key: str) -> int | None:
    try:
        lines = (_PROC / "self/status").read_text().splitlines()
    except OSError:
        return None
    found = [line for line in lines if line.startswith(key + ":")]
    return int(found[0].split()[1]) * 1024 if found else None


# ---------------------------------------------------------------------- who else


@dataclass(frozen=True, slots=True)
class Holder:
    """Another process and the memory it uses."""

    pid: int
    name: str
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}) {self.num_bytes / 2**30:.2f} GiB"


def other_holders(device: torch.device, limit: int | None = 3) -> list[Holder]:
    """Other processes with memory on the device, largest first; empty where the system does not report them."""
    found = _gpu_processes(device) if device.type == "cuda" else _host_processes()
    others = (holder for holder in found if holder.pid != os.getpid())
    return sorted(others, key=lambda holder: -holder.num_bytes)[:limit]


def _gpu_processes(device: torch.device) -> list[Holder]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    query = [command, "--query-compute-apps=gpu_uuid,pid,used_memory,process_name", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    holders = []
    for line in answer.splitlines():
        fields = [part.strip() for part in line.split(",", 3)]
        if len(fields) == 4 and fields[0].endswith(uuid) and fields[1].isdigit() and fields[2].isdigit():
            holders.append(Holder(int(fields[1]), Path(fields[3]).name, int(fields[2]) * 2**20))
    return holders


def _host_processes() -> list[Holder]:
    page = os.sysconf("SC_PAGE_SIZE")
    holders = []
    for folder in _PROC.glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):  # it has ended, or we may not read it
            resident = int((folder / "statm").read_text().split()[1]) * page
            holders.append(Holder(int(folder.name), (folder / "comm").read_text().strip(), resident))
    return holders
