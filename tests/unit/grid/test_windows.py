"""Windows of images: who encodes which, and when, for any pipeline."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

from hypothesis import given
from hypothesis import strategies as st

from mimo.grid.windows import Image, WindowSchedule, busiest_turns, deal, deal_in_order, deal_iteration, encoding_cost
from mimo.planner.simulation import FORWARD, Action, Stage, Work, one_forward_one_backward, simulate

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


def test_replicas_with_more_to_finish_have_less_to_encode() -> None:
    schedule = WindowSchedule(1, 0, 2, 8)
    assert [schedule.turns[window] for window in (0, 2, 3, 5, 7)] == [(0, 2), (0, 4), (2, 5), (4, 7), (6, 8)]
    costs = [[1.0] * 5] * 8
    owners = deal_iteration(costs, schedule, 2, backward=1.5)
    counts = [[window.count(replica) for replica in range(2)] for window in owners]
    for window in range(5):
        # In one turn window `w` is finished and window `w + 3` encoded.
        assert counts[window] == counts[window + 3][::-1] and max(counts[window]) == 3
    # The images cost 5 * 2.5 in each of five turns, 5 in the turn that encodes alone, and 15 and 22.5 at the ends.
    mean = (5 * 12.5 + 15 + 22.5) / 2
    assert mean <= busiest_turns(costs, owners, schedule, 2, backward=1.5) <= 1.05 * mean
    in_order = [deal_in_order(each, 2) for each in costs]
    assert busiest_turns(costs, in_order, schedule, 2, backward=1.5) > 1.15 * mean
    # With nothing to finish, the surplus of an odd number goes to each replica in turn.
    assert [each[0] for each in deal_iteration([[1.0]] * 8, schedule, 2, backward=0.0)] == [0, 1] * 4


def test_images_in_order_are_equal_in_number() -> None:
    assert deal_in_order([9.0, 1.0, 1.0, 1.0], 2) == [0, 0, 1, 1]
    assert deal_in_order([], 2) == []


def test_the_cost_of_an_image_is_that_of_its_layers() -> None:
    hidden, patches = 64, 96
    image = Image(0, 0, 24, (0, 0), (patches, 588))
    linear, scores = 72 * hidden**2 * patches, 12 * hidden * patches**2
    assert abs(encoding_cost(image, hidden) - (linear + scores) / (72 * hidden**2)) < 1e-9
    assert encoding_cost(Image(0, 0, 4, (16, 16), (3, 16, 16)), hidden) == 1  # whole images are all alike
    assert encoding_cost(Image(0, 0, 9, (32, 32), (5, 3, 16, 16)), hidden) == 5  # and so are tiles


def most_held(stages: int, microbatches: int, window: int, split: bool, blocking: bool) -> list[int]:
    """Simulate 1F1B with windows, and return the most microbatches of images that each stage keeps at any time.

    Later stages send features that the first one waits for; pixels and gradients go the other way.

    Args:
        stages, microbatches: of the pipeline.
        window: microbatches of a window.
        split: whether the encoder is split over the stages, so that all of them have to be at a turn together.
        blocking: whether every sender waits for its receiver.

    Raises:
        ValueError: stages wait for each other.
    """
    programs: dict[Hashable, list[Action]] = {}
    most = []
    for number in range(stages):
        schedule = WindowSchedule(window, number, stages, microbatches, together=split)
        held, peak, spread = [0], [0], set[tuple[str, int]]()

        def message(kind: str, each: int, first: bool = number == 0, number: int = number,
                    spread: set[tuple[str, int]] = spread) -> Iterator[Action]:
            keys = tuple((kind, each, stage) for stage in (range(1, stages) if first else [number]))
            sends = first == (kind != "features")
            if (kind, each) not in spread:
                spread.add((kind, each))
                yield Action(posts=keys if sends or blocking else (), awaits=() if sends and not blocking else keys)

        def turn(windows: tuple[list[int], list[int]], held: list[int] = held, peak: list[int] = peak,
                 schedule: WindowSchedule = schedule, message: Callable[[str, int], Iterator[Action]] = message
                 ) -> Iterator[Action]:
            finished, encoded = windows
            for each in encoded if finished else ():
                yield from message("pixels", each)
            for kind, sign, chosen in (("finish", -1, finished), ("encode", 1, encoded)):
                for each in chosen:
                    yield from message("gradients" if kind == "finish" else "pixels", each)
                    held[0] += sign * len(schedule.windows[each])
                    peak[0] = max(peak[0], *held)
                    yield Action(1.0, posts=((kind, each),) if split else (), awaits=((kind, each),) if split else ())
                    if kind == "encode" and each not in schedule.sent_later:
                        yield from message("features", each)

        def at(kind: str, messages: Callable[[int], list[int]] | None,
               due: Callable[[int], tuple[list[int], list[int]]],
               take: Callable[..., Iterator[Action]] = turn,
               message: Callable[[str, int], Iterator[Action]] = message) -> Callable[[int], Iterator[Action]]:
            def actions(index: int) -> Iterator[Action]:
                for each in messages(index) if messages is not None else ():
                    yield from message(kind, each)
                yield from take(due(index))
            return actions

        # The program is made first, as it is what calls `turn`.
        start = [*(action for each in schedule.first_windows for action in message("pixels", each)),
                 *turn(([], schedule.at_start()))]
        passes = Stage(number, stages, microbatches, lambda kind, index: Work(1.0), ((number - 1,),) if number else (),
                       ((number,),) if number < stages - 1 else (),
                       before_forward=at("features", schedule.sends_before, schedule.before),
                       after_forward=at("features", schedule.sends_after, schedule.after),
                       after_backward=at("gradients", schedule.takes_after_backward, schedule.after_backward),
                       before_backward=at("", None, schedule.before_backward)).program()
        programs[number] = [*start, *passes, *turn((schedule.at_end(), []))]
        assert held == [0]
        assert spread == {(kind, each) for kind in ("pixels", "features", "gradients")
                          for each in range(len(schedule.windows))}
        most += peak
    simulate(programs)
    return most


@given(stages=st.integers(1, 8), microbatches=st.integers(1, 32), split=st.booleans(), blocking=st.booleans(),
       data=st.data())
def test_no_stage_waits_forever_and_none_keeps_more_than_it_says(stages, microbatches, split, blocking, data):
    window = data.draw(st.integers(1, microbatches))
    for kept in most_held(stages, microbatches, window, split, blocking):
        assert kept <= (window if stages == 1 else stages + 2 * window - 1)


@given(size=st.integers(1, 9), microbatches=st.integers(1, 20), stages=st.integers(1, 6), forward_only=st.booleans(),
       together=st.booleans())
def test_every_window_is_encoded_and_finished_once_on_every_stage(size, microbatches, stages, forward_only, together):
    for stage in range(stages):
        schedule = WindowSchedule(size, stage, stages, microbatches, forward_only, together)
        turns = []
        for kind, index in ([(FORWARD, index) for index in range(microbatches)] if forward_only
                            else one_forward_one_backward(stage, stages, microbatches)):
            if kind == FORWARD:
                turns += [schedule.before(index), schedule.after(index)]
            else:
                # Before the others, the gradient is received together with the last output's transfer.
                drains = index >= microbatches - min(stages - 1 - stage, microbatches)
                turns += [schedule.before_backward(index) if drains else ([], []), schedule.after_backward(index)]
        encoded = schedule.at_start() + [window for _, windows in turns for window in windows]
        finished = [window for windows, _ in turns for window in windows] + schedule.at_end()
        assert encoded == finished == list(range(len(schedule.windows)))
        ready = set(schedule.at_start())
        for forward in range(microbatches):
            ready.update(schedule.before(forward)[1])
            assert stage or schedule.window_of[forward] in ready, "the first stage has the features of each pass"
            ready.update(schedule.after(forward)[1])
