"""Windows of images: who encodes which, and when, for any pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from mimo.grid.windows import Image, WindowSchedule, deal, deal_in_order, encoding_cost

COSTS = st.lists(st.floats(0.1, 100.0), max_size=60)


@given(costs=COSTS, replicas=st.integers(1, 8))
def test_no_replica_has_more_than_four_thirds_of_the_best_load(costs: list[float], replicas: int) -> None:
    loads = [0.0] * replicas
    owners = deal(costs, loads)
    assert len(owners) == len(costs)
    for replica in range(replicas):
        assert abs(sum(c for c, owner in zip(costs, owners, strict=True) if owner == replica) - loads[replica]) < 1e-9
    # No split is better than the mean or than the largest image alone.
    best = max(sum(costs) / replicas, max(costs, default=0.0))
    # Of `replicas + 1` images two share a replica, so no split is better than the two smallest of the largest.
    largest = sorted(costs, reverse=True)
    if len(costs) > replicas:
        best = max(best, largest[replicas - 1] + largest[replicas])
    assert max(loads) <= (4 / 3 - 1 / (3 * replicas)) * best * (1 + 1e-9) or len(costs) > 2 * replicas
    assert max(loads) <= sum(costs) / replicas + max(costs, default=0.0) + 1e-9


def test_earlier_windows_decide_between_equals_alone() -> None:
    totals = [10.0, 0.0]
    assert deal([5.0, 5.0, 4.0], totals) == [1, 0, 1]
    assert totals == [15.0, 9.0]
    # The surplus of an odd number goes to each replica in turn.
    totals = [0.0, 0.0]
    assert [deal([1.0], totals) for _ in range(4)] == [[0], [1], [0], [1]]


def test_images_in_order_are_equal_in_number() -> None:
    loads = [0.0, 0.0]
    assert deal_in_order([9.0, 1.0, 1.0, 1.0], loads) == [0, 0, 1, 1]
    assert loads == [10.0, 2.0]
    assert deal_in_order([], loads) == []


def test_the_cost_of_an_image_is_that_of_its_layers() -> None:
    hidden, patches = 64, 96
    image = Image(0, 0, 24, (0, 0), (patches, 588))
    linear, scores = 72 * hidden**2 * patches, 12 * hidden * patches**2
    assert abs(encoding_cost(image, hidden) - (linear + scores) / (72 * hidden**2)) < 1e-9
    assert encoding_cost(Image(0, 0, 4, (16, 16), (3, 16, 16)), hidden) < 2  # whole images are all alike


@dataclass
class Stage:
    """One rank of the pipeline, as `Simulation` runs it.

    Attributes:
        steps: what it waits for next; each a list of messages that have to be posted by both of their ends.
        held: microbatches whose images it has encoded and not finished.
        most_held: largest number of them at any time.
    """

    steps: Iterator[list[tuple[object, ...]]]
    held: int = 0
    most_held: int = 0
    waiting: list[tuple[object, ...]] = field(default_factory=list)


class Simulation:
    """Megatron Core's 1F1B with windows: which rank waits for which message.

    A message between neighbours is through when both have posted it. Features are posted by a later stage and waited
    for by the first; pixels and gradients the other way round.
    """

    def __init__(self, stages: int, microbatches: int, window: int, split: bool) -> None:
        self.posted: set[tuple[object, ...]] = set()
        self.num_stages, self.num_microbatches, self.window, self.split = stages, microbatches, window, split
        self.stages = [Stage(iter(())) for _ in range(stages)]
        for number, stage in enumerate(self.stages):
            stage.steps = self._steps(number, stage)

    def _turn(self, number: int, stage: Stage, schedule: WindowSchedule, finished: list[int],
              encoded: list[int]) -> Iterator[list[tuple[object, ...]]]:
        """Take a turn; where the encoder is split over the stages, all of them have to be at it."""
        for kind, window in [*(("finish", window) for window in finished), *(("encode", window) for window in encoded)]:
            members = len(schedule.microbatches(window))
            stage.held += members if kind == "encode" else -members
            stage.most_held = max(stage.most_held, stage.held)
            if kind == "encode" and number:
                yield [("pixels", window)]
            elif kind == "encode":
                self.posted.add(("pixels", window))
            self.posted.add((kind, window, number))
            if self.split:
                yield [(kind, window, other) for other in range(self.num_stages)]
            elif kind == "encode" and not number:
                yield [(kind, window, other) for other in range(self.num_stages)]
            elif kind == "finish" and number:
                yield [(kind, window, 0)]

    def _steps(self, number: int, stage: Stage) -> Iterator[list[tuple[object, ...]]]:
        schedule = WindowSchedule(self.window, number, self.num_stages, self.num_microbatches)
        first, last = number == 0, number == self.num_stages - 1
        total, warm_up = self.num_microbatches, min(self.num_stages - number - 1, self.num_microbatches)

        def message(kind: str, index: int, to: int) -> list[tuple[object, ...]]:
            """Post a transfer between `to` and the stage before it, and return what it waits for."""
            sender = (kind, index, to, "upper" if to == number else "lower")
            self.posted.add(sender)
            return [(kind, index, to, "lower" if to == number else "upper")]

        def received(index: int) -> list[tuple[object, ...]]:
            return [] if first else message("forward", index, number)

        def sent(index: int) -> list[tuple[object, ...]]:
            return [] if last else message("forward", index, number + 1)

        def gradient_received(index: int) -> list[tuple[object, ...]]:
            return [] if last else message("backward", index, number + 1)

        def gradient_sent(index: int) -> list[tuple[object, ...]]:
            return [] if first else message("backward", index, number)

        yield from self._turn(number, stage, schedule, [], schedule.at_start())
        for index in range(warm_up):
            yield received(index)
            yield from self._turn(number, stage, schedule, *schedule.before(index))
            yield from self._turn(number, stage, schedule, *schedule.after(index))
            yield sent(index)
        if warm_up < total:
            yield received(warm_up)
        for index in range(warm_up, total):
            yield from self._turn(number, stage, schedule, *schedule.before(index))
            yield from self._turn(number, stage, schedule, *schedule.after(index))
            yield sent(index) + gradient_received(index - warm_up)
            yield from self._turn(number, stage, schedule, *schedule.after_backward(index - warm_up))
            yield gradient_sent(index - warm_up) + (received(index + 1) if index + 1 < total else [])
        for index in range(total - warm_up, total):
            yield gradient_received(index)
            yield from self._turn(number, stage, schedule, *schedule.after_backward(index))
            yield gradient_sent(index)
        yield from self._turn(number, stage, schedule, schedule.at_end(), [])

    def run(self) -> bool:
        """Run until nothing moves; return whether all ranks are through."""
        done = [False] * self.num_stages
        moved = True
        while moved:
            moved = False
            for number, stage in enumerate(self.stages):
                while not done[number] and all(message in self.posted for message in stage.waiting):
                    moved = True
                    try:
                        stage.waiting = next(stage.steps)
                    except StopIteration:
                        done[number] = True
        return all(done)


@given(stages=st.integers(1, 8), microbatches=st.integers(1, 32), split=st.booleans(), data=st.data())
def test_no_stage_waits_forever_and_none_keeps_more_than_it_says(stages: int, microbatches: int, split: bool,
                                                                 data: st.DataObject) -> None:
    window = data.draw(st.integers(1, microbatches))
    simulation = Simulation(stages, microbatches, window, split)
    assert simulation.run(), (stages, microbatches, window)
    for stage in simulation.stages:
        assert stage.held == 0
        assert stage.most_held <= stages + 2 * (window - 1) + (stages > 1)


@given(size=st.integers(1, 9), microbatches=st.integers(1, 20), stages=st.integers(1, 6), forward_only=st.booleans())
def test_every_window_is_encoded_and_finished_once_on_every_stage(size: int, microbatches: int, stages: int,
                                                                  forward_only: bool) -> None:
    for stage in range(stages):
        schedule = WindowSchedule(size, stage, stages, microbatches, forward_only)
        backward = [] if forward_only else [schedule.after_backward]
        turns = [turn(index) for index in range(microbatches) for turn in (schedule.before, schedule.after, *backward)]
        encoded = schedule.at_start() + [window for _, windows in turns for window in windows]
        finished = [window for windows, _ in turns for window in windows] + schedule.at_end()
        assert encoded == finished == list(range(schedule.num_windows))
        ready = set(schedule.at_start())
        for forward in range(microbatches):
            ready.update(schedule.before(forward)[1])
            assert stage or forward // size in ready, "the first stage has the features of each forward pass"
            ready.update(schedule.after(forward)[1])
