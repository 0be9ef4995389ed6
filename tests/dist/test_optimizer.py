"""The optimizer that finds its views of DDP's buffers once computes what Megatron Core's own class computes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.equality import MOE
from tests.support.marks import fast_only
from tests.support.resuming import Run, train
from tests.support.spawn import WorkerPool

LAYOUTS = {"experts-bf16": (3, f"--llm-dp 2 --llm-ep 2 --bf16 {' '.join(MOE)}"),
           "unclipped": (3, "--llm-dp 2 --clip-grad 1000"),
           "overlapped-bf16": (3, "--llm-dp 2 --overlap-grad-reduce --overlap-param-gather --ddp-num-buckets 3 --bf16")}


def train_with_megatrons_class(rank: int, flags: tuple[str, ...], world_size: int, until: int) -> Run:
    from mimo.training.optimizer import IndexedDistributedOptimizer

    adopt = IndexedDistributedOptimizer.adopt
    IndexedDistributedOptimizer.adopt = lambda optimizer, fuse: None
    try:
        return train(rank, flags, world_size, until)
    finally:
        IndexedDistributedOptimizer.adopt = adopt


def train_with_own_class(rank: int, flags: tuple[str, ...], world_size: int, until: int) -> Run:
    from mimo.training.optimizer import IndexedDistributedOptimizer

    look_ups = []
    look_up = IndexedDistributedOptimizer._look_up
    IndexedDistributedOptimizer._look_up = lambda self: look_ups.append(look_up(self))
    try:
        return train(rank, flags, world_size, until)
    finally:
        IndexedDistributedOptimizer._look_up = look_up
        assert look_ups, "no optimizer was of this class"


@pytest.mark.parametrize("layout", fast_only(("experts-bf16",), LAYOUTS))
def test_steps_are_those_of_megatron_core_to_the_bit(pool: WorkerPool, layout: str) -> None:
    world_size, flags = LAYOUTS[layout]
    words = tuple(flags.split())
    runs = [pool.run(worker, words, world_size, 4, world_size=world_size)
            for worker in (train_with_megatrons_class, train_with_own_class)]
    for theirs, ours in zip(*runs, strict=True):
        assert (ours.losses, ours.grad_norms) == (theirs.losses, theirs.grad_norms)
        assert ours.exact.keys() == theirs.exact.keys()
        assert not [name for name, value in theirs.exact.items() if not np.array_equal(value, ours.exact[name])]


def count_passes_over_gradients(rank: int, flags: tuple[str, ...], world_size: int) -> int:
    from megatron.core.distributed import DistributedDataParallel

    from mimo.training.step import train_step
    from tests.support.steps import trainer_of

    passes = []
    with pytest.MonkeyPatch.context() as patch, trainer_of(rank, flags, world_size) as (parts, loader):
        patch.setattr(DistributedDataParallel, "scale_gradients", lambda *arguments: passes.append(arguments))
        assert train_step(parts, loader.next_step()).success
    return len(passes)


def test_no_pass_over_all_gradients_divides_them(pool: WorkerPool) -> None:
    """Losses are divided before the backward pass. One flag multiplies an encoder's gradients after it."""
    flags = ("--llm-dp", "2")
    assert pool.run(count_passes_over_gradients, flags, 3, world_size=3) == [0, 0, 0]
    flags = (*flags, "--correct-encoder-grad-for-partial-participation")
    assert pool.run(count_passes_over_gradients, flags, 3, world_size=3) == [1, 0, 0]
