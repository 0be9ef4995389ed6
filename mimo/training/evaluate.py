"""Loss and exact match on the held-out split, through the same grids and schedule as training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

from mimo.batch import Microbatch
from mimo.model.build import set_training
from mimo.protocols import LANGUAGE
from mimo.training.step import TrainerParts, run_schedule


@dataclass(frozen=True)
class Evaluation:
    """Figures of a held-out split.

    Attributes:
        loss: mean over its target tokens.
        exact_match: share of samples whose every target token is the argmax under teacher forcing.
        num_samples: samples counted, those with a target.
    """

    loss: float
    exact_match: float
    num_samples: int


def vocabulary_argmax(logits: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Index of the largest logit over a vocabulary split across `group`.

    Args:
        logits: `[..., vocab / tp]`, this rank's slice.
        group: tensor-parallel group.

    Returns:
        int64 `[...]`, the same on every rank of the group; the lowest index wins a tie.
    """
    values, indices = logits.float().max(dim=-1)
    indices = indices + group.rank() * logits.shape[-1]
    if group.size() == 1:
        return indices
    all_values = [torch.empty_like(values) for _ in range(group.size())]
    all_indices = [torch.empty_like(indices) for _ in range(group.size())]
    dist.all_gather(all_values, values.contiguous(), group=group)
    dist.all_gather(all_indices, indices.contiguous(), group=group)
    winner = torch.stack(all_values).argmax(dim=0, keepdim=True)
    return torch.stack(all_indices).gather(0, winner).squeeze(0)


def _score(
    model: Any,
    group: dist.ProcessGroup | None,
    counted: Iterator[list[bool]],
    batch: Microbatch,
    logits: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`[loss sum, target tokens, exactly matched samples, samples]` of one microbatch as the schedule's loss report.

    `counted` yields, for each microbatch in order, which of its samples count.
    """
    text = batch.text
    assert text is not None and group is not None, "logits are computed where text is, on the language grid"
    losses = unwrap_model(model.language_model).compute_language_model_loss(
        text.labels, logits.transpose(0, 1).contiguous()
    )
    keep = torch.tensor(next(counted), device=logits.device)
    mask = text.loss_mask * keep[:, None]
    # A sample without a target has nothing to match.
    keep = keep & (text.loss_mask > 0).any(dim=1)
    hits = (vocabulary_argmax(logits, group) == text.labels) | (text.loss_mask == 0)
    report = torch.stack(
        [
            (losses.float() * mask).sum().double(),
            mask.sum().double(),
            (hits.all(dim=1) & keep).sum().double(),
            keep.sum().double(),
        ]
    )
    return report[0], report[1].to(torch.int), report


def forward_logits(
    batches: Iterator[Microbatch], model: Any, consume: Callable[[Microbatch, torch.Tensor], Any]
) -> Any:
    """A `forward_step_func` that hands the last stage's logits to `consume`.

    `consume` returns the schedule's loss triple.
    """
    batch = next(batches)
    return model(batch, with_labels=False), partial(consume, batch)


def evaluate(parts: TrainerParts, steps: Iterable[list[Microbatch]], num_samples: int | None) -> Evaluation:
    """Evaluate on global batches. Collective over the world.

    Args:
        parts: this rank's trainer.
        steps: this rank's side of each global batch, from the start of the split; taken one by one.
        num_samples: size of the split; samples that wrap around its end are not counted. None: no end.
    """
    layout, rank = parts.grids.layout, parts.grids.rank
    totals = torch.zeros(4, dtype=torch.float64, device=parts.platform.device)
    group = parts.grids.collections[LANGUAGE].tp if parts.is_last_language_stage else None
    model = parts.built.model
    set_training(model, False)
    position = layout.language.coordinates(rank)["dp"] if parts.is_last_language_stage else 0
    with torch.no_grad():
        for microbatches in steps:
            plan = []
            for batch in microbatches:
                samples = range(len(batch.text.keys) if batch.text is not None else 0)
                indices = [position + layout.num_lanes * sample for sample in samples]
                plan.append([num_samples is None or index < num_samples for index in indices])
                position += layout.num_lanes * len(samples)
            score = partial(forward_logits, consume=partial(_score, model, group, iter(plan)))
            with parts.watchdog.waiting("evaluation", is_work=True):
                reports = run_schedule(parts, microbatches, score, forward_only=True)
            if parts.counts_losses:
                totals += torch.stack(reports).sum(dim=0)
        dist.all_reduce(totals)
    set_training(model, True)
    loss_sum, tokens, matched, samples_seen = totals.tolist()
    return Evaluation(loss_sum / max(tokens, 1.0), matched / max(samples_seen, 1.0), int(samples_seen))
