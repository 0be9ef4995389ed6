"""The update in one kernel inside whole runs, in Triton's interpreter, around a plain class in place of FusedAdam."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.equality import MOE
from tests.support.marks import fast_only
from tests.support.resuming import Run, assert_same_bits, train
from tests.support.spawn import WorkerPool

EXPERTS = ("--llm-dp", "2", "--llm-ep", "2", *MOE)
# Flags, and how close losses are.
CASES = {"experts": ((*EXPERTS, "--bf16"), 3e-3), "float32": (("--llm-dp", "2", "--clip-grad", "0.5"), 1e-5),
         "unclipped": (("--llm-dp", "2", "--clip-grad", "0"), 1e-5),
         "bf16-gradients": (("--llm-dp", "2", "--clip-grad", "0.5", "--no-grad-reduce-in-fp32", "--bf16"), 3e-3)}


class FusedAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay, called as Transformer Engine's."""

    def __init__(self, params: Any, *, adam_w_mode: bool, capturable: bool, **defaults: Any) -> None:
        assert adam_w_mode and not capturable
        super().__init__(params, {**defaults, "bias_correction": True})

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        assert not store_param_remainders
        self.state[param].update({kind: torch.zeros_like(param) for kind in ("exp_avg", "exp_avg_sq")})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param, False)
                mean, square = self.state[param]["exp_avg"], self.state[param]["exp_avg_sq"]
                mean.lerp_(param.grad, 1 - first)
                square.mul_(second).addcmul_(param.grad, param.grad, value=1 - second)
                scaled = (square / (1 - second ** group["step"])).sqrt() + group["eps"]
                update = mean / (1 - first ** group["step"]) / scaled + group["weight_decay"] * param
                param.sub_(group["lr"] * update)


FusedAdam.__module__ = "transformer_engine.pytorch.optimizers.fused_adam"


@contextmanager
def installed() -> Iterator[list[int]]:
    """Context in which this class is Transformer Engine's Adam. Yields a list with an entry for each fused update."""
    from megatron.core import optimizer

    updates: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        from mimo.training import fused_adam

        step = fused_adam.FusedUpdate.step
        patch.setattr(fused_adam.FusedUpdate, "step", lambda self: updates.append(len(updates)) or step(self))
        patch.setattr(optimizer, "Adam", FusedAdam)
        patch.setattr(optimizer, "USING_PYTORCH_OPTIMIZER", False)
        yield updates


def train_fused(rank: int, flags: tuple[str, ...], world_size: int, until: int) -> Run:
    with installed() as updates:
        run = train(rank, flags, world_size, until)
    assert bool(updates) is ("--no-fused-optimizer-update" not in flags)
    return run


# The interpreter cuts bfloat16 numbers where a GPU rounds them.
@pytest.mark.parametrize("case", fast_only(("experts", "float32"), CASES))
def test_steps_are_close_to_those_of_three_passes(pool: WorkerPool, case: str) -> None:
    flags, tolerance = CASES[case]
    expected, found = (pool.run(train_fused, (*flags, *more), 3, 4, world_size=3)
                       for more in (("--no-fused-optimizer-update",), ()))
    for theirs, ours in zip(expected, found, strict=True):
        np.testing.assert_allclose(ours.losses, theirs.losses, rtol=tolerance)
        np.testing.assert_allclose(ours.grad_norms, theirs.grad_norms, rtol=4 * tolerance)
        assert ours.updates == theirs.updates


def test_a_resumed_run_goes_on_to_the_bit(pool: WorkerPool, tmp_path: Path) -> None:
    # In float32, because the interpreter's bfloat16 weights are not the rounded ones that a checkpoint must have.
    whole = pool.run(train_fused, (*EXPERTS, "--save", str(tmp_path)), 3, 4, world_size=3)
    assert_same_bits(whole, pool.run(train_fused, (*EXPERTS, "--load", str(tmp_path)), 3, 4, world_size=3))
