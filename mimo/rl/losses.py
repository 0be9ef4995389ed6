"""Policy losses as (sum, count), so that the mean over the global batch is the same for every split of it.

The schedule divides gradients by the count of all microbatches and ranks together (`calculate_per_token_loss=True`,
`mimo.training.grad_sync`); a mean for each microbatch would weigh a token by how many share its microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from mimo.config.rl import RlConfig

# Advantages of completions: how much better each is than the others of its prompt.


STD_EPSILON = 1e-6

Advantage = Literal["grpo", "dr-grpo", "rloo"]


def advantages(rewards: Sequence[float], prompts: Sequence[int], kind: Advantage) -> torch.Tensor:
    """One advantage for each completion, from the rewards of all completions of its prompt.

    - grpo: (r - mean) / (std + 1e-6), std with n - 1 in the denominator (arXiv:2402.03300, equation 4).
    - dr-grpo: r - mean (arXiv:2503.20783).
    - rloo: r - mean of the others = (r - mean) n / (n - 1) (arXiv:2402.14740).

    A prompt with one completion has mean 0 and std 1, so that its reward itself remains.

    Args:
        rewards: of each completion.
        prompts: index of the prompt of each completion, from 0; in any order.
        kind: which.

    Returns:
        float32 `[completions]`.

    Raises:
        ValueError: a reward is not finite.
    """
    assert len(rewards) == len(prompts), f"{len(rewards)} rewards for {len(prompts)} completions"
    # float64: the mean of equal rewards must be the reward, or dividing by 1e-6 would make much of the difference.
    reward = torch.tensor(rewards, dtype=torch.float64)
    for index in torch.nonzero(~reward.isfinite()).flatten().tolist():
        raise ValueError(f"completion {index} of prompt {prompts[index]}: reward {rewards[index]} is not finite")
    group = torch.tensor(prompts, dtype=torch.int64)
    num_groups = int(group.max()) + 1 if len(prompts) else 0
    count = torch.bincount(group, minlength=num_groups).double()
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


# Which positions of a microbatch predict sampled tokens, and sums over sequences.


@dataclass
class SampledTokens:
    """The `t` positions of whole sequences, one behind the other or row by row, padding among them.

    Attributes:
        mask: bool `[t]`, True where the position predicts a token that the policy sampled.
        sequence_ids: int64 `[t]`, number of the sequence of each position, below `num_sequences`.
        num_sequences: of the microbatch; one without a sampled token, such as padding, counts nowhere.
    """

    mask: torch.Tensor
    sequence_ids: torch.Tensor
    num_sequences: int

    def masked(self, values: torch.Tensor) -> torch.Tensor:
        """`values` `[t]`, 0 where no token was sampled: whatever stands there, NaN too, has no effect or gradient."""
        return torch.where(self.mask, values, torch.zeros_like(values))

    def sequence_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of `values` `[t]` over the sampled tokens of each sequence, `[num_sequences]`."""
        sums = values.new_zeros(self.num_sequences)
        return sums.index_add(0, self.sequence_ids, self.masked(values))

    def lengths(self) -> torch.Tensor:
        """Sampled tokens of each sequence, float32 `[num_sequences]`."""
        return self.sequence_sums(torch.ones_like(self.mask, dtype=torch.float32))

    def sequence_means(self, values: torch.Tensor) -> torch.Tensor:
        """Mean of `values` `[t]` over the sampled tokens of each sequence, `[num_sequences]`; 0 where there is none."""
        return self.sequence_sums(values) / self.lengths().clamp(min=1)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """One value a sequence, `[num_sequences]`, at each of its positions, `[t]`."""
        return values[self.sequence_ids]


# Estimates of KL(policy || reference) from sampled tokens.


KlType = Literal["k1", "k2", "k3"]

# Beyond these a token says no more than that the policies differ; without them one token can outweigh a batch. exp(20)
# is 5e8: large enough never to be met where learning goes on, and far from the overflow of float32 at exp(88).
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


# Figures of a batch as sums and maxima, which add up over microbatches and ranks before anything is divided.


@dataclass
class Totals:
    """Named float64 scalars of one microbatch, of several, or of the global batch.

    Attributes:
        sums: what adds up, counts among them.
        maxima: what the largest counts of; not below 0.
    """

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def zeros(cls, sums: Iterable[str], maxima: Iterable[str], device: torch.device) -> Totals:
        """Zero-initialised sums, for a rank that computes no losses."""
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return cls(dict.fromkeys(sums, zero), dict.fromkeys(maxima, zero))

    def __or__(self, other: Totals) -> Totals:
        """Both; the names differ."""
        assert not self.sums.keys() & other.sums.keys() and not self.maxima.keys() & other.maxima.keys()
        return Totals(self.sums | other.sums, self.maxima | other.maxima)

    def over_group(self, group: dist.ProcessGroup | None = None) -> Totals:
        """Sum over all ranks: two collectives over the group, the whole world by default.

        Every rank must have the same names; ranks that hold copies of the same tokens must not all bring them.
        """
        return Totals(_reduced(self.sums, dist.ReduceOp.SUM, group), _reduced(self.maxima, dist.ReduceOp.MAX, group))

    def mean(self, name: str, count: str = "tokens") -> float:
        """A sum over a count; 0 where nothing was counted."""
        divisor = self.sums[count].item()
        return self.sums[name].item() / divisor if divisor else 0.0


def add_totals(parts: Sequence[Totals]) -> Totals:
    """Sum over several microbatches, all of which have the same names."""
    assert parts, "no microbatch"
    for part in parts:
        assert part.sums.keys() == parts[0].sums.keys() and part.maxima.keys() == parts[0].maxima.keys()
    return Totals(
        {name: torch.stack([part.sums[name] for part in parts]).sum() for name in parts[0].sums},
        {name: torch.stack([part.maxima[name] for part in parts]).amax() for name in parts[0].maxima},
    )


def _reduced(
    values: dict[str, torch.Tensor], op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> dict[str, torch.Tensor]:
    if not values:
        return {}
    names = sorted(values)
    stacked = torch.stack([values[name] for name in names])
    dist.all_reduce(stacked, op=op, group=group)
    return dict(zip(names, stacked, strict=True))



# Names of the totals of `policy_loss`, for ranks that compute none.
LOSS_SUMS = ("loss", "loss_count", "tokens", "ratio", "clipped_low", "clipped_high", "clipped_dual", "reference_kl",
             "entropy")


@dataclass
class PolicyBatch:
    """Inputs of a microbatch's loss besides the policy's log-probs, all without gradient.

    Attributes:
        sampled: the positions, whole sequences.
        advantages: float32 `[t]`, the same over a sequence.
        old_log_probs: float32 `[t]`, by the trainer before the first update on these samples.
        reference_log_probs: float32 `[t]`, of the reference policy; None without one.
        importance_weights: float32 `[t]`, of `mimo.rl.losses`; None: 1.
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
