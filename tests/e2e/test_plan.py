"""Profiles are measured on real ranks and serve later commands; reports of runs show their predictions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mimo.commands.main import main
from mimo.config.cli import parse
from mimo.planner.costs import Profile
from mimo.planner.measure import measure
from scripts.bench import presets
from scripts.report import main as report
from tests.support.launch import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_profile_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    config = parse([*presets.flags("cpu", "smallest"), "--llm-tp", "2"])
    profile = measure(config, 2, device="cpu")
    assert {name: [(each.tp, each.micro_batch_size) for each in found] for name, found in profile.modules.items()} == {
        "vision": [(1, 0), (2, 0)], "language": [(1, 1), (1, 2), (2, 1), (2, 2)]}
    for found in profile.modules.values():
        assert all(each.forward > 0 and each.backward > 0 for each in found)
    assert profile.optimizer > 0 and profile.reduction > 0 and profile.spread > 0
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile


def test_a_failure_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    config = parse([*presets.flags("cpu", "smallest"), "--seq-length", "8"])  # shorter than the samples
    with pytest.raises(ValueError, match="the measurement ended with exit code 1"):
        measure(config, 1, device="cpu")


def test_a_real_run_finds_its_prediction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    flags, plan, run = presets.flags("cpu", "smallest"), tmp_path / "plan.json", tmp_path / "run"
    assert main(["plan", "--gpus", "1", "--out", str(plan), *flags]) == 0
    done = subprocess.run([sys.executable, str(ROOT / "train_hetero.py"), *flags, "--layout", "homogeneous",
                           "--train-iters", "3", "--run-dir", str(run)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert report([str(run), "--plan", str(plan)]) == 0
    assert "mimo plan predicted" in (run / "report.html").read_text()
    # A plan can also be made from what the run has written.
    assert main(["plan", "--gpus", "1", "--out", str(plan), "--config", str(run / "run_config.toml")]) == 0
    assert report([str(run), "--plan", str(plan)]) == 0
