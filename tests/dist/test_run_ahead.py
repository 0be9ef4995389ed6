"""--encoder-run-ahead changes when an encoder runs, and no bit of what is trained."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

from tests.support.equality import Outcome, run_layout
from tests.support.marks import fast_only
from tests.support.spawn import WorkerPool

# A hang ends here, well before the time limit of a test.
TIMEOUT_S = 100
# name -> (ranks, flags, values of the flag); 12 samples an iteration, almost half of them without images
CASES = {
    "dense": (2, "", (1, 3, 20)),
    "llm-pp2": (3, "--llm-pp 2", (2, 20)),
    "encoder-tp2-two-lanes": (4, "--encoder-tp 2 --llm-dp 2", (2, 9)),
    "encoder-tp2-llm-tp2": (4, "--encoder-tp 2 --llm-tp 2 --sequence-parallel", (3,)),
    "encoder-pp2-llm-pp2": (4, "--encoder-pp 2 --llm-pp 2", (1, 3)),
    "fan-in-overlapped": (3, "--encoder-dp 2 --micro-batch-size 2 --overlap-grad-reduce --encoder-ddp-overlap", (3,)),
    "two-lanes-overlapped": (3, "--llm-dp 2 --overlap-grad-reduce --overlap-param-gather --encoder-ddp-overlap", (2,)),
    "encoder-frozen": (2, "--freeze vision", (2,)),
    "projector-frozen": (2, "--freeze projector", (2,)),
    "encoder-and-projector-frozen": (3, "--freeze vision,projector --llm-pp 2", (2, 20)),
    "language-frozen": (2, "--freeze language", (3,)),
    "text-only": (2, "--mock-text-only-fraction 1.0", (3,)),
    "one-microbatch": (2, "--global-batch-size 1", (2,)),
    "recomputed": (2, "--encoder-recompute full --recompute full", (3,)),
}


def train_with_each(rank: int, flags: tuple[str, ...], world_size: int, values: tuple[int, ...]
                    ) -> list[tuple[Outcome, tuple[int, int], set[str]]]:
    """Train with each value of the flag.

    Returns:
        The outcome, the most microbatches of this rank in flight in the first step and in later ones, and what this
        rank waited for.
    """
    from mimo.observability.spans import ScheduleSpans
    from mimo.watchdog.watchdog import OpenWait

    found = []
    for value in values:
        in_flight, waits = [0, 0], set()
        begin_backward, enter = ScheduleSpans.begin_backward, OpenWait.__enter__

        def count(spans: Any, begin: Any = begin_backward, in_flight: list[int] = in_flight) -> None:
            later = spans._begun > 1
            in_flight[later] = max(in_flight[later], spans._forward - spans._backward)
            begin(spans)

        def note(wait: Any, enter: Any = enter, waits: set[str] = waits) -> Any:
            waits.add(wait.what)
            return enter(wait)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ScheduleSpans, "begin_backward", count)
            patch.setattr(OpenWait, "__enter__", note)
            outcome = run_layout(rank, (*flags, "--encoder-run-ahead", str(value)), world_size)
        found.append((outcome, (in_flight[0], in_flight[1]), waits))
    return found


def test_an_evaluation_does_not_load_the_kernels_of_backward_passes() -> None:
    from mimo.bridge.disjoint import Bridge

    bridge = Bridge.__new__(Bridge)
    bridge.run_ahead, bridge._is_first_step, bridge._sent = 3, True, deque()
    for forward_only, ahead in ((True, 1), (False, 3), (True, 3)):
        bridge.finish_step(forward_only=forward_only)
        assert bridge.microbatches_ahead == ahead


@pytest.mark.parametrize("case", fast_only(("llm-pp2",), CASES))
def test_no_bit_changes(pool: WorkerPool, case: str) -> None:
    world_size, flags, values = CASES[case]
    ranks = pool.run(train_with_each, tuple(flags.split()), world_size, (0, *values), world_size=world_size,
                     timeout_s=TIMEOUT_S)
    for found in ranks:
        (off, _, waits), *others = found
        assert "bridge messages on their way" not in waits
        for on, _, _ in others:
            assert (on.losses, on.grad_norms) == (off.losses, off.grad_norms)
            for mine, its in zip((*on.gradients, *on.parameters), (*off.gradients, *off.parameters), strict=True):
                assert mine.key == its.key and np.array_equal(mine.value, its.value), mine.key
    stages = int(flags.split()[flags.split().index("--llm-pp") + 1]) if "--llm-pp" in flags else 1
    microbatches = {"one-microbatch": 1}.get(case, 12 // (2 if "two-lanes" in case or "fan-in" in case else 1))
    encoder_stages = 2 if "encoder-pp2" in case else 1
    for value, (_, in_flight, _) in zip((0, *values), ranks[0], strict=True):
        # Hosts load kernels in the first step.
        assert in_flight == tuple(min(stages + encoder_stages + ahead, microbatches)
                                  for ahead in (min(value, 1), value))
    if case != "text-only":
        # Messages that were sent ahead are waited for where the watchdog sees it.
        assert any("bridge messages on their way" in waits for found in ranks for _, _, waits in found[1:])
