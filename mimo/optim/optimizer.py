"""One optimizer step over modules on different grids, agreed by every rank."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.mimo.optimizer import MimoOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from mimo.observe.spans import Kind, Spans


class HeteroOptimizer(MimoOptimizer):
    """The wheel's `MimoOptimizer` with one agreement before the step instead of two, and non-finite gradients skipped.

    The wheel asks the world twice (found inf, then norms) and lets a NaN norm through: the maximum of a NaN over ranks
    is undefined, so ranks could disagree. Here norms and the flag travel together and a NaN becomes the flag.

    Attributes:
        spans: told where an update waits for other ranks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.spans = Spans()

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, int | None]:
        """Clip by the global norm and update every module, or none.

        Returns:
            Whether parameters were updated, the global gradient norm before clipping (None when skipped), and the
            number of zero gradients (None unless logged). The same on every rank.
        """
        skip = bool(self.prepare_grads())
        names = sorted(self.module_infos)
        stats = torch.zeros(len(names) + 1, dtype=torch.float64, device=torch.cuda.current_device())
        for index, name in enumerate(names):
            info = self.module_infos[name]
            if info.is_active and info.optimizer is not None:
                norm = float(info.optimizer.get_grad_norm() or 0.0)
                skip |= not math.isfinite(norm)
                stats[index] = norm**2 if math.isfinite(norm) else 0.0
        stats[-1] = float(skip)
        with self.spans.span(Kind.IDLE, "agreement on norms"):
            dist.all_reduce(stats, op=dist.ReduceOp.MAX)
        *squares, skipped = stats.tolist()
        if skipped:
            return False, None, None
        grad_norm = math.sqrt(sum(squares))
        self._clip(grad_norm)
        num_zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
        updated = torch.tensor([int(self.step_with_ready_grads())], device=stats.device)
        with self.spans.span(Kind.IDLE, "agreement on the update"):
            dist.all_reduce(updated, op=dist.ReduceOp.MIN)
        return bool(updated.item()), grad_norm, num_zeros

    def _clip(self, grad_norm: float) -> None:
        for optimizer in self._active_optimizers:
            parameters = optimizer.get_parameters()
            if parameters and self.config.clip_grad > 0:
                clip_grad_by_total_norm_fp32(parameters, max_norm=self.config.clip_grad, total_norm=grad_norm)
