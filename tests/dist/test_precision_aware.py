"""The precision-aware optimizer: what is around Transformer Engine's Adam, with a plain PyTorch class in its place.

The weights are the upper 16 bits of float32 weights, rounded half away from zero; the state has the lower 16 bits.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.equality import MOE
from tests.support.resuming import Run, assert_same_bits, find_differences, refusal, train
from tests.support.spawn import WorkerPool


def joined(weights: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The float32 weights of bfloat16 weights and their lower bits."""
    high = weights.view(torch.int16).int() - (remainder < 0).int()
    return ((high << 16) | (remainder.int() & 0xFFFF)).view(torch.float32)


def split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 weights as bfloat16 weights and lower bits."""
    bits = values.view(torch.int32)
    low = (bits & 0xFFFF).to(torch.int16)
    return ((bits >> 16) + (low < 0).int()).to(torch.int16).view(torch.bfloat16), low


class FusedAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay, called as Transformer Engine's."""

    def __init__(self, params: Any, *, lr: float, weight_decay: float, betas: tuple[float, float], eps: float,
                 capturable: bool, adam_w_mode: bool, exp_avg_dtype: torch.dtype, exp_avg_sq_dtype: torch.dtype,
                 master_weights: bool, use_decoupled_grad: bool, master_weight_dtype: torch.dtype,
                 store_param_remainders: bool) -> None:
        assert adam_w_mode and master_weights and use_decoupled_grad and store_param_remainders and not capturable
        assert master_weight_dtype == torch.float32
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        assert store_param_remainders and param.dtype == torch.bfloat16
        for name, dtype in (*self.dtypes.items(), ("master_param", torch.int16)):
            self.state[param][name] = torch.zeros_like(param, dtype=dtype)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param, True)
                state, gradient = self.state[param], param.decoupled_grad.float()
                master = joined(param, state["master_param"])
                mean = first * state["exp_avg"].float() + (1 - first) * gradient
                square = second * state["exp_avg_sq"].float() + (1 - second) * gradient**2
                scaled = (square / (1 - second ** group["step"])).sqrt() + group["eps"]
                update = mean / (1 - first ** group["step"]) / scaled + group["weight_decay"] * master
                weights, low = split(master - group["lr"] * update)
                param.copy_(weights)
                state["master_param"].copy_(low)
                state["exp_avg"].copy_(mean)
                state["exp_avg_sq"].copy_(square)


@contextmanager
def installed() -> Iterator[None]:
    """Context in which this class is Transformer Engine's Adam, and validation takes a CPU for a GPU that has it."""
    from megatron.core import optimizer
    from megatron.core.optimizer import optimizer_config

    from mimo.config import validate

    with pytest.MonkeyPatch.context() as patch:
        for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"):
            module = ModuleType(name)
            module.__spec__ = ModuleSpec(name, None)
            vars(module)["FusedAdam"] = FusedAdam
            patch.setitem(sys.modules, name, module)
        for module in (optimizer, optimizer_config):
            patch.setattr(module, "is_te_min_version", lambda *arguments, **options: True)
        patch.setattr(optimizer, "Adam", FusedAdam)
        patch.setattr(optimizer, "USING_PYTORCH_OPTIMIZER", False)
        patch.setattr(validate, "_check_precision_aware", lambda config: None)
        yield


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
def test_steps_are_close_to_those_of_the_usual_optimizer(pool, usual, flags):
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
