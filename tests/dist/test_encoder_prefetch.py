"""--encoder-prefetch-depth changes when a frozen encoder runs, and no bit of what is trained."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import launch
from tests.support.marks import fast_only
from tests.support.prefetching import assert_same_bits, check_where_it_ran, train_with_each
from tests.support.resuming import exact_state
from tests.support.spawn import WorkerPool

FROZEN = "--freeze vision"
ALL_FROZEN = "--freeze vision,projector"
# name -> (ranks, flags, depths)
CASES = {
    "one-microbatch": (2, f"{FROZEN} --global-batch-size 1 --mock-text-only-fraction 0.3", (1, 3)),
    "fan-out": (3, f"{FROZEN} --llm-dp 2 --global-batch-size 8", (1, 6)),
    "fan-in": (3, f"{FROZEN} --encoder-dp 2 --micro-batch-size 3 --global-batch-size 12", (1, 6)),
    "encoder-tp2": (3, f"{FROZEN} --encoder-tp 2 --global-batch-size 4", (1, 3, 6)),
    "encoder-tp2-llm-pp2": (4, f"{FROZEN} --encoder-tp 2 --llm-pp 2 --global-batch-size 4", (2,)),
    "encoder-tp2-one-microbatch": (3, f"{FROZEN} --encoder-tp 2 --global-batch-size 1", (1,)),
    "nothing-to-train-tp2": (3, f"{ALL_FROZEN} --encoder-tp 2 --global-batch-size 4", (1, 6)),
    "language-frozen": (2, f"{FROZEN},language --global-batch-size 4", (1, 3)),
    "overlapped-reduction": (3, f"{FROZEN} --encoder-dp 2 --micro-batch-size 2 --global-batch-size 4 "
                                "--overlap-grad-reduce --encoder-ddp-overlap", (3,)),
    "text-only": (2, f"{FROZEN} --global-batch-size 4 --mock-text-only-fraction 1.0", (2,)),
    "packed-images": (2, f"{FROZEN} --global-batch-size 4 --vision-dynamic-resolution --no-vision-class-token "
                         "--vision-image-size 32 --vision-pixel-shuffle 2 --mock-image-size 32", (2,)),
    "tiles": (2, f"{FROZEN} --global-batch-size 4 --model-provider llava_next --vision-image-grid-pinpoints 16x32 "
                 "32x16 --mock-image-size 24 --mock-image-size-cv 0.6 --seq-length 96", (2,)),
}


@pytest.mark.parametrize("case", fast_only(("fan-in", "encoder-tp2"), CASES))
def test_no_bit_changes(pool: WorkerPool, case: str) -> None:
    world_size, flags, depths = CASES[case]
    ranks = pool.run(train_with_each, tuple(flags.split()), world_size, (0, *depths), world_size=world_size)
    for rank in ranks:
        off, *on = rank
        for depth, trained in zip(depths, on, strict=True):
            assert_same_bits(off, trained)
            check_where_it_ran(off, trained, depth, several="--global-batch-size 1" not in flags)


# The whole loop: evaluations, checkpoints, the end of the run

LOOP = "--freeze vision --encoder-tp 2 --global-batch-size 2 --train-iters 5 --eval-interval 2 --eval-iters 2"
# Two microbatches an iteration, so the queue reaches over three.
DEPTH = ("--encoder-prefetch-depth", "5")
DATA = {"streams": "mock", "routed": "tests.support.routed_data:single"}


def run(rank: int, flags: tuple[str, ...], run_dir: str) -> tuple[list[float], dict[str, np.ndarray]]:
    """Loss of each iteration on this rank, and every parameter and optimizer tensor after the last."""
    from tests.support.steps import run_loop

    built: list[Any] = []
    records = run_loop(rank, (*LOOP.split(), *flags), 3, run_dir, built.append)
    return [record.lm_loss for record in records], exact_state(built[0])


def logged(run_dir: Path, key: str) -> list[float]:
    return [record[key] for record in launch.records(run_dir) if key in record]


@pytest.mark.slow
@pytest.mark.parametrize("data", DATA)
def test_runs_with_and_without_it_are_one_run(pool: WorkerPool, tmp_path: Path, data: str) -> None:
    flags = ("--dataset-provider", DATA[data])

    def ranks(name: str, *more: str) -> list[tuple[list[float], dict[str, np.ndarray]]]:
        return pool.run(run, (*flags, *more), str(tmp_path / name), world_size=3)

    checkpoints = ("--save", str(tmp_path / "checkpoints"), "--save-interval", "2")
    off, on = ranks("off"), ranks("on", *DEPTH, *checkpoints)
    assert_one_run(off, on)
    evaluations = logged(tmp_path / "off", "lm loss validation")
    assert len(evaluations) == 3 and evaluations == logged(tmp_path / "on", "lm loss validation")
    # The second iteration's checkpoint knows nothing of what was looked at before it was consumed.
    for name, more in (("resumed-on", DEPTH), ("resumed-off", ())):
        assert_one_run(off, ranks(name, *more, "--load", checkpoints[1], "--ckpt-step", "2"), begin=2)
        records = launch.records(tmp_path / name)
        assert [record["consumed_samples"] for record in records if "lm loss" in record] == [6, 8, 10]


@pytest.mark.slow
def test_a_run_that_is_stopped_leaves_nothing_waiting_and_goes_on(pool: WorkerPool, tmp_path: Path) -> None:
    """Features and data of the iterations that do not come are there when it stops, on ranks that read and others."""
    flags = ("--dataset-provider", DATA["routed"], *DEPTH, "--save", str(tmp_path / "checkpoints"))
    stopped = pool.run(run, (*flags, "--exit-duration-in-mins", "1e-6"), str(tmp_path / "stopped"), world_size=3)
    assert {len(losses) for losses, _ in stopped} == {1}
    resumed = pool.run(run, (*flags, "--load", str(tmp_path / "checkpoints")), str(tmp_path / "resumed"), world_size=3)
    whole = pool.run(run, flags[:2], str(tmp_path / "whole"), world_size=3)
    assert_one_run(whole, resumed, begin=1)


def assert_one_run(one: list[tuple[list[float], dict[str, np.ndarray]]],
                   other: list[tuple[list[float], dict[str, np.ndarray]]], begin: int = 0) -> None:
    for (losses, state), (its_losses, its_state) in zip(one, other, strict=True):
        assert losses[begin:] == its_losses and len(its_losses) == 5 - begin
        assert state.keys() == its_state.keys()
        assert [name for name, value in state.items() if not np.array_equal(value, its_state[name])] == []


# Where its time counts

DELAY_S = 0.3
SLOW = "--freeze vision --global-batch-size 1 --train-iters 4 --mock-text-only-fraction 0.0"


def run_slowly(rank: int, flags: tuple[str, ...], run_dir: str) -> list[dict[str, float]]:
    """Figures of each iteration, with a delay in each module's forward pass."""
    from megatron.core.utils import unwrap_model

    from tests.support.steps import run_loop

    def delay(parts: Any) -> None:
        model = parts.built.model
        encoders = [unwrap_model(part).encoder for part in model.modality_submodules.values()]
        for slow in (model.language_model, *encoders):
            if slow is not None:
                slow.register_forward_pre_hook(lambda *_: time.sleep(DELAY_S))

    return [record.to_dict() for record in run_loop(rank, (*SLOW.split(), *flags), 2, run_dir, delay)]


@pytest.mark.slow
def test_prefetched_passes_inside_a_wait_count_as_forward_passes(pool: WorkerPool, tmp_path: Path) -> None:
    flags = ("--encoder-prefetch-depth", "1", "--timeline-interval", "1")
    found = pool.run(run_slowly, flags, str(tmp_path), world_size=2)[0]
    # The first iteration runs its own images and the second's, the last one none.
    passes = [figures["timeline/vision/forward-s"] for figures in found]
    assert passes[0] > 2 * DELAY_S and passes[1] > DELAY_S and passes[2] > DELAY_S and passes[3] < DELAY_S
    assert [figures["encoder-prefetch-s"] > DELAY_S for figures in found] == [True, True, True, False]
    ahead = "encoder prefetch of a coming iteration"
    for iteration in range(1, 5):
        gantt = json.loads((tmp_path / "timeline" / f"step-{iteration}.json").read_text())
        intervals = [each for each in gantt["ranks"][0]["intervals"] if each["name"] == ahead]
        assert [(each["kind"], each["module"], each["microbatch"]) for each in intervals] == (
            [("forward", "vision", 0)] if iteration < 4 else [])
        assert all(each["end_s"] - each["begin_s"] > DELAY_S for each in intervals)
