"""Logits of every family on GPUs, with local and Transformer Engine layers, against Hugging Face's on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.launch import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(450)]
MAX_ERROR = {"local": 1e-4, "transformer_engine": 1e-4}


@pytest.mark.parametrize("impl", MAX_ERROR)
@pytest.mark.parametrize("num_processes", [1, 2])
def test_logits_and_exports_equal_hugging_face(tmp_path: Path, num_processes: int, impl: str) -> None:
    if torch.cuda.device_count() < num_processes:
        pytest.skip(f"needs {num_processes} GPUs")
    if impl == "transformer_engine" and importlib.util.find_spec(impl) is None:
        pytest.skip("Transformer Engine is not installed")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes),
               str(ROOT / "tests/gpu/families_worker.py"), str(tmp_path), impl]
    # Transformer Engine and Mamba's Triton kernels multiply float32 matrices in TF32 unless they may not.
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "NCCL_NVLS_ENABLE": "0",
                                "NVIDIA_TF32_OVERRIDE": "0", "TRITON_F32_DEFAULT": "ieee"}
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=400, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    print(json.dumps(found, indent=1))
    assert {name: case for name, case in found.items() if case["error"] > MAX_ERROR[impl] or case["not exported"]} == {}
