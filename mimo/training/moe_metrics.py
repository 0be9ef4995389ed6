"""MoE auxiliary losses of a step, averaged over MoE layers, microbatches and lanes.

The wheel's router records each layer's loss in a tracker; the wheel's report of it falls back to `parallel_state` for
the data-parallel group and averages with an operation gloo does not have, so the reduction is here.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

# The wheel's names of the losses that routers record, by --moe-router-load-balancing-type.
TRACKED = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


def count_moe_layers(language_model: torch.nn.Module, groups: ProcessGroupCollection, device: torch.device) -> int:
    """MoE layers of the whole language model: layers of other kinds do not count in the mean."""
    count = torch.tensor([sum(isinstance(part, MoELayer) for part in language_model.modules())], device=device)
    dist.all_reduce(count, group=groups.pp)
    return int(count.item())


def moe_losses(
    groups: ProcessGroupCollection,
    *,
    num_layers: int,
    num_moe_layers: int,
    num_microbatches: int,
    names: tuple[str, ...],
    per_layer: bool,
) -> dict[str, float]:
    """Read and clear the recorded losses. Collective over the language grid's pp and dp groups.

    Args:
        groups: the language grid's process groups.
        num_layers: entries: decoder layers of the whole model, dense ones included, and then one a depth of multi-token
            prediction, for all its layers.
        num_moe_layers: layers with experts.
        num_microbatches: forward passes since the last call.
        names: tracker names to read; the same on every rank.
        per_layer: also give `moe/<name>_layer_<i>`.
    """
    tracker = get_moe_metrics_tracker()
    losses: dict[str, float] = {}
    for name in names:
        tracker.ensure_initialized(name, num_layers, device=torch.cuda.current_device())
        entry = tracker.metrics[name]
        values = entry.values.clone()
        dist.all_reduce(values, group=groups.pp)
        if entry.reduce_group is not None:
            dist.all_reduce(values, group=entry.reduce_group)
        dist.all_reduce(values, group=groups.dp_cp)
        layers = (values / (groups.dp_cp.size() * num_microbatches)).tolist()
        losses[name] = sum(layers) / max(num_moe_layers, 1)
        if per_layer:
            losses |= {f"moe/{name}_layer_{index}": value for index, value in enumerate(layers)}
    tracker.clear()
    return losses
