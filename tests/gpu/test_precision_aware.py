"""The precision-aware optimizer on one GPU: Transformer Engine's Adam with fewer bits against the usual one."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.launch import records, torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU"),
              pytest.mark.skipif(find_spec("transformer_engine") is None, reason="needs Transformer Engine")]
SHARED = """--device cuda --transformer-impl transformer_engine --llm-dp 1 --model-provider causal_lm --num-layers 2
--vocab-size 512 --hidden-size 256 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 512
--max-position-embeddings 256 --dataset-provider mock --mock-text-only-fraction 1 --mock-min-length 100
--mock-max-length 250 --seq-length 256 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --lr-decay-style constant
--train-iters 8 --num-generations 0 --log-interval 1 --watchdog-timeout-s 200 --clip-grad 0.5
--deterministic-mode""".split()
AWARE = ("--use-precision-aware-optimizer",)
BF16_MOMENTS = (*AWARE, "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16")


def run(folder: Path, *flags: str) -> list[tuple[float, float]]:
    done = torchrun(1, *SHARED, *flags, "--run-dir", str(folder))
    assert done.returncode == 0, done.stdout[-3000:]
    found = [(record["lm loss"], record["grad-norm"]) for record in records(folder)]
    print(folder.name, found)
    return found


def test_fewer_bits_train_like_float32_state_and_resume_to_the_bit(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    usual = run(tmp_path / "usual")
    aware = run(tmp_path / "aware", *AWARE, "--save", saved, "--save-interval", "4")
    np.testing.assert_allclose(aware, usual, rtol=5e-3)
    resumed = run(tmp_path / "resumed", *AWARE, "--load", saved, "--ckpt-step", "4")
    assert resumed == aware[4:]
    np.testing.assert_allclose([loss for loss, _ in run(tmp_path / "moments", *BF16_MOMENTS)],
                               [loss for loss, _ in usual], rtol=2e-2)
