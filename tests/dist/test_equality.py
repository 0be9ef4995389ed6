"""The project's main test: the same model and batch give the same loss, gradients and step on every layout."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.support.equality import DENSE, MOE, TOLERANCE, Outcome, assert_equal, run_layout, run_oracle
from tests.support.marks import fast_only
from tests.support.spawn import WorkerPool
from tests.support.steps import run_loop

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
    "colocated-llm-pp2": (2, "--layout colocated --encoder-dp 2 --llm-pp 2"),
    "colocated-llm-pp2-window1": (2, "--layout colocated --encoder-dp 2 --llm-pp 2 --encoder-window 1"),
    "colocated-llm-pp2-iteration-chunks": (
        2, "--layout colocated --encoder-dp 2 --llm-pp 2 --encoder-window 0 --encoder-chunk 4"),
    "colocated-llm-pp2-in-order": (
        2, "--layout colocated --encoder-dp 2 --llm-pp 2 --encoder-window 3 --no-encoder-balance"),
    "colocated-encoder-tp2-llm-pp2": (2, "--layout colocated --encoder-tp 2 --llm-pp 2"),
    "colocated-encoder-dp4-llm-tp2-pp2": (
        4, "--layout colocated --encoder-dp 4 --llm-tp 2 --llm-pp 2 --sequence-parallel"),
    "colocated-encoder-tp2-dp2-llm-dp2-pp2": (
        4, "--layout colocated --encoder-tp 2 --encoder-dp 2 --llm-dp 2 --llm-pp 2"),
    "colocated-llm-ep2-pp2": (
        4, "--layout colocated --encoder-dp 4 --llm-dp 2 --llm-ep 2 --llm-pp 2 --overlap-grad-reduce"),
    "colocated-windows-llm-tp2": (
        2, "--layout colocated --encoder-dp 2 --llm-tp 2 --sequence-parallel --encoder-window 3"),
    "colocated-windows-llm-dp2-overlap": (
        2, "--layout colocated --encoder-dp 2 --llm-dp 2 --encoder-window 2 --overlap-grad-reduce "
           "--overlap-param-gather"),
    "homogeneous-dp2-pp2-overlap": (4, "--layout homogeneous --llm-dp 2 --llm-pp 2 --overlap-grad-reduce"),
    "homogeneous-pp2": (2, "--layout homogeneous --llm-pp 2 --encoder-recompute full"),
    "homogeneous-tp2-pp2-overlap": (
        4, "--layout homogeneous --llm-tp 2 --llm-pp 2 --sequence-parallel --overlap-grad-reduce"),
    "homogeneous-dp2-pp2": (4, "--layout homogeneous --llm-dp 2 --llm-pp 2"),
    "overlapped-gradient-reduction": (
        3, "--encoder-dp 2 --micro-batch-size 2 --overlap-grad-reduce --encoder-ddp-overlap --ddp-num-buckets 3"),
    "overlapped-parameter-gather": (
        3, "--llm-dp 2 --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 5000"),
    "llm-ep2-allgather": (3, "--llm-dp 2 --llm-ep 2 --moe-token-dispatcher-type allgather"),
    "llm-ep2-tp2-allgather": (
        4, "--layout colocated --encoder-dp 4 --llm-tp 2 --llm-dp 2 --llm-ep 2 --sequence-parallel "
           "--micro-batch-size 2 --moe-token-dispatcher-type allgather"),
    "llm-ep2-pp2-allgather": (
        4, "--layout colocated --encoder-dp 4 --llm-dp 2 --llm-ep 2 --llm-pp 2 --moe-token-dispatcher-type allgather"),
    "recomputed-activations": (3, "--llm-tp 2 --sequence-parallel --recompute full"),
    "unsharded-optimizer": (3, "--llm-dp 2 --no-use-distributed-optimizer"),
    "llm-cp2": (3, "--llm-cp 2"),
    "encoder-tp2-llm-cp2": (4, "--encoder-tp 2 --llm-cp 2 --recompute full"),
    "encoder-dp2-llm-cp2": (4, "--encoder-dp 2 --micro-batch-size 2 --llm-cp 2 --encoder-run-ahead 1"),
    "llm-cp2-unsharded-optimizer": (3, "--llm-cp 2 --no-use-distributed-optimizer"),
    "colocated-llm-cp2": (2, "--layout colocated --encoder-dp 2 --llm-cp 2"),
    "colocated-llm-cp2-tp2": (4, "--layout colocated --encoder-dp 4 --llm-cp 2 --llm-tp 2 --sequence-parallel "
                                  "--logits-chunk-size 12"),
    "colocated-encoder-tp2-dp2-llm-cp2-dp2": (
        4, "--layout colocated --encoder-tp 2 --encoder-dp 2 --llm-cp 2 --llm-dp 2 --encoder-window 1 "
           "--overlap-grad-reduce --overlap-param-gather --logits-chunk-size 3"),
    "colocated-llm-cp2-pp2": (4, "--layout colocated --encoder-dp 4 --llm-cp 2 --llm-pp 2"),
    "colocated-llm-cp2-ep2": (2, "--layout colocated --encoder-dp 2 --llm-cp 2 --llm-ep 2"),
    "colocated-llm-cp2-dp2-ep4": (4, "--layout colocated --encoder-dp 4 --llm-cp 2 --llm-dp 2 --llm-ep 4"),
    "colocated-llm-cp2-tp2-ep2-expert-tp2": (
        4, "--layout colocated --encoder-dp 4 --llm-cp 2 --llm-tp 2 --sequence-parallel --llm-ep 2 --llm-expt-tp 2 "
           "--micro-batch-size 2"),
    "homogeneous-cp2": (2, "--layout homogeneous --llm-cp 2"),
    "homogeneous-cp2-tp2": (4, "--layout homogeneous --llm-cp 2 --llm-tp 2 --sequence-parallel"),
    "homogeneous-cp4": (4, "--layout homogeneous --llm-cp 4 --micro-batch-size 2"),
    "homogeneous-cp2-pp2": (
        4, "--layout homogeneous --llm-cp 2 --llm-pp 2 --micro-batch-size 3 --logits-chunk-size 20"),
    "tp2-logits-by-9": (3, "--llm-tp 2 --logits-chunk-size 9"),
    "graphs-llm-tp2": (3, "--llm-tp 2 --sequence-parallel --cuda-graphs"),
    "graphs-llm-tp2-recomputed": (
        3, "--llm-tp 2 --sequence-parallel --cuda-graphs --recompute full --recompute-num-layers 1"),
    "graphs-llm-dp2-overlap": (
        3, "--llm-dp 2 --cuda-graphs --overlap-grad-reduce --overlap-param-gather --ddp-num-buckets 3"),
    "graphs-llm-ep2": (3, "--llm-dp 2 --llm-ep 2 --cuda-graphs"),
    "graphs-llm-ep2-pp2-overlap": (
        4, "--layout colocated --encoder-dp 4 --llm-dp 2 --llm-ep 2 --llm-pp 2 --cuda-graphs --overlap-grad-reduce"),
    "graphs-windows-llm-tp2-pp2-overlap": (
        4, "--layout colocated --encoder-dp 4 --llm-tp 2 --llm-pp 2 --sequence-parallel --cuda-graphs "
           "--overlap-grad-reduce"),
}
MODELS = {"dense": DENSE, "moe": MOE}
FAST = [("dense", "encoder-dp1-llm-dp2"), ("dense", "encoder-tp2-llm-tp2"), ("dense", "colocated-encoder-dp2-llm-tp2"),
        ("dense", "colocated-llm-pp2"), ("dense", "homogeneous-pp2"), ("dense", "encoder-tp2-llm-cp2"),
        ("dense", "colocated-llm-cp2-tp2"), ("moe", "encoder-pp2-llm-pp2"),
        ("moe", "llm-ep2"), ("moe", "colocated-llm-ep2-pp2")]


@pytest.fixture(scope="module")
def oracles(pool: WorkerPool) -> dict[str, Outcome]:
    return {name: pool.run(run_oracle, flags, world_size=1)[0] for name, flags in MODELS.items()}


def test_the_batch_is_mixed(oracles: dict[str, Outcome]) -> None:
    for outcome in oracles.values():
        assert outcome.batch_facts["text_only"] >= 2, "text-only microbatches"
        assert outcome.batch_facts["different_images"] >= 3, "samples differ in image tokens"
        assert outcome.batch_facts["different_targets"] >= 4, "samples differ in target tokens"
        assert min(outcome.grad_norms) > 0.5, "clipping is active"


@pytest.mark.parametrize(("model", "layout"), fast_only(FAST, itertools.product(MODELS, LAYOUTS)))
def test_equal_to_one_process(pool: WorkerPool, oracles: dict[str, Outcome], model: str, layout: str) -> None:
    world_size, flags = LAYOUTS[layout]
    if model == "dense" and "--llm-ep" in flags:
        pytest.skip("a dense model has no experts to split")
    if model == "moe" and "--llm-tp" in flags and "--sequence-parallel" not in flags:
        pytest.skip("experts with tensor parallelism need sequence parallelism")
    oracle = oracles[model]
    outcomes = pool.run(run_layout, (*flags.split(), *MODELS[model]), world_size, world_size=world_size)
    assert_equal(oracle, outcomes)


def run_with_waiting_senders(rank: int, flags: tuple[str, ...], world_size: int) -> Outcome:
    """Train with encoder windows whose messages are too large for any buffer, so that senders wait for receivers."""
    from mimo.bridge.colocated import Exchange

    post = Exchange._post

    def post_and_wait(*args: Any) -> list[Any]:
        for work in post(*args):
            work.wait()
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "_post", post_and_wait)
        return run_layout(rank, flags, world_size)


@pytest.mark.parametrize(("world_size", "flags"), [
    (2, "--encoder-dp 2 --llm-pp 2 --encoder-window 1"),
    pytest.param(4, "--encoder-dp 4 --llm-pp 4 --encoder-window 2 --num-layers 4", marks=pytest.mark.slow),
])
def test_senders_may_wait_for_receivers(pool, oracles, world_size, flags):
    outcomes = pool.run(run_with_waiting_senders, ("--layout", "colocated", *flags.split()), world_size,
                        world_size=world_size)
    if world_size == 2:
        assert_equal(oracles["dense"], outcomes)


def imbalances(rank: int, flags: tuple[str, ...], run_dir: str) -> list[tuple[float, float]]:
    """Train with encoder windows; return the imbalance of each step, and what it would be with images in order."""
    records = run_loop(rank, ("--layout", "colocated", "--encoder-dp", "2", "--llm-pp", "2", *flags), 2, run_dir)
    return [(record.encoder_imbalance, record.encoder_imbalance_unbalanced) for record in records]


def test_balancing_lowers_the_imbalance_that_a_run_reports(pool: WorkerPool, tmp_path: Path) -> None:
    (balanced, same), (in_order, _) = (
        pool.run(imbalances, flags, str(tmp_path / name), world_size=2)
        for name, flags in (("balanced", ("--encoder-window", "0")),
                            ("in-order", ("--encoder-window", "0", "--no-encoder-balance"))))
    assert balanced == same and len(balanced) == 3
    assert [would_be for _, would_be in balanced] == [actual for actual, _ in in_order]
    assert all(1 <= actual <= would_be for actual, would_be in balanced)


EXPERTS = f"{' '.join(MOE)} --moe-aux-loss-coeff 1"
ROW_LAYOUTS = {
    "pp2": (3, "--llm-pp 2 --micro-batch-size 2"),
    # Microbatches are in order of their lengths, unless all rows have --seq-length tokens.
    "cp2-pp2": (4, "--layout colocated --encoder-dp 4 --llm-cp 2 --llm-pp 2 --encoder-window 1 --microbatch-order "
                   "lengths"),
    # Lanes whose rows differ in length exchange tokens.
    "ep2-pp2": (4, f"{EXPERTS} --layout homogeneous --llm-pp 2 --llm-dp 2 --llm-ep 2 --microbatch-order lengths"),
    "two-samples-tp2-ep2": (2, f"{EXPERTS} --layout homogeneous --llm-tp 2 --llm-ep 2 --sequence-parallel "
                               "--micro-batch-size 2"),
    "microbatches-are-balanced": (2, f"{EXPERTS} --layout colocated --encoder-dp 2 --llm-cp 2 --micro-batch-size 2 "
                                     "--moe-router-load-balancing-type aux_loss"),
    "steps-are-balanced": (2, f"{EXPERTS} --layout homogeneous --llm-dp 2 --micro-batch-size 2 "
                              "--moe-router-load-balancing-type global_aux_loss"),
}


def losses_by_row_length(rank: int, world_size: int, flags: tuple[str, ...], run_dir: str
                         ) -> list[tuple[float, float | None, float]]:
    """Train; return loss, gradient norm and the share of tokens that is not padding of each step."""
    records = run_loop(rank, flags, world_size, run_dir)
    return [(record.lm_loss, record.grad_norm, record.packing_utilisation) for record in records]


@pytest.mark.parametrize("layout", [
    pytest.param(name, marks=pytest.mark.slow if name in ("two-samples-tp2-ep2", "steps-are-balanced") else ())
    for name in ROW_LAYOUTS])
def test_rows_may_have_any_length(pool: WorkerPool, layout: str, tmp_path: Path) -> None:
    ranks, flags = ROW_LAYOUTS[layout]
    whole, few, many = (
        pool.run(losses_by_row_length, ranks, (*flags.split(), "--row-lengths", lengths), str(tmp_path / lengths),
                 world_size=ranks)[-1] for lengths in ("1", "2", "64"))
    for step, (loss, grad_norm, used) in enumerate(whole):
        for other in (few, many):
            assert other[step][:2] == pytest.approx((loss, grad_norm), rel=1e-5)
        assert 0 < used < few[step][2] < many[step][2] < 1


# Losses of load balancing: the gradient of one process is that of a layout with the same --micro-batch-size.
BALANCING = {
    "seq_aux_loss": {"two-lanes": True, "two-samples": True, "two-lanes-of-two-samples": True, "cp2": True},
    "aux_loss": {"cp2": True, "two-lanes": True, "two-samples": False, "two-lanes-of-two-samples": False},
    "global_aux_loss": {"cp2": True, "two-lanes": False, "two-samples": False, "two-lanes-of-two-samples": False},
}
BALANCING_LAYOUTS = {"two-lanes": (2, "--encoder-dp 2 --llm-dp 2"), "two-samples": (1, "--micro-batch-size 2"),
                     "cp2": (2, "--encoder-dp 2 --llm-cp 2"),
                     "two-lanes-of-two-samples": (2, "--encoder-dp 2 --llm-dp 2 --micro-batch-size 2")}


def balanced_run(rank: int, kind: str, world_size: int, flags: tuple[str, ...], run_dir: str
                 ) -> tuple[list[float], list[str]]:
    """Train a mixture of experts in a colocated layout; return its gradient norms and the lines of its log."""
    from mimo.observability.metrics import RunLogger

    lines: list[str] = []
    given = ("--layout", "colocated", *MOE, "--moe-aux-loss-coeff", "1", "--moe-router-load-balancing-type", kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunLogger, "message", lambda logger, text: lines.append(text))
        records = run_loop(rank, (*given, *flags), world_size, run_dir)
    return [record.grad_norm for record in records], lines


@pytest.mark.slow
@pytest.mark.parametrize("kind", BALANCING)
def test_a_run_says_whose_load_balancing_depends_on_the_layout(pool: WorkerPool, kind: str, tmp_path: Path) -> None:
    ((alone, lines),) = pool.run(balanced_run, kind, 1, (), str(tmp_path / "alone"), world_size=1)
    notes = [line for line in lines if line.startswith(f"--moe-router-load-balancing-type {kind} balances the load of")]
    assert len(notes) == (kind != "seq_aux_loss")
    assert all("depend on --micro-batch-size" in note and "--llm-dp" in note for note in notes)
    for layout, is_equal in BALANCING[kind].items():
        world_size, flags = BALANCING_LAYOUTS[layout]
        found = pool.run(balanced_run, kind, world_size, tuple(flags.split()), str(tmp_path / layout),
                         world_size=world_size)
        assert (found[0][0][0] == pytest.approx(alone[0], rel=TOLERANCE)) == is_equal, layout
