"""A CUDA driver that is not there: kernels compile for a GPU, each launch is recorded, and nothing runs. Tensors lie in
the memory of the host."""

from types import SimpleNamespace


class Loaded:
    """A kernel in the memory of the GPU."""

    def __init__(self, name):
        self.name = name


class FakeDriver:
    """Use `install`; `launches` are (kernel, grid, arguments)."""

    def __init__(self, capability=90):
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)
        self.launches = []
        self.utils = SimpleNamespace(
            load_binary=lambda name, binary, shared, device: (object(), Loaded(name), 0, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 227 * 1024},
        )

    def install(self, monkeypatch):
        from triton.runtime.driver import driver

        monkeypatch.setattr(driver, "_active", self)
        return self

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return self._target

    def launcher_cls(self, source, metadata):
        def launch(x, y, z, stream, function, packed, about, enter, leave, *arguments):
            self.launches.append((function, (x, y, z), arguments))

        return launch
