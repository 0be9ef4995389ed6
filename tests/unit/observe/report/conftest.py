"""A run folder that several files of tests read."""

from __future__ import annotations

from pathlib import Path

import pytest

from mimo.report.run_reader import Run
from tests.support.report_runs import run_of, timeline, usual_records


@pytest.fixture
def usual(tmp_path: Path) -> Run:
    return run_of(tmp_path / "usual", usual_records(), timelines=(timeline(10, {"vision": 2, "language": 2}),))
