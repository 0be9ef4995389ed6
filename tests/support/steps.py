"""Change a rank's trainer, or look into it, while `run_layout` trains; inside a worker process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support import equality


@contextlib.contextmanager
def trainer_changed_by(change: Callable[[pytest.MonkeyPatch, Any], None]) -> Iterator[list[Any]]:
    """Inside, `change(patch, parts)` is applied to every trainer that is built; gives the trainers built so far.

    What `patch` replaces is put back at the end: worker processes live on.
    """
    built: list[Any] = []
    make_trainer = equality.make_trainer

    def make_and_change(*args: Any) -> Any:
        parts = make_trainer(*args)
        change(patch, parts)
        built.append(parts)
        return parts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(equality, "make_trainer", make_and_change)
        yield built


def inner_optimizers(module_optimizer: Any) -> list[Any]:
    """The wheel's optimizers of one module: one, or one each for dense and expert parameters."""
    return list(vars(module_optimizer).get("chained_optimizers", [module_optimizer]))
