"""The parity driver: the two layouts that it makes of one command line, what it compares, how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mimo.config.trainer import RunConfig
from mimo.config.validate import validate
from scripts.parity import run as parity
from scripts.training_runs import num_ranks

FLAGS = ["--model-provider", "mock", "--dataset-provider", "mock", "--seq-length", "128", "--encoder-dp", "1",
         "--llm-dp", "2", "--llm-tp", "2", "--micro-batch-size", "2", "--steps", "3"]


def fake_training(losses: dict[str, list[float]], made: dict[str, RunConfig]) -> Any:
    """Losses by the name of the run's folder, in place of whole runs."""
    def train(config: RunConfig, folder: Path) -> list[dict[str, float]]:
        made[folder.name] = config
        return [{"lm loss": loss} for loss in losses.get(folder.name, [])]

    return train


def test_the_homogeneous_run_differs_in_the_encoders_place_alone(monkeypatch, tmp_path):
    made: dict[str, RunConfig] = {}
    monkeypatch.setattr(parity, "train", fake_training({"homogeneous": [2.0] * 3, "separate": [2.0] * 3}, made))
    assert parity.main([*FLAGS, "--out", str(tmp_path)]) == 0
    homogeneous, separate, start = made["homogeneous"], made["separate"], made["run"]
    assert (num_ranks(homogeneous), num_ranks(separate)) == (4, 5)
    layout = validate(homogeneous, 4)
    assert layout.kind == "colocated"
    assert {(grid.offset, grid.tp, grid.dp, grid.size) for grid in layout.grids.values()} == {(0, 2, 2, 4)}
    # The same weights to start from, and otherwise the same flags.
    assert homogeneous.checkpoint == separate.checkpoint and separate.checkpoint.finetune
    assert start.checkpoint.save == separate.checkpoint.load == str(tmp_path / "start")
    assert vars(homogeneous).keys() == vars(separate).keys()
    assert [name for name in vars(separate) if vars(separate)[name] != vars(homogeneous)[name]] == ["layout"]


def test_weights_that_are_named_are_the_start(monkeypatch, tmp_path):
    made: dict[str, RunConfig] = {}
    monkeypatch.setattr(parity, "train", fake_training({"homogeneous": [2.0], "separate": [2.0]}, made))
    assert parity.main([*FLAGS, "--out", str(tmp_path), "--load", "here", "--finetune"]) == 0
    assert "run" not in made and made["separate"].checkpoint.load == "here"


@pytest.mark.parametrize(("separate", "tolerance", "code"), [
    ([4.0, 2.0, 1.0], "0", 0), ([4.0, 2.02, 1.0], "0.0101", 0), ([4.0, 1.98, 1.0], "0.0099", 1),
])
def test_differences_above_the_tolerance_fail(monkeypatch, tmp_path, capsys, separate, tolerance, code):
    losses = {"homogeneous": [4.0, 2.0, 1.0], "separate": separate}
    monkeypatch.setattr(parity, "train", fake_training(losses, {}))
    written = tmp_path / "figures.json"
    assert parity.main([*FLAGS, "--tolerance", tolerance, "--json", str(written)]) == code
    figures = json.loads(written.read_text())
    assert figures["losses"] == losses and figures["ranks"] == {"homogeneous": 4, "separate": 5}
    assert figures["first"] == 0 and figures["max"] == pytest.approx(abs(separate[1] - 2) / 2)
    assert figures["mean"] == pytest.approx(figures["max"] / 3)
    assert figures["relative_difference"][1] == pytest.approx((separate[1] - 2) / 2)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 5 and ("ABOVE" in shown[-1]) == bool(code)


@pytest.mark.parametrize(("flags", "message"), [
    (["--save", "kept"], "--save kept"),
    (["--layout", "colocated"], "--layout and --llm-only"),
    (["--global-batch-size", "3"], "--global-batch-size 3 is not a multiple"),
    (["--load", "nowhere", "--llm-tp", "3"], "--llm-tp 3"),
])
def test_runs_that_cannot_be_compared_are_refused_before_any_run(monkeypatch, capsys, flags, message):
    made: dict[str, RunConfig] = {}
    monkeypatch.setattr(parity, "train", fake_training({}, made))
    assert parity.main([*FLAGS, *flags]) == 2
    assert message in capsys.readouterr().err and not made


def test_courses_of_different_length_are_no_pair():
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        parity.compare({"homogeneous": [1.0, 2.0], "separate": [1.0]})
