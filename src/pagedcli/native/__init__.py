"""C++ kernels for CPUs, compiled on first use by the machine's compiler and loaded through a C ABI, then.

Used by attention/ and layers/. Independent of models, caches and engines: takes pointers, sizes, a thread count.
"""

from typing import TYPE_CHECKING

from pagedcli.later import modules_of

if TYPE_CHECKING:
    from pagedcli.native.build import NativeLibrary, load_library, loaded_library
else:
    __getattr__ = modules_of(__name__, NativeLibrary="build", load_library="build", loaded_library="build")

__all__ = ["NativeLibrary", "load_library", "loaded_library"]
