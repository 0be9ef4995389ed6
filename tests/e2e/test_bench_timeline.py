"""The benchmark of the timeline: both arms in one run, figures on the last line."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from scripts.bench.timeline import PATTERN, summary
from tests.support.launch import ROOT

FLAGS = """--steps 8 --warmup-steps 2 --model-provider mock --dataset-provider mock --seq-length 128 --device cpu
--no-bf16 --micro-batch-size 2 --global-batch-size 4 --encoder-dp 1 --llm-dp 1""".split()


def test_the_ratio_is_that_of_the_arms() -> None:
    found = summary([1.1 if on else 1.0 for on in PATTERN] * 3)
    assert (found["on_ms"], found["off_ms"]) == (1100.0, 1000.0)
    assert found["ratio"] == found["ratio_low"] == found["ratio_high"] == 1.1


def test_both_arms_run() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "bench" / "timeline.py"), *FLAGS], check=False,
                          capture_output=True, text=True, timeout=280,
                          env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["ranks"], found["steps"]) == (2, 8)
    assert min(found["on_ms"], found["off_ms"], found["ratio_low"]) > 0
