"""Estimates of KL(policy || reference) from sampled tokens."""

from __future__ import annotations

from typing import Literal

import torch

from mimo.rl.sampled import SampledTokens

KlType = Literal["k1", "k2", "k3"]

# Beyond these a token says no more than that the policies differ; without them one token can outweigh a batch.
MAX_LOG_RATIO = 20.0
MAX_KL = 10.0


def kl_estimates(log_probs: torch.Tensor, reference_log_probs: torch.Tensor, kind: KlType) -> torch.Tensor:
    """An estimate at each token that the policy sampled, in nats (J. Schulman, "Approximating KL divergence", 2020).

    With d = log p_policy - log p_reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. d is clamped to +-20 and the
    estimate to +-10, where it has no gradient any more. As a term of the loss only k2 has the gradient of the KL
    divergence in expectation; that of k1 is 0, that of k3 belongs to KL(reference || policy).

    Args:
        log_probs: of the policy, any shape; the gradient flows into them.
        reference_log_probs: of the reference at the same tokens.
        kind: which.
    """
    difference = (log_probs - reference_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "k1":
        estimates = difference
    elif kind == "k2":
        estimates = difference.square() / 2
    else:
        assert kind == "k3", kind
        # expm1: the difference of 1 and the exponential of a small number has few digits left.
        estimates = torch.expm1(-difference) + difference
    return estimates.clamp(-MAX_KL, MAX_KL)


def kl_of_sequences(
    sampled: SampledTokens, log_probs: torch.Tensor, reference_log_probs: torch.Tensor, kind: KlType
) -> torch.Tensor:
    """Sum of the estimates over each sequence, without gradient: what `--kl-in reward` takes, times --kl-coeff, off it.

    Args:
        sampled: the positions.
        log_probs: `[t]`, of the policy that sampled, by the trainer.
        reference_log_probs: `[t]`.
        kind: which.

    Returns:
        `[num_sequences]`.
    """
    log_probs, reference = sampled.masked(log_probs.detach()), sampled.masked(reference_log_probs.detach())
    return sampled.sequence_sums(kl_estimates(log_probs, reference, kind))
