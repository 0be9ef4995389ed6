"""The rollout engine and the trainer give the same tokens slightly other log-probs: how much, and a correction.

The engine samples from its own distribution; the loss takes the tokens for samples of the trainer's. Importance weights
p_trainer / p_rollout correct for it, truncated because a product of many would have no finite variance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mimo.rl.sampled import SampledTokens
from mimo.rl.totals import Totals

if TYPE_CHECKING:
    from mimo.config.rl import RlConfig

MAX_LOG_RATIO = 20.0

# Names of the totals below, for ranks that compute none.
IMPORTANCE_SUMS = ("importance_clipped", "importance_weight")
MISMATCH_SUMS = ("gen_kl", "abs_dlogp", "exp_abs_dlogp", "importance_ratio", "rollout_tokens")
MISMATCH_MAXIMA = ("max_abs_dlogp",)


@torch.no_grad()
def importance_weights(
    config: RlConfig, sampled: SampledTokens, old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor
) -> tuple[torch.Tensor, Totals]:
    """Factors for the policy loss of each token, detached, and how many tokens they cut.

    With w = p_trainer / p_rollout of a token, by `config.importance_correction`:

    - none: 1.
    - token: min(w, cap) (truncated importance sampling).
    - icepop: w where low <= w <= high, else 0.
    - sequence: w where the geometric mean of the sequence's w is in [low, high], else 0 for all its tokens.

    Tokens that get 0 still count in the mean of the loss, which so does not depend on who holds them.

    Args:
        config: the kind of correction and its bounds.
        sampled: the positions, whole sequences.
        old_log_probs: float32 `[t]`, by the trainer with the weights that the rollout engine had.
        rollout_log_probs: float32 `[t]`, of the distribution that the engine sampled from.

    Returns:
        float32 `[t]`, 0 where no token was sampled; and `importance_clipped`, `importance_weight`.
    """
    difference = sampled.masked(old_log_probs - rollout_log_probs).float()
    ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    low, high = config.importance_band
    kind = config.importance_correction
    if kind == "none":
        weights, clipped = torch.ones_like(ratio), torch.zeros_like(sampled.mask)
    elif kind == "token":
        weights, clipped = ratio.clamp(max=config.importance_cap), ratio > config.importance_cap
    else:
        if kind == "icepop":
            judged = ratio
        else:
            assert kind == "sequence", kind
            judged = sampled.spread(sampled.sequence_means(difference)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        clipped = (judged < low) | (judged > high)
        weights = ratio.masked_fill(clipped, 0.0)
    weights = sampled.masked(weights)
    return weights, Totals({
        "importance_clipped": (clipped & sampled.mask).sum(dtype=torch.float64),
        "importance_weight": weights.sum(dtype=torch.float64),
    })


@torch.no_grad()
def mismatch_totals(
    sampled: SampledTokens, old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor
) -> Totals:
    """How far trainer and rollout engine are apart on the sampled tokens.

    With d = log p_trainer - log p_rollout: `gen_kl`, the sum of the k3 estimates exp(d) - 1 - d of
    KL(rollout || trainer); `abs_dlogp`, the sum of |d|; `exp_abs_dlogp`, of exp(|d|); `importance_ratio`, of exp(d);
    `rollout_tokens`, their number; and the maximum `max_abs_dlogp`. Exponents are clamped to +-20.

    Args:
        sampled: the positions.
        old_log_probs: `[t]`, by the trainer with the weights that the rollout engine had.
        rollout_log_probs: `[t]`, by the engine.
    """
    # float64: a gen-KL of 1e-12 is what equal weights give in float32, far below the rounding of exp(d) - 1.
    difference = sampled.masked(old_log_probs.double() - rollout_log_probs.double())
    exponent = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    largest = difference.abs().amax() if len(difference) else difference.new_zeros(())
    return Totals({
        "gen_kl": (torch.expm1(exponent) - exponent).sum(),
        "abs_dlogp": difference.abs().sum(),
        "exp_abs_dlogp": sampled.masked(exponent.abs().exp()).sum(),
        "importance_ratio": sampled.masked(exponent.exp()).sum(),
        "rollout_tokens": sampled.mask.sum(dtype=torch.float64),
    }, {"max_abs_dlogp": largest})


def mismatch_metrics(totals: Totals) -> dict[str, float]:
    """Totals of both functions above, of the global batch, as figures for the report: means over tokens, and a maximum.

    `gen_kl` below 1e-3 is what bf16 engines reach; `exp_abs_dlogp` above 1.05 calls for a look.
    """
    means = {name: totals.mean(name, "rollout_tokens") for name in (*MISMATCH_SUMS[:-1], *IMPORTANCE_SUMS)}
    means["importance_clipped_fraction"] = means.pop("importance_clipped")
    return means | {name: totals.maxima[name].item() for name in MISMATCH_MAXIMA}
