"""The project's main test: the same model and batch give the same loss, gradients and step on every layout."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.equality import DENSE, MOE, Outcome, assert_equal, run_layout, run_oracle
from tests.support.spawn import WorkerPool

# name -> (ranks, flags)
LAYOUTS = {
    "homogeneous-dp2": (2, "--layout colocated --encoder-dp 2 --llm-dp 2"),
    "encoder-dp1-llm-dp2": (3, "--llm-dp 2"),
    "encoder-dp2-llm-dp1": (3, "--encoder-dp 2 --micro-batch-size 2"),
    "encoder-dp2-llm-dp1-uneven-samples": (3, "--encoder-dp 2 --micro-batch-size 3"),
    "encoder-tp2-llm-tp2": (4, "--encoder-tp 2 --llm-tp 2 --sequence-parallel"),
    "llm-pp2": (3, "--llm-pp 2"),
    "encoder-pp2-llm-pp2": (4, "--encoder-pp 2 --llm-pp 2"),
    "llm-ep2": (3, "--llm-dp 2 --llm-ep 2"),
    "colocated-encoder-dp2-llm-tp2": (
        2, "--layout colocated --encoder-dp 2 --llm-tp 2 --micro-batch-size 2 --sequence-parallel"),
    "colocated-encoder-tp2-llm-dp2": (2, "--layout colocated --encoder-tp 2 --llm-dp 2"),
    "overlapped-gradient-reduction": (
        3, "--encoder-dp 2 --micro-batch-size 2 --overlap-grad-reduce --encoder-ddp-overlap --ddp-num-buckets 3"),
    "overlapped-parameter-gather": (
        3, "--llm-dp 2 --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 5000"),
    "recomputed-activations": (3, "--llm-tp 2 --sequence-parallel --recompute full"),
    "unsharded-optimizer": (3, "--llm-dp 2 --no-use-distributed-optimizer"),
}
MODELS = {"dense": DENSE, "moe": MOE}


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def oracles(pool: WorkerPool) -> dict[str, Outcome]:
    return {name: pool.run(run_oracle, flags, world_size=1)[0] for name, flags in MODELS.items()}


def test_the_batch_is_mixed(oracles: dict[str, Outcome]) -> None:
    for outcome in oracles.values():
        assert outcome.batch_facts["text_only"] >= 2, "text-only microbatches"
        assert outcome.batch_facts["different_images"] >= 3, "samples differ in image tokens"
        assert outcome.batch_facts["different_targets"] >= 4, "samples differ in target tokens"
        assert min(outcome.grad_norms) > 0.5, "clipping is active"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_equal_to_one_process(pool: WorkerPool, oracles: dict[str, Outcome], model: str, layout: str) -> None:
    world_size, flags = LAYOUTS[layout]
    if model == "dense" and "--llm-ep" in flags:
        pytest.skip("a dense model has no experts to split")
    oracle = oracles[model]
    outcomes = pool.run(run_layout, (*flags.split(), *MODELS[model]), world_size, world_size=world_size)
    assert_equal(oracle, outcomes)
