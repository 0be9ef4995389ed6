"""Profiles of a run on GPUs: traces with kernels and named ranges, snapshots of memory, and NVTX ranges."""

from __future__ import annotations

import gzip
import json
import pickle
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.support.launch import torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
FLAGS = """--device cuda --bf16 --model-provider mock --dataset-provider mock --seq-length 128 --train-iters 4
--eval-iters 0 --global-batch-size 4 --micro-batch-size 1 --encoder-dp 1 --llm-dp 1 --mock-text-only-fraction 0
--profile-steps 3:3 --profile-ranks 0,1 --memory-snapshot --nvtx""".split()
MODULES = ("vision", "language")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of both grids with everything on."""
    folder = tmp_path_factory.mktemp("profiles")
    done = torchrun(2, *FLAGS, "--run-dir", str(folder), NCCL_NVLS_ENABLE="0")
    assert done.returncode == 0, done.stdout[-6000:]
    return folder


@pytest.mark.parametrize("rank", [0, 1])
def test_a_trace_has_kernels_and_names_the_passes_of_its_step(run_dir: Path, rank: int) -> None:
    with gzip.open(run_dir / "profile" / f"rank-{rank}.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    ranges = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
    for direction in ("forward", "backward"):
        for microbatch in range(4):
            # Once: the iterations around the third are not in it.
            assert ranges[f"{MODULES[rank]} stage 0 {direction} microbatch {microbatch}"] == 1, ranges
    assert ranges[f"{MODULES[rank]} stage 0 optimizer"] == 1, ranges
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert kernels and all(event["args"]["device"] == rank for event in kernels), kernels[:1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_snapshot_has_the_memory_of_its_rank_and_how_it_came_about(run_dir: Path, rank: int) -> None:
    snapshot = pickle.loads((run_dir / "memory" / f"rank-{rank}.pickle").read_bytes())
    assert rank in {segment["device"] for segment in snapshot["segments"]}
    assert "alloc" in {entry["action"] for entry in snapshot["device_traces"][rank]}
