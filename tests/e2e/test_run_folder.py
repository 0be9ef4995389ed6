"""Runs without --run-dir, as a person starts them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import ROOT, environment, records

pytestmark = pytest.mark.slow

FLAGS = ("--model-provider", "mock", "--dataset-provider", "mock", "--device", "cpu", "--no-bf16", "--layout",
         "disjoint", "--seq-length", "128", "--global-batch-size", "2", "--num-generations", "0", "--save", "saved")


def train(folder: Path, *flags: str, says: str = "") -> str:
    """Run two ranks in a folder and check a line of their output; the run's folder."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               str(ROOT / "train_hetero.py"), *FLAGS, *flags]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=280,
                          check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert says in done.stdout
    said = "run folder: "
    return next(line for line in done.stdout.splitlines() if line.startswith(said)).removeprefix(said)


def test_a_resumed_run_goes_on_in_its_folder_and_another_run_does_not(tmp_path):
    first = train(tmp_path, "--train-iters", "2")
    again = train(tmp_path, "--train-iters", "4", "--load", "saved", says="\ncontinuing with iteration 3 of 4\n")
    assert again == first
    assert [record["iteration"] for record in records(tmp_path / first) if "lm loss" in record] == [1, 2, 3, 4]
    other = train(tmp_path, "--train-iters", "1", "--save", "elsewhere", "--load", "none", "--config",
                  f"{first}/run_config.toml")
    assert other != first
    assert len(records(tmp_path / first)) == 4 and len(records(tmp_path / other)) == 1
    assert (tmp_path / "runs" / "latest").resolve() == (tmp_path / other).resolve()
