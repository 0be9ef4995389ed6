"""scripts/bench/rl_sweep.py: its command line, the rollouts that it makes up, the figures of an arm."""

from __future__ import annotations

import os
import statistics

import pytest

from mimo.config.cli import parse_as
from mimo.config.rl_run import RlRunConfig
from scripts.bench import rl_sweep
from tests.support.launch import put_commands

GIVEN = ["--device", "cpu", "--layout", "", "--layout", "--llm-dp 2 --llm-ep 2", "--tokens", "512", "--tokens", "1024"]


def planned(folder, *arguments: str) -> list[rl_sweep.Arm]:
    chosen, further = rl_sweep.parse_arguments([*GIVEN, *arguments])
    return rl_sweep.plan(chosen, further, folder)


def test_every_layout_meets_every_budget(tmp_path):
    arms = planned(tmp_path, "--prompt-length", "100", "--", "--completions-per-prompt", "4", "--recompute", "full")
    assert [(arm.layout, arm.max_tokens, arm.ranks) for arm in arms] == [
        ("", 512, 1), ("", 1024, 1), ("--llm-dp 2 --llm-ep 2", 512, 2),
        ("--llm-dp 2 --llm-ep 2", 1024, 2)]
    for arm in arms:
        config = parse_as(RlRunConfig, arm.flags, "")
        # The same rollouts for all: as long as the least budget holds.
        assert (config.train.seq_length, config.rollout.max_completion_tokens) == (512, 412)
        assert config.rl.max_tokens_per_microbatch == arm.max_tokens and config.rl.completions_per_prompt == 4


def test_a_job_of_several_nodes_runs_arms_on_its_first_ones(tmp_path, monkeypatch):
    put_commands(tmp_path, "/bin/bash", {"scontrol": 'printf "n%s\\n" 1 2 3'})
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    given = ["--slurm", "--out", str(tmp_path), "--gpus-per-node", "2", "--prompt-length", "16"]
    with pytest.raises(ValueError, match="--slurm: this is no Slurm job"):
        planned(tmp_path, *given)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    assert [arm.sizes for arm in planned(tmp_path, *given)][::2] == ["1/1/1/1", "1/1/2/2"]
    assert [rl_sweep.nodes_of(ranks, 2) for ranks in (1, 2, 4)] == [["n1"], ["n1"], ["n1", "n2"]]
    with pytest.raises(ValueError, match="a layout of 8 ranks needs 4 nodes of --gpus-per-node 2, and the job has 3"):
        planned(tmp_path, *given, "--layout", "--llm-dp 8")
    with pytest.raises(ValueError, match="3 ranks of a layout are no multiple of --gpus-per-node 2"):
        rl_sweep.nodes_of(3, 2)
    with pytest.raises(SystemExit):
        planned(tmp_path, "--slurm")


def test_lengths_of_completions_have_the_mean_and_the_spread(tmp_path):
    arm = planned(tmp_path, "--prompt-length", "16", "--", "--global-batch-size", "2048", "--seq-length", "512")[0]
    config = parse_as(RlRunConfig, arm.flags, "")
    settings = {"prompt_length": 16, "completion_length": (64, 0.5)}
    found = rl_sweep.rollouts(settings, config, 1000, 0)
    lengths = [len(each.token_ids) for each in found]
    assert statistics.mean(lengths) == pytest.approx(64, rel=0.05)
    # Of a log-normal: the mean is exp(s^2 / 2) times the median.
    assert statistics.median(lengths) == pytest.approx(64 / 1.133, rel=0.05)
    assert {len(each.prompt_ids) for each in found} == {16} and found[8].prompt == 1
    assert all(len(each.logprobs) == len(each.token_ids) and max(each.logprobs) < 0 for each in found)
    assert found == rl_sweep.rollouts(settings, config, 1000, 0)
    assert found != rl_sweep.rollouts(settings, config, 1000, 1)
    long = rl_sweep.rollouts(settings | {"completion_length": (5000, 1.0)}, config, 1000, 0)
    assert max(each.length for each in long) == 512, "prompt and completion fit --seq-length"


def test_figures_are_of_the_slowest_rank_and_of_each_lane_once():
    update = {"log_probs_s": 1.0, "update_s": 2.0, "tokens": 1200, "microbatches": 2}
    arm = rl_sweep.Arm("--llm-dp 2 --llm-tp 2", 500, [], 4, updates=[[
        update | {"lane": 0, "positions": 800}, update | {"lane": 0, "positions": 800, "update_s": 4.0},
        update | {"lane": 1, "positions": 700, "log_probs_s": 2.0}, update | {"lane": 1, "positions": 700}]],
        peaks=[{"allocated": 2**30, "reserved": 3 * 2**30}, {"allocated": 2**31, "reserved": 2**31}])
    row = rl_sweep.figures(arm)
    assert (row["log_probs_s"], row["update_s"], row["tokens_per_s"]) == (2.0, 4.0, 200)
    assert (row["padding_share"], row["budget_share"]) == (pytest.approx(0.2), 0.6)
    assert (row["peak_gib"], row["reserved_gib"]) == (2.0, 3.0)
    arm.error = "out of memory"
    assert rl_sweep.figures(arm)["update_s"] is None
    assert rl_sweep.table_of(rl_sweep.COLUMNS, [rl_sweep.figures(arm)], 4).splitlines()[2].startswith(
        "| --llm-dp 2 --llm-tp 2 | 500 | 4 |  | out of memory |  |")
