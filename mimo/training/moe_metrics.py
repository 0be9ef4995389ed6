"""MoE auxiliary losses of a step, averaged over MoE layers, microbatches and lanes.

The wheel's router records each layer's loss in a tracker; the wheel's report of it falls back to `parallel_state` for
the data-parallel group and averages with an operation gloo does not have, so the reduction is here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

# The wheel's names of the losses that routers record, by --moe-router-load-balancing-type.
TRACKED = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
# Losses whose gradient depends on the layout -> the tokens that are balanced together, the flags that decide it.
LAYOUT_DEPENDENT = {
    "aux_loss": ("the tokens of each microbatch", "--micro-batch-size and, where that is above 1, on --llm-dp"),
    "global_aux_loss": ("all lanes and the microbatches of the step so far", "--micro-batch-size and --llm-dp"),
}


def layout_note(config: TransformerConfig, *, in_rl: bool = False) -> str | None:
    """Return a line for the log if the load-balancing loss makes router gradients depend on the layout, else None.

    Args:
        config: Megatron's configuration of the language model.
        in_rl: routers take the completions of a microbatch, packed into one row, for one sequence.
    """
    kind = config.moe_router_load_balancing_type
    if not config.num_moe_experts or not config.moe_aux_loss_coeff or kind not in TRACKED:
        return None
    tokens, flags = LAYOUT_DEPENDENT.get(kind, LAYOUT_DEPENDENT["aux_loss"])
    if in_rl:
        flags, instead = "--max-tokens-per-microbatch and --llm-dp", "--moe-aux-loss-coeff 0 leaves the loss out"
    elif kind in LAYOUT_DEPENDENT:
        instead = "those of seq_aux_loss are the same in every layout"
    else:
        return None
    return (f"--moe-router-load-balancing-type {kind} balances the load of {tokens}, so router gradients depend on "
            f"{flags}; {instead}")


class MoeLosses:
    """Reads the recorded losses of a run, step by step. Made collectively by the language grid's pipeline stages.

    Args:
        model: of this rank.
        groups: the language grid's process groups; None on a rank that has no part of it, which reads nothing.
        device: where the model is.
        per_layer: also give the losses of each layer.
    """

    def __init__(self, model: Any, groups: ProcessGroupCollection | None, device: torch.device, *,
                 per_layer: bool) -> None:
        self._groups, self._per_layer, self._config = groups, per_layer, model.config
        self._num_moe_layers = 0 if groups is None else count_moe_layers(model.language_model, groups, device)

    def take(self, num_microbatches: int) -> dict[str, float]:
        """Losses of the forward passes since the last call, empty without experts. Collective over it."""
        if self._groups is None or not self._num_moe_layers:
            return {}
        config, kinds = self._config, self._config.moe_router_load_balancing_type
        names = tuple(TRACKED[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind in TRACKED)
        return moe_losses(
            self._groups, num_layers=config.num_layers + (config.mtp_num_layers or 0),
            num_moe_layers=self._num_moe_layers, num_microbatches=num_microbatches, names=names,
            per_layer=self._per_layer)


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
    """Read and clear the recorded losses. Collective over the language grid's pp, tp and dp groups.

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
        values = tracker.metrics[name].values.clone()
        dist.all_reduce(values, group=groups.pp)
        # Each rank recorded its part. The tracker knows of whose sum only on stages that have a router.
        dist.all_reduce(values, group=groups.tp_dp_cp if name == TRACKED["global_aux_loss"] else groups.tp_cp)
        dist.all_reduce(values, group=groups.dp_cp)
        layers = (values / (groups.dp_cp.size() * num_microbatches)).tolist()
        losses[name] = sum(layers) / max(num_moe_layers, 1)
        if per_layer:
            losses |= {f"moe/{name}_layer_{index}": value for index, value in enumerate(layers)}
    tracker.clear()
    return losses
