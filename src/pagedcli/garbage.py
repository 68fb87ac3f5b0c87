"""When Python's garbage collector looks for cycles: not where it takes long and finds nothing.

Used by the command line and by batch.run.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_NEW_OBJECTS = 20_000


@contextmanager
def nothing_to_collect() -> Iterator[None]:
    """No collections while modules are imported, of whose time they take a seventh. At the end what they made is as old
    as if there had been some."""
    if not gc.isenabled():
        yield
        return
    num_modules = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_modules and not _is_frozen():
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        gc.enable()


@contextmanager
def old_objects_left_alone() -> Iterator[None]:
    """The garbage collector does not look through what exists already: with torch's modules that takes 0.2 s each time,
    every few seconds of a run. New ones wait until there are _NEW_OBJECTS: those of most rows go by themselves."""
    if _is_frozen():
        yield
        return
    threshold = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, *threshold[1:])
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()


def _is_frozen() -> bool:
    """Whether somebody has frozen what exists. Takes 30 ms where it is so, as objects are counted one by one."""
    return gc.get_freeze_count() > 1000  # Python 3.12 begins with 375
