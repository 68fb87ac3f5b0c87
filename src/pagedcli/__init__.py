"""Batch generation with a paged KV cache, and a look inside it.

from pagedcli import LLM, SamplingParams
"""

from typing import TYPE_CHECKING, Any

from pagedcli.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagedcli.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # LLM pulls in torch, which takes a second: only those who use it wait
    if name == "LLM":
        from pagedcli.llm import LLM

        return LLM
    raise AttributeError(f"module 'pagedcli' has no attribute {name!r}")
