"""The boundary behind which packages are imported at their first use: they take long, and many runs need none."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx as httpx
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

    httpx, jinja2, llguidance, pyarrow, torch, transformers = map(
        _Later, ("httpx", "jinja2", "llguidance", "pyarrow", "torch", "transformers")
    )
    parquet, chat_template_utils = _Later("pyarrow.parquet"), _Later("transformers.utils.chat_template_utils")


def modules_of(package: str, **named: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose modules are imported at their first use. `named`: what is also found in the
    package itself -> its module."""

    def find(name: str) -> Any:
        module = f"{package}.{named.get(name, name)}"
        if name.startswith("_") or find_spec(module) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = import_module(module)
        return getattr(found, name) if name in named else found

    return find
