"""Measures memory: the peak of the largest step, what a device leaves for the KV cache, and which processes use it.

Used by LLMEngine before it sizes its KV cache, and by runner.memory_profile.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
from torch import Tensor

from pagedcli.core.budget import TERMS, StepShape, Terms
from pagedcli.core.groups import TableShape
from pagedcli.core.limits import Limits
from pagedcli.core.plan import Plan
from pagedcli.core.sequence import Sequence
from pagedcli.core.steps import ScheduledStep
from pagedcli.layers.sampling import SamplingLimits, choose_tokens, mask_tokens, penalize_counted, penalize_repeated
from pagedcli.native import loaded_library
from pagedcli.native.system import release_free_memory
from pagedcli.planning.machine import host_memory
from pagedcli.runner.device_state import RunnerSpec
from pagedcli.runner.model_runner import ModelRunner
from pagedcli.sampling_params import SamplingParams

Lengths = list[tuple[int, int]]  # per sequence of a step: tokens in the cache after it, new tokens
LONG_CONTEXT = 2048  # tokens; several splits of attention
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")

_OF_PENALTIES = (torch.float32, torch.uint8, torch.int32)  # a number of each of these per logit


def measure_device(spec: RunnerSpec, utilization: float) -> Terms | None:
    """Where the memory of a CUDA device goes (what is neither weights nor activations counts as runtime); None on a
    CPU, where the pool has a fixed size. Runs the largest step that the limits allow, then frees its memory.
    """
    device, limits = spec.device, spec.limits
    if device.type != "cuda":
        return None
    spec.backend.reserve(limits.table_dimensions[0], limits.max_model_len)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    current = torch.cuda.memory_allocated(device)
    step, warm_up = limits.largest_step, _other_kernels(limits)
    num_blocks = max(_num_blocks(lengths, limits.tables) for lengths in (_prompts(step), *warm_up))
    runner = ModelRunner(replace(spec, limits=limits.with_pool(num_blocks, max(2, step.num_seqs))))
    for lengths in warm_up:
        _measure(runner, lengths, every_token=True)
    _measure(runner, warm_up[-1])
    taken = measure_step(runner, step)
    assert taken is not None, "a CUDA device reports its memory"
    del runner
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return Terms(
        total=total,
        reserve=total - int(total * utilization),
        runtime=total - free - current,
        weights=current,
        activations=taken,
        measured=frozenset(TERMS) - {"graphs"},
    )


def _other_kernels(limits: Limits) -> list[Lengths]:
    """Steps that with the largest one launch every kernel in every variant, so that none is compiled in the middle of a
    run: tiles change with the number of new tokens, at powers of two, and with what else is in the step."""
    most = min(limits.max_num_batched_tokens, limits.max_model_len)
    sizes = [*(2**power for power in range((most - 1).bit_length())), most]
    context = min(most, LONG_CONTEXT)
    decodes, mixed = [(context, 1)], [(context, 1), (context, max(1, context - 1))]
    return [*([(size, size)] for size in sizes), decodes, mixed]


def graph_bytes(spec: RunnerSpec) -> int:
    """Device memory of the graphs: all are captured once on a cache of one block, then dropped."""
    device, runner = spec.device, ModelRunner(replace(spec, limits=spec.limits.with_pool(1)))
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
) -> Terms:
    """Where the memory of the runner's device goes, with the model loaded.

    On a GPU the terms are those of plan.memory. On a CPU the first step is run and the growth of this process
    measured; the total is that of the host or its cgroup. The terms exclude the KV cache and pages of a mapped
    checkpoint, which the system drops when memory is short; `mapped_weights` is the share of the weights read there.
    `expected_activations` is used where the system does not report memory (see process_memory).
    """
    if plan.memory is not None:
        found = plan.memory
        others = sum(holder.num_bytes for holder in other_holders(runner.device, limit=None))
        others = min(others, found.runtime)  # A container may list this process under another pid.
        runtime = found.used - others - plan.weight_bytes
        return replace(found, others=others, runtime=runtime, weights=plan.weight_bytes)
    measure_step(runner, StepShape(1, 1))  # threads and libraries start with the first step: that is runtime
    total, available = host_memory()
    resident = max(0, process_memory() - mapped_checkpoint())
    activations = measure_step(runner, step)
    return Terms(
        total=total,
        others=max(0, total - available - resident),
        runtime=max(0, resident - (plan.weight_bytes - min(mapped_weights, plan.weight_bytes))),
        weights=plan.weight_bytes,
        activations=expected_activations if activations is None else activations,
        measured=frozenset(TERMS) - ({"activations"} if activations is None else set()),
    )


def step_blocks(step: StepShape, tables: TableShape) -> int:
    """Blocks that the step's sequences take."""
    return _num_blocks(_prompts(step), tables)


def measure_step(runner: ModelRunner, step: StepShape) -> int | None:
    """Bytes that a step of new prompts takes on top of weights and cache; None where the system does not report it (a
    CPU outside Linux). Overwrites the first step_blocks blocks of the runner's cache.
    """
    return _measure(runner, _prompts(step))


def _prompts(step: StepShape) -> Lengths:
    return [(length, length) for length in step.lengths]


def _num_blocks(lengths: Lengths, tables: TableShape) -> int:
    return sum(tables.num_entries(total) for total, _ in lengths)


def _measure(runner: ModelRunner, lengths: Lengths, *, every_token: bool = False) -> int | None:
    """See measure_step and ModelRunner.execute."""
    work = _step_of(runner, lengths)
    runner.kv_cache[:, :, : _num_blocks(lengths, runner.limits.tables)].zero_()  # every slot is owned in this step
    on_cuda = runner.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(runner.device)
    before = torch.cuda.memory_allocated(runner.device) if on_cuda else reset_host_peak()
    logits, _ = runner.execute(work, every_token=every_token)
    _sample_with_most_memory(logits)
    if on_cuda:
        torch.cuda.synchronize(runner.device)
    peak = torch.cuda.max_memory_allocated(runner.device) if on_cuda else host_peak()
    return None if before is None or peak is None else peak - before


@torch.inference_mode()
def _sample_with_most_memory(logits: Tensor) -> None:
    """top-p over equal logits, the worst case of the sort in torch on a CPU. Kernels need none; there penalties take
    most: a copy in float32 and the tables of sampler.KeptTokens."""
    rows, device = logits.shape[0], logits.device
    by_kernels = logits.is_cuda or loaded_library() is not None
    held = [torch.empty_like(logits, dtype=dtype).zero_() for dtype in _OF_PENALTIES if by_kernels]
    ones, zeros = torch.ones(rows, device=device), torch.zeros(rows, device=device)
    limits = SamplingLimits(zeros.int(), top_p=0.95 * ones, min_p=zeros)
    scores = held[0] if held else logits.zero_()
    choose_tokens(scores, ones, limits.top_p, limits, num_drawn=rows)
    if logits.is_cuda and rows:  # the other kernels of sampling, compiled here
        choose_tokens(logits, ones, limits.top_p, limits, num_drawn=rows)
        row, (_, seen, counts) = zeros[:1].long(), held
        penalize_repeated(scores, seen, row, row, ones[:1])
        penalize_counted(scores, counts, row, row, ones[:1], ones[:1])
        mask_tokens(scores, row, zeros.new_zeros((1, -(-logits.shape[1] // 32)), dtype=torch.int32))


def _step_of(runner: ModelRunner, lengths: Lengths) -> ScheduledStep:
    """A step of sequences of the same token, in the first blocks of the cache."""
    work, next_block = ScheduledStep(), 0
    for row, (total, num_new) in enumerate(lengths):
        seq = Sequence(row, str(row), [0] * total, SamplingParams(), max_new_tokens=1)
        count = runner.limits.tables.num_entries(total)
        seq.row, seq.block_table = row, list(range(next_block, next_block + count))
        seq.num_computed_tokens = total - num_new
        next_block += count
        work.seqs.append(seq)
        work.num_new_tokens.append(num_new)
    return work


# ---------------------------------------------------------------------- the host


def reset_host_peak() -> int | None:
    """Reset the high-water mark of this process's resident memory; returns the current bytes, None where Linux's
    /proc is missing."""
    release_free_memory()  # it would hide later allocations
    try:
        _CLEAR_REFS.write_text("5")  # proc(5): resets VmHWM
    except OSError:
        return None
    return process_memory()


def process_memory() -> int:
    """Resident bytes of this process."""
    return int(psutil.Process().memory_info().rss)


def host_peak() -> int | None:
    """Peak resident bytes of this process since reset_host_peak; None where not readable. (psutil does not tell it.)"""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    found = [line for line in lines if line.startswith("VmHWM:")]
    return int(found[0].split()[1]) * 1024 if found else None


def mapped_checkpoint() -> int:
    """Resident bytes of this process that are pages of *.safetensors and *.gguf files; 0 where not readable."""
    process = psutil.Process()
    if not hasattr(process, "memory_maps"):  # psutil has it on Linux and Windows only
        return 0
    return sum(each.rss for each in process.memory_maps() if each.path.endswith((".safetensors", ".gguf")))


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
    found = psutil.process_iter(["pid", "name", "memory_info"])  # None for what we may not read
    return [
        Holder(each.info["pid"], each.info["name"], each.info["memory_info"].rss)
        for each in found
        if each.info["name"] and each.info["memory_info"] is not None
    ]
