"""LLM batch generation with a paged KV cache that can be inspected.

from pagedcli import LLM, SamplingParams, open_trace
"""

import os

# How often torch's threads look for work before they sleep: as often as the decoder's own (native/parallel.cpp). The
# default is milliseconds after each operation, on cores that the decoder needs then. Read when torch is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")

TYPE_CHECKING = False  # typing's own takes too long to import before Ctrl-C has its handler
if TYPE_CHECKING:
    from pagedcli.llm import LLM
    from pagedcli.sampling_params import SamplingParams, StructuredOutputsParams
    from pagedcli.show.notebook import open_trace

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "StructuredOutputsParams", "__version__", "open_trace"]


def __getattr__(name: str) -> object:
    # LLM imports torch, which takes a second, so it is loaded lazily
    if name == "LLM":
        from pagedcli.llm import LLM

        return LLM
    if name in ("SamplingParams", "StructuredOutputsParams"):
        from pagedcli import sampling_params

        return getattr(sampling_params, name)
    if name == "open_trace":
        from pagedcli.show.notebook import open_trace

        return open_trace
    raise AttributeError(f"module 'pagedcli' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
