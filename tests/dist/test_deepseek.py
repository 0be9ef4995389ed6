"""DeepSeek-V3: training on several layouts against one process, the router's bias, names of a checkpoint.

Logits, gradients, imports and exports are in test_hf_families.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mimo.protocols import LANGUAGE
from providers import deepseek_v3
from tests.support import deepseek, hf_families
from tests.support.equality import Outcome, find_differences
from tests.support.spawn import WorkerPool
from tests.support.stored import safetensors_of

pytestmark = pytest.mark.slow

TRAINING = {"tp2": (2, "--llm-tp 2 --sequence-parallel"), "tp2-ep2": (2, "--llm-tp 2 --sequence-parallel --llm-ep 2"),
            "pp2": (2, "--llm-pp 2"), "dp2-ep2": (2, "--llm-dp 2 --llm-ep 2"),
            "recomputed-tp2-pp2": (4, "--llm-tp 2 --llm-pp 2 --sequence-parallel --recompute full"),
            "cp2-ep2": (2, "--llm-cp 2 --llm-ep 2"),
            "cp2-tp2-recomputed": (4, "--llm-cp 2 --llm-tp 2 --sequence-parallel --recompute full"),
            "recomputed-attention": (1, "--recompute selective")}


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """variant -> folder that transformers saved."""

    @functools.cache
    def save(variant: str) -> Path:
        folder = tmp_path_factory.mktemp(variant)
        pool.run(hf_families.save_hf, f"deepseek-{variant}", str(folder), world_size=1)
        return folder

    return save


@pytest.fixture(scope="module")
def one_process(pool: WorkerPool, saved: Any) -> Outcome:
    folder = saved("yarn")
    (outcome,) = pool.run(deepseek.train, ("--hf-config", str(folder)), 1, world_size=1)
    return outcome


@pytest.mark.parametrize("layout", TRAINING)
def test_training_equals_one_process(pool: WorkerPool, saved: Any, one_process: Outcome, layout: str) -> None:
    world_size, flags = TRAINING[layout]
    outcomes = pool.run(deepseek.train, ("--hf-config", str(saved("yarn")), *flags.split()), world_size,
                        world_size=world_size)
    found = find_differences(one_process, outcomes)
    assert not found, "\n".join(found[:8] + [f"... {len(found)} differences"])


# The router's bias

BIAS_LAYOUTS = {"tp2-dp2-ep2": (4, "--llm-tp 2 --llm-dp 2 --llm-ep 2 --sequence-parallel"),
                "recomputed-pp2": (2, "--llm-pp 2 --recompute full")}


@pytest.mark.parametrize("layout", BIAS_LAYOUTS)
def test_bias_moves_towards_an_even_load(pool: WorkerPool, saved: Any, layout: str) -> None:
    world_size, flags = BIAS_LAYOUTS[layout]
    rate = 0.0625
    flags = ("--hf-config", str(saved("yarn")), "--moe-router-bias-update-rate", str(rate), *flags.split())
    by_rank = pool.run(deepseek.watch_expert_bias, flags, world_size, 2, world_size=world_size)
    holders = [steps for steps in by_rank if steps[0]["counts"]]
    assert len(holders) == (1 if "pp" in layout else world_size)
    for step in range(2):
        (layer,) = holders[0][step]["counts"]
        assert layer == 2  # counted from 1; the first layer is dense
        counts = sum(steps[step]["counts"][layer] for steps in holders)
        # 2 experts for each token: nothing is counted twice, and padding does not count.
        tokens = sum(steps[step]["tokens"] for steps in holders)
        assert int(counts.sum()) == tokens * 2 and 4 < tokens < 4 * deepseek.SEQ_LENGTH
        # arXiv:2408.15664: b_i += u * sign(mean load - load_i)
        change = rate * torch.sign(counts.double().mean() - counts).float()
        assert change.unique().numel() > 1
        for steps in holders:
            assert torch.equal(steps[step]["after"][layer], steps[step]["before"][layer] + change)
    for steps in holders:
        assert torch.equal(steps[0]["after"][layer], steps[1]["before"][layer])


def test_bias_stays_float32_in_a_bfloat16_model(pool: WorkerPool, saved: Any) -> None:
    folder = saved("yarn")
    (found,) = pool.run(deepseek.inspect_language, ("--hf-config", str(folder), "--bf16"), 1, world_size=1)
    assert found["dtypes"] == {torch.bfloat16}
    (bias,) = found["biases"].values()
    expected = safetensors_of(folder)["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert not torch.equal(expected, expected.bfloat16().float())
    assert bias.dtype is torch.float32 and torch.equal(bias, expected)


# The plan and the checkpoint's names

@pytest.mark.parametrize("variant", deepseek.VARIANTS)
def test_parameter_shapes_and_checkpoint_names(pool: WorkerPool, saved: Any, variant: str) -> None:
    folder = saved(variant)
    (found,) = pool.run(deepseek.inspect_language, ("--hf-config", str(folder)), 1, world_size=1)
    config = deepseek_v3.Config(hf_config=str(folder))
    shapes = deepseek_v3.provider.parameter_shapes(config, LANGUAGE)
    assert found["parameters"] == sum(math.prod(shape.shape) * shape.count for shape in shapes)
    assert found["missing"] == [] and not found["initialized"]
    # Layers of one kind are stacked; a dense and a MoE layer each have a place of their own.
    stacked = variant == "four-moe-layers"
    layer = "decoder.layers." if stacked else "decoder.layers.1."
    names = ["input_layernorm.weight", "self_attention.linear_kv_up_proj.layer_norm_weight", "mlp.router.expert_bias",
             "pre_mlp_layernorm.weight", "mlp.experts.experts.linear_fc1.weight",
             "mlp.shared_experts.linear_fc2.weight"]
    names.append("self_attention.linear_q_proj.weight" if variant == "uncompressed-queries" else
                 "self_attention.linear_q_up_proj.layer_norm_weight")
    assert {layer + name for name in names} <= found["keys"]
    assert ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in found["keys"]) == (not stacked)
