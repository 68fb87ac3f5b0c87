"""The answers to what a person can ask: from records to records. What only the end of a run needs is imported then."""

from typing import TYPE_CHECKING

from pagedcli.later import modules_of

if TYPE_CHECKING:
    from pagedcli.answers import cures, settings
else:
    __getattr__ = modules_of(__name__)

__all__ = ["cures", "settings"]
