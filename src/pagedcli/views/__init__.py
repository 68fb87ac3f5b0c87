"""Views of a run, each a fold of its events. What only the end of a run needs is imported then."""

from typing import TYPE_CHECKING

from pagedcli.later import modules_of

if TYPE_CHECKING:
    from pagedcli.views import whole_run
else:
    __getattr__ = modules_of(__name__)

__all__ = ["whole_run"]
