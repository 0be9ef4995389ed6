"""Offloading on one GPU: memory really falls, and training goes on bit by bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.launch import ROOT
from tests.support.offloading import ROUNDS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")]
SIZES = ("--hidden-size", "1024", "--ffn-hidden-size", "4096", "--num-layers", "4", "--vision-hidden-size", "512",
         "--vision-ffn-hidden-size", "2048")
FLAGS = ("--layout", "colocated", "--deterministic-mode", *SIZES)


def launch(file: Path, what: str, *flags: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1",
               str(ROOT / "tests/gpu/offload_worker.py"), str(file), what, *FLAGS, *flags]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=200, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found: dict[str, Any] = torch.load(file, weights_only=False)
    return found


@pytest.mark.parametrize("flags", [("--bf16",), ("--no-bf16",), ("--bf16", "--freeze", "vision")],
                         ids=["bf16", "float32", "frozen"])
def test_memory_falls_and_training_goes_on(tmp_path: Path, flags: tuple[str, ...]) -> None:
    plain, moved = launch(tmp_path / "plain.pt", "plain", *flags), launch(tmp_path / "moved.pt", "moved", *flags)
    expected, found = plain["trained"], moved["trained"]
    assert found.losses == expected.losses and len(set(found.losses)) == len(found.losses)
    assert [key for key, value in expected.weights.items() if not np.array_equal(value, found.weights[key])] == []
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found.state, expected.state, strict=True))
    assert found.left == []
    for before, away, kinds in zip(moved["seen"]["before"], moved["seen"]["away"], ROUNDS, strict=True):
        if len(kinds) >= 3:
            assert before[1] > 100e6 and away[1] == 0
            assert before[0] - away[0] >= 0.95 * before[1], (before, away)
