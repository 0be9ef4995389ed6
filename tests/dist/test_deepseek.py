"""DeepSeek-V3 against transformers' model after an import, and training on several layouts against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import deepseek
from tests.support.equality import Outcome, find_differences
from tests.support.spawn import WorkerPool

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


@pytest.mark.parametrize("variant", deepseek.VARIANTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_equal_hugging_face(pool: WorkerPool, saved: Any, variant: str, layout: str) -> None:
    world_size, flags = LAYOUTS[layout]
    folder, expected = saved[variant]
    logits = pool.run(deepseek.logits_of, ("--hf-config", str(folder), *flags.split()), world_size,
                      world_size=world_size)
    last = [found for found in logits if found is not None]
    assert len(last) == (1 if "pp" in layout else world_size)
    for found in last:
        assert float((found - expected["logits"]).abs().max()) <= MAX_ERROR


@pytest.mark.parametrize("variant", deepseek.VARIANTS)
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


@pytest.mark.parametrize("layout", TRAINING)
def test_training_equals_one_process(pool: WorkerPool, saved: Any, one_process: Outcome, layout: str) -> None:
    world_size, flags = TRAINING[layout]
    outcomes = pool.run(deepseek.train, ("--hf-config", str(saved["yarn"][0]), *flags.split()), world_size,
                        world_size=world_size)
    found = find_differences(one_process, outcomes)
    assert not found, "\n".join(found[:8] + [f"... {len(found)} differences"])
