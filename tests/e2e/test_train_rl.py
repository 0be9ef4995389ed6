"""`train_rl.py` from flags to exit code: a small mixture of experts on two processes, with a live engine."""

from __future__ import annotations

import math
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from mimo.observability.spans import Kind
from tests.support.launch import (
    broken_off_and_whole,
    finish,
    generations,
    records,
    start_torchrun,
    torchrun,
    wait_for_steps,
    wait_for_the_end,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FLAGS = """--device cpu --no-bf16 --transformer-impl local --model-provider causal_lm --num-layers 2 --hidden-size 64
--num-attention-heads 2 --num-query-groups 1 --kv-channels 32 --ffn-hidden-size 64 --vocab-size 100 --num-experts 4
--moe-router-topk 2 --moe-ffn-hidden-size 32 --qk-layernorm --llm-dp 2 --llm-ep 2 --seq-length 32
--max-completion-tokens 12 --max-tokens-per-microbatch 96 --global-batch-size 32 --completions-per-prompt 8
--train-iters 3 --lr 1e-2 --lr-decay-style constant --watchdog-timeout-s 60""".split()


def test_three_steps_train_on_completions_of_the_weights_as_they_are(tmp_path: Path) -> None:
    done = torchrun(2, *FLAGS, "--reward", "tests.support.rl_rewards:digits", "--refit-verify-interval", "1",
                    "--run-dir", str(tmp_path), script="train_rl.py")
    assert done.returncode == 0, done.stdout[-3000:]
    (note,) = [line for line in done.stdout.splitlines() if "balances the load of the tokens of each microb" in line]
    assert "router gradients depend on --max-tokens-per-microbatch and --llm-dp" in note
    steps = records(tmp_path)
    assert [step["iteration"] for step in steps] == [1, 2, 3]
    assert [step["policy-version"] for step in steps] == [0, 1, 2]
    assert [step["consumed_samples"] for step in steps] == [32, 64, 96]
    for step in steps:
        assert step["success"] and math.isfinite(step["loss"]) and step["grad-norm"] > 0
        # Engine and trainer have the same weights: after two updates that they see, stale ones would be far off.
        assert 0 <= step["gen-kl"] < 1e-5 and step["max-abs-dlogp"] < 1e-3
        assert step["importance-ratio"] == pytest.approx(1, abs=1e-4) and step["importance-clipped-fraction"] == 0
        assert 0 < step["completion-length"] <= 12 and step["refit-bytes"] > 100_000
        assert 0.9 < step["seq_load_balancing_loss"] < 4 and step["peak-memory-bytes/language"] > 1e8
    assert steps[2]["entropy"] < steps[0]["entropy"] - 0.02, "the weights have changed"
    assert done.stdout.strip().splitlines()[-1] == f"reward: {steps[2]['reward']:.4f}"


@pytest.mark.parametrize("flags", [
    "--fp8-format hybrid --llm-tp 2 --llm-dp 1 --sequence-parallel --num-query-groups 2",
    "--fp8-format e4m3 --fp8-recipe blockwise --hidden-size 128 --kv-channels 64 --num-query-groups 2 "
    "--ffn-hidden-size 128 --moe-ffn-hidden-size 128"], ids=["tensorwise-tp2", "blockwise-ep2"])
def test_a_policy_trains_in_fp8(tmp_path: Path, flags: str) -> None:
    """Rows are padded to what the products take, and the engine gets the weights before they are rounded."""
    done = torchrun(2, *FLAGS, *flags.split(), "--reward", "tests.support.rl_rewards:digits", "--importance-correction",
                    "token", "--refit-verify-interval", "1", "--run-dir", str(tmp_path), script="train_rl.py")
    assert done.returncode == 0, done.stdout[-3000:]
    assert "multiply in FP8, emulated" in done.stdout
    steps = records(tmp_path)
    assert [step["policy-version"] for step in steps] == [0, 1, 2]
    for step in steps:
        assert step["success"] and math.isfinite(step["loss"]) and step["grad-norm"] > 0
        # The engine multiplies in float32. What is left is the trainer's rounding, not another policy.
        assert 1e-7 < step["gen-kl"] < 1e-2 and 1e-4 < step["max-abs-dlogp"] < 1
    assert steps[2]["entropy"] != steps[0]["entropy"], "the weights have changed"


def test_a_reward_that_raises_ends_the_run_and_its_engine(tmp_path: Path) -> None:
    done = torchrun(2, *FLAGS, "--reward", "tests.support.rl_rewards:failing", "--run-dir", str(tmp_path),
                    script="train_rl.py", PID_FILE=str(tmp_path / "pid"))
    assert done.returncode != 0
    assert "--reward tests.support.rl_rewards:failing failed on prompt arithmetic/train/000000" in done.stdout
    assert "KeyError: 'no such answer'" in done.stdout
    engine = Path("/proc") / (tmp_path / "pid").read_text()
    deadline = time.monotonic() + 20
    while engine.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not engine.exists()


def test_a_reward_that_hangs_ends_the_run_by_name(tmp_path: Path) -> None:
    done = torchrun(2, *FLAGS, "--reward", "tests.support.rl_rewards:hanging", "--run-dir", str(tmp_path),
                    "--watchdog-timeout-s", "20", script="train_rl.py")
    assert done.returncode != 0
    assert "stall on rank 0" in done.stdout and "waiting for rewards" in done.stdout, done.stdout[-3000:]
    first, reason, *_ = (tmp_path / "stall-summary.txt").read_text().splitlines()
    assert "everybody waits for rank 0 (language grid, tp 0 cp 0 dp 0 pp 0, lane 0) on host " in first
    assert "it waits for rewards" in reason
    assert "in hanging" in (tmp_path / "stall-rank0.txt").read_text(), "where it was, as a Python stack"


def test_an_engine_that_dies_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    done = torchrun(2, *FLAGS, "--reward", "tests.support.rl_rewards:killing", "--run-dir", str(tmp_path),
                    script="train_rl.py")
    assert done.returncode != 0
    assert [step["iteration"] for step in records(tmp_path)] == [1], "what was drawn before was trained on"
    assert "RefitError: " in done.stdout, done.stdout[-3000:]
    assert re.search(r"the engine at 127\.0\.0\.1:\d+ has ended", done.stdout), done.stdout[-3000:]


LOST_FLAGS = [*FLAGS, "--train-iters", "2", "--eval-prompts", "4"]
HAS_ENDED = r"the engine (at 127\.0\.0\.1:\d+|in process \d+ on .*) has ended.*"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Records of a run whose engine is never lost."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = torchrun(2, *LOST_FLAGS, "--reward", "tests.support.rl_rewards:digits", "--run-dir", str(folder),
                    script="train_rl.py")
    assert done.returncode == 0, done.stdout[-3000:]
    return records(folder)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("reward", "flags", "reasons"), [
    ("killing_once", "--engine-restarts 1", [f"is lost: {HAS_ENDED}"]),
    ("killing_once", "--engine-restarts 1 --engine-placement ray", [f"is lost: {HAS_ENDED}"]),
    ("stopping_once", "--engine-restarts 1 --refit-timeout-s 30",
     [r"is lost: replica 0: process \d+ hangs and does not answer; sync \d+.*: trainer rank \d waits for .*worker 0; "
      "nothing came within 30 s"]),
    ("stopping_once", "--engine-restarts 1 --engine-placement ray --refit-timeout-s 30",
     [r"is lost: replica 0: process \d+ on .* hangs and does not answer; sync \d+.*: trainer rank \d waits for "
      ".*worker 0; nothing came within 30 s"]),
    ("killing_starts", "--engine-restarts 3",
     [f"is lost: {HAS_ENDED}", *2 * ["the new engine is lost, too: .*its process ended with code -9"]])],
    ids=["killed", "killed-actor", "hangs-in-a-refit", "actor-hangs-in-a-refit", "killed-in-two-starts"])
def test_an_engine_that_is_lost_is_replaced_and_the_run_goes_on_to_the_same_figures(
        tmp_path: Path, undisturbed: list[dict[str, Any]], reward: str, flags: str, reasons: list[str]) -> None:
    done = torchrun(2, *LOST_FLAGS, *flags.split(), "--reward", f"tests.support.rl_rewards:{reward}", "--run-dir",
                    str(tmp_path), script="train_rl.py", timeout_s=800, MARK=str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:]
    assert wait_for_the_end(str(tmp_path)) == []
    lines = [line for line in done.stdout.splitlines() if "a new one takes its place" in line]
    assert len(lines) == len(reasons), lines
    for number, (line, reason) in enumerate(zip(lines, reasons, strict=True), 1):
        assert re.search(rf"{reason}.*; a new one takes its place \({number} of ", line), line
    found = records(tmp_path)
    assert len(found) == len(undisturbed)
    for mine, other in zip(found, undisturbed, strict=True):
        assert mine.keys() >= {"reward validation"} or mine["gen-kl"] < 1e-5
        for key in ("reward", "reward validation", "completion-length", "loss"):
            assert mine.get(key) == pytest.approx(other.get(key), abs=1e-6)


@pytest.mark.timeout(600)
def test_a_run_without_a_new_engine_ends_with_the_cause_of_the_first_loss(tmp_path: Path) -> None:
    done = torchrun(2, *LOST_FLAGS, "--engine-restarts", "2", "--reward", "tests.support.rl_rewards:killing_starts",
                    "--run-dir", str(tmp_path), script="train_rl.py", timeout_s=500, MARK=str(tmp_path))
    assert done.returncode != 0
    assert re.search(rf"RefitError: the rollout engine is lost: {HAS_ENDED}; no new one has come up, and "
                     "--engine-restarts 2 are used up. The last one: .* ended with code -9", done.stdout), \
        done.stdout[-3000:]
    assert wait_for_the_end(str(tmp_path)) == []


@pytest.mark.timeout(900)
@pytest.mark.parametrize("placement", ["separate", "ray"])
def test_replicas_that_share_experts_draw_what_the_trainer_trains_on(tmp_path: Path, placement: str) -> None:
    """A step has four prompts, the evaluation one, so that a replica takes part without prompts of its own, too."""
    done = torchrun(2, *FLAGS, "--engine-dp", "2", "--engine-share-experts", "--engine-placement", placement,
                    "--eval-prompts", "1", "--eval-interval", "1", "--reward", "tests.support.rl_rewards:digits",
                    "--refit-verify-interval", "1", "--run-dir", str(tmp_path), script="train_rl.py", timeout_s=800,
                    MARK=str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:]
    steps = [step for step in records(tmp_path) if "loss" in step]
    assert [step["policy-version"] for step in steps] == [0, 1, 2]
    for step in steps:
        assert step["success"] and 0 <= step["gen-kl"] < 1e-5 and step["max-abs-dlogp"] < 1e-3
    assert wait_for_the_end(str(tmp_path)) == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["--engine-tp 2", "--engine-pp 2"])
def test_a_pipeline_trains_with_an_engine_of_two_workers(tmp_path: Path, engine: str) -> None:
    done = torchrun(2, *FLAGS, "--llm-dp", "1", "--llm-ep", "1", "--llm-pp", "2", *engine.split(), "--reward",
                    "tests.support.rl_rewards:digits", "--refit-verify-interval", "1", "--run-dir", str(tmp_path),
                    "--profile-steps", "2:2", "--profile-ranks", "0,1", "--timeline-interval", "2", "--peak-tflops",
                    "0.5", script="train_rl.py", MARK=str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:]
    steps = records(tmp_path)
    assert [step["policy-version"] for step in steps] == [0, 1, 2]
    for step in steps:
        assert step["success"] and 0 <= step["gen-kl"] < 1e-5 and step["max-abs-dlogp"] < 1e-3
        assert step["mfu"] == pytest.approx(step["tflops"] / 0.5) and 0 < step["tflops"] < 0.5
        parts = [step[f"timeline/language/{part}-s"] for part in Kind]
        assert sum(parts) == pytest.approx(step["timeline/language/step-s"], rel=1e-3)
        assert step["timeline/language/data-wait-s"] > 0 < step["timeline/language/backward-s"]
        assert step["timeline/text-tokens-per-lane/max"] == step["tokens"]
    assert sorted(path.name for path in (tmp_path / "timeline").glob("step-?.json")) == ["step-2.json", "step-3.json"]
    assert len(list((tmp_path / "profile").iterdir())) == 2
    assert wait_for_the_end(str(tmp_path)) == []


def test_an_engine_that_does_not_come_up_in_time_ends_the_run(tmp_path: Path) -> None:
    done = torchrun(2, *FLAGS, "--engine-start-timeout-s", "0.5", "--run-dir", str(tmp_path), script="train_rl.py")
    assert done.returncode != 0
    assert "did not start within 0.5 s" in done.stdout, done.stdout[-3000:]


def test_held_out_prompts_are_scored_before_during_and_after(tmp_path: Path) -> None:
    done = torchrun(2, *FLAGS, "--reward", "tests.support.rl_rewards:digits", "--eval-prompts", "8", "--eval-interval",
                    "2", "--num-generations", "3", "--run-dir", str(tmp_path), script="train_rl.py")
    assert done.returncode == 0, done.stdout[-3000:]
    found = {each["iteration"]: each for each in records(tmp_path) if "reward validation" in each}
    assert list(found) == [0, 2, 3]
    assert all(0 <= each["reward validation"] <= 1 for each in found.values())
    shown = re.findall(r"arithmetic/valid/0000\d\d: .*, reward [01.]+", done.stdout)
    assert len(shown) == 3, done.stdout[-3000:]
    recorded = [(each["kind"], each["iteration"]) for each in generations(tmp_path)]
    assert recorded == [("held-out", 0)] * 2 + [("training", step) for step in (1, 1, 2, 2)] + (
        [("held-out", 2)] * 2 + [("training", 3)] * 2 + [("held-out", 3)] * 3)
    for each in generations(tmp_path):
        if each["kind"] == "training":
            assert len(each["answers"]) == 8 and each["prompt"] and each["expected"].startswith("####")
            assert sum(answer["advantage"] for answer in each["answers"]) == pytest.approx(0, abs=1e-5)
    assert done.stdout.strip().splitlines()[-1] == f"reward: {found[3]['reward validation']:.4f}"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("mode", "updates", "refills"), [("sync", 2, 0), ("sync", 2, 2), ("one-step-off", 1, 0)])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path, mode: str, updates: int, refills: int) -> None:
    reward = "digits_of_odd_answers" if refills else "digits"
    flags = [*FLAGS, "--reward", f"tests.support.rl_rewards:{reward}", "--rollout-mode", mode, "--train-iters", "4",
             "--updates-per-rollout", str(updates), "--max-refills", str(refills), "--reward-threads", str(1 + refills)]
    # An engine that works ahead has the answers of the third iteration already when the run is broken off.
    found, expected = broken_off_and_whole(tmp_path, *flags)
    versions = [0, 1, 2, 3] if mode == "sync" else [0, 0, 1, 2]
    assert [step["policy-version"] for step in found] == [step["policy-version"] for step in expected] == versions
    for mine, other in zip(found, expected, strict=True):
        assert mine["reward"] == other["reward"] and mine["completion-length"] == other["completion-length"]
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert mine["grad-norm"] == pytest.approx(other["grad-norm"], rel=1e-4)
        assert mine["ratio"] == pytest.approx(other["ratio"], rel=1e-5)
    # Half of the tokens are trained on after a first update on the others.
    assert any(abs(step["ratio"] - 1) > 1e-4 for step in expected) == (updates > 1)
    assert [step["consumed_samples"] for step in expected] == [32, 64, 96, 128]
    if refills:
        # About half of the prompts teach nothing.
        asked = [step["asked-prompts"] for step in expected]
        assert min(asked) >= 4 < max(asked) and asked == [step["asked-prompts"] for step in found]
        assert all(step["equal-reward-prompts"] > 0 for step in expected if step["asked-prompts"] > 4)
    if mode == "one-step-off":
        # Completions of the policy before differ from what the present one would have said; the weights make up for it.
        assert all(step["gen-kl"] > 1e-7 for step in expected[1:]) and expected[0]["gen-kl"] < 1e-9


@pytest.mark.timeout(900)
@pytest.mark.parametrize("placement", ["separate", "ray"])
def test_a_launcher_that_is_told_to_stop_lets_the_iteration_end(tmp_path: Path, placement: str) -> None:
    """torchrun tells its workers' process groups; the engine is of none, and the iteration needs it."""
    process = start_torchrun(2, *FLAGS, "--reward", "tests.support.rl_rewards:digits", "--train-iters", "500",
                             "--rollout-mode", "one-step-off", "--engine-placement", placement, "--save",
                             str(tmp_path / "saved"), "--run-dir", str(tmp_path), script="train_rl.py",
                             MARK=str(tmp_path))
    wait_for_steps(tmp_path, process, 600)
    process.send_signal(signal.SIGTERM)
    done = finish(process, 60)
    assert "stopped by SIGTERM after iteration" in done.stdout, done.stdout[-3000:]
    saved = int((tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text())
    assert saved == records(tmp_path)[-1]["iteration"] >= 1
    assert wait_for_the_end(str(tmp_path)) == []


def test_trainer_and_engine_take_turns(tmp_path: Path) -> None:
    """The engine of a CPU does not sleep; the trainer's memory comes and goes as on GPUs that both share."""
    flags = [*FLAGS, "--reward", "tests.support.rl_rewards:digits", "--eval-prompts", "8", "--eval-interval", "2"]
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    for folder, more in ((alone, []), (shared, ["--engine-placement", "colocated", "--refit-verify-interval", "1"])):
        done = torchrun(2, *flags, *more, "--run-dir", str(folder), script="train_rl.py")
        assert done.returncode == 0, done.stdout[-3000:]
    for mine, other in zip(records(shared), records(alone), strict=True):
        assert mine.get("loss") == other.get("loss") and mine.get("grad-norm") == other.get("grad-norm")
        assert mine.get("reward validation") == other.get("reward validation")
        assert "memory-s" not in mine or mine["memory-s"] > 0


def test_a_checkpoint_of_supervised_training_is_not_a_run_to_go_on_with(tmp_path: Path) -> None:
    model = [flag for flag in FLAGS[:FLAGS.index("--seq-length")]]
    supervised = torchrun(2, *model, "--dataset-provider", "arithmetic", "--seq-length", "32", "--train-iters", "1",
                          "--global-batch-size", "4", "--save", str(tmp_path / "saved"), "--run-dir",
                          str(tmp_path / "supervised"))
    assert supervised.returncode == 0, supervised.stdout[-3000:]
    done = torchrun(2, *FLAGS, "--load", str(tmp_path / "saved"), "--run-dir", str(tmp_path / "rl"),
                    script="train_rl.py")
    assert done.returncode != 0
    assert "this checkpoint is from train_hetero.py; --finetune starts a new run" in done.stdout, done.stdout[-3000:]
