"""What policy updates give back, and what they hold fixed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from mimo.rl.totals import Totals


@dataclass(frozen=True)
class PolicyResult:
    """What the updates on a global batch did, equal on all ranks.

    Attributes:
        metrics: figures of the global batch by name.
        success: whether parameters were updated, every time.
        num_trained: completions whose update was made.
        grad_norm: global norm before clipping, the mean over updates; None when all were skipped.
        num_zeros: zero gradients of the last update, where logged.
        num_microbatches: of each data-parallel rank.
        num_tokens: of all sequences, prompts included.
        log_probs_s: seconds of the forward pass before the first update.
        reference_s: seconds of that of the reference policy, the exchange of weights included; 0 without one.
        moe_losses: load-balancing losses, as `mimo.training.moe_metrics` gives them; on language ranks alone.
        peak_memory_bytes: by module, the highest of any of its ranks so far.
    """

    metrics: dict[str, float]
    success: bool
    num_trained: int
    grad_norm: float | None
    num_zeros: int | None
    num_microbatches: int
    num_tokens: int
    log_probs_s: float = 0.0
    reference_s: float = 0.0
    moe_losses: dict[str, float] = field(default_factory=dict)
    peak_memory_bytes: dict[str, int] = field(default_factory=dict)


@dataclass
class FixedLogProbs:
    """Of each microbatch float32 `[t]`, without gradient; empty but on the last stage.

    Attributes:
        old: by the policy before the first update.
        reference: by the reference policy; None without one.
        old_s, reference_s: seconds that they took.
    """

    old: list[torch.Tensor]
    reference: list[torch.Tensor] | None
    old_s: float
    reference_s: float

    def part(self, first: int, last: int) -> FixedLogProbs:
        """Those of microbatches from `first` to before `last`."""
        reference = None if self.reference is None else self.reference[first:last]
        return replace(self, old=self.old[first:last], reference=reference)


@dataclass(frozen=True)
class UpdateResult:
    """One optimizer step: figures of its part of the global batch, and what the optimizer says of it."""

    totals: Totals
    success: bool
    grad_norm: float | None
    num_zeros: int | None
