"""Advice of the report: it follows from the figures of the run, and where they are fine there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mimo.config.cli import parse, parse_as, to_toml
from mimo.config.rl_run import RlRunConfig
from mimo.report.advice import advice, advice_section
from mimo.report.run_reader import Run, read_run
from tests.support.report_runs import evaluation, policy_record, step_record, write_run


def run_with(folder: Path, records: list[dict[str, Any]], flags: str) -> Run:
    write_run(folder, records)
    with (folder / "run_config.toml").open("a") as file:
        file.write(f"\n[more]\n{flags}\n")
    return read_run(folder)


def steps(**further: Any) -> list[dict[str, Any]]:
    return [step_record(iteration, 3.0 - 0.01 * iteration, **further) for iteration in range(1, 31)]


FOUR = "encoder-dp = 2\nllm-dp = 2\nmicro-batch-size = 1\n"


def test_ranks_move_to_the_grid_that_others_wait_for(tmp_path: Path) -> None:
    # Vision: passes 0.25 s, other work 0.09 s. Language: 0.8 s and 0.09 s. Of 4 ranks vision has 2.
    balanced = {"timeline/vision/bridge-wait-s": 0.6}
    run = run_with(tmp_path, steps(**balanced), FOUR + "llm-tp = 1\n")
    (found,) = advice(run)
    # 8 samples do not go into 3 replicas, and there is no other division whose sizes divide each other.
    assert found.flags == "" and "<code>mimo plan</code> compares" in found.found
    text = (tmp_path / "run_config.toml").read_text().replace("global-batch-size = 8", "global-batch-size = 12")
    (tmp_path / "run_config.toml").write_text(text)
    (found,) = advice(read_run(tmp_path))
    assert found.flags == "--encoder-dp 1 --llm-dp 3" and (
        "The vision grid waited for the other grid for 60 % of its step." in found.found)
    # 2 / 3 of 0.8 s, and 0.13 s of other work and waits, against 1 s.
    assert f"{1 / (0.8 * 2 / 3 + 0.13):.3g} times" in found.gain
    assert "<code>--encoder-dp 1 --llm-dp 3</code>" in advice_section([read_run(tmp_path)])


def test_nothing_is_advised_where_nobody_waits(tmp_path: Path) -> None:
    run = run_with(tmp_path, steps(**{f"timeline/{name}/bridge-wait-s": 0.01 for name in ("vision", "language")}), FOUR)
    assert advice(run) == [] and advice_section([run]) == ""


@pytest.mark.parametrize(("figures", "flags", "advised"), [
    ({"timeline/language/data-wait-s": 0.4}, "num-workers = 2", "--num-workers 4"),
    ({"timeline/language/gradient-sync-s": 0.2}, "overlap-grad-reduce = false", "--overlap-grad-reduce"),
    ({"timeline/language/pipeline-wait-s": 0.3}, "", "--micro-batch-size 2"),
    ({"packing-utilisation": 0.5}, "packing-buffer-size = 0", "--packing-buffer-size 64 --micro-batch-size 1"),
    ({"allocation-retries/language": 2}, "encoder-activation-gib = 25.0", "--encoder-activation-gib 21"),
    ({"allocation-retries/language": 0}, "encoder-activation-gib = 25.0", None),
    ({"encoder-imbalance": 1.5}, "packing-buffer-size = 8\npacking-balance = false", "--packing-balance"),
])
def test_each_figure_has_its_flag(figures: dict[str, float], flags: str, advised: str | None, tmp_path: Path) -> None:
    quiet = {f"timeline/{name}/bridge-wait-s": 0.01 for name in ("vision", "language")}
    base = FOUR.replace("micro-batch-size = 1", "micro-batch-size = 4")
    found = [each.flags for each in advice(run_with(tmp_path, steps(**quiet | figures), base + flags))]
    assert found == ([] if advised is None else [advised])


@pytest.mark.parametrize(("module", "flags", "advised"), [
    ("language", "", "--cuda-graphs"), ("language", "--recompute full", "--cuda-graphs"),
    ("language", "--cuda-graphs", "--micro-batch-size 2"), ("vision", "", "--micro-batch-size 2"),
    ("language", "--attention-dropout 0.1", "--micro-batch-size 2"),
    ("language", "--transformer-impl local --global-batch-size 9", ""),
    ("language", "--num-experts 8 --no-bf16", "--micro-batch-size 2"),
    ("language", "--num-experts 8", "--cuda-graphs")])
def test_a_gpu_that_waits_for_its_host_gets_graphs_where_the_trainer_accepts_them(module, flags, advised, tmp_path):
    quiet = {f"timeline/{name}/bridge-wait-s": 0.01 for name in ("vision", "language")}
    write_run(tmp_path, steps(**quiet, **{f"timeline/{module}/host-bound-s": 0.5}))
    given = ["--model-provider", "llava", "--dataset-provider", "mock", "--train-iters", "30", "--global-batch-size",
             "8", "--micro-batch-size", "1", "--bf16", "--encoder-dp", "1", "--llm-dp", "1", *flags.split()]
    (tmp_path / "run_config.toml").write_text(to_toml(parse(given)))
    (found,) = advice(read_run(tmp_path))
    assert found.flags == advised and "50 % of a step" in found.found


def test_a_rising_held_out_loss_ends_the_run_earlier(tmp_path: Path) -> None:
    quiet = {f"timeline/{name}/bridge-wait-s": 0.01 for name in ("vision", "language")}
    records = [*steps(**quiet), evaluation(10, 2.0, 0.5), evaluation(30, 2.5, 0.5)]
    assert [each.flags for each in advice(run_with(tmp_path, records, FOUR))] == ["--train-iters 10"]


def test_rollouts_run_beside_updates_where_the_engine_has_its_own_devices(tmp_path: Path) -> None:
    records = [policy_record(iteration, 0.5, **{"equal-reward-prompts": 0.7}) for iteration in range(1, 31)]
    run = run_with(tmp_path, records,
                   'rollout-mode = "sync"\nengine-placement = "separate"\ncompletions-per-prompt = 8')
    # An iteration of 2 s: rollout 0.6 s, refit 0.2 s, and 1.4 s beside the rollout.
    beside, more = advice(run)
    assert beside.flags == "--rollout-mode one-step-off" and f"{2 / 1.4:.3g} times" in beside.gain
    assert more.flags == "--completions-per-prompt 16" and "70 %" in more.found


QUIET = {f"timeline/{name}/bridge-wait-s": 0.01 for name in ("vision", "language")}
RUN = """--model-provider llava --dataset-provider mock --train-iters 30 --micro-batch-size 1"""


@pytest.mark.parametrize(("figures", "flags", "advised"), [
    # Graphs leave the last microbatch of a step, whose gradients are reduced, without any.
    ({"timeline/language/gradient-sync-s": 0.2}, "--encoder-dp 2 --llm-dp 2 --global-batch-size 4 --cuda-graphs",
     "--overlap-grad-reduce"),
    ({"timeline/language/gradient-sync-s": 0.2}, "--encoder-dp 2 --llm-dp 2 --global-batch-size 2 --cuda-graphs", ""),
    ({"timeline/vision/host-bound-s": 0.5}, "--global-batch-size 4", "--micro-batch-size 2"),
    ({"timeline/vision/host-bound-s": 0.5}, "--global-batch-size 4 --logits-chunk-size 1", ""),
    # Of six ranks, the language model should have five, over which its experts do not divide.
    ({"timeline/vision/bridge-wait-s": 0.6}, "--encoder-dp 2 --llm-dp 4 --global-batch-size 20",
     "--encoder-dp 1 --llm-dp 5"),
    ({"timeline/vision/bridge-wait-s": 0.6}, "--encoder-dp 2 --llm-dp 4 --global-batch-size 20 --llm-offset 2",
     "--encoder-dp 1 --llm-dp 5 --llm-offset 1"),
    ({"timeline/vision/bridge-wait-s": 0.6},
     "--encoder-dp 2 --llm-dp 4 --global-batch-size 20 --num-experts 8 --llm-ep 4", ""),
])
def test_flags_that_the_trainer_refuses_are_not_advised(figures, flags, advised, tmp_path):
    write_run(tmp_path, steps(**QUIET | figures))
    (tmp_path / "run_config.toml").write_text(to_toml(parse([*RUN.split(), *flags.split()])))
    (found,) = advice(read_run(tmp_path))
    assert found.flags == advised and found.found and (advised or not found.gain)


@pytest.mark.parametrize(("flags", "advised"), [
    ("--train-iters 30 --lr-warmup-iters 5", "--train-iters 10"), ("--train-iters 30 --lr-warmup-iters 20", ""),
    ("--train-samples 240", "--train-samples 80")])
def test_a_shorter_run_is_counted_as_the_run_is(flags: str, advised: str, tmp_path: Path) -> None:
    write_run(tmp_path, [*steps(**QUIET), evaluation(10, 2.0, 0.5), evaluation(30, 2.5, 0.5)])
    given = f"--model-provider llava --dataset-provider mock --eval-iters 1 {flags}".split()
    (tmp_path / "run_config.toml").write_text(to_toml(parse(given)))
    (found,) = advice(read_run(tmp_path))
    assert found.flags == advised and "best at iteration 10" in found.found


def test_packing_leaves_a_row_to_every_encoder_replica(tmp_path: Path) -> None:
    colocated = 'encoder-dp = 2\nllm-tp = 2\nmicro-batch-size = 2\npacking-buffer-size = 0\n'
    for more, advised in (("", []), ("encoder-window = 1\n", ["--packing-buffer-size 64 --micro-batch-size 1"])):
        write_run(tmp_path, steps(**QUIET, **{"packing-utilisation": 0.5}), layout="colocated")
        with (tmp_path / "run_config.toml").open("a") as file:
            file.write(f"\n[more]\n{colocated}{more}")
        assert [each.flags for each in advice(read_run(tmp_path))] == advised


@pytest.mark.parametrize(("flags", "advised"), [
    ("--global-batch-size 16", "--completions-per-prompt 16"),
    ("--global-batch-size 8", "--completions-per-prompt 16 --global-batch-size 16"),
    ("--global-batch-size 24", "--completions-per-prompt 16 --global-batch-size 48")])
def test_more_completions_of_a_prompt_fit_into_the_batch(flags: str, advised: str, tmp_path: Path) -> None:
    records = [policy_record(iteration, 0.5, **{"equal-reward-prompts": 0.7}) for iteration in range(1, 31)]
    write_run(tmp_path, records)
    given = f"--model-provider causal_lm --device cpu --no-bf16 --train-iters 30 --rollout-mode one-step-off {flags}"
    (tmp_path / "run_config.toml").write_text(to_toml(parse_as(RlRunConfig, given.split(), "")))
    (found,) = advice(read_run(tmp_path))
    assert found.flags == advised


def test_longer_completions_get_room(tmp_path: Path) -> None:
    records = [policy_record(iteration, 0.5, **{"truncated-completions": 0.7}) for iteration in range(1, 31)]
    for tokens, advised in ((300, "--max-completion-tokens 800 --seq-length 1000 --max-tokens-per-microbatch 1000"),
                            (2000, "--max-completion-tokens 800 --seq-length 1000")):
        write_run(tmp_path, records)
        given = ("--model-provider causal_lm --device cpu --no-bf16 --train-iters 30 --rollout-mode one-step-off "
                 f"--seq-length 600 --max-completion-tokens 400 --max-tokens-per-microbatch {max(tokens, 600)}")
        (tmp_path / "run_config.toml").write_text(to_toml(parse_as(RlRunConfig, given.split(), "")))
        (found,) = advice(read_run(tmp_path))
        assert found.flags == advised
