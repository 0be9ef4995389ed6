"""Train with queues of encoder prefetch of several lengths, and see where the encoder ran."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.support.global_state import Piece, read_gradients
from tests.support.resuming import exact_state

NUM_STEPS = 4


@dataclass
class Trained:
    """Results and weights of a rank, and where its encoder ran.

    Attributes:
        losses, grad_norms: losses and gradient norms of each step.
        gradients: gradients of the first step.
        state: every parameter and optimizer tensor at the end.
        ran_in: for each microbatch that the encoder ran on, in order, what had it run.
        queued: images in the queue at the end of each step.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float | None] = field(default_factory=list)
    gradients: list[Piece] = field(default_factory=list)
    state: dict[str, np.ndarray] = field(default_factory=dict)
    ran_in: list[str] = field(default_factory=list)
    queued: list[int] = field(default_factory=list)


def inside(place: list[str], name: str, call: Any) -> Any:
    """Wrap a function so that `name` is the last element of `place` while it runs."""
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        place.append(name)
        try:
            return call(*args, **kwargs)
        finally:
            place.pop()

    return wrapper


@contextmanager
def watched(parts: Any, trained: Trained) -> Iterator[None]:
    """Inside, what has the encoder of this rank run is written down."""
    from mimo.model.submodule import VisionSubmodule
    from mimo.training.encoder_prefetch import EncoderPrefetch

    place = ["forward"]
    run_encoder = VisionSubmodule.run_encoder

    def noting(*args: Any, **kwargs: Any) -> Any:
        output = run_encoder(*args, **kwargs)
        if output is not None:
            trained.ran_in.append(place[-1])
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VisionSubmodule, "run_encoder", noting)
        for name in ("launch", "fill", "take"):
            patch.setattr(EncoderPrefetch, name, inside(place, name, getattr(EncoderPrefetch, name)))
        for bridge in parts.communicator.bridges:
            if parts.prefetch is not None and bridge.while_waiting is not None:
                bridge.while_waiting = parts.prefetch.launch
        yield


def train(rank: int, flags: tuple[str, ...], world_size: int, depth: int) -> Trained:
    from mimo.config.validate import num_microbatches, steps_ahead
    from mimo.training.step import train_step
    from tests.support.steps import trainer_of

    trained = Trained()
    flags = (*flags, "--encoder-prefetch-depth", str(depth))
    with trainer_of(rank, flags, world_size) as (parts, loader), watched(parts, trained):
        assert (parts.prefetch is not None) == (depth > 0 and "vision" in parts.grids.modules)
        ahead = steps_ahead(depth, num_microbatches(parts.config))
        for step in range(NUM_STEPS):
            microbatches = loader.next_step()
            coming = loader.peek(min(ahead, NUM_STEPS - step - 1))
            result = train_step(parts, microbatches, coming=coming, force_all_reduce=step == 0)
            trained.losses.append(result.loss)
            trained.grad_norms.append(result.grad_norm)
            if step == 0:
                trained.gradients = read_gradients(parts.built.model)
            if parts.prefetch is not None:
                trained.queued.append(parts.prefetch.num_held)
        parts.built.model.disable_forward_pre_hook()
        trained.state = exact_state(parts)
    return trained


def train_with_each(rank: int, flags: tuple[str, ...], world_size: int, depths: tuple[int, ...]) -> list[Trained]:
    return [train(rank, flags, world_size, depth) for depth in depths]


def assert_same_bits(one: Trained, other: Trained) -> None:
    assert one.losses == other.losses and one.grad_norms == other.grad_norms
    for piece, its in zip(one.gradients, other.gradients, strict=True):
        assert piece.key == its.key and np.array_equal(piece.value, its.value), piece.key
    assert one.state.keys() == other.state.keys()
    assert [name for name, value in one.state.items() if not np.array_equal(value, other.state[name])] == []


def check_where_it_ran(off: Trained, on: Trained, depth: int, *, several: bool) -> None:
    """Once for each microbatch with images, ahead of it but for the first of the run, and into the next iteration."""
    assert len(on.ran_in) == len(off.ran_in) and set(off.ran_in) <= {"forward"}
    if not on.ran_in:
        return
    first, *others = on.ran_in
    assert first == "take" and set(others) <= {"launch", "fill"}
    assert max(on.queued) <= depth and on.queued[-1] == 0
    if several:
        assert all(on.queued[:-1]), "of the next iteration"
