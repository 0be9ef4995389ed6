"""A run beside the prediction that `mimo plan` wrote for its layout."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from mimo.commands.main import main
from mimo.config.cli import parse, to_toml
from mimo.report.page import page
from mimo.report.run_reader import Run, read_run, with_prediction
from scripts.bench import presets
from scripts.report import main as report
from tests.support.report_runs import headings, usual_records, write_run

MODEL = [*presets.PRESETS["smallest"], "--no-bf16", "--train-iters", "50"]


def planned(folder: Path, *flags: str) -> tuple[Path, dict[str, Any]]:
    """Write a plan for two GPUs and return its path and contents."""
    path = folder / "plan.json"
    assert main(["plan", "--gpus", "2", "--plan-steps", "1", "--out", str(path), *MODEL, *flags]) == 0
    return path, json.loads(path.read_text())


def run_on(folder: Path, flags: str) -> Run:
    """Return a run with these flags besides those of the model: steps of a second, a peak of 3 GiB."""
    write_run(folder, usual_records())
    (folder / "run_config.toml").write_text(to_toml(parse([*MODEL, *shlex.split(flags)])))
    return read_run(folder)


def test_the_page_shows_the_prediction_beside_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, document = planned(tmp_path)
    expected = next(each for each in document["layouts"] if each["kind"] == "colocated")
    run = run_on(tmp_path / "run", expected["flags"] + " --lr 5e-4")
    found = with_prediction(run, path).predicted
    assert found is not None and (found.step_s, found.memory_gib) == (expected["step_s"], expected["memory_gib"])
    assert not found.other_data
    capsys.readouterr()
    assert report([str(run.path), "--plan", str(path)]) == 0
    html = (run.path / "report.html").read_text()
    assert "Prediction and run" in headings(html) and "Prediction and run" not in headings(page([run]))
    assert f"({found.fullest})</td>" in html and f"{100 * (found.memory_gib / 3 - 1):+.1f} %</td>" in html
    assert f"{100 * (found.step_s - 1):+.1f} %</td>" in html and "of it reached</td>" in html
    assert f"mimo plan predicted {1000 * found.step_s:.3g} ms, {100 * (1 - found.step_s):.1f} % less." in html


def test_other_data_is_said_and_the_own_layout_is_found(tmp_path: Path) -> None:
    own = "--layout colocated --encoder-dp 2 --llm-pp 2 --encoder-window 2"
    path, document = planned(tmp_path, *own.split())
    assert document["own"] is not None
    run = with_prediction(run_on(tmp_path / "run", f"{own} --mock-images-max 2"), path)
    assert run.predicted is not None and run.predicted.other_data
    assert "The prediction has other data than the run" in page([run])


def test_a_plan_of_another_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, document = planned(tmp_path)
    flags = document["layouts"][0]["flags"]
    no_plan = tmp_path / "metrics.json"
    no_plan.write_text('{"run": 1}')
    for number, (more, file, message) in enumerate((
            (" --hidden-size 64", path, "is of another run"), (" --global-batch-size 16", path, "--global-batch-size"),
            (" --recompute full", path, "no prediction for the layout"), ("", no_plan, "not a file of `mimo plan"))):
        run = run_on(tmp_path / str(number), flags + more)
        capsys.readouterr()
        assert report([str(run.path), "--plan", str(file)]) == 2
        assert message in capsys.readouterr().err
