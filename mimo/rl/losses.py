"""Policy losses as (sum, count), so that the mean over the global batch is the same for every split of it.

The schedule divides gradients by the count of all microbatches and ranks together (`calculate_per_token_loss=True`,
`mimo.training.grad_sync`); a mean for each microbatch would weigh a token by how many share its microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mimo.rl.kl import kl_estimates
from mimo.rl.sampled import SampledTokens
from mimo.rl.totals import Totals

if TYPE_CHECKING:
    from mimo.config.rl import RlConfig

# exp(20) is 5e8: large enough never to be met where learning goes on, and far from the overflow of float32 at exp(88).
MAX_LOG_RATIO = 20.0

# Names of the totals of `policy_loss`, for ranks that compute none.
LOSS_SUMS = ("loss", "loss_count", "tokens", "ratio", "clipped_low", "clipped_high", "clipped_dual", "reference_kl",
             "entropy")


@dataclass
class PolicyBatch:
    """What the loss of a microbatch needs beside the policy's log-probs, all without gradient.

    Attributes:
        sampled: the positions, whole sequences.
        advantages: float32 `[t]`, the same over a sequence.
        old_log_probs: float32 `[t]`, by the trainer before the first update on these samples.
        reference_log_probs: float32 `[t]`, of the reference policy; None without one.
        importance_weights: float32 `[t]`, of `mimo.rl.importance`; None: 1.
    """

    sampled: SampledTokens
    advantages: torch.Tensor
    old_log_probs: torch.Tensor
    reference_log_probs: torch.Tensor | None = None
    importance_weights: torch.Tensor | None = None


def policy_loss(
    config: RlConfig, batch: PolicyBatch, log_probs: torch.Tensor, entropies: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, Totals]:
    """Sum of the losses of a microbatch, what it is to be divided by, and both among the figures for the report.

    The loss of a token is that of --policy-loss times its importance weight, plus --kl-coeff times the estimate of the
    KL divergence (`--kl-in loss`), minus --entropy-coeff times the entropy.

    Args:
        config: the flags.
        batch: the microbatch.
        log_probs: float32 `[t]`, of the policy that is being trained.
        entropies: `[t]`; needed with --entropy-coeff, and reported where given.

    Returns:
        The sum, a scalar with gradient; the count, int32, of tokens or sequences by --loss-aggregation; the totals
        `LOSS_SUMS`, 0 for what is not given.
    """
    sampled = batch.sampled
    log_probs = sampled.masked(log_probs)
    losses, sums = _policy_terms(config, batch, log_probs)
    sums |= dict.fromkeys(("reference_kl", "entropy"), torch.zeros_like(sums["tokens"]))
    if batch.importance_weights is not None:
        losses = losses * sampled.masked(batch.importance_weights.detach())
    if batch.reference_log_probs is not None:
        kl = kl_estimates(log_probs, sampled.masked(batch.reference_log_probs.detach()), config.kl_type)
        sums["reference_kl"] = kl.detach().sum(dtype=torch.float64)
        if config.kl_in == "loss":
            losses = losses + config.kl_coeff * kl
    assert batch.reference_log_probs is not None or config.kl_in != "loss" or not config.kl_coeff, "no reference"
    if entropies is not None:
        entropies = sampled.masked(entropies)
        sums["entropy"] = entropies.detach().sum(dtype=torch.float64)
    if config.entropy_coeff:
        assert entropies is not None, "--entropy-coeff needs entropies"
        losses = losses - config.entropy_coeff * entropies
    weights, count = token_weights(config, sampled)
    total = (losses * weights).sum()
    sums |= {"loss": total.detach().double(), "loss_count": count.double()}
    return total, count, Totals(sums)


def loss_metrics(totals: Totals) -> dict[str, float]:
    """Totals of the global batch as figures for the report: the loss by its own divisor, the others by tokens."""
    means = {name: totals.mean(name) for name in LOSS_SUMS if name not in ("loss", "loss_count", "tokens")}
    return {"loss": totals.mean("loss", "loss_count")} | means


def loss_count(config: RlConfig, completion_lengths: Sequence[int]) -> int:
    """The divisor of a batch whose completions have so many tokens: the sum of those of `token_weights`."""
    return sum(completion_lengths) if config.aggregation == "token-mean" else len(completion_lengths)


def token_weights(config: RlConfig, sampled: SampledTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight of each token's loss, and this microbatch's part of the divisor, by --loss-aggregation.

    - token-mean: 1, over the tokens.
    - seq-mean-token-mean: 1 / length of its sequence, over the sequences.
    - seq-mean-token-sum-norm: 1 / --loss-norm-length, over the sequences (arXiv:2503.20783).

    All are sums over whole sequences, so neither microbatches nor data parallelism change the quotient.

    Returns:
        float32 `[t]`, 0 where no token was sampled; int32 scalar.
    """
    ones = torch.ones_like(sampled.mask, dtype=torch.float32)
    kind = config.aggregation
    if kind == "token-mean":
        return sampled.masked(ones), sampled.mask.sum(dtype=torch.int32)
    lengths = sampled.lengths()
    num_sequences = (lengths > 0).sum(dtype=torch.int32)
    if kind == "seq-mean-token-mean":
        return sampled.masked(sampled.spread(1.0 / lengths.clamp(min=1))), num_sequences
    assert kind == "seq-mean-token-sum-norm" and config.loss_norm_length is not None, kind
    return sampled.masked(ones / config.loss_norm_length), num_sequences


def _policy_terms(
    config: RlConfig, batch: PolicyBatch, log_probs: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The policy loss of each token, `[t]`, and sums of what was clipped of it.

    - ppo: -min(r A, clip(r) A) (arXiv:1707.06347, equation 7), with --dual-clip-ratio c at most -c A where A < 0
      (arXiv:1912.09729).
    - gspo: the same with the geometric mean of a sequence's ratios in place of r (arXiv:2507.18071).
    - cispo: -clip(r) A log p, the clipped ratio without gradient (arXiv:2506.13585).
    """
    sampled = batch.sampled
    advantage = sampled.masked(batch.advantages.detach())
    log_ratio = log_probs - sampled.masked(batch.old_log_probs.detach())
    if config.policy_loss == "gspo":
        log_ratio = sampled.spread(sampled.sequence_means(log_ratio))
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clip_low, clip_high = config.clip_range
    low, high = 1 - clip_low, 1 + clip_high
    clipped_ratio = ratio.clamp(low, high)
    dual = torch.zeros_like(sampled.mask)
    if config.policy_loss == "cispo":
        losses = -clipped_ratio.detach() * advantage * log_probs
        too_low, too_high = ratio < low, ratio > high
    else:
        losses = -torch.minimum(ratio * advantage, clipped_ratio * advantage)
        # On the other side of the bound the clipped term is the larger one: nothing is cut.
        too_low, too_high = (ratio < low) & (advantage < 0), (ratio > high) & (advantage > 0)
        if config.dual_clip_ratio is not None:
            bound = -config.dual_clip_ratio * advantage
            dual = (advantage < 0) & (losses > bound)
            losses = torch.where(dual, bound, losses)
    with torch.no_grad():
        counted = {"clipped_low": too_low, "clipped_high": too_high, "clipped_dual": dual}
        sums = {name: (where & sampled.mask).sum(dtype=torch.float64) for name, where in counted.items()}
        sums["tokens"] = sampled.mask.sum(dtype=torch.float64)
        sums["ratio"] = sampled.masked(ratio).sum(dtype=torch.float64)
    return losses, sums
