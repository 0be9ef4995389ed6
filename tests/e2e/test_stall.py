"""Nothing waits without a name: a rank that stops makes the run end, saying who waited for what."""

from __future__ import annotations

from pathlib import Path

from tests.support.launch import losses, torchrun


def test_a_stalled_lane_ends_the_run_by_name(tmp_path: Path) -> None:
    done = torchrun(
        2,
        "--device",
        "cpu",
        "--model-provider",
        "mock",
        "--dataset-provider",
        "tests.support.stalling_data:provider",
        "--no-bf16",
        "--train-iters",
        "3",
        "--watchdog-timeout-s",
        "8",
        "--seq-length",
        "256",
        "--run-dir",
        str(tmp_path),
    )
    assert done.returncode != 0
    assert len(losses(tmp_path)) == 1, "the first iteration was trained and recorded"
    assert "rank 1 (language grid, tp 0 cp 0 dp 0 pp 0, lane 0)" in done.stdout, done.stdout[-3000:]
    assert "data" in done.stdout and "iteration" in done.stdout
    reports = list(tmp_path.glob("stall-rank*.txt"))
    assert reports and any("next_step" in report.read_text() for report in reports), (
        "where it waited, as a Python stack"
    )
