"""Every kernel that a model launches on a GPU that is not here, at its real sizes: its tensors have no content."""

import json
from dataclasses import dataclass

import torch
from attention_cases import make_batch
from model_zoo import load_model
from pretend_cuda import GPU, PretendGpu
from triton_compile import NAMES, Compiled

from pagedcli.attention.base import named_dtype
from pagedcli.attention.select import load_backend
from pagedcli.config import EngineConfig
from pagedcli.models.base import cache_shape
from pagedcli.models.reading import read_spec
from pagedcli.models.spec import layer_groups
from pagedcli.planning.decide import decide
from pagedcli.planning.machine import described_gpu
from pagedcli.runner.device_state import state_pools

TYPES = {**NAMES, torch.float8_e4m3fn: "fp8e4nv", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8"}

OPTIONS = {"num_warps", "num_stages", "enable_fp_fusion", "launch_pdl"}


@dataclass(frozen=True)
class Launch:
    """A kernel as it is launched: launches that are equal share one compiled kernel."""

    function: object
    types: tuple  # (name, type) of the arguments that are no constants
    constants: tuple  # (name, value)
    options: tuple

    def __str__(self):
        changing = {name: value for name, value in self.constants if name not in ("S", "SPLIT", "STAGES", "CHUNK")}
        return f"{self.function.__name__} {changing} {dict(self.types)}"

    def compiled(self, capability, tmp_path):
        options = dict(self.options)
        types, constants = dict(self.types), dict(self.constants)
        return Compiled(
            self.function, types, constants, capability, options["num_warps"], tmp_path, options.get("num_stages")
        )


class _Recorder:
    """Takes the place of a kernel."""

    def __init__(self, function, launches):
        self._function, self._launches = function, launches

    def __getitem__(self, grid):
        assert all(0 < size < (2**16, 2**31)[axis == 0] for axis, size in enumerate(grid)), grid

        def launch(*args, **kwargs):
            names = self._function.arg_names
            given = dict(zip(names, args, strict=False)) | kwargs
            options = {name: given.pop(name) for name in OPTIONS & given.keys()}
            assert given.keys() == set(names)
            fixed = {param.name for param in self._function.params if param.is_constexpr}
            types = tuple((name, _type_of(given[name])) for name in names if name not in fixed)
            constants = tuple((name, given[name]) for name in names if name in fixed)
            self._launches.add(Launch(self._function, types, constants, tuple(sorted(options.items()))))

        return launch


def _type_of(value):
    if isinstance(value, torch.Tensor):
        assert value.device == GPU, "a kernel got a pointer to host memory"
        return f"*{TYPES[value.dtype]}"
    return "i32" if isinstance(value, int) else "fp32"


def launches_of(config, folder, monkeypatch, *, capability, steps, **options):
    """Every different launch of some steps, each of so many (tokens in the cache after it, new tokens)."""
    from pagedcli.attention import triton_kernels as attention_kernels
    from pagedcli.attention import triton_paged
    from pagedcli.layers import triton_experts as expert_kernels
    from pagedcli.layers import triton_layers as layer_kernels
    from pagedcli.layers import triton_products as product_kernels
    from pagedcli.layers import triton_recurrent as recurrent_kernels
    from pagedcli.layers import triton_sampling as sampling_kernels
    from pagedcli.layers import triton_stream as stream_kernels
    from pagedcli.layers.sampling import SamplingLimits, choose_tokens

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    spec = read_spec(folder)
    engine = EngineConfig(model=str(folder), device="cuda", load_format="dummy", **options)
    gpu = described_gpu(80 * 2**30, capability=capability)
    decision = decide(engine, spec, gpu)
    decided = decision.plan
    assert decided.backend == "triton", decided.refused
    launches = set()
    with monkeypatch.context() as patched, PretendGpu(memory="meta").install(patched):
        modules = (attention_kernels, layer_kernels, product_kernels, expert_kernels)
        for module in (*modules, recurrent_kernels, sampling_kernels, stream_kernels):
            for name in dir(module):
                if name.endswith("_kernel"):
                    patched.setattr(module, name, _Recorder(getattr(module, name), launches))
        patched.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        patched.setattr(triton_paged, "launch_problem", lambda: None)
        for module in (product_kernels, expert_kernels, stream_kernels):
            patched.setattr(module, "processors_of", lambda _: 132)
        backend = load_backend("triton", decision.attention)
        model = load_model(
            folder, spec, backend=backend, dtype=named_dtype(decided.dtype), device=GPU, load_format="dummy",
            decoder=decided.decoder, max_model_len=1024,
        )  # fmt: skip
        num_groups = len(layer_groups(model.attention_layers))
        shape = cache_shape(model, backend, 64, decided.limits.block_size)
        cache = torch.empty(shape, dtype=named_dtype(decided.kv_dtype), device=GPU)
        states = state_pools(model, 300, named_dtype(decided.dtype), GPU)
        for lengths in steps:
            batch, num_tokens = _batch(lengths, decided.limits.block_size, num_groups)
            if states:
                slots = torch.zeros(len(lengths), dtype=torch.int32, device=GPU)
                batch.state_reads, batch.state_writes, batch.states = slots, slots, states
            ids = torch.zeros(num_tokens, dtype=torch.int64, device=GPU)
            hidden = model.forward(ids, ids, batch, cache)
            logits = model.compute_logits(hidden[: len(lengths)])
            numbers = torch.zeros(len(lengths), device=GPU)
            for limits in (None, SamplingLimits(numbers.int(), numbers, numbers)):
                choose_tokens(logits, numbers, numbers, limits, num_drawn=len(lengths))
        rows, words = numbers.long(), torch.zeros(len(numbers), -(-logits.shape[1] // 32), device=GPU).int()
        for seen in (torch.zeros_like(logits, dtype=dtype) for dtype in (torch.uint8, torch.int32)):
            sampling_kernels.penalize(logits.float(), seen, rows, rows, numbers, numbers)
        sampling_kernels.mask_tokens(logits.float(), rows, words)
    return launches


def _batch(lengths, block_size, num_groups):
    """A step of so many groups of layers, and its number of new tokens."""
    num_tokens = sum(new for _, new in lengths)
    width = -(-max(total for total, _ in lengths) // block_size)
    table = torch.zeros((len(lengths), width), dtype=torch.int32, device=GPU)
    batches = [make_batch(lengths, table, [0] * num_tokens, GPU) for _ in range(num_groups)]
    batches[0].others = tuple(batches[1:])
    return batches[0], num_tokens
