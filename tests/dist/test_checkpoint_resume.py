"""A run that goes on from a checkpoint is the run that was not interrupted: to the bit on the same layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.equality import MOE
from tests.support.resuming import assert_same_bits, train
from tests.support.spawn import WorkerPool

DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
# name -> (ranks, flags, flags of the run that saves)
SAME_LAYOUT = {
    "disjoint-llm-dp2": (3, "--llm-dp 2", ""),
    "colocated-bf16": (2, "--layout colocated --encoder-dp 2 --llm-tp 2 --micro-batch-size 2 --sequence-parallel "
                       "--bf16", "--async-save"),
    "pp2": (4, "--encoder-pp 2 --llm-pp 2 --bf16", "--async-save"),
    "tp2": (4, "--encoder-tp 2 --llm-tp 2 --no-use-distributed-optimizer", ""),
    "moe-ep2-bf16": (3, f"--llm-dp 2 --llm-ep 2 --bf16 {' '.join(MOE)}", ""),
    "unsharded-optimizer-bf16": (3, "--encoder-dp 2 --micro-batch-size 2 --no-use-distributed-optimizer --bf16", ""),
    "overlapped": (3, "--llm-dp 2 --overlap-grad-reduce --overlap-param-gather --ddp-num-buckets 3", "--async-save"),
}


@pytest.mark.parametrize("layout", SAME_LAYOUT)
def test_same_layout_continues_to_the_bit(pool: WorkerPool, tmp_path: Path, layout: str) -> None:
    world_size, flags, saving = SAME_LAYOUT[layout]
    flags = (*flags.split(), *DROPOUT)
    whole = pool.run(train, (*flags, *saving.split(), "--save", str(tmp_path)), world_size, world_size=world_size)
    rest = pool.run(train, (*flags, "--load", str(tmp_path)), world_size, world_size=world_size)
    assert_same_bits(whole, rest)
