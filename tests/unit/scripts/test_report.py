"""scripts/report.py: the file it writes, what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.report import main
from tests.support.report_runs import usual_records, write_run

ROOT = Path(__file__).parents[3]


def test_the_page_lies_in_the_run_folder_or_where_it_is_wanted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = write_run(tmp_path / "run", usual_records())
    assert main([str(folder)]) == 0
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert capsys.readouterr().out == f"report: {folder / 'report.html'}\n"
    assert main([str(folder), str(folder), "--output", str(tmp_path / "two.html")]) == 0
    assert "A against B" in (tmp_path / "two.html").read_text()


def test_a_folder_without_a_run_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = write_run(tmp_path / "run", usual_records())
    assert main([str(folder), str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and str(tmp_path / "metrics.jsonl") in error
    assert not (folder / "report.html").exists()
    assert main([str(folder), "--output", str(tmp_path / "nowhere" / "page.html")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_problems_of_the_run_are_told(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = write_run(tmp_path / "run", usual_records(), planned=500)
    assert main([str(folder)]) == 0
    assert "end at iteration 50 of 500" in capsys.readouterr().err
