"""Weights & Biases and MLflow themselves: what they have kept of a run is what its metrics.jsonl has."""

from __future__ import annotations

import json

import pytest

from mimo.config.trainer import is_folder
from mimo.observability.trackers import tag_of
from tests.support.tracked_run import CONFIG

RUNS = "from tests.support.tracked_run import main\nmain()\n"
NOT_SENT = ("iteration", "wall_time", "success")


@pytest.fixture
def tracked(start, tmp_path, monkeypatch):
    """Train in a process of its own, without a network; gives what the tracker has kept, and what it should have."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)

    def run(*arguments):
        output, error = start(RUNS, tmp_path / "run", *arguments, cwd=tmp_path).communicate(timeout=200)
        assert "the run goes on" not in output, output
        assert output, error
        config, kept = json.loads(output.splitlines()[-1])
        wanted = {}
        for line in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()):
            figures = {name if name == "consumed_samples" else tag_of(name): value for name, value in line.items()
                       if value is not None and name not in NOT_SENT}
            wanted.setdefault(str(line["iteration"]), {}).update(figures)
        return config, kept, wanted

    return run


def test_wandb_offline(tracked):
    config, kept, wanted = tracked("wandb")
    assert kept == wanted
    assert config == {"train": {"lr": 0.5}}


def test_a_folder_of_mlflow(tracked, tmp_path):
    config, kept, wanted = tracked("mlflow", "tracked")
    assert kept == {step: {name.replace("/", "."): value for name, value in figures.items()}
                    for step, figures in wanted.items()}
    assert wanted["2"]["train/lm loss"] == "NaN" and "optim.learning-rate.vision" in kept["1"]
    assert config == CONFIG
    assert (tmp_path / "tracked").is_dir()


@pytest.mark.parametrize(("uri", "expected"), [
    ("runs", True), ("/runs", True), ("file:///runs", True), ("databricks", False), ("databricks://profile", False),
    ("http://host:5000", False), ("sqlite:///runs.db", False)])
def test_what_is_a_folder(uri, expected):
    assert is_folder(uri) == expected
