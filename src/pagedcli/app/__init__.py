"""The applications on the terminal. Their modules load textual, so they are imported at their first use."""

from typing import TYPE_CHECKING

from pagedcli.later import modules_of

if TYPE_CHECKING:
    from pagedcli.app import base, kv_app, pool_app
else:
    __getattr__ = modules_of(__name__)

__all__ = ["base", "kv_app", "pool_app"]
