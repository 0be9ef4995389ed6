"""Private parts of Megatron Core 0.19.2 that the optimizer relies on.

Look through it when Megatron Core is upgraded: tests/unit/test_compat.py names what is gone.
"""

from __future__ import annotations

from typing import Any

import torch

OVERRIDDEN = {
    # `IndexedDistributedOptimizer` copies gradients and parameters through views that it finds once. Megatron Core
    # would have to keep such views itself; if it renames these methods, ours are never called and updates become slow.
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer": (
        "_copy_model_grads_to_main_grads", "_copy_main_params_to_model_params"),
}
"""Class -> private methods of it that a subclass in `mimo.training` overrides."""


def counts_for_norm(optimizer: Any, parameter: torch.nn.Parameter) -> bool:
    """Return whether a parameter's gradient is part of this rank's share of the norm.

    `MegatronOptimizer._filter_grads_for_norm`: the public `get_grads_for_grad_norm` filters all gradients anew in each
    step.
    """
    # Reading a gradient that is not there would warn, as a float32 parameter's shard is no leaf.
    name = "decoupled_grad" if optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 else "grad"
    setattr(parameter, name, torch.empty_like(parameter))
    counts = bool(optimizer._filter_grads_for_norm([parameter]))
    setattr(parameter, name, None)
    return counts
