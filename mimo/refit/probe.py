"""Whether an engine and the trainer mean the same by a policy: log-probs of the same tokens on both sides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mimo.refit.meeting import RefitError

# Beyond this a token says no more than that the two differ.
MAX_DIFFERENCE = 20.0


class ScoresPrompts(Protocol):
    """An engine or a handle to one."""

    def prompt_logprobs(self, prompts: Sequence[dict[str, Any]]) -> list[list[float]]:
        """Of each prompt, the log-prob of every token from the second on."""
        ...


@dataclass(frozen=True)
class ProbeReport:
    """How far apart both sides are.

    Attributes:
        max_difference: largest absolute difference of the log-probs of a token, in nats.
        mean_difference: mean of it.
        kl: mean over the tokens of k3 = exp(-d) - 1 + d with d = log p_engine - log p_trainer (J. Schulman,
            "Approximating KL divergence", 2020): of tokens that the engine sampled it estimates
            KL(p_engine || p_trainer).
        num_tokens: that were compared.
        worst: prompt and token (from 0) where the difference is largest.
    """

    max_difference: float
    mean_difference: float
    kl: float
    num_tokens: int
    worst: tuple[int, int]


def compare_logprobs(engine: ScoresPrompts, prompts: Sequence[dict[str, Any]],
                     trainer_logprobs: Sequence[Sequence[float]], tolerance: float) -> ProbeReport:
    """Ask an engine for the log-probs of prompts and compare them with the trainer's.

    Args:
        engine: serves what it was given last.
        prompts: vLLM's: `{"prompt_token_ids": [...]}`.
        trainer_logprobs: of each prompt, of every token from the second on, as
            `mimo.training.prompt_logprobs.prompt_logprobs` gives them.
        tolerance: largest difference that a token may have, in nats. A tensor that few tokens use, an expert's, shows
            in few of them, so a mean would hide it.

    Raises:
        ValueError: the two sides do not have the same tokens, or none.
        RefitError: a token's difference is larger than the tolerance, or a log-prob is not finite.
    """
    answers = engine.prompt_logprobs(prompts)
    lengths = [len(own) for own in trainer_logprobs]
    if [len(own) for own in answers] != lengths or not sum(lengths):
        raise ValueError(f"the trainer's log-probs are of {lengths} tokens, the engine's of "
                         f"{[len(own) for own in answers]}")
    pairs = [((prompt, token + 1), theirs, ours)
             for prompt, (answer, own) in enumerate(zip(answers, trainer_logprobs, strict=True))
             for token, (theirs, ours) in enumerate(zip(answer, own, strict=True))]
    broken = [(place, theirs, ours) for place, theirs, ours in pairs if not math.isfinite(theirs - ours)]
    if broken:
        place, theirs, ours = broken[0]
        raise RefitError(f"token {place[1]} of prompt {place[0]} has log-prob {theirs} in the engine and {ours} in the "
                         f"trainer; {len(broken)} of {len(pairs)} tokens are like that")
    differences = [(theirs - ours, place) for place, theirs, ours in pairs]
    largest, worst = max((abs(difference), place) for difference, place in differences)
    report = ProbeReport(largest, sum(abs(each) for each, _ in differences) / len(pairs),
                         sum(map(_k3, (each for each, _ in differences))) / len(pairs), len(pairs), worst)
    if largest > tolerance:
        raise RefitError(
            f"engine and trainer do not have the same weights: the log-probs of token {worst[1]} of prompt {worst[0]} "
            f"differ by {largest:.3g} nats, which is more than {tolerance:g}; over {len(pairs)} tokens they differ by "
            f"{report.mean_difference:.3g} on average, and k3 is {report.kl:.3g}")
    return report


def _k3(difference: float) -> float:
    clamped = max(-MAX_DIFFERENCE, min(MAX_DIFFERENCE, difference))
    return math.expm1(-clamped) + clamped
