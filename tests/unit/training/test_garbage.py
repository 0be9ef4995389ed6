"""Objects that the garbage collector examines while a run trains."""

from __future__ import annotations

import gc
import weakref

from mimo.training.setup import kept_objects


class Node:
    """Refers to itself, so that only a collection ends it."""

    def __init__(self) -> None:
        self.itself = self


def test_existing_objects_are_ignored_until_the_end() -> None:
    before = Node()
    early = weakref.ref(before)
    with kept_objects():
        late = weakref.ref(Node())
        del before
        gc.collect()
        assert late() is None, "what came later is collected"
        assert early() is not None, "what was there is not looked at"
    gc.collect()
    assert early() is None, "and is collected afterwards"
