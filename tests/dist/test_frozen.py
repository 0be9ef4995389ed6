"""--freeze: frozen parameters keep every bit and have no optimizer, the others train as on one process."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tests.support.equality import Outcome, assert_equal, part_of, run_layout, run_oracle
from tests.support.global_state import initial_value
from tests.support.spawn import WorkerPool

pytestmark = pytest.mark.slow

FREEZE = ("vision", "vision,projector", "language", "language,vision")
PARTS = {"vision", "projector", "language"}
# name -> (ranks, flags)
LAYOUTS = {"disjoint": (3, "--llm-dp 2"),
           "colocated": (2, "--layout colocated --encoder-dp 2 --llm-tp 2 --micro-batch-size 2 --sequence-parallel"),
           "colocated-pp2": (2, "--layout colocated --encoder-dp 2 --llm-pp 2"),
           "homogeneous-pp2": (2, "--layout homogeneous --llm-pp 2")}
# Stages of which some or all are frozen still pass activations and gradients on.
PIPELINES = {"language,vision": (4, "--encoder-pp 2 --llm-pp 2"), "vision": (3, "--encoder-pp 2"),
             "vision,projector": (3, "--encoder-pp 2")}


@dataclass
class FrozenOutcome:
    """A rank's `Outcome`, whether each of its modules has an optimizer, and the learning rates it would report."""

    outcome: Outcome
    has_optimizer: dict[str, bool]
    learning_rates: dict[str, float]


@pytest.fixture(scope="module")
def oracles(pool: WorkerPool) -> dict[str, Outcome]:
    return {freeze: pool.run(run_oracle, ("--freeze", freeze), world_size=1)[0] for freeze in FREEZE}


def run_frozen(rank: int, flags: tuple[str, ...], world_size: int) -> FrozenOutcome:
    from mimo.training.optimizer import current_learning_rates
    from tests.support.steps import trainer_changed_by

    with trainer_changed_by(lambda patch, parts: None) as trainers:
        outcome = run_layout(rank, flags, world_size)
    (parts,) = trainers
    has_optimizer = {name: info.optimizer is not None for name, info in parts.optimizer.module_infos.items()
                     if info.is_active}
    return FrozenOutcome(outcome, has_optimizer, current_learning_rates(parts.config, parts.scheduler, ("vision",)))


def check(oracle: Outcome, ranks: list[FrozenOutcome], frozen: set[str]) -> None:
    assert_equal(oracle, [found.outcome for found in ranks])
    moved = set()
    for found in ranks:
        for piece in found.outcome.parameters:
            initial = initial_value(piece.key, piece.shape)[piece.slices].numpy()
            if not np.array_equal(piece.value, initial):
                moved.add(part_of(piece.key))
        assert found.learning_rates.keys() == PARTS - frozen
        for module, has_optimizer in found.has_optimizer.items():
            parts = {"language"} if module == "language" else {"vision", "projector"}
            assert has_optimizer == bool(parts - frozen), module
            assert has_optimizer or found.outcome.optimizer_tensors[module] == 0, module
    assert moved == PARTS - frozen


@pytest.mark.parametrize("freeze", FREEZE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_frozen_parts(pool: WorkerPool, oracles: dict[str, Outcome], layout: str, freeze: str) -> None:
    world_size, flags = LAYOUTS[layout]
    ranks = pool.run(run_frozen, (*flags.split(), "--freeze", freeze), world_size, world_size=world_size)
    check(oracles[freeze], ranks, set(freeze.split(",")))


@pytest.mark.parametrize("freeze", PIPELINES)
def test_frozen_stages(pool: WorkerPool, oracles: dict[str, Outcome], freeze: str) -> None:
    world_size, flags = PIPELINES[freeze]
    ranks = pool.run(run_frozen, (*flags.split(), "--freeze", freeze), world_size, world_size=world_size)
    check(oracles[freeze], ranks, set(freeze.split(",")))
    first_stage = ranks[0]
    trains = {part_of(piece.key) for piece in first_stage.outcome.parameters} - set(freeze.split(","))
    assert bool(first_stage.outcome.optimizer_tensors["vision"]) == bool(trains), "a frozen stage holds no state"


def test_frozen_overlap(pool: WorkerPool, oracles: dict[str, Outcome]) -> None:
    """Overlapped reduction on both modules while only the projector trains."""
    flags = "--encoder-dp 2 --micro-batch-size 2 --overlap-grad-reduce --encoder-ddp-overlap --freeze language,vision"
    ranks = pool.run(run_frozen, tuple(flags.split()), 3, world_size=3)
    check(oracles["language,vision"], ranks, {"language", "vision"})
