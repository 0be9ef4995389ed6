"""The sweep of policy updates: its last line has every figure of each arm, also of one that runs out of memory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.launch import start_bench
from tests.support.slurm import put_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_every_arm_is_a_row_one_that_runs_out_of_memory_too() -> None:
    # Stages fill a microbatch up with padding, 12,000 tokens of 16,384 here; its attention needs gigabytes on the CPU.
    done = start_bench("rl_sweep", "--layout", "--llm-pp 2", *"""--device cpu --tokens 256 --tokens 16384
        --prompt-length 16 --completion-length 96:0.6 --repeats 2 --memory-limit-gib 0.5 --
        --global-batch-size 32""".split())
    found = json.loads(done.stdout.splitlines()[-1])
    fits, full = found["arms"]
    assert (fits["max_tokens"], fits["ranks"], fits["error"]) == (256, 2, "")
    assert fits["microbatches"] >= 12 and len(fits["update_all_s"]) == 2
    assert 0 < fits["log_probs_s"] < fits["update_s"] and fits["tokens_per_s"] > 0
    # Pipeline stages hand over microbatches of one size, so all that is not full is padding.
    assert 0 < fits["padding_share"] < 0.5
    assert fits["padding_share"] == pytest.approx(1 - fits["budget_share"])
    assert fits["peak_gib"] > 0.1 and fits["reserved_gib"] is None
    assert (full["max_tokens"], full["error"], full["update_s"]) == (16384, "out of memory", None)
    assert full["peak_gib"] > 0.1
    rows = [line for line in done.stdout.splitlines() if line.startswith("| --llm-pp 2 |")]
    assert len(rows) == 2 and rows[1].startswith("| --llm-pp 2 | 16384 | 2 | 1/2/1/1 | out of memory | ")


def test_an_arm_runs_over_the_nodes_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_cluster(tmp_path, "", scontrol="echo localhost; echo localhost")
    for name, value in (("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}"), ("SLURM_JOB_NODELIST", "n[1-2]"),
                        ("SLURM_JOB_ID", str(os.getpid()))):
        monkeypatch.setenv(name, value)
    done = start_bench("rl_sweep", "--out", str(tmp_path / "out"), "--layout", "--llm-dp 2", *"""--device cpu --slurm
        --gpus-per-node 1 --tokens 128 --tokens 256 --prompt-length 16 --completion-length 32:0.6 --repeats 1 --
        --global-batch-size 16""".split())
    *_, fastest, last = done.stdout.splitlines()
    for row in json.loads(last)["arms"]:
        assert row["error"] == "" and row["tokens_per_s_per_rank"] == pytest.approx(row["tokens_per_s"] / 2)
    assert fastest.startswith("fastest: --llm-dp 2 with ")
