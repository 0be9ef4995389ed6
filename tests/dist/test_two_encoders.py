"""Several encoders, each on a grid of its own, through the Python API."""

from __future__ import annotations

import numpy as np
import pytest

from mimo.grid.layout import validate_layout
from mimo.grid.spec import GridSpec, Layout
from tests.support.equality import NUM_STEPS, Outcome, note_gradients, open_training, parse_config
from tests.support.global_state import assemble, read_parameters, worst_errors
from tests.support.spawn import WorkerPool

pytestmark = pytest.mark.slow

FLAGS = ("--model-provider", "tests.support.two_encoders:model",
         "--dataset-provider", "tests.support.two_encoders:data")
VISION, THERMAL = GridSpec("vision"), GridSpec("thermal", offset=1)
ONE = Layout("colocated", 1, (VISION, GridSpec("thermal")), GridSpec("language"))
LAYOUTS = {
    "three-grids": Layout("disjoint", 3, (VISION, THERMAL), GridSpec("language", offset=2)),
    "thermal-tp2": Layout("disjoint", 4, (VISION, GridSpec("thermal", offset=1, tp=2)), GridSpec("language", offset=3)),
    "two-lanes": Layout("disjoint", 4, (VISION, THERMAL), GridSpec("language", offset=2, dp=2)),
    "colocated": Layout("colocated", 2, (GridSpec("vision", dp=2), GridSpec("thermal", tp=2)),
                        GridSpec("language", tp=2)),
    "colocated-pp2-windows": Layout("colocated", 2, (GridSpec("vision", dp=2), GridSpec("thermal", tp=2)),
                                    GridSpec("language", pp=2), encoder_window=2),
}


def run_two_encoders(rank: int, layout: Layout, micro_batch_size: int) -> Outcome:
    from mimo.training.step import train_step

    config = parse_config(*FLAGS, "--micro-batch-size", str(micro_batch_size), "--llm-dp", str(layout.num_lanes))
    outcome = Outcome()
    with open_training(config, layout, rank) as (parts, loader):
        note_gradients(parts, outcome)
        for step in range(NUM_STEPS):
            outcome.losses.append(train_step(parts, loader.next_step(), force_all_reduce=step == 0).loss)
        outcome.parameters = read_parameters(parts.built.model)
    return outcome


@pytest.fixture(scope="module")
def reference(pool: WorkerPool) -> Outcome:
    return pool.run(run_two_encoders, ONE, 1, world_size=1)[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_equal_to_one_process(pool: WorkerPool, reference: Outcome, name: str) -> None:
    layout = LAYOUTS[name]
    micro_batch_size = 2 if name == "colocated" else 1
    validate_layout(layout, micro_batch_size=micro_batch_size, global_batch_size=12)
    outcomes = pool.run(run_two_encoders, layout, micro_batch_size, world_size=layout.world_size)
    for outcome in outcomes:
        np.testing.assert_allclose(outcome.losses, reference.losses, rtol=1e-5)
    for whole, by_rank in ((reference.gradients, [outcome.gradients for outcome in outcomes]),
                           (reference.parameters, [outcome.parameters for outcome in outcomes])):
        errors = worst_errors(assemble(whole), by_rank)
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] < 1e-5, f"{worst}: {errors[worst]:.2e}"
    both = assemble(reference.gradients)
    for name in ("vision", "thermal"):
        assert any(np.abs(value).max() > 0 for key, value in both.items() if f"modality_submodules.{name}." in key)
