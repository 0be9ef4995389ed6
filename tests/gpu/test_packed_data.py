"""Shards, packed rows and images of any size on GPUs: Transformer Engine's packed attention against plain PyTorch's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.launch import ROOT, losses, records, torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
SIZES = """--model-provider llava --device cuda --vision-patch-size 4 --vision-num-channels 1 --vision-hidden-size 128
--vision-num-layers 2 --vision-num-attention-heads 2 --vision-ffn-hidden-size 256 --no-vision-class-token
--vision-final-layernorm --num-layers 2 --hidden-size 256 --num-attention-heads 4 --num-query-groups 2
--ffn-hidden-size 512 --vocab-size 32 --make-vocab-size-divisible-by 32 --image-token-id 3 --seq-length 128 --lr 1e-3
--lr-decay-style constant --log-interval 1 --num-generations 0 --train-iters 8 --micro-batch-size 1
--global-batch-size 16 --watchdog-timeout-s 120""".split()
ANY_SIZE = ("--vision-dynamic-resolution", "--vision-image-size", "32", "--vision-pixel-shuffle", "2",
            "--image-tiling", "dynamic", "--min-patches", "4", "--max-patches", "64")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards") / "digits"
    subprocess.run([sys.executable, "scripts/prepare_digits.py", str(folder), "--samples", "400", "--shards", "4",
                    "--image-size", "8", "--strip", "--any-size"], cwd=ROOT, check=True)
    return folder


def run(shards: Path, folder: Path, *flags: str) -> list[float]:
    done = torchrun(2, *SIZES, *ANY_SIZE, "--dataset-provider", "energon", "--data-path", str(shards / "blend.yaml"),
                    "--tokenizer", str(shards / "tokenizer"), "--image-mean", "0.287", "--image-std", "0.354",
                    "--packing-buffer-size", "32", "--packing-balance", "--num-workers", "2", *flags, "--run-dir",
                    str(folder), NCCL_NVLS_ENABLE="0")
    assert done.returncode == 0, done.stdout[-3000:]
    return losses(folder)


DISJOINT = ("--encoder-dp", "1", "--llm-tp", "1")


def test_transformer_engine_agrees_with_plain_layers(shards: Path, tmp_path: Path) -> None:
    local = run(shards, tmp_path / "local", *DISJOINT, "--transformer-impl", "local", "--bf16")
    engine = run(shards, tmp_path / "engine", *DISJOINT, "--transformer-impl", "transformer_engine", "--bf16")
    exact = run(shards, tmp_path / "exact", *DISJOINT, "--transformer-impl", "local", "--no-bf16")
    print({"local bf16": local, "engine bf16": engine, "local fp32": exact})
    np.testing.assert_allclose(engine, local, rtol=2e-2)
    np.testing.assert_allclose(local, exact, rtol=2e-2)
    last = records(tmp_path / "engine")[-1]
    assert last["packing-utilisation"] > 0.7 and last["image-tokens"] > 0


def test_colocated_lanes(shards: Path, tmp_path: Path) -> None:
    flags = ("--layout", "colocated", "--encoder-tp", "2", "--llm-tp", "2", "--sequence-parallel", "--transformer-impl",
             "transformer_engine", "--bf16")
    routed, own = (run(shards, tmp_path / mode, *flags, "--lane-loader", mode) for mode in ("routed", "per-lane"))
    np.testing.assert_allclose(routed, own, rtol=1e-3)
    assert routed[-1] < 0.7 * routed[0]


def test_goes_on_exactly(shards: Path, tmp_path: Path) -> None:
    flags = (*DISJOINT, "--transformer-impl", "local", "--bf16", "--deterministic-mode")
    whole = run(shards, tmp_path / "whole", *flags)
    for iterations in (3, 8):
        resumed = run(shards, tmp_path / "resumed", *flags, "--train-iters", str(iterations), "--save",
                      str(tmp_path / "save"), "--load", str(tmp_path / "save"))
    assert resumed == whole
