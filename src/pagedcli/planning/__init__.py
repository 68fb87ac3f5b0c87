"""What is decided before anything is loaded. Modules that need torch are imported at their first use."""

from typing import TYPE_CHECKING

from pagedcli.later import modules_of

if TYPE_CHECKING:
    from pagedcli.planning import decide, decision, machine
else:
    __getattr__ = modules_of(__name__)

__all__ = ["decide", "decision", "machine"]
