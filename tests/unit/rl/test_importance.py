"""The correction for rollouts of another engine, and the figures of how far it is off."""

import dataclasses
import math

import pytest
import torch

from mimo.config.rl import RlConfig
from mimo.rl.losses import (
    IMPORTANCE_SUMS,
    MISMATCH_MAXIMA,
    MISMATCH_SUMS,
    SampledTokens,
    Totals,
    add_totals,
    importance_weights,
    mismatch_metrics,
    mismatch_totals,
)

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
    assert weights == pytest.approx(expected, rel=1e-5)
    assert sums["importance_clipped"] == clipped
    assert sums["importance_weight"] == pytest.approx(sum(expected), rel=1e-5)


@pytest.mark.parametrize("kind", ["none", "token", "icepop", "sequence"])
def test_engines_that_agree_change_nothing(kind):
    weights, sums = weights_of([1.0] * 5, importance_correction=kind)
    assert weights == [0, 1, 1, 1, 1] and sums["importance_clipped"] == 0


@pytest.mark.parametrize("kind", ["token", "icepop", "sequence"])
def test_impossible_tokens_give_finite_weights(kind):
    rollout = ROLLOUT.clone()
    rollout[1], rollout[3] = -math.inf, -200.0
    config = dataclasses.replace(RlConfig(), importance_correction=kind)
    weights, _ = importance_weights(config, SAMPLED, torch.full((5,), -1.0), rollout)
    assert weights.isfinite().all()


def test_mismatch_by_hand():
    differences = [math.nan, 0.1, -0.2, 0.0, 0.3]
    totals = mismatch_totals(SAMPLED, ROLLOUT.double() + torch.tensor(differences).double(), ROLLOUT)
    kept = differences[1:]
    expected = {
        "gen_kl": sum(math.exp(d) - 1 - d for d in kept), "abs_dlogp": 0.6, "rollout_tokens": 4,
        "exp_abs_dlogp": sum(math.exp(abs(d)) for d in kept), "importance_ratio": sum(math.exp(d) for d in kept)}
    assert {name: value.item() for name, value in totals.sums.items()} == pytest.approx(expected, rel=1e-6)
    assert totals.maxima["max_abs_dlogp"].item() == pytest.approx(0.3)
    assert totals.mean("abs_dlogp", "rollout_tokens") == pytest.approx(0.15)


def test_gen_kl_is_that_of_the_rollouts_distribution_from_the_trainers():
    rollout, trainer = (torch.randn(6, generator=torch.Generator().manual_seed(seed)).double().log_softmax(0)
                        for seed in (0, 1))
    all_tokens = [SampledTokens(torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64), 1)] * 6
    estimates = [mismatch_totals(one, trainer[i : i + 1], rollout[i : i + 1]).sums["gen_kl"]
                 for i, one in enumerate(all_tokens)]
    mean = (rollout.exp() * torch.stack(estimates)).sum()
    torch.testing.assert_close(mean, (rollout.exp() * (rollout - trainer)).sum())


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
