"""Kernels in C++ for CPUs, compiled on first use by the compiler of the machine and loaded through a C ABI.

Used by attention/ and layers/. Knows nothing of models, caches or engines: pointers, sizes and a number of threads.
"""

from pagedcli.native.build import NativeLibrary, load_library, loaded_library

__all__ = ["NativeLibrary", "load_library", "loaded_library"]
