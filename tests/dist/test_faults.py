"""The equality test can fail: deliberate faults, put in from outside, each show up where they belong."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.support.equality import NUM_STEPS, Outcome, find_differences, run_layout, run_oracle
from tests.support.spawn import WorkerPool

pytestmark = pytest.mark.slow

FAN_OUT = ("--llm-dp", "2")
FAN_IN = ("--encoder-dp", "2", "--micro-batch-size", "2")
# First language rank of both layouts' three ranks, and a rank with a data-parallel peer in FAN_OUT.
FIRST_LANE, SECOND_LANE = 1, 2


@pytest.fixture(scope="module")
def oracle(pool: WorkerPool) -> Outcome:
    return pool.run(run_oracle, (), world_size=1)[0]


def count_a_lane_twice(rank: int, patch: pytest.MonkeyPatch, parts: Any) -> None:
    """Let the first lane report its target tokens twice."""
    from mimo.training import step

    loss_function, mean_over_targets = step.loss_function, step.mean_over_targets

    def report_twice(batch: Any, losses: Any) -> Any:
        total, count, report = loss_function(batch, losses)
        return total, count, report * report.new_tensor([1, 2])

    if rank == FIRST_LANE:
        patch.setattr(step, "loss_function", report_twice)
        patch.setattr(step, "mean_over_targets", lambda parts, microbatches: mean_over_targets(parts, 2 * microbatches))


def divide_encoder_gradients_by_dp(rank: int, patch: pytest.MonkeyPatch, parts: Any) -> None:
    from megatron.core.utils import get_model_config

    finalize = parts.grad_sync.finalize

    def finalize_and_divide(*args: Any, **options: Any) -> None:
        finalize(*args, **options)
        if "vision" in parts.built.wrapped:
            parts.built.wrapped["vision"].scale_gradients(1 / 2)

    patch.setattr(get_model_config(parts.built.model), "finalize_model_grads_func", finalize_and_divide)


def skip_the_last_update_of_a_shard(rank: int, patch: pytest.MonkeyPatch, parts: Any) -> None:
    """Make Adam leave one rank's shard as it is in the last step. The parameter gather still runs."""
    from tests.support.steps import inner_optimizers

    if rank == SECOND_LANE:
        (optimizer,) = inner_optimizers(parts.optimizer.module_infos["language"].optimizer)
        adam_step, steps = optimizer.optimizer.step, itertools.count(1)
        patch.setattr(optimizer.optimizer, "step", lambda: adam_step() if next(steps) < NUM_STEPS else None)


def drop_the_last_parameter_gather(rank: int, patch: pytest.MonkeyPatch, parts: Any) -> None:
    """Keep one rank from taking over what its data-parallel peer updated in the last step."""
    update, steps = parts.optimizer.step_with_ready_grads, itertools.count(1)

    def update_own_shard_only() -> bool:
        buckets = [bucket for buffer in parts.built.wrapped["language"].buffers for bucket in buffer.buckets]
        before = [bucket.param_data.clone() for bucket in buckets]
        success = update()
        if next(steps) == NUM_STEPS:
            for bucket, old in zip(buckets, before, strict=True):
                peer = 0  # this rank is the second of two
                bucket.param_data.chunk(2)[peer].copy_(old.chunk(2)[peer])
        return success

    if rank == SECOND_LANE:
        patch.setattr(parts.optimizer, "step_with_ready_grads", update_own_shard_only)


def swap_rows_of_lanes(rank: int, patch: pytest.MonkeyPatch, parts: Any) -> None:
    """Let the encoder send each lane the other's rows, as many as both have."""
    import torch

    from mimo.bridge.disjoint import Bridge

    transfer = Bridge._transfer

    def transfer_swapped(bridge: Bridge, what: str, sends: Any, receives: Any) -> Any:
        if sends is not None and what.startswith("send_forward"):
            first, second = sends[0].detach().split(sends[1])
            shared = min(len(first), len(second))
            sends = (torch.cat([second[:shared], first[shared:], first[:shared], second[shared:]]), sends[1])
        return transfer(bridge, what, sends, receives)

    patch.setattr(Bridge, "_transfer", transfer_swapped)


def run_with_fault(rank: int, flags: tuple[str, ...], fault: Callable[[int, pytest.MonkeyPatch, Any], None]) -> Outcome:
    from tests.support.steps import trainer_changed_by

    with trainer_changed_by(partial(fault, rank)):
        return run_layout(rank, flags, 3)


def find_kinds(oracle: Outcome, outcomes: list[Outcome]) -> set[tuple[str, str]]:
    """List differences: ("loss", step), ("grad norm", step), ("gradient" or "parameter", module)."""
    kinds = set()
    for difference in find_differences(oracle, outcomes):
        if difference.startswith(("gradient ", "parameter ")):
            what, name = difference.split(" ")[:2]
            kinds.add((what, "vision" if "modality_submodules" in name else "language"))
        else:
            what, step = difference.split(" of step ")
            kinds.add((what, step.split(" ")[0]))
    return kinds


def test_a_lane_counted_twice_is_found(pool: WorkerPool, oracle: Outcome) -> None:
    kinds = find_kinds(oracle, pool.run(run_with_fault, FAN_OUT, count_a_lane_twice, world_size=3))
    assert {("loss", "0"), ("gradient", "vision"), ("gradient", "language")} <= kinds


def test_encoder_gradients_divided_by_dp_are_found(pool: WorkerPool, oracle: Outcome) -> None:
    kinds = find_kinds(oracle, pool.run(run_with_fault, FAN_IN, divide_encoder_gradients_by_dp, world_size=3))
    assert {("gradient", "vision"), ("grad norm", "0"), ("parameter", "vision")} <= kinds
    assert not {("loss", "0"), ("gradient", "language")} & kinds, "the first step's"


@pytest.mark.parametrize("fault", [skip_the_last_update_of_a_shard, drop_the_last_parameter_gather])
def test_a_stale_shard_is_found(pool: WorkerPool, oracle: Outcome, fault: Any) -> None:
    """Losses and gradients cannot show it: it is the last step's."""
    assert find_kinds(oracle, pool.run(run_with_fault, FAN_OUT, fault, world_size=3)) == {("parameter", "language")}


def test_rows_of_two_lanes_swapped_are_found(pool: WorkerPool, oracle: Outcome) -> None:
    kinds = find_kinds(oracle, pool.run(run_with_fault, FAN_OUT, swap_rows_of_lanes, world_size=3))
    assert {("loss", "0"), ("gradient", "vision"), ("gradient", "language")} <= kinds
