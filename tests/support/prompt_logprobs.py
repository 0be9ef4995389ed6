"""The trainer's log-probs of given tokens, through the same grids and schedule as training."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

from mimo.data.batch import Microbatch, TextBatch
from mimo.data.loader import StepLoader
from mimo.data.sources import GivenSource
from mimo.grid.lanes import needs_of
from mimo.model.build import set_training
from mimo.model.vocabulary import TokenFunction
from mimo.protocols import LANGUAGE, ModelProvider, Sample
from mimo.training.evaluate import forward_values, whole_rows
from mimo.training.step import TrainerParts, run_schedule


def prompt_logprobs(parts: TrainerParts, provider: ModelProvider, prompts: Sequence[Sequence[int]]
                    ) -> list[list[float]]:
    """Compute log-probs of the tokens of text prompts. Collective over the world.

    Every lane computes all prompts, so that their number need not fit the layout. The model stays in evaluation mode.

    Args:
        parts: this rank's trainer.
        provider: the model family.
        prompts: token ids, at most `--seq-length` for each prompt; the same on every rank.

    Returns:
        For each prompt, the natural logarithm of the probability of each token from the second on, given those before.
        The same on every rank.

    Raises:
        ValueError: a prompt is too long or has an id outside of the vocabulary.
    """
    train = parts.config.train
    every = train.micro_batch_size
    rows = [Sample(f"prompt {number}", np.array(tokens, np.int64), np.ones(len(tokens), bool), images=[])
            for number, tokens in enumerate(prompts)]
    rows += [rows[-1]] * (-len(rows) % every)
    source = GivenSource(
        [rows[first:first + every] for first in range(0, len(rows), every)],
        needs_of(parts.grids.layout, parts.grids.rank, parts.config.train.micro_batch_size), "prompts")
    loader = StepLoader(
        parts.grids.layout, parts.grids.rank, source, model_provider=provider, model_config=parts.config.model_family,
        micro_batch_size=every, num_microbatches=len(rows) // every, seq_length=train.seq_length, prefetch=False,
        dtype=next(parts.built.model.parameters()).dtype)
    found = target_logprobs(parts, loader.next_step())
    return [found[f"prompt {number}"].tolist() for number in range(len(prompts))]


@torch.no_grad()
def target_logprobs(parts: TrainerParts, microbatches: Sequence[Microbatch]) -> dict[str, torch.Tensor]:
    """Compute log-probs of the target tokens of every sample. Collective over the world.

    Args:
        parts: this rank's trainer.
        microbatches: this rank's side of one global batch.

    Returns:
        Log-probs of all lanes' samples by key, float32 `[targets]` on the host. The same on every rank.
    """
    found: dict[str, torch.Tensor] = {}

    def losses(text: TextBatch) -> TokenFunction:
        language: Any = unwrap_model(parts.built.model.language_model)
        return TokenFunction(
            lambda logits, labels: (language.compute_language_model_loss(labels.t(), logits).t(),),
            (text.own(text.labels),))

    def collect(batch: Microbatch, values: tuple[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        text = batch.text
        assert text is not None, "logits are computed where text is"
        whole = whole_rows(text, values[0], parts.grids.collections[LANGUAGE].cp)
        rows = [-own[mask > 0].float().cpu() for own, mask in zip(whole, text.loss_mask, strict=True)]
        found.update(zip(text.keys, rows, strict=True))
        zero = torch.zeros((), device=whole.device)
        return zero, zero.to(torch.int), zero

    set_training(parts.built.model, False)
    run_schedule(parts, microbatches, partial(forward_values, function=losses, consume=collect), forward_only=True)
    by_rank: list[Any] = [None] * parts.grids.layout.world_size
    dist.all_gather_object(by_rank, found, group=parts.grids.host)
    return {key: values for own in by_rank for key, values in own.items()}
