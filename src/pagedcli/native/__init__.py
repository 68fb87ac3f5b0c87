"""C++ kernels for CPUs, compiled on first use by the machine's compiler and loaded through a C ABI.

Used by attention/ and layers/. Independent of models, caches and engines: takes pointers, sizes, a thread count.
"""

from pagedcli.native.build import NativeLibrary, load_library, loaded_library

__all__ = ["NativeLibrary", "load_library", "loaded_library"]
