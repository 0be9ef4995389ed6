"""`train_rl.py` with an FP8 cache whose scales follow the policy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_train_rl import FLAGS
from tests.e2e.test_train_rl_images import MODELS, PROMPTS
from tests.support.launch import broken_off_and_whole, records, torchrun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CALIBRATED = ["--engine-kv-cache-dtype", "fp8", "--engine-kv-scales", "calibrated"]
KV_FLAGS = [*FLAGS, *CALIBRATED, "--reward", "tests.support.rl_rewards:digits"]


# Completions of --rollout-mode one-step-off come from the policy before, whatever the cache is.
@pytest.mark.parametrize(("flags", "most"), [
    ("--llm-dp 1 --llm-ep 1 --llm-pp 2 --engine-pp 2", 1e-2), ("--engine-dp 2 --engine-placement ray", 1e-2),
    ("--refit-delta --refit-verify-interval 2", 1e-2), ("--rollout-mode one-step-off", 1.0)],
    ids=["stages", "ray-replicas", "delta", "one-step-off"])
def test_every_refit_of_a_run_brings_scales_and_is_verified(tmp_path: Path, flags: str, most: float) -> None:
    done = torchrun(2, *KV_FLAGS, "--refit-verify-interval", "1", *flags.split(), "--run-dir", str(tmp_path),
                    script="train_rl.py", timeout_s=800)
    assert done.returncode == 0, done.stdout[-3000:]
    steps = records(tmp_path)
    assert len(steps) == 3
    for step in steps:
        # The engine rounds keys and values. What is left is this rounding, not another policy.
        assert step["success"] and 1e-7 < step["gen-kl"] < most and 1e-4 < step["largest-kv-scale"] < 1


@pytest.mark.parametrize("model", ["qwen3-vl", "nemotron"])
def test_layers_of_a_model_with_images_get_scales(tmp_path: Path, model: str) -> None:
    """The first rank, which sends the scales, has the encoder alone."""
    done = torchrun(3, *MODELS[model], *PROMPTS["digits"].split(), "--llm-dp", "2", *CALIBRATED,
                    "--refit-verify-interval", "1", "--eval-prompts", "0", "--run-dir", str(tmp_path),
                    script="train_rl.py", timeout_s=800)
    assert done.returncode == 0, done.stdout[-3000:]
    for step in records(tmp_path):
        assert step["success"] and 0 < step["gen-kl"] < 1e-2 and 1e-4 < step["largest-kv-scale"] < 1


def test_a_resumed_run_sends_the_scales_of_the_run_before(tmp_path: Path) -> None:
    """Scales that were measured anew would be others, and change the engine's log-probs."""
    found, expected = broken_off_and_whole(tmp_path, *KV_FLAGS, "--train-iters", "4")
    for mine, other in zip(found, expected, strict=True):
        assert mine["reward"] == other["reward"] and mine["completion-length"] == other["completion-length"]
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert mine["gen-kl"] == pytest.approx(other["gen-kl"], rel=1e-2)


def test_a_lost_engine_is_replaced_by_one_with_the_same_scales(tmp_path: Path) -> None:
    flags = [*KV_FLAGS, "--train-iters", "2", "--engine-restarts", "1"]
    runs = []
    for reward in ("digits", "killing_once"):
        folder = tmp_path / reward
        folder.mkdir()
        done = torchrun(2, *flags, "--reward", f"tests.support.rl_rewards:{reward}", "--run-dir", str(folder),
                        script="train_rl.py", timeout_s=800, MARK=str(folder))
        assert done.returncode == 0, done.stdout[-3000:]
        assert ("a new one takes its place" in done.stdout) == (reward == "killing_once")
        runs.append(records(folder))
    for mine, other in zip(*runs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert mine["gen-kl"] == pytest.approx(other["gen-kl"], rel=1e-2)


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_faults_of_a_refit_are_caught_beside_an_fp8_cache(model: str) -> None:
    done = subprocess.run([sys.executable, "scripts/bench/refit_verify.py", "--device", "cpu", "--model", model,
                           f"--flags={' '.join(CALIBRATED)}"], capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["good"]["refits"] == 20 and result["good"]["false_alarms"] == [] and result["missed"] == []
