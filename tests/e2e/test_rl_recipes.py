"""The recipes of scripts/rl that run on the CPU: from a supervised checkpoint to the reward that each promises."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import ROOT, records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

BASH = shutil.which("bash") or "/bin/bash"


def run_recipe(name: str, runs: Path, *flags: str) -> tuple[str, list[dict[str, Any]]]:
    """Run a recipe with this Python.

    Args:
        name: name of the script.
        runs: where it writes.
        flags: a family, flags for train_rl.py.

    Returns:
        What it printed, and the records of reinforcement learning.
    """
    environment = os.environ | {"PYTHON": sys.executable, "RUNS": str(runs)}
    done = subprocess.run([BASH, str(ROOT / "scripts" / "rl" / name), *flags], cwd=runs, env=environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=1780, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout, records(runs / "grpo")


def test_arithmetic(tmp_path: Path) -> None:
    output, found = run_recipe("arithmetic_cpu.sh", tmp_path)
    evaluations = [record["reward validation"] for record in found if "reward validation" in record]
    steps = [record for record in found if "gen-kl" in record]
    # Greedily it mostly says one too many; of what it draws, about a third is right.
    assert evaluations[0] < 0.5 and evaluations[-1] > 0.9, evaluations
    assert 0.2 < steps[0]["reward"] < 0.6
    assert output.strip().splitlines()[-1] == f"reward: {evaluations[-1]:.4f}"
    assert len(steps) == steps[-1]["iteration"] and max(step["gen-kl"] for step in steps) < 1e-5


@pytest.mark.parametrize("family", ["llava", "qwen3_vl", "nemotron"])
def test_digits(tmp_path: Path, family: str) -> None:
    output, found = run_recipe("digits_cpu.sh", tmp_path, family)
    evaluations = [record["reward validation"] for record in found if "reward validation" in record]
    steps = [record for record in found if "gen-kl" in record]
    assert 0.1 < evaluations[0] < 0.5 and evaluations[-1] > 0.9, evaluations
    assert output.strip().splitlines()[-1] == f"reward: {evaluations[-1]:.4f}"
    assert len(steps) == steps[-1]["iteration"] and max(step["gen-kl"] for step in steps) < 1e-5
