"""scripts/preflight.py on GPUs: what nvidia-smi says, NCCL between two "nodes" of one GPU each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.slurm import run_preflight

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def test_two_nodes_of_one_gpu_reach_each_other(tmp_path: Path) -> None:
    (first, report), (second, silence) = run_preflight(
        tmp_path, "--device", "cuda", gpus_per_node=1, first={"CUDA_VISIBLE_DEVICES": "0", "NCCL_NVLS_ENABLE": "0"},
        second={"CUDA_VISIBLE_DEVICES": "1", "NCCL_NVLS_ENABLE": "0"})
    assert (first, second, silence) == (0, 0, ""), report
    assert "  1 x " in report and " MiB free" in report and "NCCL over all nodes: " in report


def test_missing_gpus_are_counted(tmp_path: Path) -> None:
    wanted = torch.cuda.device_count() + 1
    (first, report), (second, _) = run_preflight(tmp_path, "--device", "cuda", gpus_per_node=wanted)
    assert (first, second) == (1, 1)
    assert f"PROBLEM GPUs: {wanted - 1} visible, {wanted} are needed" in report
