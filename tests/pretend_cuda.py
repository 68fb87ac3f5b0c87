"""A GPU that is not there: CPU tensors that say they are on cuda:0 and behave as if they were.

What it is strict about: tensors of two devices never meet; a copy to the host holds rubbish until an event behind it
was waited for; pinned memory must not change while a copy may still read it; nothing waits for the device, and nothing
is uploaded, while a graph is captured; a replayed graph repeats tensor operations and kernels, no Python; kernels are
launched on the thread's current device, and get the strides of tensors that are not contiguous; operations have the
types that CUDA computes. Kernels run in triton's interpreter, so TRITON_INTERPRET=1 must be set.
"""

import contextlib
import inspect
import threading
from types import SimpleNamespace

import torch
from torch.cuda._utils import _get_device_index
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

GPU = torch.device("cuda", 0)
TOTAL, FREE = 1 << 28, 200 << 20  # bytes
WAITS = {"item", "tolist", "nonzero", "argwhere", "masked_select", "equal", "allclose", "bincount", "histc"}
WAITS |= {"unique", "_unique2", "_unique_impl", "unique_consecutive", "is_nonzero", "_local_scalar_dense"}
WAITS |= {"__bool__", "__int__", "__float__", "__index__", "__contains__", "__complex__"}
UPLOADS = {"tensor", "as_tensor", "asarray", "scalar_tensor", "frombuffer"}  # of values that the host has
# What a CPU computes and CUDA does not, from torch's own tables (OpInfo.dtypesIfCUDA): products of integers.
PRODUCTS = {"addbmm", "addmm", "addmv", "baddbmm", "bmm", "dot", "einsum", "inner", "linear", "matmul", "mm", "mv"}
PRODUCTS |= {"tensordot", "vdot", "__matmul__", "__rmatmul__"}
INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
# What CUDA does with e4m3, which those tables leave out: it moves and converts.
WITH_FLOAT8 = {
    "__getitem__", "__len__", "__setitem__", "as_subclass", "bool", "chunk", "clone", "contiguous", "data_ptr",
    "detach", "dim", "element_size", "empty_like", "expand", "fill_", "flatten", "float", "half", "is_contiguous",
    "narrow", "new_empty", "numel", "permute", "reshape", "size", "split", "storage_offset", "stride", "t",
    "_scaled_mm", "tensor_split", "transpose", "unbind", "unsqueeze", "untyped_storage", "view", "zero_",
}  # fmt: skip


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on the GPU. Operations give OnGpu again."""

    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def numpy(self, *_, **__):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    __array__ = numpy


def plain(value):
    """The CPU tensor behind it, with the same memory."""
    return value.as_subclass(torch.Tensor) if isinstance(value, OnGpu) else value


def variant(function, args, kwargs):
    """What a launch makes triton compile: name, constants, options, and of the other arguments their types, which
    numbers are 1 or multiples of 16, and which pointers are aligned."""
    given = dict(zip(function.arg_names, args, strict=False)) | kwargs
    parameters = inspect.signature(function.fn).parameters
    whole = function.kwargs.get("do_not_specialize") or ()
    aligned = function.kwargs.get("do_not_specialize_on_alignment") or ()
    found = {}
    for name, value in given.items():
        constant = name not in parameters or "constexpr" in str(parameters[name].annotation)
        if constant or value is None or isinstance(value, bool):
            found[name] = str(value)
            continue
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        found[name] = str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__
        if name not in whole and not isinstance(value, float):
            found[name] += " 1" if type(value) is int and value == 1 else ""
            found[name] += " x16" if name not in aligned and number % 16 == 0 else ""
    return function.__name__, *sorted(found.items())


def wide_product(a, b, *, out_dtype):
    """torch.mm of a GPU, which does not round its sums."""
    return torch.mm(a.to(out_dtype), b.to(out_dtype))


def what_is_new(variants, known):
    """Each variant that was not known: its kernel, and in what it differs from the nearest known one."""
    found = []
    for name, *items in variants - known:
        others = [set(other[1:]) for other in known if other[0] == name]
        found.append((name, *sorted(min((set(items) - other for other in others), key=len, default=items))))
    return sorted(found)


class PretendGpu(TorchFunctionMode):
    """Use as a context; `install` replaces what is asked of torch.cuda and of triton.

    `runs_kernels` False: kernels change nothing and fresh memory is zero. The interpreter is slow, and what a step asks
    of the device does not depend on what its kernels compute. `memory` "meta": tensors have a shape and no content, and
    any number that is read is 0.5.
    """

    def __init__(self, *, runs_kernels=True, memory="cpu"):
        super().__init__()
        self.runs_kernels = runs_kernels
        self.memory = memory
        self.waits = []  # names of operations that waited for the device
        self.variants = set()  # of kernels: what triton would have compiled by now, see variant
        self.replays = 0
        self.recording = None  # operations of the graph that is being captured
        self.current = threading.local()
        self.current_elsewhere = 0  # the current device of a thread that has chosen none
        self.reading = []  # (pinned source, what it held) of uploads that may be under way
        self.arriving = []  # (host tensor, value) of downloads under way
        self.pinned = {}  # address of a storage -> it, kept alive

    # ------------------------------------------------------------------ tensor operations

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        ours = [tensor for tensor in tensors if isinstance(tensor, OnGpu)]
        if name == "copy_" or name == "to" or name in ("cpu", "cuda"):
            return self._copy(func, name, args, kwargs, ours)
        if name == "pin_memory":
            return self._pin(args[0].clone())
        pin = kwargs.pop("pin_memory", False)
        to_gpu = self._is_gpu(kwargs.get("device"))
        if to_gpu:
            kwargs["device"] = self.memory
        assert not any(self._is_gpu(arg) for arg in args if isinstance(arg, torch.device)), func
        if ours:
            foreign = [tensor for tensor in tensors if not isinstance(tensor, OnGpu) and tensor.dim()]
            assert not foreign, f"{name}: Expected all tensors to be on the same device"
            self._check_types(name, {tensor.dtype for tensor in ours})
            if self._waits(name, args, kwargs):
                self._wait_for_device(name)
        elif not to_gpu:
            result = func(*args, **kwargs)
            return self._pin(result) if pin else result
        elif name in UPLOADS:
            self._upload(torch.as_tensor(args[0]), non_blocking=False)
        if self.memory == "meta" and name in ("item", "__int__"):
            return 0.5 if name == "item" else 0
        if name == "mm" and "out_dtype" in kwargs:  # only a GPU has it
            func = wide_product
        if self.memory == "meta":  # its operations ask for the device
            args, kwargs = tree_map(plain, (args, kwargs))
        result = func(*args, **kwargs)
        if not self.runs_kernels and "empty" in name:
            result.zero_()
        result = tree_map(lambda x: x.as_subclass(OnGpu) if type(x) is torch.Tensor else x, result)
        if "empty" not in name:  # a replayed graph has its memory already
            self._record(func, args, kwargs, result)
        return result

    @staticmethod
    def _check_types(name, dtypes):
        missing = INTEGERS & dtypes if name in PRODUCTS else set()
        if torch.float8_e4m3fn in dtypes and name not in WITH_FLOAT8:
            missing = {torch.float8_e4m3fn}
        assert not missing, f'"{name}" not implemented on CUDA for {missing}'

    @staticmethod
    def _waits(name, args, kwargs):
        """Whether an operation on the device needs a value on the host, or one from there."""
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            masks = [part for part in index if isinstance(part, torch.Tensor) and part.dtype == torch.bool]
            return bool(masks) or any(isinstance(part, list) for part in index)
        if name == "repeat_interleave":
            return kwargs.get("output_size") is None
        return name in WAITS or (name == "where" and len(args) + len(kwargs) == 1)

    def _copy(self, func, name, args, kwargs, ours):
        """What may cross between devices."""
        if name == "copy_":
            target, source = args[:2]
            non_blocking = kwargs.pop("non_blocking", args[2] if len(args) > 2 else False)
            if isinstance(target, OnGpu) and not isinstance(source, OnGpu):
                self._upload(source, non_blocking)
                plain(target).copy_(source)
                return target
            assert isinstance(target, OnGpu) or not isinstance(source, OnGpu), "a waiting download"
            result = func(target, source)
            if ours:
                self._record(func, (target, source), {}, target)
            return result
        tensor, rest = args[0], list(args[1:])
        device = "cuda" if name == "cuda" else "cpu" if name == "cpu" else kwargs.pop("device", None)
        for arg in list(rest):
            if isinstance(arg, torch.device) or (isinstance(arg, str) and name == "to"):
                device = arg
                rest.remove(arg)
        non_blocking = kwargs.pop("non_blocking", False)
        source, here = plain(tensor), isinstance(tensor, OnGpu)
        there = here if device is None else self._is_gpu(device)
        if name != "to":
            rest, kwargs = [], {}
        result = source.to(*rest, **kwargs) if rest or kwargs else source
        if there and not here:
            self._upload(source, non_blocking)
            return result.to(self.memory, copy=True).as_subclass(OnGpu)
        if here and not there:
            if not non_blocking:
                self._wait_for_device(name)
                return result.clone()
            assert self.recording is None, "a download inside of a graph"
            rubbish = torch.full_like(result, 123)
            self.arriving.append((rubbish, result.clone()))
            return self._pin(rubbish)
        if not here:
            return result
        if result is source:
            return tensor
        result = result.as_subclass(OnGpu)
        self._record(func, args, {**kwargs, **({} if device is None else {"device": device})}, result)
        return result

    def _upload(self, source, non_blocking):
        assert self.recording is None, "an upload inside of a graph"
        if not non_blocking or source.untyped_storage().data_ptr() not in self.pinned:
            self.waits += ["upload"] * bool(source.numel())
            return
        self.reading.append((source, source.clone()))

    def _pin(self, tensor):
        storage = tensor.untyped_storage()
        self.pinned[storage.data_ptr()] = storage
        return tensor

    def _record(self, func, args, kwargs, result):
        if self.recording is not None and any(isinstance(leaf, OnGpu) for leaf in tree_leaves(result)):
            self.recording.append((func, args, kwargs, result))

    @staticmethod
    def _is_gpu(device):
        return device is not None and not isinstance(device, int) and torch.device(device).type == "cuda"

    # ------------------------------------------------------------------ order

    def _wait_for_device(self, name):
        assert self.recording is None, f"{name} waits for the device inside of a graph"
        self.waits.append(name)
        self.pass_until(len(self.reading), len(self.arriving))

    def pass_until(self, num_reading, num_arriving):
        """What was under way has happened."""
        with torch._C.DisableTorchFunction(), torch.inference_mode():
            for source, held in self.reading[:num_reading]:
                assert torch.equal(source, held), "pinned memory changed while a copy was reading it"
            for target, value in self.arriving[:num_arriving]:
                if target is not None:
                    target.copy_(value)
        self.reading[:num_reading] = [(torch.empty(0), torch.empty(0))] * num_reading
        self.arriving[:num_arriving] = [(None, None)] * num_arriving

    # ------------------------------------------------------------------ torch.cuda and triton

    def install(self, monkeypatch):
        """Replace torch.cuda's functions for the test, and triton's launch."""
        from triton.runtime.interpreter import GridExecutor, InterpretedFunction

        gpu = self

        class Event:
            def __init__(self, **_):
                self.at = None

            def record(self, *_):
                self.at = len(gpu.reading), len(gpu.arriving)

            def synchronize(self):
                assert gpu.recording is None, "an event was waited for inside of a graph"
                if self.at is not None:
                    gpu.pass_until(*self.at)

            def query(self):
                self.synchronize()
                return True

            def elapsed_time(self, other):
                return 1.0

        class Graph:
            def pool(self):
                return (0, 1)

            def replay(self):
                gpu.replays += 1
                with torch._C.DisableTorchFunction():
                    for func, args, kwargs, result in self.operations:
                        again = func(*args, **kwargs)
                        if func is launch:
                            continue
                        pairs = zip(tree_leaves(result), tree_flatten(again)[0], strict=True)
                        for old, new in pairs:
                            if isinstance(new, torch.Tensor) and new.data_ptr() != old.data_ptr():
                                plain(old).copy_(plain(new))

        @contextlib.contextmanager
        def graph(which, pool=None, stream=None):
            assert gpu.recording is None
            assert stream is not None, "torch's own capture stream is one per process"
            gpu.recording = []
            yield
            which.operations, gpu.recording = gpu.recording, None

        call, run = GridExecutor.__call__, InterpretedFunction.run

        def recorded_run(function, *args, grid, warmup, **kwargs):
            gpu.variants.add(variant(function, args, kwargs))
            return run(function, *args, grid=grid, warmup=warmup, **kwargs)

        def launch(executor, args, kwargs):
            if not gpu.runs_kernels:
                return
            with torch._C.DisableTorchFunction():
                call(executor, *tree_map(plain, args), **tree_map(plain, kwargs))

        def checked_launch(executor, *args, **kwargs):
            tensors = [arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, torch.Tensor)]
            assert all(isinstance(tensor, OnGpu) for tensor in tensors), "a kernel got a pointer to host memory"
            numbers = {arg for arg in tree_leaves((args, kwargs)) if type(arg) is int}
            for tensor in tensors:
                known = plain(tensor).is_contiguous() or tensor.stride(0) in numbers
                assert known, f"{executor.fn.__name__} reads rows one after the other; they lie {tensor.stride()} apart"
            assert current_device() == 0, "a kernel was launched on the thread's current device, which is another one"
            launch(executor, args, kwargs)
            if gpu.recording is not None:
                gpu.recording.append((launch, (executor, args, kwargs), {}, None))

        about = SimpleNamespace(
            name="pretended", major=9, minor=0, multi_processor_count=2, total_memory=TOTAL, uuid="none"
        )

        def on(device=None):
            assert device is None or _get_device_index(device, optional=True) == 0

        def set_device(device):
            assert _get_device_index(device) == 0
            gpu.current.index = 0

        def current_device():
            return getattr(gpu.current, "index", gpu.current_elsewhere)

        def synchronize(device=None):
            on(device)
            assert gpu.recording is None
            gpu.pass_until(len(gpu.reading), len(gpu.arriving))

        class Stream:
            def __init__(self, device=None):
                on(device)

        replaced = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": current_device,
            "set_device": set_device,
            "synchronize": synchronize,
            "empty_cache": lambda: None,
            "get_device_name": lambda device=None: about.name,
            "get_device_capability": lambda device=None: on(device) or (9, 0),
            "get_device_properties": lambda device=None: on(device) or about,
            "mem_get_info": lambda device=None: on(device) or (FREE, TOTAL),
            "memory_allocated": lambda device=None: on(device) or 0,
            "max_memory_allocated": lambda device=None: on(device) or 1 << 20,
            "reset_peak_memory_stats": on,
            "Event": Event,
            "CUDAGraph": Graph,
            "graph": graph,
            "Stream": Stream,
        }
        monkeypatch.setattr(torch._utils, "_get_current_device_index", lambda: 0)
        for name, value in replaced.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(GridExecutor, "__call__", checked_launch)
        monkeypatch.setattr(InterpretedFunction, "run", recorded_run)
        return self
