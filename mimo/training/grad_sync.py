"""Reduces gradients inside each module's own groups."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.transformer.moe.router import TopKRouter

from mimo.grid.groups import Grids
from mimo.model.build import BuiltModel
from mimo.observability.spans import Kind, Trace


class GradSync:
    """Gradient reduction that the schedule calls after the last backward pass of a step.

    Megatron Core's `finalize_model_grads` runs once for each module, in the module's groups, and does not normalise:
    losses were divided by the number of target tokens of the *global* batch (`mimo.training.step.mean_over_targets`).
    """

    def __init__(self, built: BuiltModel, grids: Grids, trace: Trace) -> None:
        self.built, self.grids, self.trace = built, grids, trace
        self._kept_biases: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Whether the reductions of the current schedule leave full gradients on every rank.
        self.force_all_reduce = False
        for encoder in grids.layout.encoders:
            if encoder.name in built.wrapped:
                start_in_order(built.wrapped[encoder.name])

    def start(self, *unused: Any) -> None:
        """Start the overlapped reductions of a later pipeline stage, behind its last backward pass.

        This is Megatron Core's `grad_sync_func`. Encoders that run in windows are left out: they have no overlap, as
        their last backward passes come after the schedule.
        """
        for wrapped in self.built.wrapped.values():
            if wrapped.ddp_config.overlap_grad_reduce:
                for group in wrapped.bucket_groups + wrapped.expert_parallel_bucket_groups:
                    group.start_grad_sync(force_all_reduce=self.force_all_reduce)

    def finalize(
        self,
        model: list[Any],
        num_tokens: torch.Tensor | None = None,
        *,
        pg_collection: Any = None,
        force_all_reduce: bool = False,
    ) -> None:
        """Reduce every module's gradients, and move its routers' expert biases by the load of the step.

        The signature is Megatron Core's `finalize_model_grads_func`; `model`, `num_tokens` and `pg_collection` describe
        one module there and are not used.
        """
        self._kept_biases = [(bias, bias.clone()) for bias in expert_biases(self.built.model)]
        for name, wrapped in self.built.wrapped.items():
            complete_registration(wrapped)
            with self.trace.wait("gradient reduction", Kind.GRADIENT_SYNC, module=name,
                                 group=self.grids.layout.grids[name].ranks):
                finalize_model_grads(
                    [wrapped], None, pg_collection=self.grids.collections[name], force_all_reduce=force_all_reduce
                )

    def undo_expert_biases(self) -> None:
        """Put the routers' expert biases back to what they were before `finalize`: the step is not taken."""
        for bias, kept in self._kept_biases:
            bias.copy_(kept)

    def correct_participation(self, participants: dict[str, torch.Tensor]) -> None:
        """Multiply the gradients of encoders by dp / participants.

        Args:
            participants: encoder -> scalar count of its data-parallel ranks that saw an image this step.
        """
        for name, count in participants.items():
            if name in self.built.wrapped:
                correction = participation_correction(count, self.grids.layout.grids[name].dp)
                self.built.wrapped[name].scale_gradients(correction.float())


def expert_biases(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the expert biases of a rank's routers, which `GradSync.finalize` updates instead of the optimizer."""
    return [part.expert_bias for part in model.modules() if isinstance(part, TopKRouter) and part.enable_expert_bias]


def participation_correction(participants: torch.Tensor, dp: int) -> torch.Tensor:
    """Return `dp / participants` where 0 < participants < dp, else 1, as a scalar tensor without a synchronisation."""
    return torch.where(
        (participants > 0) & (participants < dp), dp / participants.clamp(min=1), torch.ones_like(participants)
    )


def start_in_order(wrapped: DistributedDataParallel) -> None:
    """Start the overlapped reductions of a module's bucket groups in list order, on every rank.

    Megatron Core starts a group when its last gradient is there, in the order of the backward pass. A rank whose last
    microbatch is text-only runs no backward pass and so cannot know that order; its peers' collectives would meet
    others of its own.
    """
    if not wrapped.ddp_config.overlap_grad_reduce:
        return
    for groups in (wrapped.bucket_groups, wrapped.expert_parallel_bucket_groups):
        start = _OrderedStart([group.start_grad_sync for group in groups])
        for index, group in enumerate(groups):
            group.start_grad_sync = partial(start, index)


class _OrderedStart:
    """Delays each start until all earlier ones were made, and begins again after the last one."""

    def __init__(self, starts: list[Callable[[bool], None]]) -> None:
        self._starts = starts
        self._held: dict[int, bool] = {}
        self._next = 0

    def __call__(self, index: int, force_all_reduce: bool = False) -> None:
        self._held[index] = force_all_reduce
        while self._next in self._held:
            self._starts[self._next](self._held.pop(self._next))
            self._next = (self._next + 1) % len(self._starts)


def complete_registration(wrapped: DistributedDataParallel) -> None:
    """With overlapped reduction, count parameters that got no gradient in the last microbatch as ready.

    Megatron Core starts a bucket's reduction when all its parameters have had a gradient in the last microbatch. An
    encoder whose last microbatch is text-only has none: it would fail (or, in the first step, record that no gradient
    is ever to be expected) while its data-parallel peers wait in the collective. Its buckets are complete as they are;
    `start_in_order` makes the peers start theirs in the same order.
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
