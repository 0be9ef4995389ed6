"""Encoder prefetch over NCCL, on a stream of its own and on that which computes: not a bit of the training changes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.launch import ROOT
from tests.support.prefetching import Trained, assert_same_bits, check_where_it_ran

pytestmark = pytest.mark.gpu
DEPTHS = (1, 3, 4)
# Enough for the encoder still to run when the host is far ahead; sizes that Transformer Engine takes.
MODEL = """--freeze vision --bf16 --deterministic-mode --hidden-size 256 --num-attention-heads 4 --num-query-groups 4
--ffn-hidden-size 512 --vision-num-layers 12 --vision-hidden-size 512 --vision-num-attention-heads 8
--vision-ffn-hidden-size 2048 --vision-image-size 64 --vision-patch-size 8 --mock-image-size 64 --seq-length 256
--mock-text-only-fraction 0.2""".split()
# name -> (GPUs, flags)
LAYOUTS = {"encoder-tp1": (2, "--global-batch-size 4"), "one-microbatch": (2, "--global-batch-size 1"),
           "nothing-to-train": (2, "--global-batch-size 4 --freeze vision,projector"),
           "encoder-tp2": (3, "--global-batch-size 4 --encoder-tp 2"),
           "encoder-tp2-one-microbatch": (3, "--global-batch-size 1 --encoder-tp 2"),
           "encoder-tp2-llm-tp2": (4, "--global-batch-size 4 --encoder-tp 2 --llm-tp 2 --sequence-parallel"),
           "encoder-dp2-llm-pp2": (4, "--global-batch-size 8 --encoder-dp 2 --llm-pp 2 --micro-batch-size 2")}


def train(folder: Path, num_processes: int, *flags: str) -> list[list[Trained]]:
    """Results of each rank without prefetch and with each depth."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes),
               str(ROOT / "tests/gpu/prefetch_worker.py"), str(folder), ",".join(map(str, (0, *DEPTHS))), *MODEL,
               *flags]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "NCCL_NVLS_ENABLE": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=280, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(num_processes)]


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_bit_changes(tmp_path: Path, layout: str, impl: str) -> None:
    num_processes, flags = LAYOUTS[layout]
    if torch.cuda.device_count() < num_processes:
        pytest.skip(f"needs {num_processes} GPUs")
    if impl == "transformer_engine" and importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs Transformer Engine")
    for off, *on in train(tmp_path, num_processes, *flags.split(), "--transformer-impl", impl):
        for depth, trained in zip(DEPTHS, on, strict=True):
            assert_same_bits(off, trained)
            check_where_it_ran(off, trained, depth, several=False)
