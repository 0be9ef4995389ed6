"""A model that has only some of the new weights computes no logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mimo.refit.rendezvous import RefitError
from tests.support.lazy import Lazy

receiver = Lazy("mimo.refit.receiver")


class Model:
    """The part of a model that the guard uses."""

    def compute_logits(self, hidden: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return scale * hidden


def guarded(complete: bool) -> tuple[Model, Any]:
    model = Model()
    guard = receiver.Guard(model)
    guard.arm(complete)
    return model, guard


def refuses(model: Model) -> bool:
    try:
        return not torch.equal(model.compute_logits(torch.ones(2), scale=3.0), torch.full((2,), 3.0))
    except RefitError as error:
        assert "no complete weights" in str(error)
        return True


def test_made_up_weights_are_refused_and_loaded_ones_served() -> None:
    assert refuses(guarded(complete=False)[0])
    assert not refuses(guarded(complete=True)[0])


def test_an_update_is_served_when_all_of_it_has_come() -> None:
    model, guard = guarded(complete=True)
    guard.close()
    assert refuses(model)
    with pytest.raises(RefitError, match="ends without all of its weights"):
        guard.open()
    assert refuses(model)
    guard.received()
    assert refuses(model)
    guard.open()
    assert not refuses(model)
    guard.close()
    with pytest.raises(RefitError, match="ends without all of its weights"):
        guard.open()  # what came before does not count for a later update


def test_a_new_trainer_makes_broken_weights_no_better() -> None:
    model, guard = guarded(complete=True)
    guard.close()
    guard.arm(complete=True)
    assert refuses(model)


def test_a_new_trainer_does_not_stop_what_is_served() -> None:
    model, guard = guarded(complete=False)
    guard.close()
    guard.received()
    guard.open()
    guard.arm(complete=False)
    assert not refuses(model)
