"""The benchmark of checkpoints runs, and its last line has every figure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import ROOT

pytestmark = pytest.mark.slow

SMALL = ("--hidden-size", "64", "--num-layers", "2", "--seq-length", "96", "--repeats", "2", "--steps", "2")
SECONDS = {"sync_stall_s", "async_stall_s", "async_save_s", "async_publish_s", "until_published_s", "copy_s", "step_s",
           "load_s"}
RATIOS = {"copy_bytes_per_s", "async_over_sync", "async_over_copy"}


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2)])
def test_the_benchmark_prints_every_figure(tmp_path: Path, num_ranks: int) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "bench" / "checkpoint.py"), "--device", "cpu", "--nproc",
               str(num_ranks), "--dir", str(tmp_path), *SMALL]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=280,
                          env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["device"] == "cpu" and figures["world_size"] == num_ranks
    # Two layers and an embedding of 64: some 300 thousand parameters of 14 bytes, split over the ranks.
    assert 2e6 / num_ranks < figures["bytes_per_rank"] < 8e6 / num_ranks
    assert all(figures[name] > 0 for name in SECONDS | RATIOS)
    assert figures["async_over_sync"] == pytest.approx(figures["async_stall_s"] / figures["sync_stall_s"])
    assert figures["async_over_copy"] == pytest.approx(figures["async_stall_s"] / figures["copy_s"])
    reached = figures["async_over_sync"] < 0.05 or figures["async_over_copy"] <= 1.2
    assert figures["meets_target"] == reached
    assert {"step_during_save_s", "step_slowdown", "device_name", "all"} <= figures.keys()
    assert all(len(figures["all"][name]) == 2 for name in ("sync_stall_s", "async_stall_s", "copy_s", "step_s"))
    assert not list(tmp_path.iterdir()), "the checkpoints are gone"
