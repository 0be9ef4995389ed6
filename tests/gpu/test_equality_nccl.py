"""The equality test over NCCL: loss, gradients and steps of each layout against one GPU in plain PyTorch, float32."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.equality import DENSE, MOE, Outcome, assert_equal
from tests.support.launch import ROOT

pytestmark = pytest.mark.gpu
LAYOUTS = {
    "one-gpu": (1, "--layout colocated"),
    "homogeneous-dp2": (2, "--layout colocated --encoder-dp 2 --llm-dp 2"),
    "encoder-dp1-llm-dp1": (2, ""),
    "colocated-encoder-dp2-llm-tp2": (
        2,
        "--layout colocated --encoder-dp 2 --llm-tp 2 --micro-batch-size 2 --sequence-parallel",
    ),
    "colocated-encoder-tp2-llm-dp2": (2, "--layout colocated --encoder-tp 2 --llm-dp 2"),
    "encoder-dp1-llm-dp2": (3, "--llm-dp 2"),
    "encoder-dp2-llm-dp1-uneven-samples": (3, "--encoder-dp 2 --micro-batch-size 3"),
    "llm-ep2": (3, "--llm-dp 2 --llm-ep 2"),
    "llm-cp2": (3, "--llm-cp 2"),
    "colocated-llm-cp2": (2, "--layout colocated --encoder-dp 2 --llm-cp 2"),
    "encoder-pp2-llm-pp2": (4, "--encoder-pp 2 --llm-pp 2"),
    "encoder-tp2-llm-tp2": (4, "--encoder-tp 2 --llm-tp 2 --sequence-parallel"),
    "overlapped": (4, "--encoder-dp 2 --llm-dp 2 --overlap-grad-reduce --overlap-param-gather --encoder-ddp-overlap"),
}


def launch(folder: Path, num_processes: int, what: str, *flags: str) -> list[Outcome]:
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes),
               str(ROOT / "tests/gpu/equality_worker.py"), str(folder), what, *flags]
    # Megatron's router multiplies by Transformer Engine where it is installed, in TF32 unless it may not.
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "NCCL_NVLS_ENABLE": "0",
                                "NVIDIA_TF32_OVERRIDE": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(num_processes)]


@pytest.mark.parametrize("model", ["dense", "moe"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_to_one_gpu(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, layout: str, model: str) -> None:
    num_processes, flags = LAYOUTS[layout]
    if torch.cuda.device_count() < num_processes:
        pytest.skip(f"needs {num_processes} GPUs")
    extra = MOE if model == "moe" else DENSE
    if model == "dense" and "--llm-ep" in flags:
        pytest.skip("a dense model has no experts to split")
    saved = tmp_path_factory.getbasetemp() / f"oracle-{model}"
    oracle = (
        torch.load(saved / "0.pt", weights_only=False)
        if (saved / "0.pt").exists()
        else launch(saved, 1, "oracle", *extra)[0]
    )
    assert_equal(oracle, launch(tmp_path / "layout", num_processes, "layout", *flags.split(), *extra))
