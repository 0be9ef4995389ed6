from __future__ import annotations

from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo.observability.spans import Kind, ScheduleSpans, Spans
from mimo.observability.timeline import PARTS, parts_of


class StepClock:
    """A clock that advances by a second at each look."""

    def __init__(self):
        self.now = 0.0

    def start(self):
        pass

    def mark(self):
        self.now += 1.0
        return self.now

    def seconds(self, marks):
        return marks

    def lead_s(self, mark, reached_s):
        return None


def told(spans):
    return [(each.label.kind, each.label.name, each.label.module, each.label.microbatch, each.end_s - each.begin_s)
            for each in spans.intervals()]


def test_a_step_falls_apart_without_gap_or_overlap():
    spans = Spans(StepClock(), {"vision": 0, "language": 1})
    spans.begin_step()
    with spans.span(Kind.FORWARD, "forward", microbatch=3), spans.span(Kind.BRIDGE_WAIT, "gather", module="vision"):
        pass
    spans.end_step()
    assert told(spans) == [
        (Kind.OTHER, "step", "language", None, 1.0), (Kind.FORWARD, "forward", "language", 3, 1.0),
        (Kind.BRIDGE_WAIT, "gather", "vision", 3, 1.0), (Kind.FORWARD, "forward", "language", 3, 1.0),
        (Kind.OTHER, "step", "language", None, 1.0)]
    found = spans.intervals()
    assert all(one.end_s == two.begin_s for one, two in zip(found, found[1:], strict=False))


def test_a_stretch_may_go_on_as_another_module():
    spans = Spans(StepClock(), {"vision": 0, "language": 0})
    spans.begin_step()
    with spans.span(Kind.BACKWARD, "backward", microbatch=0):
        spans.switch("vision")
        spans.switch("vision")
    spans.end_step()
    assert [each[2] for each in told(spans)] == ["language", "language", "vision", "language"]


def test_nothing_is_recorded_outside_a_step_or_when_it_is_off():
    spans = Spans(StepClock(), {"language": 0})
    with spans.span(Kind.FORWARD, "evaluation"):
        pass
    assert spans.intervals() == []
    spans.enabled = False
    spans.begin_step()
    with spans.span(Kind.FORWARD, "forward"):
        spans.switch("vision")
    spans.end_step()
    assert spans.intervals() == [] and not spans.active


def test_a_second_step_forgets_the_first():
    spans = Spans(StepClock(), {"language": 0})
    for _ in range(2):
        spans.begin_step()
        with spans.span(Kind.FORWARD, "forward"):
            pass
        spans.end_step()
    assert len(spans.intervals()) == 3


def test_profilers_get_ranges_that_name_module_stage_and_microbatch():
    spans, seen = Spans(None, {"vision": 0, "language": 1}), []

    @contextmanager
    def range_of(name):
        seen.append(f"+{name}")
        yield
        seen.append(f"-{name}")

    spans.listen(range_of)
    with spans.span(Kind.FORWARD, "forward", microbatch=2), spans.span(Kind.FORWARD, "forward", module="vision"):
        spans.switch("vision")
    spans.listen()
    with spans.span(Kind.OPTIMIZER, "optimizer"):
        pass
    outer, inner = "language stage 1 forward microbatch 2", "vision stage 0 forward microbatch 2"
    assert seen == [f"+{outer}", f"+{inner}", f"-{inner}", f"-{outer}"]


STRETCHES = st.recursive(st.builds(list), lambda inner: st.lists(
    st.tuples(st.sampled_from(Kind), st.sampled_from(("vision", "language")), inner), max_size=3), max_leaves=12)


@given(STRETCHES, st.sampled_from(("vision", "language")))
def test_parts_sum_to_the_step(stretches, module):
    spans = Spans(StepClock(), {"vision": 0, "language": 0})

    def run(children):
        for kind, name, inner in children:
            with spans.span(kind, "work", module=name):
                run(inner)

    spans.begin_step()
    run(stretches)
    spans.end_step()
    intervals = spans.intervals()
    parts = parts_of(intervals, module)
    assert tuple(parts) == PARTS
    assert sum(parts.values()) == pytest.approx(intervals[-1].end_s - intervals[0].begin_s)


def test_parts_of_a_module_that_shares_its_ranks():
    spans = Spans(StepClock(), {"vision": 0, "language": 0})
    spans.begin_step()
    with spans.span(Kind.FORWARD, "forward"), spans.span(Kind.FORWARD, "forward", module="vision"):
        pass
    with spans.span(Kind.BRIDGE_WAIT, "gather", module="vision"):
        pass
    spans.end_step()
    vision, language = (parts_of(spans.intervals(), name) for name in ("vision", "language"))
    assert (vision["forward"], vision["other-modules"], vision["bridge-wait"]) == (1.0, 2.0, 1.0)
    assert (language["forward"], language["other-modules"], language["bridge-wait"]) == (2.0, 1.0, 1.0)


def one_forward_one_backward(timers):
    """Megatron Core's steady state on a middle stage, with the calls of the communicator."""
    timers("forward-recv", log_level=2).start()
    timers("forward-recv").stop()
    for _ in range(2):
        timers("forward-compute", log_level=2).start()
        timers("forward-compute").stop()
        timers("forward-send-backward-recv", log_level=2).start()
        timers("forward-send-backward-recv").stop()
        timers.begin_backward()
        timers.end_backward()
        timers("backward-send-forward-recv", log_level=2).start(barrier=False)
        timers("backward-send-forward-recv").stop()


def test_passes_and_transfers_of_the_wheels_schedule():
    spans = Spans(StepClock(), {"language": 1})
    timers = ScheduleSpans(spans)
    one_forward_one_backward(timers)  # an evaluation: nobody listens
    timers.begin(2)
    spans.begin_step()
    timers("forward-backward", log_level=1).start(barrier=True)
    one_forward_one_backward(timers)
    timers("forward-backward").stop()
    spans.end_step()
    assert [(kind, name, index) for kind, name, _, index, _ in told(spans) if kind is not Kind.OTHER] == [
        (Kind.PIPELINE_WAIT, "recv_forward", 0),
        (Kind.FORWARD, "forward", 0), (Kind.PIPELINE_WAIT, "send_forward_recv_backward", 0),
        (Kind.BACKWARD, "backward", 0), (Kind.PIPELINE_WAIT, "send_backward_recv_forward", 1),
        (Kind.FORWARD, "forward", 1), (Kind.PIPELINE_WAIT, "send_forward_recv_backward", 1),
        (Kind.BACKWARD, "backward", 1), (Kind.PIPELINE_WAIT, "send_backward_recv_forward", 2)]
