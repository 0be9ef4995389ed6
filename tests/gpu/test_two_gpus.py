"""Two GPUs with NCCL: the same command line, the same losses as one GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.launch import ROOT, losses, torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
BASE = ("--config", str(ROOT / "scripts/configs/quickstart.toml"), "--device", "cuda", "--train-iters", "6",
        "--lr-warmup-iters", "2", "--eval-interval", "0", "--num-generations", "0")
ONE = ("--layout", "colocated", "--encoder-dp", "1", "--llm-tp", "1")
DISJOINT = ("--encoder-dp", "1", "--llm-tp", "1")
DATA_PARALLEL = ("--layout", "colocated", "--encoder-dp", "2", "--llm-tp", "1", "--llm-dp", "2")


def run(folder: Path, num_processes: int, *flags: str) -> list[float]:
    done = torchrun(num_processes, *BASE, *flags, "--run-dir", str(folder), NCCL_NVLS_ENABLE="0")
    assert done.returncode == 0, done.stdout[-3000:]
    return losses(folder)


@pytest.mark.parametrize("precision", ["--no-bf16", "--bf16"])
def test_layouts_agree_with_one_gpu(tmp_path: Path, precision: str) -> None:
    one = run(tmp_path / "one", 1, *ONE, precision)
    tolerance = 1e-5 if precision == "--no-bf16" else 5e-3
    np.testing.assert_allclose(run(tmp_path / "disjoint", 2, *DISJOINT, precision), one, rtol=tolerance)
    np.testing.assert_allclose(run(tmp_path / "dp", 2, *DATA_PARALLEL, precision), one, rtol=tolerance)
    overlap = ("--overlap-grad-reduce", "--overlap-param-gather", "--encoder-ddp-overlap", "--ddp-num-buckets", "3")
    np.testing.assert_allclose(run(tmp_path / "overlap", 2, *DATA_PARALLEL, *overlap, precision), one, rtol=tolerance)


def test_tensor_parallel_language_model_learns(tmp_path: Path) -> None:
    found = run(tmp_path / "tp", 2, "--layout", "colocated", "--encoder-dp", "2", "--llm-tp", "2",
                "--sequence-parallel", "--bf16")
    assert found[-1] < 0.85 * found[0]


def test_text_only_steps_move_nothing_over_the_bridge(tmp_path: Path) -> None:
    found = run(tmp_path / "text", 2, *DISJOINT, "--digits-text-only-fraction", "1", "--bf16")
    assert np.isfinite(found).all()
