"""Optimizers of this rank's modules: one each, none where nothing trains, with their own learning rates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.mimo.optimizer import ModuleOptimizerInfo
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import ParamKey

from mimo.config.optim import OptimConfig
from mimo.grid.groups import Grids
from mimo.model.build import BuiltModel
from mimo.optim.optimizer import HeteroOptimizer
from mimo.protocols import LANGUAGE


def peak_learning_rates(config: OptimConfig) -> dict[str, float]:
    """Peak learning rate of `language`, `encoder` and `projector` parameters."""
    encoder = config.lr if config.encoder_lr is None else config.encoder_lr
    projector = encoder if config.projector_lr is None else config.projector_lr
    return {LANGUAGE: config.lr, "encoder": encoder, "projector": projector}


def build_optimizer(config: OptimConfig, built: BuiltModel, grids: Grids) -> HeteroOptimizer:
    """One optimizer for each module that trains on any of its ranks; None for the others.

    Collective over each module's ranks only: ranks of a frozen module take no part.
    """
    infos = {}
    for name in grids.layout.grids:
        active = name in grids.modules
        optimizer = None
        if name in built.wrapped:
            optimizer = _build_one(config, built, grids, name)
        infos[name] = ModuleOptimizerInfo(
            optimizer=optimizer, grid=grids.grids[name], pg_collection=grids.collections.get(name), is_active=active
        )
    return HeteroOptimizer(infos, optimizer_config(config, config.lr, built.params_dtype))


def optimizer_config(config: OptimConfig, lr: float, params_dtype: torch.dtype) -> OptimizerConfig:
    """The wheel's optimizer configuration for a module whose peak learning rate is `lr`."""
    return OptimizerConfig(
        optimizer="adam",
        lr=lr,
        min_lr=config.min_lr * lr / config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        clip_grad=config.clip_grad,
        bf16=params_dtype == torch.bfloat16,
        params_dtype=params_dtype,
        use_distributed_optimizer=config.use_distributed_optimizer,
        log_num_zeros_in_grad=config.log_num_zeros_in_grad,
    )


def _build_one(config: OptimConfig, built: BuiltModel, grids: Grids, name: str) -> Any:
    rates = peak_learning_rates(config)
    module_config = optimizer_config(config, rates[LANGUAGE if name == LANGUAGE else "encoder"], built.params_dtype)
    overrides: dict[ParamKey, Any] = get_standard_config_overrides(module_config)
    if name != LANGUAGE:
        scale = config.min_lr / config.lr
        overrides[ParamKey(name="*input_projections*")] = {
            "max_lr": rates["projector"],
            "min_lr": rates["projector"] * scale,
        }
        if config.encoder_weight_decay is not None:
            decay = config.encoder_weight_decay
            overrides[ParamKey(name="*")] = {"start_wd": decay, "end_wd": decay}
    groups = grids.collections[name]
    with object_gather_within(groups.intra_dist_opt):
        return get_megatron_optimizer(
            module_config,
            [built.wrapped[name]],
            config_overrides=overrides,
            use_gloo_process_groups=False,
            pg_collection=groups,
        )


@contextmanager
def object_gather_within(default: dist.ProcessGroup) -> Iterator[None]:
    """Inside, `all_gather_object` and `get_world_size` without a group mean `default`.

    The wheel aligns parameter groups over the world, which gives every module the other modules' groups, and hangs when
    the ranks of a frozen module build no optimizer.
    """
    gather, size = dist.all_gather_object, dist.get_world_size

    def gather_within(object_list: Any, obj: Any, group: Any = None) -> Any:
        return gather(object_list, obj, group=group or default)

    def size_within(group: dist.ProcessGroup | None = None) -> int:
        return size(group or default)

    dist.all_gather_object, dist.get_world_size = gather_within, size_within
    try:
        yield
    finally:
        dist.all_gather_object, dist.get_world_size = gather, size
