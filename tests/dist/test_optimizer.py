"""The optimizer that finds its views of DDP's buffers once computes what Megatron Core's own class computes."""

from __future__ import annotations

from functools import partial, partialmethod
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.equality import MOE
from tests.support.marks import fast_only
from tests.support.resuming import Run, train
from tests.support.spawn import WorkerPool
from tests.support.steps import trainer_of

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


def waits_before_an_update(rank: int, flags: tuple[str, ...],
                           world_size: int) -> tuple[list[str], list[list[float]]]:
    """Return the calls after the passes that would make the host wait for a GPU, and the norms in both ways."""
    from megatron.core.optimizer import optimizer as megatron

    from mimo.training import step
    from mimo.training.optimizer import HeteroOptimizer

    waits: list[str] = []
    prepared: list[list[float]] = []
    run_schedule, prepare, norm_of = step.run_schedule, HeteroOptimizer.prepare, megatron.get_grad_norm_fp32

    def record(patch: pytest.MonkeyPatch, device: torch.device, *names: str) -> None:
        def call(name: str, original: Any, tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            if name != "to" or (device in arguments and not options.get("non_blocking")):
                waits.append(name)
            return original(tensor, *arguments, **options)

        for name in names:
            patch.setattr(torch.Tensor, name, partialmethod(partial(call, name, getattr(torch.Tensor, name))))

    with pytest.MonkeyPatch.context() as patch, trainer_of(rank, flags, world_size) as (parts, loader):
        device = parts.platform.device

        def norm_on_device(*arguments: Any, **options: Any) -> torch.Tensor:
            """Leave the norm in a tensor, as with Transformer Engine. Its kernels do not wait; those of a CPU do."""
            known = len(waits)
            norm = norm_of(*arguments, **options)
            del waits[known:]
            return torch.tensor([norm])

        def prepare_twice(optimizer: HeteroOptimizer) -> None:
            prepare(optimizer)
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(megatron, "get_grad_norm_fp32", norm_on_device)
                prepared.append(optimizer._prepared.tolist())
                record(inner, device, "item", "tolist", "cpu", "__bool__", "__float__")
                prepare(optimizer)
            prepared.append(optimizer._prepared.tolist())

        def run_and_record(*arguments: Any, **options: Any) -> Any:
            reports = run_schedule(*arguments, **options)
            record(patch, device, "to")
            return reports

        patch.setattr(HeteroOptimizer, "prepare", prepare_twice)
        patch.setattr(step, "run_schedule", run_and_record)
        assert step.train_step(parts, loader.next_step()).success
    return waits, prepared


def test_the_host_finds_gradients_and_norms_without_waiting_for_a_gpu(pool: WorkerPool) -> None:
    flags = ("--llm-dp", "2", "--llm-ep", "2", "--bf16", *MOE)
    for waits, (on_host, on_device) in pool.run(waits_before_an_update, flags, 3, world_size=3):
        assert waits == []
        assert on_device == pytest.approx(on_host, rel=1e-6) and max(on_host[:-1]) > 0
