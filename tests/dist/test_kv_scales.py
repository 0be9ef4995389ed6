"""Scales of an engine's FP8 cache: measured on any layout, and set in a live engine with the weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from mimo.rollout.process import EngineProcess
from tests.support import kv_scales, refit
from tests.support.spawn import WorkerPool

LAYOUTS = {1: [""], 2: ["--llm-tp 2 --sequence-parallel", "--llm-pp 2", "--llm-cp 2", "--llm-dp 2"]}


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, kv_scales.KvScales]]:
    """Folder of each model, and the scales of its keys, values and queries by transformers."""
    found = {}
    for name in ("refit-qwen3", "kv-hybrid"):
        folder = tmp_path_factory.mktemp(name)
        found[name] = folder, kv_scales.expected(pool.run(kv_scales.save, name, str(folder), world_size=1)[0])
    return found


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("name", ["refit-qwen3", "kv-hybrid"])
def test_scales_are_those_of_transformers_on_every_layout(pool, saved, name, ranks):
    folder, expected = saved[name]
    assert max(map(max, expected.values())) > 2, "an unscaled cache would clip values"
    layouts = tuple(tuple(layout.split()) for layout in LAYOUTS[ranks])
    by_rank = pool.run(kv_scales.measured, name, str(folder), layouts, ranks, world_size=ranks, timeout_s=300)
    for found in by_rank:
        for layout, scales in zip(layouts, found, strict=True):
            assert scales.keys() == expected.keys(), layout
            for layer, three in expected.items():
                assert scales[layer] == pytest.approx(three, rel=2e-4), (layout, layer)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_engine_with_measured_scales_is_one_that_has_loaded_them(pool, saved, tmp_path):
    folder, _ = saved["refit-qwen3"]
    process = EngineProcess(refit.engine_options(folder, kv_cache_dtype="fp8"))
    try:
        (scales, (one, calibrated, *again), error), *_ = pool.run(
            kv_scales.engine_logprobs, "refit-qwen3", str(folder), ("--llm-pp", "2"), 2, process.handle, world_size=2,
            timeout_s=600)
    finally:
        process.close()
    assert again == [one, calibrated], "the prefix cache has nothing of other scales"
    assert "has scales of keys and values for layers [0, 1, 99], and the engine has a cache for [0, 1] of them" in error
    kv_scales.save_with_scales(folder, tmp_path / "loaded", scales)
    options = refit.engine_options(tmp_path / "loaded", kv_cache_dtype="fp8")
    reference = EngineProcess(dataclasses.replace(options, load_format="auto"))
    try:
        loaded = reference.handle.prompt_logprobs([{"prompt_token_ids": tokens} for tokens in kv_scales.SEQUENCES])
    finally:
        reference.close()
    assert loaded == calibrated
    differences = [abs(a - b) for left, right in zip(one, calibrated, strict=True)
                   for a, b in zip(left, right, strict=True)]
    assert torch.tensor(differences).mean() > 0.05, "scales matter to this model"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_layers_of_a_hybrid_model_find_their_scales_on_two_stages(pool, saved):
    """Two engines of other stages than the trainer's, with the same scales, answer the same."""
    folder, expected = saved["kv-hybrid"]
    found = []
    for pp in (1, 2):
        process = EngineProcess(refit.engine_options(folder, pp=pp, kv_cache_dtype="fp8"))
        try:
            (scales, (one, calibrated, *_), error), *_ = pool.run(
                kv_scales.engine_logprobs, "kv-hybrid", str(folder), ("--llm-pp", "2"), 2, process.handle,
                world_size=2, timeout_s=600)
        finally:
            process.close()
        assert scales.keys() == expected.keys() == {1, 5, 6} and "layers [1, 5, 6, 99]" in error
        found.append((one, calibrated))
    assert found[0] == found[1] and found[0][0] != found[0][1]
