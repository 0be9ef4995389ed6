"""The hybrid decoder behind RADIO over NCCL: every layout of tests/dist/test_nemotron.py against one GPU, float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.dist.test_nemotron import LAYOUTS, MODELS, TINY
from tests.gpu.test_equality_nccl import launch
from tests.support.equality import Outcome, assert_equal

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(650)]
# The first step compiles the kernels of Mamba-2, and times several forms of each: over a minute.
PATIENT = ("--watchdog-timeout-s", "240")


def oracle_of(folder: Path, model: str) -> Outcome:
    """Results of one GPU in plain PyTorch, computed once for each model."""
    saved = folder / f"nemotron-oracle-{model}"
    if (saved / "0.pt").exists():
        outcome: Outcome = torch.load(saved / "0.pt", weights_only=False)
        return outcome
    return launch(saved, 1, "oracle", *TINY.split(), *MODELS[model].split(), *PATIENT)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_to_one_gpu(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, layout: str) -> None:
    model, num_processes, grids = LAYOUTS[layout]
    if torch.cuda.device_count() < num_processes:
        pytest.skip(f"needs {num_processes} GPUs")
    oracle = oracle_of(tmp_path_factory.getbasetemp(), model)
    flags = (*grids.split(), *TINY.split(), *MODELS[model].split(), *PATIENT)
    assert_equal(oracle, launch(tmp_path / "layout", num_processes, "layout", *flags))
