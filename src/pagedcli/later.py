"""The boundary behind which packages are imported at their first use: they take long, and many runs need none."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2 as jinja2
    import llguidance as llguidance
    import pyarrow as pyarrow
    import torch as torch
    import transformers as transformers
    from pyarrow import parquet as parquet
    from transformers.utils import chat_template_utils as chat_template_utils
else:

    class _Later:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            return getattr(import_module(self._name), name)

    jinja2, llguidance, pyarrow, torch, transformers = map(
        _Later, ("jinja2", "llguidance", "pyarrow", "torch", "transformers")
    )
    parquet, chat_template_utils = _Later("pyarrow.parquet"), _Later("transformers.utils.chat_template_utils")
