"""The precision-aware optimizer: what is around Transformer Engine's Adam, with a plain PyTorch class in its place."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.equality import MOE
from tests.support.fused_adam import installed, joined, split
from tests.support.resuming import Run, assert_same_bits, find_differences, refusal, train
from tests.support.spawn import WorkerPool

AWARE = ("--bf16", "--use-precision-aware-optimizer")
BF16_MOMENTS = (*AWARE, "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16")
BF16_GRADIENTS = (*AWARE, "--main-grads-dtype", "bf16", "--no-grad-reduce-in-fp32")
EXPERTS = ("--llm-dp", "2", "--llm-ep", "2", *MOE)


def test_weights_and_their_lower_bits_are_the_float32_weights() -> None:
    values = torch.randn(100_000) * torch.logspace(-30, 30, 100_000)
    weights, low = split(values)
    assert torch.equal(joined(weights, low), values)
    assert (weights != values.to(torch.bfloat16)).float().mean() < 1e-3, "only ties round differently"


def train_aware(rank: int, flags: tuple[str, ...], world_size: int, until: int = 4) -> Run:
    with installed():
        return train(rank, flags, world_size, until)


def refuse_aware(rank: int, flags: tuple[str, ...], world_size: int) -> str | None:
    with installed():
        return refusal(rank, flags, world_size)


@pytest.fixture(scope="module")
def usual(pool: WorkerPool) -> list[Run]:
    """Each rank's run with the usual optimizer."""
    return pool.run(train, (*EXPERTS, "--bf16"), 3, 4, world_size=3)


@pytest.mark.parametrize("flags", [AWARE, BF16_MOMENTS, BF16_GRADIENTS],
                         ids=["fp32-moments", "bf16-moments", "bf16-gradients"])
def test_steps_are_close_to_those_of_the_usual_optimizer(pool: WorkerPool, usual: list[Run],
                                                         flags: tuple[str, ...]) -> None:
    found = pool.run(train_aware, (*EXPERTS, *flags), 3, world_size=3)
    for theirs, ours in zip(usual, found, strict=True):
        np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-3 if flags == AWARE else 5e-3)
        np.testing.assert_allclose(ours.grad_norms, theirs.grad_norms, rtol=2e-2)


def norms_after_a_step(rank: int, flags: tuple[str, ...], world_size: int) -> tuple[float, float]:
    """Return the norm that a step reports, and the squared norm of this rank's gradients as Adam has read them."""
    from mimo.training.step import train_step
    from tests.support.steps import trainer_of

    with installed(), trainer_of(rank, flags, world_size) as (parts, loader):
        result = train_step(parts, loader.next_step())
        gradients: list[Any] = [parameter.decoupled_grad for one in parts.optimizer.inner_optimizers()
                                for group in one.optimizer.param_groups for parameter in group["params"]]
        return result.grad_norm, sum(gradient.float().square().sum().item() for gradient in gradients)


def test_gradients_are_clipped(pool: WorkerPool) -> None:
    found = pool.run(norms_after_a_step, (*AWARE, "--llm-dp", "2", "--clip-grad", "0.01"), 3, world_size=3)
    assert all(norm > 0.1 for norm, _ in found)
    assert math.sqrt(sum(square for _, square in found)) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("flags", [AWARE, BF16_MOMENTS], ids=["fp32-moments", "bf16-moments"])
def test_a_resumed_run_goes_on_to_the_bit(pool: WorkerPool, tmp_path: Path, flags: tuple[str, ...]) -> None:
    own = (*flags, "--llm-dp", "2")
    whole = pool.run(train_aware, (*own, "--save", str(tmp_path)), 3, world_size=3)
    rest = pool.run(train_aware, (*own, "--load", str(tmp_path)), 3, world_size=3)
    assert_same_bits(whole, rest)
    other = pool.run(train_aware, (*flags, "--llm-tp", "2", "--sequence-parallel", "--load", str(tmp_path)), 3,
                     world_size=3)
    assert find_differences(whole, other, 2e-2) == []


def test_other_dtypes_of_a_checkpoint_are_refused(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(train_aware, (*AWARE, "--save", str(tmp_path)), 2, 2, world_size=2)
    told = pool.run(refuse_aware, (*BF16_MOMENTS, "--load", str(tmp_path)), 2, world_size=2)[0]
    assert told is not None
    assert "saved with --exp-avg-dtype fp32 --exp-avg-sq-dtype fp32, and this run has --exp-avg-dtype bf16" in told
    told = pool.run(refusal, ("--bf16", "--load", str(tmp_path)), 2, world_size=2)[0]
    assert told is not None
    assert "saved with --use-precision-aware-optimizer, and this run has --no-use-precision-aware-optimizer" in told
    assert pool.run(refuse_aware, (*BF16_MOMENTS, "--load", str(tmp_path), "--no-load-optim"), 2,
                    world_size=2) == [None, None]
