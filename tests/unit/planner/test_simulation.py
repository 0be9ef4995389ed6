"""The event simulation against the closed formulas of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo.planner.simulation import (
    BACKWARD,
    FORWARD,
    Action,
    Stage,
    Work,
    links_of,
    one_forward_one_backward,
    simulate,
)


def pipeline(stages: int, microbatches: int, forward_s: float, backward_s: float, *, slow: int = -1,
             delay_s: float = 0.0) -> float:
    """Seconds of a pipeline of equal stages, one of which may be slower."""
    def work(stage: int) -> Callable[[str, int], Work]:
        return lambda kind, _: Work((forward_s if kind == FORWARD else backward_s) + delay_s * (stage == slow))

    programs = {stage: Stage(stage, stages, microbatches, work(stage),
                             ((stage - 1,),) if stage else (), ((stage,),) if stage < stages - 1 else ()).program()
                for stage in range(stages)}
    return simulate(programs).seconds


@given(stages=st.integers(1, 8), microbatches=st.integers(1, 24), forward_s=st.floats(0.1, 3), ratio=st.floats(1, 3))
def test_a_pipeline_of_equal_stages_takes_its_passes_and_the_bubble(stages, microbatches, forward_s, ratio):
    each = forward_s * (1 + ratio)
    expected = (microbatches + stages - 1) * each
    assert pipeline(stages, microbatches, forward_s, forward_s * ratio) == pytest.approx(expected)


def test_the_slowest_stage_sets_the_pace() -> None:
    even = pipeline(3, 12, 1.0, 2.0)
    # Every microbatch waits for the slow stage twice, but for what the filling and draining hides.
    assert even + 12.0 - 1.0 <= pipeline(3, 12, 1.0, 2.0, slow=1, delay_s=0.5) <= even + 12.0


@pytest.mark.parametrize(("encoder_s", "language_s", "stages", "shares"), [
    (6.0, 5.0, 1, (0.947, 0.986, 1.0)),
    (6.0, 5.0, 2, (0.900, 0.947, 0.973, 1.0)),
    # The first and the last pass of the faster encoder cannot be hidden.
    (5.0, 7.5, 1, (0.947, 0.947)),
])
def test_an_encoder_that_runs_ahead_of_twelve_microbatches(encoder_s, language_s, stages, shares):
    for ahead, share in enumerate(shares):
        def work(stage: int) -> Callable[[str, int], Work]:
            whole = language_s if stage else encoder_s
            return lambda kind, _: Work(whole / 3 if kind == FORWARD else whole * 2 / 3)

        programs = {
            stage: Stage(stage, stages + 1, 12, work(stage), ((stage - 1,),) if stage else (),
                         ((stage,),) if stage < stages else (), run_ahead=0 if stage else ahead,
                         buffered=((0,),) if ahead and stage < 2 else ()).program()
            for stage in range(stages + 1)}
        assert 12 * max(encoder_s, language_s) / simulate(programs).seconds == pytest.approx(share, abs=5e-4)


@pytest.mark.parametrize(("ahead", "stops"), [(0, False), (1, False), (2, True)])
@pytest.mark.parametrize(("encoder_stages", "language_stages"), [(1, 1), (1, 3), (2, 2), (3, 1)])
def test_an_encoder_may_be_one_microbatch_ahead_if_senders_wait_for_receivers(
        ahead: int, stops: bool, encoder_stages: int, language_stages: int) -> None:
    stages = encoder_stages + language_stages
    programs = {stage: Stage(stage, stages, 12, lambda kind, microbatch: Work(1.0), *links_of("link", stage, stages),
                             run_ahead=ahead if stage < encoder_stages else 0).program() for stage in range(stages)}
    with pytest.raises(ValueError, match="wait for each other") if stops else nullcontext():
        simulate(programs)


def test_each_pass_occurs_once_and_backward_after_forward() -> None:
    for stage in range(4):
        order = one_forward_one_backward(stage, 4, 6, run_ahead=2 * (stage == 0))
        assert sorted(order) == sorted((kind, number) for kind in (FORWARD, BACKWARD) for number in range(6))
        assert all(order.index((FORWARD, number)) < order.index((BACKWARD, number)) for number in range(6))
    assert [kind for kind, _ in one_forward_one_backward(0, 2, 6, run_ahead=2)][:4] == [FORWARD] * 4


def test_who_waits_forever_is_named() -> None:
    with pytest.raises(ValueError, match="wait for each other"):
        simulate({"one": [Action(posts=("a",), awaits=("b",))], "two": [Action(awaits=("c",))]})


def test_a_transfer_takes_its_time() -> None:
    programs = {"one": [Action(1.0, posts=("a",))], "two": [Action(awaits=("a",)), Action(2.0, label="work")]}
    timeline = simulate(programs, lambda key: 0.5)
    assert timeline.end_s == {"one": 1.0, "two": 3.5}
    assert timeline.last == "two" and timeline.busy_s["two"]["work"] == 2.0


def test_the_host_is_at_most_one_piece_of_work_ahead_of_the_device() -> None:
    def seconds(*work: tuple[float, float]) -> float:
        return simulate({"one": [Action(own, host_s=host) for own, host in work]}).seconds

    # Launches of 1 s hide behind the work before, except for the first ones.
    assert seconds((3.0, 1.0), (3.0, 1.0), (3.0, 1.0)) == pytest.approx(9.0)
    assert seconds((0.5, 1.0), (0.5, 1.0), (0.5, 1.0)) == pytest.approx(3.0)
    # The host waits for the device to begin the long work before it launches more than the next piece.
    assert seconds((0.1, 0.0), (5.0, 0.0), (0.1, 0.0), (0.1, 4.0)) == pytest.approx(9.1)
    assert seconds((5.0, 0.0), (0.1, 4.0)) == pytest.approx(5.1)
