"""Shards and workers that fail under a whole run: one message names them, every rank ends, no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.test_energon_kills import descendants
from tests.support.digit_shards import LAYOUT, MODEL, data_flags, write_shards
from tests.support.launch import find_worker, finish, start_torchrun, torchrun

pytestmark = pytest.mark.slow

FLAGS = (*MODEL, *LAYOUT, "--dataset-provider", "energon", "--train-iters", "100000")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "shards")


def started_workers(shards: Path, tmp_path: Path, *flags: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A run that trains, and the processes of its data workers, which are children of rank 0."""
    process = start_torchrun(3, *FLAGS, *data_flags(shards), *flags, "--run-dir", str(tmp_path / "run"))
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or not metrics.read_text():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0][-3000:]
        time.sleep(0.1)
    workers = [pid for pid in descendants(find_worker(process.pid, 0))
               if b"train_hetero" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(workers) == 4, "two lanes of two workers"
    return process, workers


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while left := [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]:
        assert time.monotonic() < deadline, f"processes {left} are left"
        time.sleep(0.2)


def test_a_worker_that_hangs_is_named_with_its_shard(shards: Path, tmp_path: Path) -> None:
    process, workers = started_workers(shards, tmp_path, "--watchdog-timeout-s", "15")
    os.kill(workers[1], signal.SIGSTOP)
    done = finish(process, 120)
    assert done.returncode != 0
    assert f"waiting for worker 1 (lane 0, pid {workers[1]})" in done.stdout, done.stdout[-4000:]
    assert ".tar" in done.stdout
    summary = (tmp_path / "run" / "stall-summary.txt").read_text()
    first, reason = summary.splitlines()[:2]
    assert "everybody waits for rank 0 (vision grid, tp 0 cp 0 dp 0 pp 0, lanes 0-1) on host " in first, summary
    assert f"its data loader has no data: waiting for worker 1 (lane 0, pid {workers[1]})" in reason
    assert_gone(workers)


def test_a_worker_that_is_killed_is_named_with_its_shard(shards: Path, tmp_path: Path) -> None:
    process, workers = started_workers(shards, tmp_path)
    os.kill(workers[2], signal.SIGKILL)
    done = finish(process, 60)
    assert done.returncode != 0
    words = f"a data worker was killed by signal 9: worker 2 (lane 1, pid {workers[2]})"
    said = next(line for line in done.stdout.splitlines() if words in line)
    assert "rank 0 (vision grid, tp 0 cp 0 dp 0 pp 0, lanes 0-1)" in said, "by itself or by one that waits for its data"
    assert_gone(workers)


def test_a_truncated_shard_ends_the_run_by_name(shards: Path, tmp_path: Path) -> None:
    shard = shards / "digits" / "train-001.tar"
    shard.write_bytes(shard.read_bytes()[:9000])
    done = torchrun(3, *FLAGS, *data_flags(shards), "--run-dir", str(tmp_path / "run"))
    assert done.returncode != 0
    assert "cannot read sample" in done.stdout and "train-001.tar" in done.stdout, done.stdout[-4000:]
