"""What is shown of records: tables, pictures, lines on a terminal. What most runs do not show is imported late."""

from typing import TYPE_CHECKING

from pagedcli.later import modules_of

if TYPE_CHECKING:
    from pagedcli.show import data_files, step_tables
else:
    __getattr__ = modules_of(__name__)

__all__ = ["data_files", "step_tables"]
