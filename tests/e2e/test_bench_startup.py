"""The benchmark of starts: cold processes, phases that sum to the whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from mimo.observability.startup import Phase
from tests.support.launch import ROOT

pytestmark = pytest.mark.slow
FLAGS = """--device cpu --repeats 1 --warmup-runs 0 --steps 3 --warmup-steps 1 --model-provider mock --dataset-provider
mock --seq-length 128 --no-bf16 --micro-batch-size 2 --global-batch-size 4 --encoder-dp 1 --llm-dp 1""".split()


def test_a_start_is_taken_apart():
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "bench" / "startup.py"), *FLAGS], check=False,
                          capture_output=True, text=True, timeout=280,
                          env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    (run,) = json.loads(done.stdout.splitlines()[-1])["runs"]
    assert set(run["parts_s"]) == {"launcher", *(phase.value for phase in Phase)}
    assert sum(run["parts_s"].values()) == pytest.approx(run["whole_s"])
    assert min(run["parts_s"].values()) >= 0 and run["parts_s"]["imports"] > 0
    assert min(run["first_over_steady"], run["baseline_s"], run["imports_over_baseline"]) > 0
    assert run["process_groups"] > run["process_groups_of_a_rank"] > 10
