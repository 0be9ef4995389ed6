"""DeepSeek-V3 against transformers' model after an import, and training on several layouts against one process."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from mimo.protocols import LANGUAGE
from providers import deepseek_v3
from tests.support import deepseek
from tests.support.equality import Outcome, find_differences
from tests.support.marks import fast_only
from tests.support.spawn import WorkerPool
from tests.support.stored import safetensors_of

MAX_ERROR = 1e-4
# name -> (ranks, flags)
LAYOUTS = {
    "one-process": (1, ""),
    "tp2": (2, "--llm-tp 2 --sequence-parallel"),
    "pp2": (2, "--llm-pp 2"),
    "ep2": (2, "--llm-dp 2 --llm-ep 2"),
}
TRAINING = {
    "tp2": (2, "--llm-tp 2 --sequence-parallel"),
    "tp2-ep2": (2, "--llm-tp 2 --sequence-parallel --llm-ep 2"),
    "pp2": (2, "--llm-pp 2"),
    "dp2-ep2": (2, "--llm-dp 2 --llm-ep 2"),
    "recomputed-tp2-pp2": (4, "--llm-tp 2 --llm-pp 2 --sequence-parallel --recompute full"),
    "cp2-ep2": (2, "--llm-cp 2 --llm-ep 2"),
    "cp2-tp2-recomputed": (4, "--llm-cp 2 --llm-tp 2 --sequence-parallel --recompute full"),
    "recomputed-attention": (1, "--recompute selective"),
}


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """variant -> (folder, what transformers computes)."""
    found = {}
    for variant in deepseek.VARIANTS:
        folder = tmp_path_factory.mktemp(variant)
        found[variant] = folder, pool.run(deepseek.save_hf_model, variant, str(folder), world_size=1)[0]
    return found


@pytest.mark.parametrize(("variant", "layout"), fast_only(
    [("yarn", layout) for layout in LAYOUTS], itertools.product(deepseek.VARIANTS, LAYOUTS)))
def test_logits_and_export_equal_hugging_face(pool: WorkerPool, saved: Any, tmp_path: Path, variant: str,
                                              layout: str) -> None:
    import torch

    world_size, flags = LAYOUTS[layout]
    folder, expected = saved[variant]
    logits = pool.run(deepseek.logits_of, ("--hf-config", str(folder), *flags.split()), world_size, str(tmp_path),
                      world_size=world_size)
    last = [found for found in logits if found is not None]
    assert len(last) == (1 if "pp" in layout else world_size)
    for found in last:
        assert float((found - expected["logits"]).abs().max()) <= MAX_ERROR
    source, exported = safetensors_of(folder), safetensors_of(tmp_path)
    assert exported.keys() == source.keys()
    for name, tensor in source.items():
        assert exported[name].dtype is tensor.dtype and torch.equal(exported[name], tensor), name
    if layout == "one-process":  # with a config.json of our own
        (reloaded,) = pool.run(deepseek.hf_logits_of, str(tmp_path), world_size=1)
        assert torch.equal(reloaded, expected["logits"])


@pytest.mark.parametrize("variant", fast_only(["yarn"], deepseek.VARIANTS))
def test_gradients_equal_hugging_face(pool: WorkerPool, saved: Any, variant: str) -> None:
    folder, expected = saved[variant]
    (found,) = pool.run(deepseek.gradients_of, ("--hf-config", str(folder)), world_size=1)
    assert found.keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        error = float((found[name] - gradient).norm() / gradient.norm().clamp_min(1e-12))
        assert error < 1e-4, (name, error)


@pytest.fixture(scope="module")
def one_process(pool: WorkerPool, saved: Any) -> Outcome:
    folder, _ = saved["yarn"]
    (outcome,) = pool.run(deepseek.train, ("--hf-config", str(folder)), 1, world_size=1)
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize("layout", TRAINING)
def test_training_equals_one_process(pool: WorkerPool, saved: Any, one_process: Outcome, layout: str) -> None:
    world_size, flags = TRAINING[layout]
    outcomes = pool.run(deepseek.train, ("--hf-config", str(saved["yarn"][0]), *flags.split()), world_size,
                        world_size=world_size)
    found = find_differences(one_process, outcomes)
    assert not found, "\n".join(found[:8] + [f"... {len(found)} differences"])


# The router's bias

BIAS_LAYOUTS = {
    "tp2-dp2-ep2": (4, "--llm-tp 2 --llm-dp 2 --llm-ep 2 --sequence-parallel"),
    "recomputed-pp2": (2, "--llm-pp 2 --recompute full"),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", BIAS_LAYOUTS)
def test_bias_moves_towards_an_even_load(pool: WorkerPool, saved: Any, layout: str) -> None:
    import torch

    world_size, flags = BIAS_LAYOUTS[layout]
    rate = 0.0625
    flags = ("--hf-config", str(saved["yarn"][0]), "--moe-router-bias-update-rate", str(rate), *flags.split())
    by_rank = pool.run(deepseek.watch_expert_bias, flags, world_size, 2, world_size=world_size)
    holders = [steps for steps in by_rank if steps[0]["counts"]]
    assert len(holders) == (1 if "pp" in layout else world_size)
    for step in range(2):
        (layer,) = holders[0][step]["counts"]
        assert layer == 2  # counted from 1; the first layer is dense
        counts = sum(steps[step]["counts"][layer] for steps in holders)
        # 4 samples of padded length, 2 experts each: nothing is counted twice, padding counts.
        assert int(counts.sum()) == 4 * deepseek.SEQ_LENGTH * 2
        # arXiv:2408.15664: b_i += u * sign(mean load - load_i)
        change = rate * torch.sign(counts.double().mean() - counts).float()
        assert change.unique().numel() > 1
        for steps in holders:
            assert torch.equal(steps[step]["after"][layer], steps[step]["before"][layer] + change)
    for steps in holders:
        assert torch.equal(steps[0]["after"][layer], steps[1]["before"][layer])


@pytest.mark.slow
def test_bias_stays_float32_in_a_bfloat16_model(pool: WorkerPool, saved: Any) -> None:
    import torch

    folder, _ = saved["yarn"]
    (found,) = pool.run(deepseek.inspect_language, ("--hf-config", str(folder), "--bf16"), 1, world_size=1)
    assert found["dtypes"] == {torch.bfloat16}
    (bias,) = found["biases"].values()
    expected = safetensors_of(folder)["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert not torch.equal(expected, expected.bfloat16().float())
    assert bias.dtype is torch.float32 and torch.equal(bias, expected)


# The plan and the checkpoint's names

@pytest.mark.slow
@pytest.mark.parametrize("variant", deepseek.VARIANTS)
def test_parameter_shapes_and_checkpoint_names(pool: WorkerPool, saved: Any, variant: str) -> None:
    folder, _ = saved[variant]
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
