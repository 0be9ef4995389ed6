"""Stalls on GPUs: hosts run ahead of their devices, so the record of the process groups helps the summary."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.support.launch import find_worker, finish, start_torchrun, wait_for_steps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
FLAGS = """--device cuda --bf16 --model-provider mock --dataset-provider mock --train-iters 100000 --eval-iters 0
--watchdog-timeout-s 10 --global-batch-size 4""".split()
DISJOINT: tuple[str, ...] = ()
TENSOR_PARALLEL = ("--layout", "colocated", "--encoder-tp", "2", "--llm-tp", "2")
STALLED = {"disjoint-sleep-0": (DISJOINT, "sleep", 0), "disjoint-sleep-1": (DISJOINT, "sleep", 1),
           "tensor-parallel-sleep": (TENSOR_PARALLEL, "sleep", 1), "disjoint-stop": (DISJOINT, "stop", 1)}


@pytest.mark.parametrize("case", STALLED)
def test_the_summary_names_the_rank(tmp_path: Path, case: str) -> None:
    flags, fault, rank = STALLED[case]
    process = start_torchrun(2, *FLAGS, *flags, "--run-dir", str(tmp_path), script="tests/support/stalled_run.py",
                             NCCL_NVLS_ENABLE="0", STALL=f"{fault}:{rank}" if fault == "sleep" else "")
    if fault == "stop":
        wait_for_steps(tmp_path, process)
        os.kill(find_worker(process.pid, rank), signal.SIGSTOP)
    done = finish(process, 150)
    assert done.returncode != 0
    path = tmp_path / "stall-summary.txt"
    assert path.exists(), done.stdout[-6000:]
    summary = path.read_text()
    print(summary)
    assert f"waits for rank {rank} (" in summary.splitlines()[0], summary
    assert ("time.sleep" if fault == "sleep" else "its process is stopped") in summary
    assert (tmp_path / "flight-recorder" / f"rank_{1 - rank}").stat().st_size > 0
