"""When Python's garbage collector looks for cycles: not where it takes long and finds nothing.

Used by the command line and by batch.run.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEW_OBJECTS = 20_000


@contextmanager
def nothing_to_collect() -> Iterator[None]:
    """No collections while modules are imported, of whose time they take a seventh. At the end all is as old as if
    there had been some."""
    if (
        not gc.isenabled() or gc.get_freeze_count() > 1000
    ):  # somebody has taken care; Python 3.12 begins with 375 frozen
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()  # into the oldest generation
        gc.enable()


@contextmanager
def old_objects_left_alone() -> Iterator[None]:
    """The garbage collector does not look through what exists already: with torch's modules that takes 0.2 s each time,
    every few seconds of a run. New ones wait until there are _NEW_OBJECTS: those of most rows go by themselves."""
    if gc.get_freeze_count() > 1000:  # somebody has done so
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
