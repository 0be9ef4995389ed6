"""Layouts and model options beyond the main equality test, and two ways in which ranks once fell out of step."""

from __future__ import annotations

import pytest

from tests.support.equality import MOE, Outcome, assert_equal, run_layout, run_oracle
from tests.support.spawn import WorkerPool
from tests.support.steps import trainer_of

pytestmark = pytest.mark.slow

# Every option that changes which gradients tensor-parallel ranks or pipeline stages share.
OPTIONS = ("--no-untie-embeddings-and-output-weights", "--qk-layernorm", "--add-qkv-bias", "--num-query-groups", "1",
           "--vision-patch-bias", "--vision-final-layernorm")
# name -> (ranks, flags)
LAYOUTS = {
    "tied-embeddings-llm-pp2": (3, "--llm-pp 2"),
    "encoder-tp2": (3, "--encoder-tp 2"),
    "fewer-key-heads-than-tp": (3, "--llm-tp 2"),
    "fewer-key-heads-than-tp-sequence-parallel": (3, "--llm-tp 2 --sequence-parallel"),
    "colocated-fan-in-overlapped": (
        4, "--layout colocated --encoder-dp 4 --llm-dp 2 --llm-tp 2 --micro-batch-size 3 --sequence-parallel "
        "--overlap-grad-reduce --encoder-ddp-overlap --overlap-param-gather --ddp-num-buckets 3"),
    "colocated-fan-out": (4, "--layout colocated --encoder-dp 2 --encoder-tp 2 --llm-dp 4 --micro-batch-size 3"),
    "pipelines-overlapped": (4, "--encoder-pp 2 --llm-pp 2 --overlap-grad-reduce --encoder-ddp-overlap "
                             "--overlap-param-gather --ddp-num-buckets 3"),
}
# With the default seed, two experts of a token tie in the third step, and rounding decides.
LLM_ONLY = ("--llm-only", "--encoder-lr", "none", "--projector-lr", "none", "--encoder-weight-decay", "none",
            "--mock-text-only-fraction", "1", "--seed", "99")
LLM_ONLY_LAYOUTS = {
    "pp2-dp2": ((), "--llm-pp 2 --llm-dp 2"),
    "moe-tp2-dp2-ep2-expt-tp2": (MOE, "--llm-tp 2 --llm-dp 2 --sequence-parallel --llm-ep 2 --llm-expt-tp 2"),
    # Experts are divided and the rest is not, so that their gradients have groups of their own.
    "moe-dp4-expt-tp2": (MOE, "--llm-dp 4 --llm-expt-tp 2"),
}


@pytest.fixture(scope="module")
def oracle(pool: WorkerPool) -> Outcome:
    outcome: Outcome = pool.run(run_oracle, OPTIONS, world_size=1)[0]
    return outcome


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_to_one_process(pool: WorkerPool, oracle: Outcome, layout: str) -> None:
    world_size, flags = LAYOUTS[layout]
    assert_equal(oracle, pool.run(run_layout, (*flags.split(), *OPTIONS), world_size, world_size=world_size))


@pytest.mark.parametrize("layout", LLM_ONLY_LAYOUTS)
def test_language_model_alone(pool: WorkerPool, layout: str) -> None:
    model, flags = LLM_ONLY_LAYOUTS[layout]
    single = pool.run(run_layout, (*LLM_ONLY, *model), 1, world_size=1)[0]
    assert_equal(single, pool.run(run_layout, (*flags.split(), *LLM_ONLY, *model), 4, world_size=4))


def losses_of(rank: int, flags: tuple[str, ...], world_size: int, num_steps: int
              ) -> list[tuple[float, float, int | None]]:
    """Loss, gradient norm and last microbatch's image tokens on this rank (None without encoder) of each step."""
    from mimo.training.step import train_step

    steps = []
    with trainer_of(rank, flags, world_size) as (parts, loader):
        for _ in range(num_steps):
            microbatches = loader.next_step()
            last = microbatches[-1].encoders
            result = train_step(parts, microbatches)
            steps.append((result.loss, result.grad_norm, sum(last["vision"].token_counts) if last else None))
    return steps


def test_encoder_ranks_reduce_buckets_in_one_order(pool: WorkerPool) -> None:
    # With a bucket for each parameter, the order of a backward pass is not that of the list.
    flags = "--encoder-dp 2 --micro-batch-size 2 --global-batch-size 4 --mock-text-only-fraction 0.5".split()
    overlap = "--overlap-grad-reduce --encoder-ddp-overlap --ddp-bucket-size 1".split()
    plain = pool.run(losses_of, tuple(flags), 3, 6, world_size=3)
    overlapped = pool.run(losses_of, (*flags, *overlap), 3, 6, world_size=3)
    first, second = ([bool(images) for _, _, images in steps] for steps in overlapped[:2])
    assert any(one != other for one, other in zip(first[1:], second[1:], strict=True)), "one alone has no image last"
    for ours, theirs in zip(overlapped[2], plain[2], strict=True):
        assert ours[:2] == pytest.approx(theirs[:2], rel=1e-5)


def test_encoder_pipeline_in_bf16(pool: WorkerPool) -> None:
    one_stage = pool.run(losses_of, ("--bf16",), 2, 2, world_size=2)[0]
    two_stages = pool.run(losses_of, ("--bf16", "--encoder-pp", "2"), 3, 2, world_size=3)[0]
    for ours, theirs in zip(two_stages, one_stage, strict=True):
        assert ours[:2] == pytest.approx(theirs[:2], rel=1e-3)
