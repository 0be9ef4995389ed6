"""Policy losses as (sum, count), so that the mean over the global batch is the same for every split of it.

The schedule divides gradients by the count of all microbatches and ranks together (`calculate_per_token_loss=True`,
`mimo.training.grad_sync`); a mean for each microbatch would weigh a token by how many share its microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_reduce

if TYPE_CHECKING:
    from mimo.config.rl import Advantage, KlType, RlConfig

STD_EPSILON = 1e-6


def advantages(rewards: Sequence[float], prompts: Sequence[int], kind: Advantage) -> torch.Tensor:
    """Compute the advantage of each completion from the rewards of all completions of its prompt.

    - grpo: (r - mean) / (std + 1e-6), std with n - 1 in the denominator (arXiv:2402.03300, equation 4).
    - dr-grpo: r - mean (arXiv:2503.20783).
    - rloo: r - mean of the others = (r - mean) n / (n - 1) (arXiv:2402.14740).

    A prompt with one completion counts as mean 0 and std 1, so that the advantage is the reward.

    Args:
        rewards: reward of each completion.
        prompts: index of the prompt of each completion, from 0; in any order.
        kind: the formula.

    Returns:
        float32 `[completions]`.

    Raises:
        ValueError: a reward is not finite.
    """
    assert len(rewards) == len(prompts), f"{len(rewards)} rewards for {len(prompts)} completions"
    reward = torch.tensor(rewards, dtype=torch.float64)
    for index in torch.nonzero(~reward.isfinite()).flatten().tolist():
        raise ValueError(f"completion {index} of prompt {prompts[index]}: reward {rewards[index]} is not finite")
    group = torch.tensor(prompts, dtype=torch.int64)
    num_groups = int(group.max()) + 1 if len(prompts) else 0
    count = torch.bincount(group, minlength=num_groups).double()
    # Compared with the least reward of each prompt, equal rewards are exactly 0, and so is their mean: dividing by 1e-6
    # would amplify a difference by rounding.
    least = torch.full((num_groups,), torch.inf, dtype=torch.float64).scatter_reduce_(0, group, reward, "amin")
    least[count == 1] = 0.0
    reward = reward - least[group]
    mean = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, group, reward) / count.clamp(min=1)
    mean[count == 1] = 0.0
    centred = reward - mean[group]
    if kind == "dr-grpo":
        return centred.float()
    others = (count - 1).clamp(min=1)
    if kind == "rloo":
        return (centred * torch.where(count == 1, 1.0, count / others)[group]).float()
    assert kind == "grpo", kind
    squares = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, group, centred.square())
    std = torch.where(count == 1, 1.0, (squares / others).sqrt())
    return (centred / (std[group] + STD_EPSILON)).float()


@dataclass
class SampledTokens:
    """The `t` positions of whole sequences, packed or row by row, padding included.

    Context-parallel ranks each have some positions of every sequence. Sums and means of a sequence are over all of
    them; sums over tokens are this rank's.

    Attributes:
        mask: bool `[t]`, True where the position predicts a token that the policy sampled.
        sequence_ids: int64 `[t]`, number of each position's sequence, below `num_sequences`.
        num_sequences: sequences of the microbatch. One without a sampled token, such as padding, does not count.
        group: the ranks that share the sequences; None if all positions are here.
    """

    mask: torch.Tensor
    sequence_ids: torch.Tensor
    num_sequences: int
    group: dist.ProcessGroup | None = None

    def masked(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values` `[t]` with 0 where no token was sampled. Even NaN there has no effect and no gradient."""
        return torch.where(self.mask, values, torch.zeros_like(values))

    def own_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sum `values` `[t]` over this rank's sampled tokens of each sequence, `[num_sequences]`."""
        sums = values.new_zeros(self.num_sequences)
        return sums.index_add(0, self.sequence_ids, self.masked(values))

    def sequence_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sum `values` `[t]` over the sampled tokens of each sequence, `[num_sequences]`. Collective over `group`.

        So is the backward pass: each rank's loss depends on the values of all ranks.
        """
        sums = self.own_sums(values)
        if self.group is None or self.group.size() == 1:
            return sums
        whole: torch.Tensor = all_reduce(sums, group=self.group)
        return whole

    def lengths(self) -> torch.Tensor:
        """Count the sampled tokens of each sequence, float32 `[num_sequences]`. Collective over `group`."""
        return self.sequence_sums(torch.ones_like(self.mask, dtype=torch.float32))

    def count_sequences(self, lengths: torch.Tensor) -> torch.Tensor:
        """Count the sequences with sampled tokens, int32 scalar: 0 on all ranks of `group` but the first.

        `lengths` are those of `lengths()`.
        """
        counts = self.group is None or self.group.rank() == 0
        return (lengths > 0).sum(dtype=torch.int32) * counts

    def sequence_means(self, values: torch.Tensor) -> torch.Tensor:
        """Average `values` `[t]` over the sampled tokens of each sequence, `[num_sequences]`; 0 without any."""
        return self.sequence_sums(values) / self.lengths().clamp(min=1)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Repeat one value for each sequence, `[num_sequences]`, at all its positions, `[t]`."""
        return values[self.sequence_ids]


# Limits for single tokens, so that one token cannot outweigh a batch. exp(20) is 5e8: a run that learns never reaches
# it, and it is far below the overflow of float32 at exp(88).
MAX_LOG_RATIO = 20.0
MAX_KL = 10.0


def kl_estimates(log_probs: torch.Tensor, reference_log_probs: torch.Tensor, kind: KlType) -> torch.Tensor:
    """Estimate KL(policy || reference) at each sampled token, in nats.

    The estimators are from J. Schulman, "Approximating KL divergence", 2020. With d = log p_policy - log p_reference:
    k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. d is clamped to +-20 and the estimate to +-10, beyond which there is no
    gradient. As a term of the loss, only k2 has the gradient of the KL divergence in expectation. The gradient of k1 is
    0, and that of k3 is the gradient of KL(reference || policy).

    Args:
        log_probs: the policy's log-probs, any shape; the gradient flows into them.
        reference_log_probs: the reference's log-probs of the same tokens.
        kind: the estimator.
    """
    difference = (log_probs - reference_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "k1":
        estimates = difference
    elif kind == "k2":
        estimates = difference.square() / 2
    else:
        assert kind == "k3", kind
        # expm1, because the exponential of a small number minus 1 would have few correct digits.
        estimates = torch.expm1(-difference) + difference
    return estimates.clamp(-MAX_KL, MAX_KL)


def kl_of_sequences(
    sampled: SampledTokens, log_probs: torch.Tensor, reference_log_probs: torch.Tensor, kind: KlType
) -> torch.Tensor:
    """Sum the estimates over each sequence, without gradient. `--kl-in reward` subtracts them, times --kl-coeff.

    The sums are those of this rank's tokens, to be added up over context-parallel ranks.

    Args:
        sampled: the positions.
        log_probs: `[t]`, the sampling policy's log-probs, computed by the trainer.
        reference_log_probs: `[t]`, the reference's.
        kind: the estimator.

    Returns:
        `[num_sequences]`.
    """
    log_probs, reference = sampled.masked(log_probs.detach()), sampled.masked(reference_log_probs.detach())
    return sampled.own_sums(kl_estimates(log_probs, reference, kind))


@dataclass
class Totals:
    """Figures of one or more microbatches, or of the global batch, as float64 scalars by name.

    Sums and maxima can be combined over microbatches and ranks. Means are computed only at the end.

    Attributes:
        sums: figures that add up, counts included.
        maxima: figures of which the largest counts; not below 0.
    """

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def zeros(cls, sums: Iterable[str], maxima: Iterable[str], device: torch.device) -> Totals:
        """Zero-initialised sums, for a rank that computes no losses."""
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return cls(dict.fromkeys(sums, zero), dict.fromkeys(maxima, zero))

    def __or__(self, other: Totals) -> Totals:
        """Return both. Names must differ."""
        assert not self.sums.keys() & other.sums.keys() and not self.maxima.keys() & other.maxima.keys()
        return Totals(self.sums | other.sums, self.maxima | other.maxima)

    def over_world(self) -> Totals:
        """Combine the totals of all ranks in two collectives over the world.

        Every rank must have the same names. If several ranks have copies of the same tokens, only one may count them.
        """
        return Totals(_reduced(self.sums, dist.ReduceOp.SUM), _reduced(self.maxima, dist.ReduceOp.MAX))

    def mean(self, name: str, count: str = "tokens") -> float:
        """Divide a sum by a count; 0 if nothing was counted."""
        divisor = self.sums[count].item()
        return self.sums[name].item() / divisor if divisor else 0.0


def add_totals(parts: Sequence[Totals]) -> Totals:
    """Combine the totals of several microbatches, which must have the same names."""
    assert parts, "no microbatch"
    for part in parts:
        assert part.sums.keys() == parts[0].sums.keys() and part.maxima.keys() == parts[0].maxima.keys()
    return Totals(
        {name: torch.stack([part.sums[name] for part in parts]).sum() for name in parts[0].sums},
        {name: torch.stack([part.maxima[name] for part in parts]).amax() for name in parts[0].maxima},
    )


def _reduced(values: dict[str, torch.Tensor], op: dist.ReduceOp.RedOpType) -> dict[str, torch.Tensor]:
    if not values:
        return {}
    names = sorted(values)
    stacked = torch.stack([values[name] for name in names])
    dist.all_reduce(stacked, op=op)
    return dict(zip(names, stacked, strict=True))


# Names of the totals of `policy_loss`, for ranks that compute none.
LOSS_SUMS = ("loss", "loss_count", "tokens", "ratio", "clipped_low", "clipped_high", "clipped_dual", "reference_kl",
             "entropy")


@dataclass
class PolicyBatch:
    """Inputs of a microbatch's loss besides the policy's log-probs, all without gradient.

    Attributes:
        sampled: the positions, whole sequences.
        advantages: float32 `[t]`, the same for all tokens of a sequence.
        old_log_probs: float32 `[t]`, computed by the trainer before the first update on these samples.
        reference_log_probs: float32 `[t]`, the reference policy's; None without one.
        importance_weights: float32 `[t]`, see `importance_weights`; None for 1.
    """

    sampled: SampledTokens
    advantages: torch.Tensor
    old_log_probs: torch.Tensor
    reference_log_probs: torch.Tensor | None = None
    importance_weights: torch.Tensor | None = None


def policy_loss(
    config: RlConfig, batch: PolicyBatch, log_probs: torch.Tensor, entropies: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, Totals]:
    """Compute the sum of a microbatch's losses, its divisor, and figures for the report.

    The loss of a token is --policy-loss times its importance weight, plus --kl-coeff times the estimate of the KL
    divergence (`--kl-in loss`), minus --entropy-coeff times the entropy.

    Args:
        config: the flags.
        batch: the microbatch.
        log_probs: float32 `[t]`, of the policy that is trained.
        entropies: `[t]`; required by --entropy-coeff, and reported if given.

    Returns:
        The sum, a scalar with gradient. The count of tokens or sequences by --loss-aggregation, int32. The totals
        `LOSS_SUMS`, with 0 for inputs that are not given.
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
    """Turn totals of the global batch into figures: the loss over its own divisor, the others over tokens."""
    means = {name: totals.mean(name) for name in LOSS_SUMS if name not in ("loss", "loss_count", "tokens")}
    return {"loss": totals.mean("loss", "loss_count")} | means


def loss_count(config: RlConfig, completion_lengths: Sequence[int]) -> int:
    """Compute the divisor of a batch from its completions' lengths: the sum of what `token_weights` returns."""
    return sum(completion_lengths) if config.aggregation == "token-mean" else len(completion_lengths)


def token_weights(config: RlConfig, sampled: SampledTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight of each token's loss, and this microbatch's part of the divisor, by --loss-aggregation.

    - token-mean: 1, over the tokens.
    - seq-mean-token-mean: 1 / length of its sequence, over the sequences.
    - seq-mean-token-sum-norm: 1 / --loss-norm-length, over the sequences (arXiv:2503.20783).

    All of these are sums over whole sequences, so neither microbatches nor data parallelism change the quotient.

    Returns:
        float32 `[t]`, 0 where no token was sampled; int32 scalar.
    """
    ones = torch.ones_like(sampled.mask, dtype=torch.float32)
    kind = config.aggregation
    if kind == "token-mean":
        return sampled.masked(ones), sampled.mask.sum(dtype=torch.int32)
    lengths = sampled.lengths()
    num_sequences = sampled.count_sequences(lengths)
    if kind == "seq-mean-token-mean":
        return sampled.masked(sampled.spread(1.0 / lengths.clamp(min=1))), num_sequences
    assert kind == "seq-mean-token-sum-norm" and config.loss_norm_length is not None, kind
    return sampled.masked(ones / config.loss_norm_length), num_sequences


def _policy_terms(
    config: RlConfig, batch: PolicyBatch, log_probs: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the policy loss of each token, `[t]`, and sums of what was clipped.

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


# The rollout engine and the trainer give the same tokens slightly other log-probs: how much, and a correction.
#
# The engine samples from its own distribution; the loss takes the tokens for samples of the trainer's. Importance
# weights p_trainer / p_rollout correct for it, truncated because a product of many would have no finite variance.

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

    Tokens with weight 0 still count in the mean of the loss, so that it does not depend on the rank that holds them.

    Args:
        config: the kind of correction and its bounds.
        sampled: the positions, whole sequences.
        old_log_probs: float32 `[t]`, computed by the trainer with the weights that the rollout engine had.
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
    """Measure how much the log-probs of trainer and rollout engine differ on the sampled tokens.

    With d = log p_trainer - log p_rollout: `gen_kl`, the sum of the k3 estimates exp(d) - 1 - d of
    KL(rollout || trainer); `abs_dlogp`, the sum of |d|; `exp_abs_dlogp`, of exp(|d|); `importance_ratio`, of exp(d);
    `rollout_tokens`, their number; and the maximum `max_abs_dlogp`. Exponents are clamped to +-20.

    Args:
        sampled: the positions.
        old_log_probs: `[t]`, computed by the trainer with the weights that the rollout engine had.
        rollout_log_probs: `[t]`, computed by the engine.
    """
    # float64: equal weights in float32 give a gen-KL of 1e-12, which is far below the rounding of exp(d) - 1.
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
    """Turn totals of the two functions above, of the global batch, into figures: means over tokens, and a maximum.

    bf16 engines reach a `gen_kl` below 1e-3. An `exp_abs_dlogp` above 1.05 should be investigated.
    """
    means = {name: totals.mean(name, "rollout_tokens") for name in (*MISMATCH_SUMS[:-1], *IMPORTANCE_SUMS)}
    means["importance_clipped_fraction"] = means.pop("importance_clipped")
    return means | {name: totals.maxima[name].item() for name in MISMATCH_MAXIMA}
