"""Blocks and scales that an FP8 engine makes of refitted weights, against those of the trainer's products."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.launch import ROOT

pytestmark = pytest.mark.slow

SCRIPT = """
import torch
from mimo.platform import get_platform
from mimo.platform import import_megatron
get_platform("cpu")
import_megatron()
from mimo.model.fp8 import E4M3, quantised
from mimo.refit.compat import use_trainer_scales
from vllm.utils import deep_gemm
plain = deep_gemm.per_block_cast_to_fp8
use_trainer_scales()
use_trainer_scales()
from vllm.model_executor.layers.quantization.online import fp8
torch.manual_seed(0)
weight = torch.randn(384, 512) * torch.logspace(-2, 2, 512)
weight[:128, :128] = 0.0
weight[128, 128] = 448.0 * 2**5
weight[256, 256] = 1.7578125 * 2**9
weight = weight.bfloat16()
ours, scales = quantised(weight, E4M3, "blockwise", is_weight=True)
ours = ours.reshape(weight.shape)
with torch.compiler.set_stance("force_eager"):
    engine, engine_scales = fp8.per_block_cast_to_fp8(weight, block_size=[128, 128], use_ue8m0=False)
    other, other_scales = plain(weight, block_size=[128, 128], use_ue8m0=False)
assert torch.equal(engine.view(torch.uint8), ours.view(torch.uint8))
assert engine_scales.shape == (3, 4)
present = weight.reshape(3, 128, 4, 128).abs().amax(dim=(1, 3)) > 0
assert torch.equal(engine_scales[present], scales.reshape(3, 4)[present]) and int((~present).sum()) == 1
assert not torch.equal(other_scales, engine_scales), "vLLM's own scales are no powers of two"
assert torch.equal(engine_scales.log2(), engine_scales.log2().round())
"""


def test_an_engine_makes_the_blocks_that_the_trainer_multiplies_with():
    pytest.importorskip("vllm")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr[-2000:]
