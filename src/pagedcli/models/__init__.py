"""Models: config.json -> ModelSpec, weights -> CausalLM. Uses attention backends only through their contract. Modules
that need torch or transformers are imported at their first use.
"""

from typing import TYPE_CHECKING

from pagedcli.later import modules_of

if TYPE_CHECKING:
    from pagedcli.models import packed_formats, transformers_fallback
else:
    __getattr__ = modules_of(__name__)

__all__ = ["packed_formats", "transformers_fallback"]
