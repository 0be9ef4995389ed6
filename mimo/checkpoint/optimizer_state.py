"""Optimizer state as slices of global tensors, so that every layout can load what any layout has saved.

Megatron Core's formats either follow its gradient buckets, and can then only be loaded with another data-parallel size,
or gather a whole optimizer over its data-parallel ranks first. Here each rank saves the flat ranges that it owns as
boxes of the global tensors, without communication, and loads the parts that it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

from mimo.checkpoint.entries import Saved, flat_range
from mimo.compat import parameter_ranges
from mimo.training.optimizer import HeteroOptimizer

MOMENTS = ("exp_avg", "exp_avg_sq")
MAIN = "fp32_param"
REMAINDER = "master_param"
"""The 16 bits of each float32 weight that its bfloat16 weight lacks, as the precision-aware optimizer names them."""


@dataclass
class Optimized:
    """Optimizer state of one parameter on this rank.

    Attributes:
        saved: the parameter.
        main: values that the optimizer updates: an fp32 copy of elements `begin` to `end`, or the parameter's own
            memory.
        begin, end: range of the parameter's elements, in row-major order.
        inner: the torch (or Transformer Engine) optimizer.
        group: the optimizer's parameter group.
        owned: whether no other data-parallel rank has these elements.
    """

    saved: Saved
    main: torch.Tensor
    begin: int
    end: int
    inner: Any
    group: dict[str, Any]
    owned: bool

    @property
    def weights(self) -> torch.Tensor:
        """Values of these elements in the model, flat."""
        return self.saved.tensor.detach().reshape(-1)[self.begin: self.end]

    @property
    def has_main(self) -> bool:
        """Whether `main` is a copy of the parameter."""
        return self.main.data_ptr() != self.weights.data_ptr()

    def step(self) -> int:
        """Return the number of updates that Adam has counted."""
        return int(self.inner.state.get(self.main, {}).get("step", self.group.get("step", 0)))

    def set_step(self, step: int) -> None:
        """Set the number of updates. torch's optimizers keep it in the state, fused ones in the group."""
        if isinstance(self.inner, torch.optim.Adam | torch.optim.AdamW):
            self.inner.state[self.main]["step"] = torch.tensor(float(step))
        else:
            self.group["step"] = step

    def values(self) -> dict[str, torch.Tensor]:
        """Return the moments and the fp32 copy, or what is stored instead of it, by kind."""
        state = self.inner.state[self.main]
        values = {kind: state[kind] for kind in (*MOMENTS, REMAINDER) if kind in state}
        if self.has_main:
            values[MAIN] = self.main
        return values

    def entries(self) -> list[ShardedTensor]:
        """Return entries for `values`, as views."""
        found = []
        for kind, value in self.values().items():
            key = f"mimo.{self.saved.module}.optimizer.state.{kind}"
            found += flat_range(self.saved, self.begin, self.end, value.detach(), key, owned=self.owned)
        return found


def optimized(optimizer: HeteroOptimizer, saved: Iterable[Saved]) -> list[Optimized]:
    """Return the state that this rank's optimizers hold. Where there was none yet, moments are zero."""
    by_parameter = {id(tensor.tensor): tensor for tensor in saved}
    found = []
    for one in optimizer.inner_optimizers():
        _allocate(one)
        for parameter, main, begin, end, group, owned in _held(one):
            assert id(parameter) in by_parameter, (
                f"a parameter of shape {tuple(parameter.shape)} is optimized but not saved")
            if begin < end:
                found.append(Optimized(by_parameter[id(parameter)], main, begin, end, one.optimizer, group, owned))
    return found


def _allocate(optimizer: Any) -> None:
    """Allocate the state of every parameter. torch's Adam would do so only in its first step."""
    if optimizer.config.use_precision_aware_optimizer:
        # Megatron Core's function calls this method without its second argument.
        adam = optimizer.optimizer
        for group in adam.param_groups:
            for parameter in group["params"]:
                if not adam.state[parameter]:
                    adam.initialize_state(parameter, parameter.dtype == torch.bfloat16)
    elif optimizer.init_state_fn is not None:
        optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
    if isinstance(optimizer.optimizer, torch.optim.Adam | torch.optim.AdamW):
        for state in optimizer.optimizer.state.values():
            state.setdefault("step", torch.tensor(0.0))


def _held(optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, int, dict[str, Any], bool]]:
    """Yield (model parameter, main values, begin, end, group, owned) of an optimizer of Megatron Core."""
    groups = optimizer.optimizer.param_groups
    if isinstance(optimizer, DistributedOptimizer):
        for parameter, (group, order) in optimizer.model_param_group_index_map.items():
            span, _ = parameter_ranges(optimizer, parameter)
            yield parameter, groups[group]["params"][order], span.start, span.end, groups[group], True
        return
    owner = {id(parameter): group for group in groups for parameter in group["params"]}
    if isinstance(optimizer, Float16OptimizerWithFloat16Params):
        pairs = [
            pair
            for model, main in ((optimizer.float16_groups, optimizer.fp32_from_float16_groups),
                                (optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups))
            for models, mains in zip(model, main, strict=True)
            for pair in zip(models, mains, strict=True)
        ]
    else:
        assert isinstance(optimizer, FP32Optimizer), type(optimizer)
        pairs = [(parameter, parameter) for group in groups for parameter in group["params"]]
    for parameter, main in pairs:
        yield parameter, main, 0, parameter.numel(), owner[id(main)], False


def steps_of(held: Iterable[Optimized]) -> dict[str, dict[str, int]]:
    """Return Adam's number of updates of each part of each module on this rank. It is the same within a part."""
    steps: dict[str, dict[str, int]] = {}
    for one in held:
        part, step = one.saved.part, one.step()
        known = steps.setdefault(one.saved.module, {}).setdefault(part, step)
        assert known == step, f"{one.saved.name} of {one.saved.module} counts {step} updates, others of {part} {known}"
    return steps


@torch.no_grad()
def take_weights(held: Iterable[Optimized]) -> None:
    """Set the fp32 copies to the model's weights."""
    for one in held:
        if one.has_main:
            one.main.view(-1).copy_(one.weights)
        elif REMAINDER in one.values():
            one.values()[REMAINDER].zero_()


@torch.no_grad()
def differing(held: Iterable[Optimized]) -> list[str]:
    """Return the parameters whose weights are not their rounded fp32 copies, as `module: name`.

    A step with learning rate 0 would change them.
    """
    return [
        f"{one.saved.module}: {one.saved.name}" for one in held
        if one.has_main and not torch.equal(one.main.view(-1).to(one.weights.dtype), one.weights)
    ]
