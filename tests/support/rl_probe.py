"""The probe of a refit beside an engine that is made up; inside a worker process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mimo.config.rl import RlConfig
from mimo.config.validate import validate
from mimo.refit.rendezvous import RefitError
from mimo.rl.images import ImageTokens, needs_pixels
from mimo.rl.policy import PolicyTrainer
from mimo.rl.probe import Expected, RefitProbe
from mimo.watchdog.process_exit import ReportedElsewhereError
from tests.support import equality
from tests.support.vlm_updates import VOCAB_SIZE, PictureSet, parsed


class Engine:
    """An engine that gives prepared answers.

    Attributes:
        answers: to the prompts, whatever they are.
        asked: their tokens.
    """

    answers: list[list[float]]
    asked: list[list[int]]

    def prompt_logprobs(self, prompts: Sequence[dict[str, Any]]) -> list[list[float]]:
        """Whatever is asked."""
        self.asked = [prompt["prompt_token_ids"] for prompt in prompts]
        return self.answers


def probe(rank: int, flags: tuple[str, ...], world_size: int, config: RlConfig) -> (
        tuple[list[list[list[int]]], Expected, Expected, list[str]]):
    """Return what the trainer expects with its weights and with scrambled ones, and this rank's verdicts on engines.

    Returns:
        The sequences (on the first rank); both expectations; complaints about an engine with the right log-probs, and
        about one that is 0.01 nats off at every token.
    """
    from mimo.registry import model_provider

    run = parsed(config, flags)
    layout = validate(run, world_size)
    with equality.open_trainer(run, layout) as parts:
        images = ImageTokens.of(model_provider("llava"), run.model_family, layout)
        prompts = PictureSet() if needs_pixels(layout, rank) else None
        policy = PolicyTrainer(parts, config, VOCAB_SIZE, 0, images, prompts)
        engine = Engine()
        made = RefitProbe(run, policy, PictureSet() if rank == 0 else None, engine if rank == 0 else None, VOCAB_SIZE)
        before = [parameter.detach().clone() for parameter in parts.built.model.parameters()]
        found, told = made.expect(), []
        with made.scrambled() as other:
            pass
        after = list(parts.built.model.parameters())
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True)), "weights come back"
        for change in (0.0, 0.01):
            engine.answers = [[0.0 if value is None else value + change for value in row] for row in found.logprobs]
            try:
                made.compare(found, "the weights")
                told.append("")
            except (RefitError, ReportedElsewhereError) as error:
                told.append(f"{type(error).__name__}: {error}")
    return [engine.asked] if rank == 0 else [], found, other, told
