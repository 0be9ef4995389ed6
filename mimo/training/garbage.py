"""Python's garbage collector while a run trains."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_objects() -> Iterator[None]:
    """Context in which collections pass over what exists at its begin.

    Modules, models and plans are about half a million objects. A full collection walks them all, for some tenths of a
    second; each rank has it at another time, and all others wait for that rank.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
