"""The Qwen-VL families and LLaVA-NeXT on every layout against one process, packed rows against single ones.

Logits, gradients, imports and exports against transformers are in test_hf_families.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mimo.protocols import VideoSize
from mimo.visual import ImageSize
from tests.support import equality, packing
from tests.support.marks import fast_only
from tests.support.packing import Outcome
from tests.support.spawn import WorkerPool

TOWER_25 = """--model-provider qwen2_5_vl --mrope-section 1 2 1 --num-query-groups 2 --vision-patch-size 4
--vision-hidden-size 16 --vision-num-layers 4 --vision-num-attention-heads 2 --vision-ffn-hidden-size 20
--vision-window-size 16 --vision-full-attention-layers 1 2 --image-token-id 95 --hidden-size 32
--num-attention-heads 4 --vocab-size 96 --max-position-embeddings 4096 --rotary-base 100"""
DECODER = "--num-layers 4 --ffn-hidden-size 48"
IMAGES = """--mock-image-size 16 --mock-image-size-cv 0.6 --mock-video-fraction 0.4 --mock-video-frames 6
--video-token-id 94 --seq-length 96"""
# Three levels, of which the last is added behind the cut between two stages of two layers.
TOWER_3 = """--model-provider qwen3_vl --mrope-section 4 2 2 --num-query-groups 2 --kv-channels 16 --vision-patch-size 4
--vision-hidden-size 16 --vision-num-layers 4 --vision-num-attention-heads 2 --vision-ffn-hidden-size 20
--vision-num-position-embeddings 25 --vision-deepstack-layers 0 1 3 --image-token-id 95 --hidden-size 32
--num-attention-heads 4 --num-layers 4 --vocab-size 96 --max-position-embeddings 4096 --rotary-base 100"""
# Tiles of 2 x 2 tokens in grids of up to three, of which two share a width.
TILES = """--model-provider llava_next --num-query-groups 2 --vision-image-size 16 --vision-patch-size 8
--vision-image-grid-pinpoints 16x32 32x16 32x32 48x16 --vision-hidden-size 16 --vision-num-layers 4
--vision-num-attention-heads 2 --vision-ffn-hidden-size 20 --image-token-id 95 --hidden-size 32
--num-attention-heads 4 --vocab-size 96 --max-position-embeddings 4096"""
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.01"
OF_TILES = "--mock-image-size 24 --mock-image-size-cv 0.8 --seq-length 128"
MODELS = {"qwen2.5-vl": TOWER_25, "qwen3-vl": TOWER_3, "llava-next": TILES}
# name -> (ranks, flags)
LAYOUTS = {"disjoint": (2, ""), "disjoint-tp2": (4, "--encoder-tp 2 --llm-tp 2 --sequence-parallel"),
           "disjoint-tp2-without-sequence-parallelism": (3, "--llm-tp 2"),
           "disjoint-pp2": (4, "--encoder-pp 2 --llm-pp 2"), "disjoint-fan-out": (3, "--llm-dp 2"),
           "disjoint-fan-in": (3, "--encoder-dp 2 --micro-batch-size 2"),
           "colocated": (2, "--layout colocated --encoder-tp 2 --llm-dp 2"),
           "colocated-windows": (2, "--layout colocated --encoder-dp 2 --llm-pp 2"),
           "homogeneous-pp2": (2, "--layout homogeneous --llm-pp 2"), "disjoint-cp2": (3, "--llm-cp 2"),
           "colocated-cp2-tp2": (4, "--layout colocated --encoder-dp 4 --llm-cp 2 --llm-tp 2 --sequence-parallel"),
           "homogeneous-cp2-pp2": (4, "--layout homogeneous --llm-cp 2 --llm-pp 2"),
           "recomputed": (2, "--recompute full --encoder-recompute full"),
           "recomputed-selectively": (2, "--recompute selective"),
           "graphs-tp2": (3, "--llm-tp 2 --sequence-parallel --cuda-graphs"),
           "graphs-windows-pp2": (2, "--layout colocated --encoder-dp 2 --llm-pp 2 --cuda-graphs")}
FAST = [("qwen2.5-vl", "graphs-tp2"), ("qwen2.5-vl", "disjoint-tp2"), ("qwen2.5-vl", "disjoint-pp2"),
        ("qwen3-vl", "colocated-windows"), ("llava-next", "disjoint-tp2"), ("llava-next", "colocated-windows")]
SIZES: dict[str, tuple[ImageSize, ...]] = {
    "qwen2.5-vl": ((16, 24), VideoSize(8, 16, 4, 0.5), (8, 32), VideoSize(16, 24, 4, 1.0)),
    "qwen3-vl": ((16, 24), VideoSize(16, 16, 2), (8, 32), VideoSize(40, 24, 2)),
    "llava-next": ((16, 24), (31, 9), (8, 70), (100, 90))}
TOLERANCE = 3e-6


def flags_of(model: str) -> str:
    return f"{MODELS[model]} {DECODER} {OF_TILES if model == 'llava-next' else IMAGES}"


@pytest.fixture(scope="module")
def oracle(pool: WorkerPool) -> Callable[[str], equality.Outcome]:
    """The training of one process in plain PyTorch, computed once."""

    @functools.cache
    def run(model: str) -> equality.Outcome:
        flags = flags_of(model)
        (outcome,) = pool.run(equality.run_oracle, tuple(flags.split()), world_size=1)
        return outcome

    return run


@pytest.mark.parametrize(("model", "layout"), fast_only(FAST, [
    (model, layout) for model in MODELS for layout in LAYOUTS]))
def test_training_equals_one_process(pool: WorkerPool, oracle: Any, model: str, layout: str) -> None:
    world_size, grids = LAYOUTS[layout]
    flags = f"{flags_of(model)} {grids}"
    expected = oracle(model)
    assert expected.batch_facts["text_only"] >= 2 and expected.batch_facts["different_images"] >= 3
    equality.assert_equal(expected, pool.run(equality.run_layout, tuple(flags.split()), world_size,
                                             world_size=world_size))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "grids"), [(3, "--llm-dp 2 --llm-ep 2"), (
    4, "--layout colocated --encoder-dp 4 --llm-dp 2 --llm-ep 2 --llm-pp 2"), (
    4, "--encoder-tp 2 --llm-tp 2 --llm-ep 2 --sequence-parallel --recompute full")])
def test_training_of_experts_equals_one_process(pool: WorkerPool, ranks: int, grids: str) -> None:
    flags = f"{TOWER_3} {IMAGES} {EXPERTS}"
    (expected,) = pool.run(equality.run_oracle, tuple(flags.split()), world_size=1)
    equality.assert_equal(expected, pool.run(equality.run_layout, (*flags.split(), *grids.split()), ranks,
                                             world_size=ranks))


def packed_flags(model: str) -> tuple[str, ...]:
    return ("--seq-length", "128") if model == "llava-next" else ("--video-token-id", "94")


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> Callable[[str], Outcome]:
    """The samples one by one on one process, computed once."""

    @functools.cache
    def run(model: str) -> Outcome:
        flags = (*MODELS[model].split(), *packed_flags(model), "--layout", "colocated")
        (outcome,) = pool.run(packing.run, flags, 1, False, SIZES[model], world_size=1)
        return outcome

    return run


@pytest.mark.parametrize(("model", "layout"), fast_only([("qwen2.5-vl", "colocated")], [
    (model, layout) for model in MODELS for layout in ("colocated", "disjoint-tp2", "disjoint-pp2", "disjoint-cp2")]))
def test_packed_rows_equal_each_sample_alone(pool: WorkerPool, alone: Any, model: str, layout: str) -> None:
    ranks, grids = LAYOUTS[layout]
    flags = (*MODELS[model].split(), *packed_flags(model), *grids.split())
    if "--llm-cp" in flags and model != "llava-next":
        flags = (*flags, "--seq-length", "64")
    outcomes = pool.run(packing.run, flags, ranks, True, SIZES[model], world_size=ranks)
    found = packing.differences(alone(model), outcomes, TOLERANCE)
    assert not found, "\n".join(found)


def test_a_change_of_the_tower_changes_the_features(pool: WorkerPool) -> None:
    (found,) = pool.run(changed_features, world_size=1)
    assert found.pop("same") == 0.0
    assert set(found) == {"windows", "whole images", "order of layers"} and min(found.values()) > 1e-3, found


def changed_features(rank: int) -> dict[str, float]:
    """Largest change of an image's features by changes of the attention."""
    import dataclasses

    import numpy as np

    from mimo.data.encoder_inputs import PatchOrder, packed_patches
    from mimo.grid.spec import GridSpec
    from mimo.platform import current_platform
    from mimo.protocols import LANGUAGE
    from providers import qwen2_5_vl
    from providers.common.qwen_vision import Qwen25VisionConfig
    from tests.support import provider_cases as cases

    sizes = Qwen25VisionConfig(
        vision_patch_size=4, vision_hidden_size=16, vision_num_layers=4, vision_num_attention_heads=2,
        vision_ffn_hidden_size=20, vision_window_size=16, vision_full_attention_layers=(1, 2))
    config = qwen2_5_vl.Config(**{**vars(sizes), "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 4,
                                  "num_layers": 1, "mrope_section": (1, 2, 1), "vocab_size": 96})
    images = [np.random.default_rng(0).standard_normal((3, 40, 24)).astype(np.float32)]
    inputs = packed_patches(images, [(40, 24)], PatchOrder(4, 2, 2), torch.float32)

    def features(**changes: Any) -> torch.Tensor:
        with cases.grids_of(GridSpec("vision"), GridSpec(LANGUAGE)) as grids:
            current_platform().seed(7, tp_rank=0, ep_rank=0, expt_tp_rank=0)
            context = cases.context_of(grids, "vision", 64)
            spec = qwen2_5_vl.provider.encoder_spec(dataclasses.replace(config, **changes), "vision", context)
            module = spec.module.from_spec(spec, is_first_stage=True, is_last_stage=True)
            cases.randomize(module)
            return module(inputs).detach()

    expected = features()
    return {name: float((features(**changes) - expected).abs().max()) for name, changes in (
        ("same", {}), ("windows", {"vision_window_size": 8}), ("whole images", {"vision_full_attention_layers": ()}),
        ("order of layers", {"vision_full_attention_layers": (0, 3)}))}
