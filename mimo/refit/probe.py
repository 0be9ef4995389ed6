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
                     trainer_logprobs: Sequence[Sequence[float | None]], tolerance: float,
                     names: Sequence[str] = ()) -> ProbeReport:
    """Ask an engine for the log-probs of prompts and compare them with the trainer's.

    Args:
        engine: serves what it was given last.
        prompts: vLLM's: `{"prompt_token_ids": [...]}`.
        trainer_logprobs: of each prompt, of every token from the second on, as
            `mimo.training.prompt_logprobs.prompt_logprobs` gives them; None for a token that is not compared.
        tolerance: largest difference that a token may have, in nats. A tensor that few tokens use, an expert's, shows
            in few of them, so a mean would hide it.
        names: of the prompts, for messages; their numbers where none are given.

    Raises:
        ValueError: the two sides do not have the same tokens, or none to compare.
        RefitError: a token's difference is larger than the tolerance, or a log-prob is not finite; with prompt, token
            and both values.
    """
    answers = engine.prompt_logprobs(prompts)
    lengths = [len(own) for own in trainer_logprobs]
    if [len(own) for own in answers] != lengths:
        raise ValueError(f"the trainer's log-probs are of {lengths} tokens, the engine's of "
                         f"{[len(own) for own in answers]}")
    pairs = [((prompt, token + 1), theirs, ours)
             for prompt, (answer, own) in enumerate(zip(answers, trainer_logprobs, strict=True))
             for token, (theirs, ours) in enumerate(zip(answer, own, strict=True)) if ours is not None]
    if not pairs:
        raise ValueError(f"{len(prompts)} prompts have no token whose log-probs could be compared")

    def told(pair: tuple[tuple[int, int], float, float]) -> str:
        (prompt, token), theirs, ours = pair
        return (f"token {token} of prompt {names[prompt] if names else prompt} has log-prob {theirs:.6g} in the engine "
                f"and {ours:.6g} in the trainer")

    broken = [pair for pair in pairs if not math.isfinite(pair[1] - pair[2])]
    if broken:
        raise RefitError(f"{told(broken[0])}; {len(broken)} of {len(pairs)} tokens are like that")
    differences = [theirs - ours for _, theirs, ours in pairs]
    worst = max(pairs, key=lambda pair: abs(pair[1] - pair[2]))
    report = ProbeReport(abs(worst[1] - worst[2]), sum(map(abs, differences)) / len(pairs),
                         sum(map(_k3, differences)) / len(pairs), len(pairs), worst[0])
    if report.max_difference > tolerance:
        raise RefitError(
            f"engine and trainer do not have the same weights: {told(worst)}; they differ by "
            f"{report.max_difference:.3g} nats, which is more than {tolerance:g}; over {len(pairs)} tokens they differ "
            f"by {report.mean_difference:.3g} on average, and k3 is {report.kl:.3g}")
    return report


def _k3(difference: float) -> float:
    clamped = max(-MAX_DIFFERENCE, min(MAX_DIFFERENCE, difference))
    return math.expm1(-clamped) + clamped
