"""Advantages, importance weights and policy losses: numbers by hand, gradients, the same mean for every split."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from mimo.config.rl import RlConfig
from mimo.rl.losses import (
    IMPORTANCE_SUMS,
    LOSS_SUMS,
    MISMATCH_MAXIMA,
    MISMATCH_SUMS,
    PolicyBatch,
    SampledTokens,
    Totals,
    add_totals,
    advantages,
    importance_weights,
    kl_estimates,
    kl_of_sequences,
    loss_metrics,
    mismatch_metrics,
    mismatch_totals,
    policy_loss,
    token_weights,
)

NO_CORRECTION = RlConfig(importance_correction="none")


def config(**fields):
    return dataclasses.replace(NO_CORRECTION, **fields)


def batch_of(lengths, masks, advantages, old, **more):
    """Sequences of whole tokens; `masks` says which were sampled."""
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    sampled = SampledTokens(torch.tensor(masks, dtype=torch.bool), ids, len(lengths))
    return PolicyBatch(sampled, torch.tensor(advantages)[ids], torch.tensor(old), **more)


def one_token(ratio, advantage, **fields):
    """Loss, its gradient with respect to the log-prob, and the totals of a token with this ratio."""
    log_prob = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    batch = batch_of([1], [True], [float(advantage)], [-1.0 - math.log(ratio)])
    total, count, totals = policy_loss(config(**fields), batch, log_prob)
    assert count.item() == 1 and count.dtype == torch.int32
    return total.item(), torch.autograd.grad(total, log_prob)[0].item(), {k: v.item() for k, v in totals.sums.items()}


def test_defaults_are_those_of_the_papers():
    """Sequences whose ratios are 1.001 and 0.999: within the range of a token's, outside of that of a sequence's."""
    batch = batch_of([3, 2], [True] * 5, [1.0, -1.0], [-1.0] * 5)
    log_probs = torch.tensor([-0.999] * 3 + [-1.001] * 2, dtype=torch.float64)
    total, count, totals = policy_loss(config(policy_loss="gspo"), batch, log_probs)
    assert (count.item(), totals.sums["clipped_high"].item(), totals.sums["clipped_low"].item()) == (2, 3, 2)
    assert total.item() == pytest.approx(-(1 + 4e-4) + (1 - 3e-4), abs=1e-6)
    total, count, totals = policy_loss(config(), batch, log_probs)
    assert (count.item(), totals.sums["clipped_high"].item(), totals.sums["clipped_low"].item()) == (5, 0, 0)
    assert total.item() == pytest.approx(-3 * math.exp(1e-3) + 2 * math.exp(-1e-3), abs=1e-6)
    for ratio, cut in ((0.01, 0.0), (4.9, 0.0), (5.1, 1.0)):
        sums = one_token(ratio, 1.0, policy_loss="cispo")[2]
        assert (sums["clipped_low"], sums["clipped_high"]) == (0.0, cut), ratio


@pytest.mark.parametrize(("ratio", "advantage", "dual", "loss", "gradient", "clipped"), [
    (1.0, 2.0, None, -2.0, -2.0, None), (1.1, 2.0, None, -2.2, -2.2, None),
    (1.5, 2.0, None, -2.6, 0.0, "clipped_high"),  # 1.3 * 2
    (0.5, 2.0, None, -1.0, -1.0, None),  # the clipped term is larger: no bound
    (1.5, -2.0, None, 3.0, 3.0, None), (0.5, -2.0, None, 1.6, 0.0, "clipped_low"),  # 0.8 * 2
    (0.9, -2.0, None, 1.8, 1.8, None), (5.0, -2.0, None, 10.0, 10.0, None),
    # A dual clip bounds the loss of a negative advantage.
    (5.0, -2.0, 3.0, 6.0, 0.0, "clipped_dual"), (2.0, -2.0, 3.0, 4.0, 4.0, None),
    (5.0, 2.0, 3.0, -2.6, 0.0, "clipped_high"),
])
def test_ppo_by_hand(ratio, advantage, dual, loss, gradient, clipped):
    fields = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "dual_clip_ratio": dual}
    got, slope, sums = one_token(ratio, advantage, **fields)
    assert (got, slope) == (pytest.approx(loss, rel=1e-6), pytest.approx(gradient, rel=1e-6))
    expected = {name: float(name == clipped) for name in ("clipped_low", "clipped_high", "clipped_dual")}
    assert {name: sums[name] for name in expected} == expected
    assert sums["ratio"] == pytest.approx(ratio, rel=1e-6) and sums["tokens"] == 1


@pytest.mark.parametrize(("ratio", "advantage", "weight"), [(1.0, 2.0, 1.0), (3.0, 2.0, 1.2), (0.5, 2.0, 0.8),
                                                            (3.0, -2.0, 1.2), (0.5, -2.0, 0.8)])
def test_cispo_keeps_the_gradient_of_clipped_tokens(ratio, advantage, weight):
    got, slope, sums = one_token(ratio, advantage, policy_loss="cispo", clip_ratio_low=0.2, clip_ratio_high=0.2)
    assert slope == pytest.approx(-weight * advantage, rel=1e-6)
    assert got == pytest.approx(weight * advantage, rel=1e-6)  # -w A log p, log p = -1
    assert (sums["clipped_high"], sums["clipped_low"]) == (float(weight == 1.2), float(weight == 0.8))


def test_gspo_takes_the_geometric_mean_of_a_sequence():
    # Ratios 2, 1/2 of the first sequence: 1. The second's are 1.1 and 1.21: 1.1^1.5. A prompt token is in neither.
    ratios = torch.tensor([7.0, 2.0, 0.5, 1.1, 1.21], dtype=torch.float64)
    log_probs = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    batch = batch_of([3, 2], [False, True, True, True, True], [1.0, 2.0], [0.0] * 5)
    batch.old_log_probs = -ratios.log()
    total, count, totals = policy_loss(config(policy_loss="gspo", clip_ratio_low=0.2, clip_ratio_high=1.0,
                                                loss_aggregation="token-mean"), batch, log_probs)
    second = 1.1 ** 1.5
    assert total.item() == pytest.approx(-(2 * 1 * 1 + 2 * second * 2)) and count.item() == 4
    # Each token has 1 / |y| of the sequence's gradient, which counts |y| times in the mean over tokens.
    gradient = torch.autograd.grad(total, log_probs)[0]
    torch.testing.assert_close(gradient, -torch.tensor([0, 1, 1, 2 * second, 2 * second], dtype=torch.float64))
    assert totals.mean("ratio") == pytest.approx((1 + second) / 2)


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("log_prob", [1e4, -1e4, 60.0])
def test_ratios_that_overflow_are_clamped(kind, log_prob):
    log_probs = torch.tensor([log_prob, 0.0], requires_grad=True)
    batch = batch_of([1, 1], [True, True], [-1.0, 1.0], [0.0, 0.0])
    total, _, totals = policy_loss(config(policy_loss=kind), batch, log_probs)
    assert total.isfinite() and torch.autograd.grad(total, log_probs)[0].isfinite().all()
    assert totals.sums["ratio"].item() == pytest.approx(1 + math.exp(20 if log_prob > 0 else -20), rel=1e-5)


@pytest.mark.parametrize(("kind", "aggregation"), [("ppo", "token-mean"), ("gspo", "seq-mean-token-mean"),
                                                   ("cispo", "seq-mean-token-mean")])
def test_values_at_padding_have_no_effect(kind, aggregation):
    nan = math.nan
    flags = config(policy_loss=kind, loss_aggregation=aggregation, kl_coeff=0.1, entropy_coeff=0.1)

    def run(filler, advantage):
        leaf = torch.tensor([filler, -1.0, -2.0, filler], requires_grad=True)
        batch = batch_of([3, 1], [False, True, True, False], [1.0, advantage], [filler, -1.5, -2.0, filler],
                         reference_log_probs=torch.tensor([filler, -1.2, -2.2, filler]),
                         importance_weights=torch.tensor([filler, 1.0, 2.0, filler]))
        total, count, totals = policy_loss(flags, batch, leaf, torch.tensor([filler, 1.0, 0.5, filler]))
        return total, count, torch.autograd.grad(total, leaf)[0], totals

    clean, dirty = run(0.0, 0.0), run(nan, nan)
    for expected, found in zip(clean[:3], dirty[:3], strict=True):
        assert torch.equal(expected, found)
    assert clean[3].sums == dirty[3].sums and clean[0] != 0
    assert clean[2][0] == 0 and clean[2][3] == 0
    assert run(math.inf, 0.0)[0] == clean[0]


def test_weights_kl_and_entropy_by_hand():
    log_probs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    batch = batch_of([2], [True, True], [2.0], [-1.0, -2.0], reference_log_probs=torch.tensor([-1.5, -2.0]),
                     importance_weights=torch.tensor([0.5, 0.0]))
    entropies = torch.tensor([1.0, 3.0], dtype=torch.float64)
    total, count, totals = policy_loss(config(kl_coeff=0.1, kl_type="k2", entropy_coeff=0.01), batch, log_probs,
                                       entropies)
    # Policy -0.5 * 2 and 0; KL 0.5^2 / 2; entropy 4.
    assert total.item() == pytest.approx(-1.0 + 0.1 * 0.125 - 0.01 * 4) and count.item() == 2
    torch.testing.assert_close(torch.autograd.grad(total, log_probs)[0], torch.tensor([-1 + 0.1 * 0.5, 0.0]).double())
    assert totals.mean("entropy") == 2 and totals.mean("reference_kl") == 0.0625
    assert totals.sums.keys() == set(LOSS_SUMS)
    metrics = loss_metrics(totals)
    assert metrics["loss"] == pytest.approx(total.item() / 2) and metrics["entropy"] == 2 and metrics["ratio"] == 1


@pytest.mark.parametrize(("kind", "naive"), [
    ("k1", lambda policy, reference: policy - reference),
    ("k2", lambda policy, reference: (policy - reference) ** 2 / 2),
    ("k3", lambda policy, reference: (reference - policy).exp() - (reference - policy) - 1),
])
def test_the_gradient_of_the_kl_term_is_that_of_its_formula(kind, naive):
    generator = torch.Generator().manual_seed(3)
    log_probs, reference = (-3 * torch.rand(6, generator=generator, dtype=torch.float64) for _ in range(2))
    log_probs.requires_grad_()
    masks = [True, True, False, True, True, True]
    batch = batch_of([4, 2], masks, [0.0, 0.0], [0.0] * 6, reference_log_probs=reference)
    total, count, totals = policy_loss(config(kl_coeff=0.7, kl_type=kind), batch, log_probs)
    terms = naive(log_probs, reference)[torch.tensor(masks)]
    assert count.item() == 5 and totals.mean("reference_kl") == pytest.approx(terms.mean().item())
    gradient, expected = (torch.autograd.grad(each, log_probs)[0] for each in (total, 0.7 * terms.sum()))
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
    assert gradient[2] == 0 and gradient.count_nonzero() == 5


def test_kl_in_the_reward_is_reported_and_leaves_the_loss_alone():
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    batch = batch_of([2], [True, True], [2.0], [-1.0, -2.0], reference_log_probs=torch.tensor([-1.5, -2.0]))
    total, _, totals = policy_loss(config(kl_coeff=0.1, kl_in="reward"), batch, log_probs)
    assert total.item() == pytest.approx(-4.0) and totals.sums["reference_kl"] > 0


@pytest.mark.parametrize(("kind", "expected", "expected_count"), [
    # Two sequences with 2 and 1 sampled tokens, and one without any.
    ("token-mean", [1, 1, 0, 1, 0], 3), ("seq-mean-token-mean", [0.5, 0.5, 0, 1, 0], 2),
    ("seq-mean-token-sum-norm", [0.1, 0.1, 0, 0.1, 0], 2)])
def test_aggregation_by_hand(kind, expected, expected_count):
    length = 10 if kind == "seq-mean-token-sum-norm" else None
    sampled = SampledTokens(torch.tensor([True, True, False, True, False]), torch.tensor([0, 0, 0, 1, 2]), 3)
    weights, count = token_weights(config(loss_aggregation=kind, loss_norm_length=length), sampled)
    assert weights.tolist() == pytest.approx(expected) and count.item() == expected_count


LENGTHS = [5, 1, 3, 4, 2, 7]
SPLITS = [[range(6)], [[0], [1], [2], [3], [4], [5]], [[0, 1, 2], [3, 4, 5]], [[5, 0], [4, 1, 3, 2]],
          [[3], [0, 1, 2, 4, 5]]]


def policy_of_linear_model(flags, split):
    """Loss and gradient of a small model, over microbatches of these sequences."""
    generator = torch.Generator().manual_seed(3)
    sequences = []
    for length in LENGTHS:
        hidden = torch.randn(length, 4, generator=generator, dtype=torch.float64)
        old, reference, weights = (torch.randn(length, generator=generator, dtype=torch.float64) / 2 for _ in range(3))
        mask = torch.arange(length) >= length // 3
        advantage = torch.randn((), generator=generator, dtype=torch.float64).expand(length)
        sequences.append((hidden, old, reference, weights.exp(), mask, advantage))
    weight = torch.linspace(-0.5, 0.5, 4, dtype=torch.float64).requires_grad_()
    sums, counts, totals = [], 0, []
    for members in split:
        parts = [sequences[index] for index in members]
        hidden, old, reference, weights, mask, advantage = (torch.cat(column) for column in zip(*parts, strict=True))
        ids = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor([len(part[0]) for part in parts]))
        batch = PolicyBatch(SampledTokens(mask, ids, len(parts)), advantage, old, reference, weights)
        log_probs = hidden @ weight
        total, count, figures = policy_loss(flags, batch, log_probs, log_probs.square())
        total.backward()
        sums.append(total.item())
        counts += count.item()
        totals.append(figures)
    return sum(sums) / counts, weight.grad / counts, add_totals(totals)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
def test_every_split_into_microbatches_gives_the_same(kind, aggregation):
    flags = config(policy_loss=kind, loss_aggregation=aggregation, entropy_coeff=0.01, kl_coeff=0.1, dual_clip_ratio=(
        None if kind == "cispo" else 2.0), loss_norm_length=9 if aggregation == "seq-mean-token-sum-norm" else None)
    loss, gradient, totals = policy_of_linear_model(flags, SPLITS[0])
    assert gradient.abs().max() > 0.01
    for split in SPLITS[1:]:
        other_loss, other_gradient, other_totals = policy_of_linear_model(flags, split)
        assert other_loss == pytest.approx(loss, rel=1e-6)  # weights of tokens are float32
        torch.testing.assert_close(other_gradient, gradient, atol=1e-6, rtol=1e-6)
        for name, value in totals.sums.items():
            torch.testing.assert_close(other_totals.sums[name], value, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("kind", "expected"), [("k1", [0.0, 0.5, -0.5, 10.0, -10.0]),
                                                ("k2", [0.0, 0.125, 0.125, 10.0, 10.0]),
                                                ("k3", [0.0, math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5, 10.0, 10.0])])
def test_kl_by_hand(kind, expected):
    difference = torch.tensor([0.0, 0.5, -0.5, 30.0, -30.0])
    estimates = kl_estimates(difference - 1, torch.tensor(-1.0), kind)
    assert estimates.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_k3_of_small_differences_keeps_its_digits():
    estimate = kl_estimates(torch.tensor(1e-4), torch.tensor(0.0), "k3")
    assert estimate.item() == pytest.approx(5e-9, rel=1e-2)


def test_kl_of_sequences():
    sampled = SampledTokens(torch.tensor([False, True, True, True]), torch.tensor([0, 0, 0, 1]), 3)
    log_probs = torch.tensor([math.nan, -1.0, -1.0, -2.0], requires_grad=True)
    sums = kl_of_sequences(sampled, log_probs, torch.tensor([math.nan, -2.0, -1.5, -2.5]), "k1")
    assert sums.tolist() == pytest.approx([1.5, 0.5, 0.0]) and not sums.requires_grad


# Two sequences, the first with a prompt token whose log-probs mean nothing.
SAMPLED = SampledTokens(torch.tensor([False, True, True, True, True]), torch.tensor([0, 0, 0, 1, 1]), 2)
RATIOS = [math.nan, 4.0, 0.25, 1.5, 0.9]
ROLLOUT = torch.tensor([math.nan, -1.0, -2.0, -3.0, -4.0])


def weights_of(ratios=RATIOS, **fields):
    old = (ROLLOUT + torch.tensor(ratios).log()).requires_grad_()
    weights, totals = importance_weights(dataclasses.replace(RlConfig(), **fields), SAMPLED, old, ROLLOUT)
    assert not weights.requires_grad
    return weights.tolist(), {name: value.item() for name, value in totals.sums.items()}


@pytest.mark.parametrize(("fields", "expected", "clipped"), [
    ({"importance_correction": "none"}, [0, 1, 1, 1, 1], 0),
    ({"importance_correction": "token"}, [0, 2, 0.25, 1.5, 0.9], 1),
    ({"importance_correction": "token", "importance_cap": 1.2}, [0, 1.2, 0.25, 1.2, 0.9], 2),
    ({"importance_correction": "icepop"}, [0, 4, 0, 1.5, 0.9], 1),
    ({"importance_correction": "icepop", "importance_high": 2.0}, [0, 0, 0, 1.5, 0.9], 2),
    ({"importance_correction": "icepop", "importance_low": 0.0}, [0, 4, 0.25, 1.5, 0.9], 0),
    # Geometric means: 1 and sqrt(1.35).
    ({"importance_correction": "sequence"}, [0, 4, 0.25, 0, 0], 2),
    ({"importance_correction": "sequence", "importance_high": 1.2}, [0, 4, 0.25, 1.5, 0.9], 0),
])
def test_weights_by_hand(fields, expected, clipped):
    weights, sums = weights_of(**fields)
    assert weights == pytest.approx(expected, rel=1e-5) and sums["importance_clipped"] == clipped
    assert sums["importance_weight"] == pytest.approx(sum(expected), rel=1e-5)


@pytest.mark.parametrize("kind", ["token", "icepop", "sequence"])
def test_impossible_tokens_give_finite_weights(kind):
    rollout = ROLLOUT.clone()
    rollout[1], rollout[3] = -math.inf, -200.0
    config = dataclasses.replace(RlConfig(), importance_correction=kind)
    weights, _ = importance_weights(config, SAMPLED, torch.full((5,), -1.0), rollout)
    assert weights.isfinite().all()


def test_mismatch_by_hand():
    # Their mean over completions of the engine is the divergence of its distribution from the trainer's.
    differences = [math.nan, 0.1, -0.2, 0.0, 0.3]
    totals = mismatch_totals(SAMPLED, ROLLOUT.double() + torch.tensor(differences).double(), ROLLOUT)
    kept = differences[1:]
    expected = {
        "gen_kl": sum(math.exp(d) - 1 - d for d in kept), "abs_dlogp": 0.6, "rollout_tokens": 4,
        "exp_abs_dlogp": sum(math.exp(abs(d)) for d in kept), "importance_ratio": sum(math.exp(d) for d in kept)}
    assert {name: value.item() for name, value in totals.sums.items()} == pytest.approx(expected, rel=1e-6)
    assert totals.maxima["max_abs_dlogp"].item() == pytest.approx(0.3)
    assert totals.mean("abs_dlogp", "rollout_tokens") == pytest.approx(0.15)


def test_small_differences_are_not_lost_in_rounding():
    one = SampledTokens(torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64), 1)
    totals = mismatch_totals(one, torch.tensor([-1.0]), torch.tensor([-1.0 - 2**-20]))
    assert totals.sums["gen_kl"].item() == pytest.approx(2.0**-41, rel=1e-4)


def test_totals_of_parts_are_those_of_the_whole():
    generator = torch.Generator().manual_seed(5)
    old, rollout = torch.randn(2, 9, generator=generator)
    ids = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2])
    mask = torch.rand(9, generator=generator) < 0.7
    whole = mismatch_totals(SampledTokens(mask, ids, 3), old, rollout)
    parts = [mismatch_totals(SampledTokens(mask[rows], ids[rows], 3), old[rows], rollout[rows])
             for rows in (ids == 2, ids != 2, ids > 7)]
    together = add_totals(parts)
    for name, value in whole.sums.items():
        torch.testing.assert_close(together.sums[name], value)
    assert together.maxima == whole.maxima


def test_no_tokens():
    none = SampledTokens(torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.int64), 0)
    totals = mismatch_totals(none, torch.zeros(0), torch.zeros(0))
    zeros = Totals.zeros(MISMATCH_SUMS, MISMATCH_MAXIMA, torch.device("cpu"))
    assert totals == zeros and totals.mean("gen_kl", "rollout_tokens") == 0


def test_figures_of_the_report():
    old = ROLLOUT + torch.tensor(RATIOS).log()
    _, clipped = importance_weights(RlConfig(), SAMPLED, old, ROLLOUT)
    assert clipped.sums.keys() == set(IMPORTANCE_SUMS)
    metrics = mismatch_metrics(mismatch_totals(SAMPLED, old, ROLLOUT) | clipped)
    assert metrics["importance_clipped_fraction"] == 0.25
    assert metrics["importance_weight"] == pytest.approx((2 + 0.25 + 1.5 + 0.9) / 4)
    assert metrics["importance_ratio"] == pytest.approx((4 + 0.25 + 1.5 + 0.9) / 4)
    assert metrics["max_abs_dlogp"] == pytest.approx(math.log(4))
    assert metrics.keys() == {"gen_kl", "abs_dlogp", "exp_abs_dlogp", "importance_ratio", "importance_weight",
                              "importance_clipped_fraction", "max_abs_dlogp"}


# Rewards 1, 0, 0, 1, 1: mean 0.6, squares 1.2, unbiased std sqrt(0.3); 2, 4: mean 3, std sqrt(2); 7 is alone.
REWARDS = [1, 0, 2, 0, 1, 1, 4, 7]
PROMPTS = [0, 0, 1, 0, 0, 0, 1, 2]
SQRT_03, SQRT_2 = 0.5477225575, 1.4142135624
EXPECTED = {
    "grpo": [0.4 / SQRT_03, -0.6 / SQRT_03, -1 / SQRT_2, -0.6 / SQRT_03, 0.4 / SQRT_03, 0.4 / SQRT_03, 1 / SQRT_2, 7],
    "dr-grpo": [0.4, -0.6, -1, -0.6, 0.4, 0.4, 1, 7],
    # Against the mean of the others: 1 - 2/4, 0 - 3/4, 2 - 4.
    "rloo": [0.5, -0.75, -2, -0.75, 0.5, 0.5, 2, 7],
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_advantages_by_hand(kind):
    got = advantages(REWARDS, PROMPTS, kind)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.tensor(EXPECTED[kind]), atol=1e-5, rtol=1e-5)
    assert advantages([], [], kind).tolist() == []


def test_the_epsilon_is_added_to_the_standard_deviation():
    # Unbiased std of 0 and 2e-6 is 1.414e-6; with 1e-6 added.
    expected = 1e-6 / (2e-6 / SQRT_2 + 1e-6)
    assert advantages([0.0, 2e-6], [0, 0], "grpo").tolist() == pytest.approx([-expected, expected], rel=1e-5)


@pytest.mark.parametrize("kind", EXPECTED)
@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -7.7, 1e6 + 0.1, 123456789.123])
def test_equal_rewards_teach_nothing(kind, value):
    assert advantages([value] * 7, [0] * 7, kind).tolist() == [0.0] * 7


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number(bad):
    with pytest.raises(ValueError, match=f"completion 1 of prompt 4: reward {bad} is not finite"):
        advantages([0.0, bad], [4, 4], "grpo")
