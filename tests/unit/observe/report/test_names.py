"""The page reads figures under the names that runs write them under."""

from __future__ import annotations

from mimo.observability.metrics import StepRecord
from mimo.observability.timeline import OTHER_MODULES, PARTS, STEP
from mimo.report.summary import ENGINE_PARTS, OWN_PARTS
from mimo.rl.records import PolicyRecord
from mimo.rl.rollouts import Completion, Rollouts, rollout_metrics
from tests.support.report_runs import policy_record, step_record

# What the tracker adds.
TRACKED = {"wall_time"}


def test_iterations_of_training() -> None:
    parts = [f"{module}/{part}{end}" for module in ("vision", "language") for part in (*PARTS, STEP)
             if part != OTHER_MODULES for end in ("-s", "-max-s")]
    record = StepRecord(
        iteration=1, consumed_samples=8, lm_loss=1.0, grad_norm=1.0, learning_rate=1e-3, batch_size=8,
        iteration_time_s=1.0, module_learning_rates={"language": 1e-3, "vision": 1e-3}, tflops=1.0, mfu=0.1,
        timeline=dict.fromkeys(parts, 0.1), peak_memory_bytes={"vision": 1, "language": 1}, checkpoint_s=0.5,
        encoder_imbalance=1.0, encoder_prefetch_s=0.1).to_dict()
    assert step_record(1, 1.0).keys() - TRACKED <= record.keys()
    assert {"checkpoint-s", "encoder-imbalance", "encoder-prefetch-s", "packing-utilisation"} <= record.keys()


def test_iterations_of_reinforcement_learning() -> None:
    parts = [key.removesuffix("-s") for key in (*ENGINE_PARTS, *OWN_PARTS, "rollout-wait-s")]
    completion = Completion("a", 0, (1,), (2,), (-0.5,), "stop", 1.0)
    figures = rollout_metrics(Rollouts((completion,), "0")) | {"loss": 0.0, "gen_kl": 0.0, "entropy": 0.0}
    record = PolicyRecord(
        iteration=1, consumed_samples=8, skipped_iterations=0, policy_version=0, success=True, grad_norm=1.0,
        num_zeros=None, learning_rate=1e-4, batch_size=8, num_tokens=80, num_microbatches=1, world_size=1,
        figures=figures, refit_bytes=1, seconds=dict.fromkeys([*parts, "iteration"], 0.1)).to_dict()
    assert policy_record(1, 0.5).keys() - TRACKED <= record.keys()
