"""The benchmark of training on whole runs: its last line has every figure of each layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import ROOT

pytestmark = pytest.mark.slow

FLAGS = """--steps 3 --warmup-steps 1 --model-provider mock --dataset-provider mock --seq-length 128 --device cpu
--no-bf16 --micro-batch-size 2 --global-batch-size 4 --mock-text-only-fraction 0""".split()
LAYOUTS = ("--run", "disjoint=--encoder-dp 1 --llm-dp 1", "--run", "alone=--layout colocated")


def test_the_benchmark_prints_every_figure(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "bench" / "train.py"), *FLAGS, *LAYOUTS, "--out",
                           str(tmp_path)], check=False, capture_output=True, text=True, timeout=280,
                          env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert [(run["name"], run["ranks"]) for run in found["runs"]] == [("disjoint", 2), ("alone", 1)]
    for run in found["runs"]:
        assert min(run["step_ms"], run["tokens_per_s_per_gpu"], run["tflops_per_gpu"]) > 0
        assert set(run["peak_memory_gib"]) == {"vision", "language"} and min(run["peak_memory_gib"].values()) > 0
        times = run["time_ms"]
        assert {"data_wait", "bridge_wait", "rest", "forward_backward/vision", "optimizer/language"} <= times.keys()
        assert 0 < times["forward_backward/language"] and 0 < times["optimizer/language"]
        assert len(run["losses"]) == 3 and run["loss_first"] == run["losses"][0] != run["loss_last"]
    assert (tmp_path / "disjoint" / "metrics.jsonl").exists()
