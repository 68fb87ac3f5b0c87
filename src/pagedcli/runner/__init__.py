"""What runs a model on a device. Its modules load torch, so they are imported at their first use."""

from typing import TYPE_CHECKING

from pagedcli.later import modules_of

if TYPE_CHECKING:
    from pagedcli.runner import inspection, memory_profile, self_test, weight_cache
    from pagedcli.runner.llm_engine import LLMEngine
else:
    __getattr__ = modules_of(__name__, LLMEngine="llm_engine")

__all__ = ["LLMEngine", "inspection", "memory_profile", "self_test", "weight_cache"]
