"""A plain PyTorch equivalent of Transformer Engine's Adam for bfloat16 weights, for tests of what surrounds it.

The weights are the upper 16 bits of float32 weights, rounded half away from zero; the state has the lower 16 bits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch


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
