"""Workloads, measurements and the machine's floor for `pagedcli bench`. Independent of the terminal."""

from typing import TYPE_CHECKING

from pagedcli.later import modules_of

if TYPE_CHECKING:
    from pagedcli.bench import calibration
else:
    __getattr__ = modules_of(__name__)

__all__ = ["calibration"]
