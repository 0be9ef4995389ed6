"""Pixels that travel in 8 bits give the training of normalised ones, to the bit, for a quarter of the bytes."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from tests.dist.test_qwen_vl import DECODER, IMAGES, TOWER_25
from tests.support.equality import Outcome, run_layout
from tests.support.global_state import assemble
from tests.support.marks import fast_only
from tests.support.spawn import WorkerPool

DATA = "tests.support.routed_data:"
# name -> ranks, flags
LAYOUTS = {
    "colocated-windows-pp2": (2, "--layout colocated --encoder-dp 2 --llm-pp 2"),
    "fan-in": (3, "--encoder-dp 2 --micro-batch-size 2"),
    "encoder-pp2": (3, "--encoder-pp 2"),
    "frozen-and-prefetched": (2, "--freeze vision --encoder-prefetch-depth 2"),
    "homogeneous-pp2": (2, "--layout homogeneous --llm-pp 2"),
    "windows-of-single-images": (
        2, "--layout colocated --encoder-dp 2 --llm-dp 2 --encoder-window 1 --encoder-chunk 1"),
    "videos-of-any-size": (2, f"{TOWER_25} {DECODER} {IMAGES} --layout colocated --encoder-dp 2 --llm-pp 2"),
}


def train(rank: int, flags: tuple[str, ...], world_size: int, dataset: str) -> tuple[Outcome, int]:
    """Train three steps; return the outcome, and the bytes of pixels that this rank sent in encoder windows."""
    from mimo.bridge.colocated import PIXELS, Exchange

    staged, sent = Exchange.staged, 0

    def count(exchange: Exchange, what: str, sends: dict[int, Any], receives: dict[int, Any]) -> None:
        nonlocal sent
        sent += sum(message.nbytes for message in sends.values()) if what == PIXELS else 0
        staged(exchange, what, sends, receives)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "staged", count)
        return run_layout(rank, ("--dataset-provider", DATA + dataset, *flags), world_size), sent


@pytest.mark.parametrize("layout", fast_only(["colocated-windows-pp2", "fan-in"], LAYOUTS))
def test_training_is_the_same_to_the_bit(pool: WorkerPool, layout: str) -> None:
    world_size, flags = LAYOUTS[layout]
    (levels, few), (floats, many) = (
        zip(*pool.run(train, tuple(flags.split()), world_size, dataset, world_size=world_size), strict=True)
        for dataset in ("levels", "normalised"))
    assert "colocated" not in flags or 4 * sum(few) == sum(many) > 0
    for one, other in zip(levels, floats, strict=True):
        assert (one.losses, one.grad_norms) == (other.losses, other.grad_norms)
    found, expected = (assemble([piece for outcome in each for piece in outcome.parameters])
                       for each in (levels, floats))
    assert found and all(np.array_equal(found[name], expected[name]) for name in expected)


def bytes_of_lanes(rank: int, world_size: int) -> dict[str, int]:
    """Return the bytes that this rank sends to others as the reader of a lane, by data set."""
    from mimo import comm
    from tests.dist.test_routed_lanes import batches_of

    sent = 0

    def count(value: Any, protocol: int) -> bytes:
        nonlocal sent
        payload = dumps(value, protocol=protocol)
        sent += len(payload)
        return payload

    dumps, found = pickle.dumps, {}
    flags = ("--encoder-dp", "2", "--micro-batch-size", "2", "--mock-image-size", "64", "--vision-image-size", "64",
             "--vision-patch-size", "32")
    for dataset in ("routed_levels", "routed_normalised"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(comm.pickle, "dumps", count)
            batches_of(rank, flags, world_size, DATA + dataset, "routed", steps=1)
        found[dataset], sent = sent, 0
    return found


def test_readers_send_a_quarter_of_the_bytes(pool: WorkerPool) -> None:
    found = pool.run(bytes_of_lanes, 3, world_size=3)
    few, many = (sum(each[name] for each in found) for name in ("routed_levels", "routed_normalised"))
    assert 0 < few < 0.27 * many, (few, many)
