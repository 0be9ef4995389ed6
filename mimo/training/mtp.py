"""Losses of multi-token prediction of a step: what they are divided by, and their report."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from mimo.batch import Microbatch
from mimo.model.mtp import MtpBlock, MtpInputs


def count_targets(microbatches: Sequence[Microbatch], depths: int) -> torch.Tensor:
    """Target tokens of the decoder and of each depth, float64 `[1 + depths]` on the host."""
    counts = torch.zeros(1 + depths, dtype=torch.float64)
    for batch in microbatches:
        assert batch.text is not None, "language ranks hold text"
        inputs = MtpInputs.of(batch.text)
        counts += torch.stack([mask.sum(dtype=torch.float64)
                               for mask in (inputs.loss_mask, *inputs.target_masks(depths))])
    return counts


def begin_mtp_step(mtp: MtpBlock | None, microbatches: Sequence[Microbatch], groups: ProcessGroupCollection | None,
                   device: torch.device) -> None:
    """Tell multi-token prediction the target tokens of the global batch. Collective over the last stage's lanes.

    Args:
        mtp: of this rank; None where there is none, which makes this do nothing.
        microbatches: this rank's side of the step, on the host.
        groups: the language grid's process groups.
        device: where the model is.
    """
    if mtp is None:
        return
    assert groups is not None, "multi-token prediction is on the language grid"
    targets = count_targets(microbatches, len(mtp.layers)).to(device)
    dist.all_reduce(targets, group=groups.dp_cp)
    mtp.begin_step(targets)


def mtp_losses(mtp: MtpBlock | None, groups: ProcessGroupCollection | None) -> dict[str, float]:
    """`mtp_<depth> loss` of the step, each a mean over the depth's targets of the global batch.

    Collective over the last stage's lanes; empty on ranks without multi-token prediction.
    """
    if mtp is None:
        return {}
    assert groups is not None and mtp.loss_sums is not None and mtp.targets is not None, "a step was made"
    sums = mtp.loss_sums.clone()
    dist.all_reduce(sums, group=groups.dp_cp)
    means = sums / mtp.targets.clamp(min=1)
    return {f"mtp_{depth + 1} loss": mean for depth, mean in enumerate(means.tolist())}
