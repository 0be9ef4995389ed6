"""The hybrid decoder behind its encoder: every layout gives the loss, gradients and steps of one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import equality, packing, resuming
from tests.support.global_state import initial_value
from tests.support.marks import fast_only
from tests.support.spawn import WorkerPool

# The oracle does not move the router's bias; test_mtp.py compares it on hybrid layers, test_deepseek.py watches it.
TINY = "--model-provider nemotron-moe-vlm-tiny --mock-image-size 32 --moe-router-bias-update-rate 0"
MODELS = {"tiny": "--moe-aux-loss-coeff 0.01", "latent": "--moe-latent-size 32 --moe-aux-loss-coeff 0.01",
          "tied": "--no-untie-embeddings-and-output-weights",
          "wide": "--no-vision-dynamic-resolution --vision-image-size 16 --vision-image-width 48"}
# name -> (model, ranks, flags)
LAYOUTS = {
    "ep2": ("tiny", 3, "--llm-dp 2 --llm-ep 2"),
    "ep2-allgather": ("latent", 3, "--llm-dp 2 --llm-ep 2 --moe-token-dispatcher-type allgather"),
    "ep2-shared-overlap": ("tiny", 3, "--llm-dp 2 --llm-ep 2 --moe-shared-expert-overlap"),
    "tp2-shared-overlap": ("tiny", 3, "--llm-tp 2 --sequence-parallel --moe-shared-expert-overlap --recompute full"),
    "tp2": ("tiny", 3, "--llm-tp 2 --sequence-parallel"),
    "latent-ep2-tp2": ("latent", 4, "--layout colocated --encoder-dp 2 --encoder-tp 2 --llm-tp 2 --llm-dp 2 --llm-ep 2 "
                                    "--sequence-parallel"),
    "ep2-tp2-expt-tp2": ("tiny", 4, "--layout colocated --encoder-dp 4 --llm-tp 2 --llm-dp 2 --llm-ep 2 "
                                    "--llm-expt-tp 2 --sequence-parallel --micro-batch-size 2"),
    "cp2": ("tiny", 3, "--llm-cp 2"),
    "cp2-ep2-tp2": ("tiny", 4, "--layout colocated --encoder-dp 4 --llm-cp 2 --llm-tp 2 --llm-ep 2 "
                               "--sequence-parallel --recompute full"),
    "cp2-pp2": ("tiny", 4, "--layout homogeneous --llm-cp 2 --llm-pp 2"),
    "pp2": ("tiny", 3, "--llm-pp 2"),
    "pp3": ("tiny", 4, "--llm-pp 3"),
    "encoder-tp2-recomputed": ("tiny", 4, "--encoder-tp 2 --llm-tp 2 --sequence-parallel --recompute full"),
    "overlapped": ("tiny", 3, "--llm-dp 2 --llm-ep 2 --overlap-grad-reduce --overlap-param-gather --ddp-num-buckets 3"),
    "homogeneous": ("tiny", 2, "--layout colocated --encoder-dp 2 --llm-dp 2 --llm-ep 2"),
    "latent-pp2": ("latent", 3, "--llm-pp 2"),
    "tied-pp2": ("tied", 3, "--llm-pp 2"),
    "graphs-pp2": ("tiny", 3, "--llm-pp 2 --cuda-graphs"),
    "wide-encoder-tp2": ("wide", 3, "--encoder-tp 2"),
}
PACKED = """--model-provider nemotron-moe-vlm-tiny --hybrid-layer-pattern ME*-M --image-token-id 95
--vision-num-layers 1 --moe-router-bias-update-rate 0"""
SIZES = ((16, 16), (16, 48), (32, 16), (32, 48))
PACKED_LAYOUTS = {"tp2": (3, "--llm-tp 2 --sequence-parallel"), "ep2": (3, "--llm-dp 2 --llm-ep 2"),
                  "recomputed": (2, "--recompute full"), "cp2": (3, "--llm-cp 2 --seq-length 64")}


@pytest.fixture(scope="module")
def oracle_of(pool: WorkerPool) -> Callable[[str], equality.Outcome]:
    """One process in plain PyTorch, computed once a model."""

    @functools.cache
    def oracle(model: str) -> equality.Outcome:
        (outcome,) = pool.run(equality.run_oracle, (*TINY.split(), *MODELS[model].split()), world_size=1)
        return outcome

    return oracle


@pytest.mark.parametrize("layout", fast_only(("latent-ep2-tp2", "pp2"), LAYOUTS))
def test_equal_to_one_process(pool: WorkerPool, oracle_of: Any, layout: str) -> None:
    model, ranks, grids = LAYOUTS[layout]
    oracle = oracle_of(model)
    assert oracle.batch_facts["text_only"] >= 2 and oracle.batch_facts["different_images"] >= 3
    flags = (*grids.split(), *TINY.split(), *MODELS[model].split())
    equality.assert_equal(oracle, pool.run(equality.run_layout, flags, ranks, world_size=ranks))


@pytest.mark.slow
@pytest.mark.parametrize("layout", PACKED_LAYOUTS)
def test_a_pack_equals_its_samples_one_by_one(pool: WorkerPool, layout: str) -> None:
    ranks, grids = PACKED_LAYOUTS[layout]
    alone = (*PACKED.split(), "--layout", "colocated")
    (expected,) = pool.run(packing.run, alone, 1, False, SIZES, world_size=1)
    outcomes = pool.run(packing.run, (*PACKED.split(), *grids.split()), ranks, True, SIZES, world_size=ranks)
    found = packing.differences(expected, outcomes, 1e-5)
    assert not found, "\n".join(found)


CONSTANT = ("--global-batch-size", "4", "--lr-decay-style", "constant", "--lr-warmup-iters", "0", "--min-lr", "0")


@pytest.mark.slow
def test_stage_1_moves_the_projector_alone_and_stage_2_goes_on(pool: WorkerPool, tmp_path: Path) -> None:
    frozen, flags = frozenset({"vision", "language"}), (*CONSTANT, *TINY.split())
    (oracle,) = pool.run(equality.run_oracle, flags, 4, frozen, resuming.SAVED_AT, world_size=1)
    # The router's bias would move, if it did not stand still with the rest of the language model.
    stage1 = ("--llm-dp", "2", "--llm-ep", "2", *flags, "--moe-router-bias-update-rate", "0.1", "--training-stage",
              "stage1", "--save", str(tmp_path))
    before = pool.run(resuming.train, stage1, 3, 0, world_size=3)
    first = pool.run(resuming.train, stage1, 3, resuming.SAVED_AT, world_size=3)
    assert first[0].losses == pytest.approx(oracle.losses[:resuming.SAVED_AT], rel=equality.TOLERANCE)
    assert [run.updates for run in first] == [{"projector": {resuming.SAVED_AT}}, {}, {}], "optimizer states"
    for run, start in zip(first, before, strict=True):
        biases = [name for name in run.exact if name.endswith("expert_bias")]
        assert biases or "projector" in run.updates
        assert all(np.array_equal(run.exact[name], start.exact[name]) for name in biases)
        for piece in run.parameters:
            initial = initial_value(piece.key, piece.shape)[piece.slices].numpy()
            assert np.array_equal(piece.value, initial) == (equality.part_of(piece.key) in frozen), piece.key
    second = ("--llm-tp", "2", "--sequence-parallel", *flags, "--training-stage", "stage2", "--load", str(tmp_path))
    for run in pool.run(resuming.train, second, 3, 4, world_size=3):
        assert run.losses == pytest.approx(oracle.losses[resuming.SAVED_AT:], rel=equality.TOLERANCE)
        # Adam's first updates turn rounding of small gradients into steps.
        assert run.grad_norms == pytest.approx(oracle.grad_norms[resuming.SAVED_AT:], rel=1e-3)
