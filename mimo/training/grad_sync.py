"""Gradients across ranks: reduced inside each module's own groups, then divided by the world's token count."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import finalize_model_grads

from mimo.grid.groups import Grids
from mimo.model.build import BuiltModel
from mimo.observe.watchdog import Watchdog


class GradSync:
    """What the schedule calls after the last backward pass of a step.

    The wheel's `finalize_model_grads` runs once for each module, in the module's groups, and does not normalise: the divisor
    is the number of target tokens of the *global* batch, which only the world knows (`scale`).

    Args:
        built: this rank's modules.
        grids: process groups.
        watchdog: told which module's reduction is waited for.
    """

    def __init__(self, built: BuiltModel, grids: Grids, watchdog: Watchdog) -> None:
        self.built, self.grids, self.watchdog = built, grids, watchdog

    def finalize(self, model: list[Any], num_tokens: torch.Tensor | None = None, *, pg_collection: Any = None,
                 force_all_reduce: bool = False) -> None:
        """Reduce every module's gradients. The signature is the wheel's `finalize_model_grads_func`; `model`,
        `num_tokens` and `pg_collection` describe one module there and are not used."""
        for name, wrapped in self.built.wrapped.items():
            complete_registration(wrapped)
            with self.watchdog.waiting("gradient reduction", module=name):
                finalize_model_grads([wrapped], None, pg_collection=self.grids.collections[name],
                                     force_all_reduce=force_all_reduce)

    def scale(self, num_tokens: torch.Tensor, participants: dict[str, torch.Tensor] | None = None) -> None:
        """Divide every gradient by the global number of target tokens.

        Args:
            num_tokens: scalar on the device; below 1 counts as 1.
            participants: encoder -> scalar count of its data-parallel ranks that saw an image this step; given only with
                `--correct-encoder-grad-for-partial-participation`, which multiplies by dp / participants.
        """
        factor = 1.0 / num_tokens.clamp(min=1)
        for name, wrapped in self.built.wrapped.items():
            correction = 1.0
            if participants is not None and name in participants:
                correction = participation_correction(participants[name], self.grids.layout.grids[name].dp)
            wrapped.scale_gradients((factor * correction).float())


def participation_correction(participants: torch.Tensor, dp: int) -> torch.Tensor:
    """`dp / participants` where 0 < participants < dp, else 1 (scalar tensor, no host synchronisation)."""
    return torch.where((participants > 0) & (participants < dp), dp / participants.clamp(min=1), torch.ones_like(participants))


def complete_registration(wrapped: DistributedDataParallel) -> None:
    """With overlapped reduction, count parameters that got no gradient in the last microbatch as ready.

    The wheel starts a bucket's reduction when all its parameters have had a gradient in the last microbatch. An encoder whose
    last microbatch is text-only has none: it would fail (or, in the first step, record that no gradient is ever to be
    expected) while its data-parallel peers wait in the collective. Its buckets are complete as they are, and buckets are
    started in list order, the order in which the peers' backward passes finish them.
    """
    if not wrapped.ddp_config.overlap_grad_reduce:
        return
    for group in wrapped.bucket_groups + wrapped.expert_parallel_bucket_groups:
        if group.grad_reduce_handle is not None:
            # Under way already. Later pipeline stages start it after their backward passes, without any count.
            continue
        for bucket in group.buckets:
            for parameter in bucket.params_list:
                if parameter not in group.per_param_grad_ready_counts:
                    group.register_grad_ready(parameter)
