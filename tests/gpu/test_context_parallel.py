"""Context parallelism with Transformer Engine on two GPUs, in bfloat16, against float32 on data-parallel ranks.

The error of each gradient may not exceed that of data-parallel ranks in bfloat16 by much. In float32, layouts with
context parallelism are compared with one process (test_equality_nccl.py, and tests/dist without GPUs).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.context_worker import MODELS
from tests.support.launch import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"),
]
# Errors of gradients in bfloat16 are about 0.01. A missing token, or keys of another rank, make them larger than 0.1.
FACTOR, SMALLEST = 1.5, 0.02


@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_as_exact_as_those_of_data_parallel_ranks(tmp_path: Path, model: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               str(ROOT / "tests/gpu/context_worker.py"), str(tmp_path), model]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "NCCL_NVLS_ENABLE": "0",
                                "NVIDIA_TF32_OVERRIDE": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=450, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found = json.loads((tmp_path / f"{model}.json").read_text())
    failed = {kind: errors["failed"] for kind, errors in found["errors"].items() if "failed" in errors}
    assert not failed, "\n".join(f"{kind}: {text}" for kind, text in failed.items())
    noise = found["errors"]["data-parallel"]
    for kind in MODELS[model][1]:
        errors = found["errors"][kind]
        print(model, kind, found["losses"][kind], "largest error", max(errors.values()), "of", max(noise.values()))
        assert found["losses"][kind] == pytest.approx(found["losses"]["data-parallel"], rel=2e-3)
        wrong = {name: (error, noise[name]) for name, error in errors.items()
                 if error > max(FACTOR * noise[name], SMALLEST)}
        assert not wrong, f"{kind}: {wrong}"
