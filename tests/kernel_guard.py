"""Watches every access of Triton kernels in the interpreter: bounds, and races between the programs of a launch.

An access must lie within one of the tensors that the launch was given, and no program may touch what another program of
the same launch has written (atomic operations may). What it does not see: an access that ends in another tensor of the
same launch, races between the threads of one program (the interpreter has none), and what only a GPU's compiler does.
"""

import numpy as np
import torch


class KernelFault(AssertionError):
    """A kernel accessed memory that is not its own."""


class Guard:
    """Use `install` once; it lasts as long as the process, or until monkeypatch undoes it."""

    def __init__(self):
        self.num_launches = 0
        self._bounds = None  # first and last addresses of the launch's tensors; None: outside of a launch
        self._stores, self._loads = [], []  # (program, addresses)

    def install(self, monkeypatch=None):
        from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

        replace = setattr if monkeypatch is None else monkeypatch.setattr
        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
        cas, rmw = InterpreterBuilder.create_atomic_cas, InterpreterBuilder.create_atomic_rmw
        call = GridExecutor.__call__

        def guarded_load(builder, ptrs, mask, *rest):
            self._loads.append(self._access("load", builder, ptrs, mask.data))
            return load(builder, ptrs, mask, *rest)

        def guarded_store(builder, ptrs, value, mask, *rest):
            self._stores.append(self._access("store", builder, ptrs, mask.data))
            return store(builder, ptrs, value, mask, *rest)

        def guarded_cas(builder, ptr, *rest):
            self._access("atomic operation", builder, ptr, np.ones(ptr.data.shape, bool))
            return cas(builder, ptr, *rest)

        def guarded_rmw(builder, operation, ptr, value, mask, *rest):
            self._access("atomic operation", builder, ptr, mask.data)
            return rmw(builder, operation, ptr, value, mask, *rest)

        def guarded_call(executor, *args, **kwargs):
            self._begin([arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)])
            call(executor, *args, **kwargs)
            self._check_races(executor.fn.__name__)
            self._bounds = None

        for name, function in (
            ("create_masked_load", guarded_load),
            ("create_masked_store", guarded_store),
            ("create_atomic_cas", guarded_cas),
            ("create_atomic_rmw", guarded_rmw),
        ):
            replace(InterpreterBuilder, name, function)
        replace(GridExecutor, "__call__", guarded_call)
        return self

    def _begin(self, tensors):
        spans = []
        for tensor in tensors:
            if tensor.numel():
                reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
                spans.append([tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.itemsize])
        merged = []
        for start, end in sorted(spans):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(end, merged[-1][1])
            else:
                merged.append([start, end])
        self._bounds = np.array(merged, dtype=np.uint64).reshape(-1, 2)
        self._stores, self._loads = [], []
        self.num_launches += 1

    def _access(self, kind, builder, ptrs, mask):
        addresses = np.broadcast_to(ptrs.data, mask.shape)[mask.astype(bool)].astype(np.uint64)
        size = np.uint64(max(1, ptrs.get_element_ty().primitive_bitwidth // 8))
        starts, ends = self._bounds[:, 0], self._bounds[:, 1]
        place = np.searchsorted(starts, addresses, side="right") - 1
        inside = place >= 0
        if len(ends):
            inside &= addresses + size <= ends[place]
        if not inside.all():
            raise KernelFault(f"program {builder.grid_idx}: {kind} of {int((~inside).sum())} elements out of bounds")
        x, y, z = builder.grid_idx
        return (x * 2**16 + y) * 2**16 + z, np.unique(addresses)

    def _check_races(self, name):
        stored, writers = _joined(self._stores)
        order = np.lexsort((writers, stored))
        stored, writers = stored[order], writers[order]
        twice = (stored[1:] == stored[:-1]) & (writers[1:] != writers[:-1])
        if twice.any():
            raise KernelFault(f"{name}: {int(twice.sum())} elements are stored by two programs")
        loaded, readers = _joined(self._loads)
        if not len(stored):
            return
        place = np.minimum(np.searchsorted(stored, loaded), len(stored) - 1)
        foreign = (stored[place] == loaded) & (writers[place] != readers)
        if foreign.any():
            raise KernelFault(f"{name}: {int(foreign.sum())} elements are loaded by one program and stored by another")


def _joined(accesses):
    """Addresses of all accesses, and the program of each."""
    if not accesses:
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    addresses = np.concatenate([found for _, found in accesses])
    return addresses, np.concatenate([np.full(len(found), program) for program, found in accesses])
