"""Training with weights, gradients and optimizer state on the host between steps: bit by bit what it is without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import offloading
from tests.support.equality import DENSE, MOE
from tests.support.marks import fast_only
from tests.support.spawn import WorkerPool

OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "4000")
# name -> (ranks, flags)
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "disjoint-overlap-bf16": (3, ("--llm-dp", "2", "--bf16", *OVERLAP, *DENSE)),
    "disjoint-bf16": (3, ("--llm-dp", "2", "--bf16")),
    "disjoint-float32": (3, ("--llm-dp", "2")),
    "unsharded-optimizer-bf16": (3, ("--llm-dp", "2", "--bf16", "--no-use-distributed-optimizer",
                                     "--overlap-grad-reduce")),
    "unsharded-optimizer-float32": (2, ("--no-use-distributed-optimizer",)),
    "colocated-frozen-encoder": (2, ("--layout", "colocated", "--encoder-dp", "2", "--llm-tp", "2",
                                     "--micro-batch-size", "2", "--sequence-parallel", "--bf16", "--freeze",
                                     "vision,projector")),
    "moe-ep2-overlap": (3, ("--llm-dp", "2", "--llm-ep", "2", "--bf16", *OVERLAP, *MOE)),
    "pp2": (3, ("--llm-pp", "2", "--bf16", "--freeze", "vision")),
    "graphs": (2, ("--cuda-graphs", "--bf16")),
}


@pytest.mark.parametrize("layout", fast_only(["disjoint-overlap-bf16"], LAYOUTS))
def test_no_memory_is_left_behind_and_training_goes_on_bit_by_bit(pool: WorkerPool, layout: str) -> None:
    world_size, flags = LAYOUTS[layout]
    plain = pool.run(offloading.train, flags, world_size, False, world_size=world_size)
    moved = pool.run(offloading.train, flags, world_size, True, world_size=world_size)
    for expected, found in zip(plain, moved, strict=True):
        assert found.left == []
        assert found.losses == expected.losses and found.grad_norms == expected.grad_norms
        assert found.weights.keys() == expected.weights.keys()
        assert [key for key, value in expected.weights.items() if not np.array_equal(value, found.weights[key])] == []
        assert len(found.state) == len(expected.state)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found.state, expected.state, strict=True))
        assert found.freed["weights"] > 0
    assert len(set(plain[0].losses)) == len(plain[0].losses), "nothing was trained"


@pytest.mark.slow
def test_a_frozen_module_gives_its_weights_and_has_nothing_else(pool: WorkerPool) -> None:
    found = pool.run(offloading.train, ("--freeze", "vision,projector"), 2, True, world_size=2)
    assert found[0].freed["weights"] > 0 and found[0].freed["gradients"] == found[0].freed["optimizer"] == 0
    assert found[1].freed["gradients"] > 0 and found[1].freed["optimizer"] > 0


def test_calls_that_need_offloaded_memory_raise_an_error(pool: WorkerPool, tmp_path: Path) -> None:
    for found in pool.run(offloading.refusals, ("--llm-dp", "2", "--bf16", *OVERLAP), 3, str(tmp_path), world_size=3):
        away = {"gradients": "gradients", "optimizer": "gradients, optimizer",
                "weights": "weights, gradients, optimizer"}
        for kind, named in away.items():
            for call in ("step", "norms", "update"):
                assert f"{named} of this trainer are offloaded" in found.pop(f"{kind}: {call}")
            own_step = found.pop(f"{kind}: own step")
            assert f"{named.removesuffix(', optimizer')} of this trainer are offloaded" in own_step
        for call in ("evaluation", "refit", "checkpoint", "export"):
            assert "weights of this trainer are offloaded" in found.pop(f"weights: {call}")
        assert "optimizer of this trainer are offloaded" in found.pop("optimizer: checkpoint")
        # Nothing else is in the way of a refit, an evaluation or an export.
        assert found == {}
