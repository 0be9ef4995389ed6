"""Messages of 1F1B behind an encoder that runs ahead, on communicators that run them in order: no rank waits for ever.

Every message is a rendezvous, as large ones of NCCL are: it ends when both ranks have come to it, and no message of a
communicator ends on a rank before those that the rank posted there earlier.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

# (name of the communicator, message); a message is the same on both sides.
Message = tuple[str, str]


@dataclass(frozen=True)
class Step:
    """Messages that a rank posts together, and whether it goes on only when they have ended."""

    messages: tuple[Message, ...]
    waits: bool = True


def encoder_steps(stages: int, num_microbatches: int, ahead: int, *, fused: bool) -> list[Step]:
    """Steps of an encoder of one stage, before a language model of `stages` stages."""
    features, gradients = ("bridge", "bridge") if fused else ("features", "gradients")
    warmup = min(stages + ahead, num_microbatches)
    steps = [Step(((features, f"f{number}"),), waits=fused) for number in range(warmup)]
    for number in range(warmup, num_microbatches):
        sends, receives = (features, f"f{number}"), (gradients, f"g{number - warmup}")
        steps += [Step((sends, receives))] if fused else [Step((sends,), waits=False), Step((receives,))]
    return steps + [Step(((gradients, f"g{number}"),)) for number in range(num_microbatches - warmup, num_microbatches)]


def stage_steps(stage: int, stages: int, num_microbatches: int, *, fused: bool) -> list[Step]:
    """Steps of a language stage, as Megatron Core's schedule makes them."""
    def before(kind: str, number: int) -> Message:
        if stage == 0:
            return ("bridge" if fused else {"f": "features", "g": "gradients"}[kind], f"{kind}{number}")
        return (f"stages {stage - 1} {stage}", f"{kind}{number}")

    def behind(kind: str, number: int) -> tuple[Message, ...]:
        return () if stage == stages - 1 else ((f"stages {stage} {stage + 1}", f"{kind}{number}"),)

    waits = fused or stage > 0  # what the first stage sends to an encoder that runs ahead is not waited for
    warmup = min(stages - 1 - stage, num_microbatches)
    steps = []
    for number in range(warmup):
        steps += [Step((before("f", number),)), Step(behind("f", number))]
    if warmup < num_microbatches:
        steps.append(Step((before("f", warmup),)))
    for number in range(warmup, num_microbatches):
        done = number - warmup
        steps.append(Step((*behind("f", number), *behind("g", done))))
        sends, receives = before("g", done), before("f", number + 1)
        if number == num_microbatches - 1:
            steps.append(Step((sends,), waits))
        elif waits:
            steps.append(Step((sends, receives)))
        else:
            steps += [Step((sends,), waits=False), Step((receives,))]
    for number in range(num_microbatches - warmup, num_microbatches):
        steps += [Step(behind("g", number)), Step((before("g", number),), waits)]
    return steps


def ends(programs: list[list[Step]]) -> bool:
    """Whether all ranks come to the end of their steps, and all messages with them."""
    position = [0] * len(programs)
    queues: list[dict[str, deque[tuple[int, str]]]] = [{} for _ in programs]
    unfinished: list[dict[int, int]] = [{} for _ in programs]
    posted = [-1] * len(programs)
    progress = True
    while progress:
        progress = False
        for rank, steps in enumerate(programs):
            while position[rank] < len(steps):
                here, step = position[rank], steps[position[rank]]
                if posted[rank] < here:
                    posted[rank] = here
                    unfinished[rank][here] = len(step.messages)
                    for communicator, message in step.messages:
                        queues[rank].setdefault(communicator, deque()).append((here, message))
                    progress = True
                if step.waits and unfinished[rank][here]:
                    break
                position[rank] += 1
                progress = True
        for one in range(len(programs)):
            for other in range(one + 1, len(programs)):
                for communicator in queues[one].keys() & queues[other].keys():
                    mine, theirs = (_first(queues[rank][communicator]) for rank in (one, other))
                    for message in mine.keys() & theirs.keys():
                        for rank, step_of in ((one, mine), (other, theirs)):
                            queues[rank][communicator].remove((step_of[message], message))
                            unfinished[rank][step_of[message]] -= 1
                        progress = True
    return all(position[rank] == len(steps) for rank, steps in enumerate(programs)) and not any(
        queue for each in queues for queue in each.values())


def _first(queue: deque[tuple[int, str]]) -> dict[str, int]:
    """Return the messages of the oldest step in a queue, which may end now."""
    return {message: step for step, message in queue if step == queue[0][0]}


def programs_of(stages: int, num_microbatches: int, ahead: int, *, fused: bool) -> list[list[Step]]:
    return [encoder_steps(stages, num_microbatches, ahead, fused=fused),
            *(stage_steps(stage, stages, num_microbatches, fused=fused) for stage in range(stages))]


@given(stages=st.integers(1, 6), num_microbatches=st.integers(1, 24), ahead=st.integers(0, 30))
def test_everybody_comes_to_the_end(stages: int, num_microbatches: int, ahead: int) -> None:
    assert ends(programs_of(stages, num_microbatches, ahead, fused=False))
    assert ends(programs_of(stages, num_microbatches, 0, fused=True))


@pytest.mark.parametrize("ahead", [2, 3])
def test_one_batch_for_both_directions_would_never_end(ahead: int) -> None:
    """Why the bridge of an encoder that runs ahead neither batches both directions nor waits for what it sends."""
    assert not ends(programs_of(1, 12, ahead, fused=True))
