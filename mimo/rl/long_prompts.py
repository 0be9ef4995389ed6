"""Prompts that leave no room for a completion: found before a run begins, not where it comes to them."""

from __future__ import annotations

import logging

from mimo.config.rl_run import RlRunConfig
from mimo.rl.images import ImageTokens
from mimo.rl.prompts import FinitePromptSet, PromptSet
from mimo.rl.rollouts import prompt_length

logger = logging.getLogger("mimo.rl")


def fit_prompts(prompts: PromptSet, split: str, config: RlRunConfig, images: ImageTokens | None,
                num_asked: int) -> None:
    """Refuse the prompts of a finite set that are too long, or leave them out with `--skip-long-prompts`.

    Of a set without end nothing is known ahead: its prompts are looked at when their turn comes.

    Args:
        prompts: of a split; those that are too long are left out in place.
        split: `train` or `valid`.
        config: of the run.
        images: how the model takes images; None: it takes none.
        num_asked: places from 0 on that the whole run comes to.

    Raises:
        ValueError: a prompt that the run comes to is too long, or every prompt is; names flags and values.
    """
    skips, name = config.data.skip_long_prompts, config.data.dataset_provider
    if not isinstance(prompts, FinitePromptSet):
        if skips:
            raise ValueError(f"--skip-long-prompts: --dataset-provider {name} has no list of prompts (num_prompts and "
                             "leave_out of mimo.rl.prompts.FinitePromptSet); leave it out")
        return
    tokens, completion = config.train.seq_length, config.rollout.max_completion_tokens
    limit, total = tokens - completion, prompts.num_prompts
    # What is left out must not depend on how far a run goes: one with more iterations continues its order.
    count = total if skips else min(total, num_asked)
    found = (prompts.prompt(index) for index in range(count))
    lengths = {prompt.key: length for prompt in found if (length := prompt_length(prompt, images)) > limit}
    if not lengths:
        return
    key, longest = max(lengths.items(), key=lambda item: item[1])
    said = (f"{len(lengths)} of {count} prompts of the {split} split of {name} have more than the {limit} tokens that "
            f"--seq-length {tokens} leaves beside --max-completion-tokens {completion}; the longest, {key}, has "
            f"{longest}")
    if not skips:
        raise ValueError(f"{said}: give --seq-length {longest + completion} or more, or --skip-long-prompts")
    if len(lengths) == total:
        raise ValueError(f"--skip-long-prompts leaves nothing: {said}")
    prompts.leave_out(lengths.keys())
    logger.info("--skip-long-prompts: %s. They are left out", said)
