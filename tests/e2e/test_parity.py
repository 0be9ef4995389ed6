"""The parity driver on whole runs: separate grids give the losses of the homogeneous one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import ROOT

pytestmark = pytest.mark.slow

FLAGS = """--steps 2 --tolerance 1e-5 --model-provider mock --dataset-provider mock --seq-length 128 --device cpu
--no-bf16 --encoder-dp 1 --llm-dp 2 --micro-batch-size 2 --global-batch-size 8""".split()


def test_separate_grids_repeat_the_losses_of_the_homogeneous_one(tmp_path: Path) -> None:
    written = tmp_path / "figures.json"
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "parity" / "run.py"), *FLAGS, "--json", str(written)],
                          check=False, capture_output=True, text=True, timeout=280,
                          env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"})
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    figures = json.loads(written.read_text())
    assert figures["ranks"] == {"homogeneous": 2, "separate": 3}
    assert len(figures["relative_difference"]) == 2 and figures["max"] <= 1e-5
    first, second = figures["losses"]["separate"]
    assert first > 0 and first != second, "two steps of training"
    assert "relative difference: first" in done.stdout.splitlines()[-1]
