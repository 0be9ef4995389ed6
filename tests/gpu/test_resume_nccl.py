"""Resuming over NCCL: bit by bit on the same layout with --deterministic-mode, to 1e-5 on others."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.launch import ROOT, losses, torchrun
from tests.support.stored import stored_tensors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
BASE = ("--config", str(ROOT / "scripts/configs/quickstart.toml"), "--device", "cuda", "--train-iters", "7",
        "--lr-warmup-iters", "2", "--eval-interval", "0", "--eval-iters", "0", "--num-generations", "0")
STEP, LAST = 2, 7
DISJOINT = "--encoder-dp 1 --llm-tp 1"
LAYOUTS = {"disjoint": (2, DISJOINT), "colocated-dp2": (2, "--layout colocated --encoder-dp 2 --llm-tp 1 --llm-dp 2"),
           "colocated-tp2": (2, "--layout colocated --encoder-dp 2 --llm-tp 2 --sequence-parallel"),
           "one": (1, "--layout colocated --encoder-dp 1 --llm-tp 1"),
           "encoder-dp2-llm-pp2": (4, "--encoder-dp 2 --llm-tp 1 --llm-pp 2"),
           "encoder-tp2-llm-tp2": (4, "--encoder-dp 1 --encoder-tp 2 --llm-tp 2 --sequence-parallel"),
           "overlap": (4, "--encoder-dp 2 --llm-tp 1 --llm-dp 2 --overlap-grad-reduce --overlap-param-gather")}


def run(folder: Path, layout: str, *flags: str) -> list[float]:
    """Train on a layout; losses by iteration."""
    num_processes, placed = LAYOUTS[layout]
    if torch.cuda.device_count() < num_processes:
        pytest.skip(f"needs {num_processes} GPUs")
    done = torchrun(num_processes, *BASE, *placed.split(), *flags, "--save", str(folder / "saved"), "--run-dir",
                    str(folder / "run"), NCCL_NVLS_ENABLE="0")
    assert done.returncode == 0, done.stdout[-3000:]
    return losses(folder / "run")


@pytest.mark.parametrize("save", ["--no-async-save", "--async-save"])
@pytest.mark.parametrize("precision", ["--no-bf16", "--bf16"])
@pytest.mark.parametrize("layout", ["disjoint", "colocated-tp2", "overlap"])
def test_same_layout_repeats_bit_by_bit(tmp_path: Path, layout: str, precision: str, save: str) -> None:
    flags = [precision, save, "--deterministic-mode"]
    if importlib.util.find_spec("transformer_engine") is None:
        flags += ["--transformer-impl", "local"]
    whole = run(tmp_path / "whole", layout, *flags, "--save-interval", str(STEP))
    load = ("--load", str(tmp_path / "whole/saved"), "--ckpt-step", str(STEP))
    resumed = run(tmp_path / "resumed", layout, *flags, *load)
    assert resumed == whole[STEP:]
    expected = stored_tensors(tmp_path / f"whole/saved/iter_{LAST:07d}")
    found = stored_tensors(tmp_path / f"resumed/saved/iter_{LAST:07d}")
    assert expected.keys() == found.keys()
    assert [key for key, value in expected.items() if not torch.equal(value, found[key])] == []


def test_other_layouts_go_on(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", "disjoint", "--no-bf16", "--save-interval", str(STEP))
    for layout in ("colocated-dp2", "colocated-tp2", "one", "encoder-dp2-llm-pp2", "encoder-tp2-llm-tp2", "overlap"):
        if torch.cuda.device_count() >= LAYOUTS[layout][0]:
            load = ("--load", str(tmp_path / "whole/saved"), "--ckpt-step", str(STEP))
            resumed = run(tmp_path / layout, layout, "--no-bf16", *load)
            np.testing.assert_allclose(resumed, whole[STEP:], rtol=1e-5)


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine")
@pytest.mark.parametrize("before", ["local", "transformer_engine"])
def test_layer_implementations_share_checkpoints(tmp_path: Path, before: str) -> None:
    after = {"local": "transformer_engine", "transformer_engine": "local"}[before]
    flags = ("--no-bf16", "--save-interval", str(STEP))
    whole = run(tmp_path / "whole", "disjoint", *flags, "--transformer-impl", before)
    load = ("--load", str(tmp_path / "whole/saved"), "--ckpt-step", str(STEP))
    resumed = run(tmp_path / "resumed", "disjoint", "--no-bf16", "--transformer-impl", after, *load)
    np.testing.assert_allclose(resumed, whole[STEP:], rtol=1e-4)
