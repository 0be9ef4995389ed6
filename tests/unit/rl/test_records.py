"""The line of an iteration and its figures."""

from __future__ import annotations

import dataclasses

from mimo.rl.records import PolicyRecord, format_policy_steps

FIGURES = {"reward": 0.5, "completion-length": 7.25, "entropy": 1.5, "loss": -0.25, "gen_kl": 2e-9,
           "reference_kl": 0.25}
RECORD = PolicyRecord(
    iteration=3, consumed_samples=48, skipped_iterations=0, policy_version=2, success=True, grad_norm=0.75,
    num_zeros=None, learning_rate=1e-3, batch_size=16, num_tokens=400, num_microbatches=2, world_size=4,
    figures=FIGURES, refit_bytes=1000,
    seconds={"refit": 0.1, "rollout": 0.2, "reward": 0.0, "update": 0.3, "iteration": 1.0},
    moe_losses={"seq_load_balancing_loss": 1.25}, peak_memory_bytes={"language": 3000})


def test_figures_have_the_names_of_a_training_run():
    record = RECORD.to_dict()
    assert record["gen-kl"] == 2e-9 and record["reference-kl"] == 0.25 and "gen_kl" not in record
    assert record["tokens-per-s-per-gpu"] == 100 and record["iteration-time"] == 1.0 and record["update-s"] == 0.3
    assert record["policy-version"] == 2 and record["refit-bytes"] == 1000 and record["grad-norm"] == 0.75
    assert record["seq_load_balancing_loss"] == 1.25 and record["peak-memory-bytes/language"] == 3000
    assert RECORD.headline == "reward 0.500"


def test_a_line_of_several_iterations_has_means_of_rewards_and_times():
    better = dataclasses.replace(RECORD, iteration=4, figures=FIGURES | {"reward": 1.0}, skipped_iterations=1,
                                 grad_norm=None, success=False, seconds=dict(RECORD.seconds, update=0.5))
    assert format_policy_steps([RECORD, better], 10) == (
        "iteration     4/  10 | samples 48 | reward 0.7500 | length 7.2 | entropy 1.500 | loss -2.500E-01 | "
        "gen-kl 2.0E-09 | lr 1.0E-03 | step skipped | refit 0.10 s | rollout 0.20 s | update 0.40 s | skipped 1")
