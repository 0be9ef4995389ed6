"""The probe of a refit beside an engine that is made up; inside a worker process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mimo.config.rl import RlConfig
from mimo.config.validate import validate
from mimo.observe.errors import ReportedElsewhereError
from mimo.refit.meeting import RefitError
from mimo.rl.images import ImageTokens, needs_pixels
from mimo.rl.policy import PolicyTrainer
from mimo.rl.probe import RefitProbe
from tests.support import equality
from tests.support.vlm_updates import VOCAB_SIZE, PictureSet, parsed


class Engine:
    """That answers what it is told to."""

    answers: list[list[float]]

    def prompt_logprobs(self, prompts: Sequence[dict[str, Any]]) -> list[list[float]]:
        """Whatever is asked."""
        assert all("prompt_token_ids" in prompt for prompt in prompts)
        return self.answers


def probe(rank: int, flags: tuple[str, ...], world_size: int, config: RlConfig) -> (
        tuple[list[list[float | None]], list[str]]):
    """The trainer's log-probs, and what this rank says of an engine with the same ones and of one with another."""
    from mimo.registry import model_provider

    run = parsed(config, flags)
    layout = validate(run, world_size)
    parts: Any = equality.make_trainer(run, layout)
    images = ImageTokens.of(model_provider("llava"), run.model_family, layout)
    policy = PolicyTrainer(parts, config, VOCAB_SIZE, 0, images, PictureSet() if needs_pixels(layout, rank) else None)
    engine = Engine()
    made = RefitProbe(run, policy, PictureSet() if rank == 0 else None, engine if rank == 0 else None)
    found, told = made.trainer_logprobs(), []
    engine.answers = [[0.0 if value is None else value for value in row] for row in found]
    for change in (0.0, 0.01):
        row, place = next((row, place) for row in (3, 4) for place, value in enumerate(found[row]) if value is not None)
        engine.answers[row][place] += change
        try:
            made.compare(found)
            told.append("")
        except (RefitError, ReportedElsewhereError) as error:
            told.append(f"{type(error).__name__}: {error}")
    parts.watchdog.close()
    parts.grids.destroy()
    return found, told
