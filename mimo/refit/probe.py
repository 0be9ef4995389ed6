"""Whether an engine and the trainer compute with the same weights: log-probs of the same tokens on both sides.

Two correct sides differ by rounding, by how much depends on the model. The trainer measures it: it computes the
log-probs a second time with weights that are rounded otherwise. The engine may be a few times as far off as that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mimo.refit.meeting import RefitError

# A token's difference counts as no more than this many nats in k3, so that single tokens do not decide it.
MAX_DIFFERENCE = 1.0
# The engine may differ by this many times the rounding noise on average, and by its square times the noise in k3.
NOISE_FACTOR = 2.0
# Log-probs are float32 on both sides: differences below these say nothing, however small the noise is.
MEAN_FLOOR = 2e-5
KL_FLOOR = 2e-9

LogProbs = Sequence[Sequence[float | None]]
"""For each prompt, the log-prob of every token from the second on; None for a token that is not compared."""


class ScoresPrompts(Protocol):
    """An engine or a handle to one."""

    def prompt_logprobs(self, prompts: Sequence[dict[str, Any]]) -> list[list[float]]:
        """For each prompt, the log-prob of every token from the second on."""
        ...


@dataclass(frozen=True)
class Expected:
    """The trainer's side of a comparison.

    Attributes:
        logprobs: with the weights that the engine should have.
        rounded: the same with weights that are rounded otherwise, see `mimo.refit.scramble.rounded`.
    """

    logprobs: LogProbs
    rounded: LogProbs


@dataclass(frozen=True)
class ProbeReport:
    """How far apart both sides are.

    Attributes:
        mean_difference: mean over the tokens of the absolute difference of the log-probs, in nats.
        kl: mean over the tokens of k3 = exp(d) - 1 - d with d = log p_trainer - log p_engine (J. Schulman,
            "Approximating KL divergence", 2020), d being limited to +-1.
        mean_limit, kl_limit: what rounding explains.
        num_tokens: tokens that were compared.
        worst: prompt and token (from 0) where the difference is largest.
    """

    mean_difference: float
    kl: float
    mean_limit: float
    kl_limit: float
    num_tokens: int
    worst: tuple[int, int]


def compare_logprobs(engine: ScoresPrompts, prompts: Sequence[dict[str, Any]], expected: Expected,
                     names: Sequence[str] = ()) -> ProbeReport:
    """Ask an engine for the log-probs of prompts and compare them with the trainer's.

    Args:
        engine: serves what it was given last.
        prompts: requests as vLLM takes them: `{"prompt_token_ids": [...]}`.
        expected: the trainer's log-probs.
        names: of the prompts, for messages; their numbers where none are given.

    Raises:
        ValueError: the two sides do not have the same tokens, or none to compare.
        RefitError: the mean difference or k3 is larger than rounding explains, or a log-prob is not finite.
    """
    answers = engine.prompt_logprobs(prompts)
    lengths = [len(own) for own in expected.logprobs]
    if [len(own) for own in answers] != lengths:
        raise ValueError(f"the trainer's log-probs are of {lengths} tokens, the engine's of "
                         f"{[len(own) for own in answers]}")
    found = _differences(answers, expected.logprobs)
    if not found:
        raise ValueError(f"{len(prompts)} prompts have no token whose log-probs could be compared")

    def described(place: tuple[int, int]) -> str:
        prompt, token = place
        return (f"token {token} of prompt {names[prompt] if names else prompt} has log-prob "
                f"{answers[prompt][token - 1]:.6g} in the engine and {expected.logprobs[prompt][token - 1]:.6g} in the "
                "trainer")

    broken = [place for place, difference in found.items() if not math.isfinite(difference)]
    if broken:
        raise RefitError(f"{described(broken[0])}; {len(broken)} of {len(found)} tokens are like that")
    mean, kl = _figures(found)
    noise_mean, noise_kl = _figures(_differences(expected.rounded, expected.logprobs))
    report = ProbeReport(mean, kl, NOISE_FACTOR * noise_mean + MEAN_FLOOR, NOISE_FACTOR ** 2 * noise_kl + KL_FLOOR,
                         len(found), max(found, key=lambda place: abs(found[place])))
    if mean > report.mean_limit or kl > report.kl_limit:
        raise RefitError(
            f"engine and trainer do not compute with the same weights: over {len(found)} tokens their log-probs differ "
            f"by {mean:.3g} nats on average, and k3 is {kl:.3g}; rounding explains {report.mean_limit:.3g} and "
            f"{report.kl_limit:.3g} at most. The largest difference: {described(report.worst)}")
    return report


def _differences(theirs: LogProbs, ours: LogProbs) -> dict[tuple[int, int], float]:
    """Our log-prob less theirs, by prompt and token, where there are both."""
    return {(prompt, token + 1): our - their
            for prompt, (answer, own) in enumerate(zip(theirs, ours, strict=True))
            for token, (their, our) in enumerate(zip(answer, own, strict=True))
            if our is not None and their is not None}


def _figures(differences: dict[tuple[int, int], float]) -> tuple[float, float]:
    """Mean absolute difference, and mean k3."""
    values = list(differences.values())
    limited = [max(-MAX_DIFFERENCE, min(MAX_DIFFERENCE, each)) for each in values]
    return sum(map(abs, values)) / len(values), sum(math.expm1(each) - each for each in limited) / len(values)
