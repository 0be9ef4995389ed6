"""The benchmark of layouts on real runs: every kind, equal losses, one that runs out of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import ROOT

# Several starts of torchrun one after the other, each with its imports.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
FLAGS = """--device cpu --gpus 2 --preset smallest --candidates 1 --search-steps 1 --warmup-steps 2 --rounds 1 --steps 2
--global-batch-size 4 --no-variants""".split()


def run(*flags: str) -> tuple[dict[str, Any], str]:
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "bench" / "layouts.py"), *FLAGS, *flags], check=False,
                          capture_output=True, text=True, timeout=580,
                          env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_every_kind_trains_alike(tmp_path: Path) -> None:
    colocated = "--layout colocated --encoder-dp 2 --llm-tp 2 --sequence-parallel --micro-batch-size 2"
    found, _ = run("--out", str(tmp_path), "--colocated", colocated)
    rows = {row["kind"]: row for row in found["layouts"]}
    assert set(rows) == {"homogeneous", "colocated", "disjoint"} and len(found["layouts"]) == 3
    for row in rows.values():
        assert min(row["tokens_per_s"], row["tflops"], row["step_ms"], row["peak_gib"], row["over_homogeneous"]) > 0
        assert row["rounds"] == 1 and len(row["losses"]) == 4 and not row["error"]
    assert rows["homogeneous"]["over_homogeneous"] == 1
    assert 0 < rows["disjoint"]["eta_split"] <= 1 and rows["colocated"]["eta_split"] is None
    # Also where tensor parallelism splits what is drawn: the same weights, the same batches.
    assert "--encoder-dp 2 --llm-tp 2" in rows["colocated"]["layout"]
    assert 0 <= found["loss_difference"] <= found["loss_tolerance"] == 1e-4
    assert (tmp_path / "round-1--disjoint----encoder-dp-1---llm-dp-1" / "metrics.jsonl").exists()


def test_a_layout_without_room_is_a_row_and_the_next_one_runs() -> None:
    small = "--encoder-dp 1 --llm-dp 1"
    large = f"{small} --hidden-size 512 --vocab-size 400000 --image-token-id 399999"
    found, err = run("--kind", "disjoint", "--disjoint", large, "--disjoint", small, "--memory-limit-gib", "0.5")
    full, trained = found["layouts"]
    assert (full["layout"], full["error"], full["tokens_per_s"]) == (large, "out of memory", None)
    assert "out-of-memory-rank1: " in err and "allocate" in err
    assert (trained["layout"], trained["error"], trained["rounds"]) == (small, "", 1) and trained["tokens_per_s"] > 0
    assert found["loss_difference"] < 1e-6 and trained["over_homogeneous"] is None
