from __future__ import annotations

import itertools
import json
import os
import signal

import pytest

from mimo.config.trainer import ObserveConfig
from mimo.config.validate import check_device, check_observe
from mimo.grid.spec import GridSpec, Layout
from mimo.observability.clock import DeviceClock
from mimo.observability.profiler import StepProfiler
from mimo.observability.spans import Interval, Kind, Label, Spans
from mimo.observability.timeline import Timeline, TimelineSignal, chrome_trace
from tests.support.report_runs import interval, timeline

DISJOINT = Layout("disjoint", 3, (GridSpec("vision"),), GridSpec("language", offset=1, dp=2))


def step_of(module, busy_s, wait_s):
    forward, wait = Label(Kind.FORWARD, "forward", module, 0), Label(Kind.BRIDGE_WAIT, "recv_forward", module, 0)
    end = 5.0 + wait_s
    return [Interval(wait, 5.0, end), Interval(forward, end, end + busy_s - 0.25, 0.2),
            Interval(forward, end + busy_s - 0.25, end + busy_s, 1e-4)]


def test_figures_are_mean_and_maximum_over_the_ranks_of_a_module():
    steps = [step_of("vision", 3.0, 1.0), step_of("language", 1.0, 3.0), step_of("language", 2.0, 2.0)]
    timelines = [Timeline(DISJOINT, rank, reports_lane=rank > 0, has_device=True) for rank in range(3)]
    rows = [timeline.own(step, []) for timeline, step in zip(timelines, steps, strict=True)]
    largest, summed = [max(each) for each in zip(*rows, strict=True)], [sum(each) for each in zip(*rows, strict=True)]
    figures = timelines[0].figures(largest, summed)
    assert figures["vision/forward-s"] == figures["vision/forward-max-s"] == 3.0
    assert (figures["language/forward-s"], figures["language/forward-max-s"]) == (1.5, 2.0)
    assert (figures["language/bridge-wait-s"], figures["language/bridge-wait-max-s"]) == (2.5, 3.0)
    assert figures["language/step-s"] == figures["language/step-max-s"] == 4.0
    assert figures["language/host-bound-s"] == 0.25, "the last part of each pass, before which the device had caught up"
    assert "language/other-modules-s" not in figures, "these grids share no ranks"
    assert all(other.figures(largest, summed) == figures for other in timelines)


def check_trace(trace, document):
    """Compare a trace, rule by rule of the format, with the document that it was made from."""
    names = {"process_name": {}, "thread_name": {}, "thread_sort_index": {}}
    slices = []
    for event in trace["traceEvents"]:
        assert event["pid"] >= 1 and isinstance(event["tid"], int)
        if event["ph"] == "M":
            [value] = event["args"].values()
            thread = event["pid"] if event["name"] == "process_name" else (event["pid"], event["tid"])
            names[event["name"]][thread] = value
        else:
            assert event["ph"] == "X" and event["ts"] >= 0 and event["dur"] > 0 and event["name"] and event["cat"]
            slices.append(event)
    assert names["thread_name"].keys() == names["thread_sort_index"].keys()
    assert {(event["pid"], event["tid"]) for event in slices} <= names["thread_name"].keys()
    assert len({tid for _, tid in names["thread_name"]}) == len(names["thread_name"]), "no thread of two processes"
    by_rank = {}
    for event in slices:
        rank = names["thread_sort_index"][event["pid"], event["tid"]]
        assert names["thread_name"][event["pid"], event["tid"]].startswith(f"rank {rank} ")
        by_rank.setdefault(rank, []).append((event["cat"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6))
    for rank in document["ranks"]:
        wanted = [(one["kind"], one["begin_s"], one["end_s"]) for one in rank["intervals"] if one["kind"] != "other"]
        found = sorted(by_rank[rank["rank"]], key=lambda each: each[1])
        assert [kind for kind, *_ in found] == [kind for kind, *_ in wanted]
        assert [at for _, *at in found] == [pytest.approx(at, abs=1e-7) for _, *at in wanted]
        for thread in {(event["pid"], event["tid"]) for event in slices}:
            own = sorted((event["ts"], event["dur"]) for event in slices if (event["pid"], event["tid"]) == thread)
            assert all(ts + dur <= later + 1e-6 for (ts, dur), (later, _) in itertools.pairwise(own))
    return names


def test_a_step_is_a_chrome_trace_of_a_process_for_each_grid():
    document = timeline(10, {"vision": 2, "language": 3}, microbatches=4)
    names = check_trace(json.loads(json.dumps(chrome_trace(document))), document)
    assert names["process_name"] == {1: "vision grid", 2: "language grid"}
    assert [pid for pid, _ in names["thread_name"]] == [1, 1, 2, 2, 2]


def test_a_rank_of_two_grids_is_a_thread_of_each():
    intervals = [interval("forward", 0.0, 0.4, "vision", 0), interval("forward", 0.4, 1.0, "language", 1)]
    document = {"iteration": 1, "tokens_per_lane": {}, "ranks": [
        {"rank": 0, "modules": {"vision": {"dp": 0}, "language": {"dp": 0}}, "intervals": intervals}]}
    trace = chrome_trace(document)
    check_trace(trace, document)
    assert [(event["pid"], event["name"]) for event in trace["traceEvents"] if event["ph"] == "X"] == [
        (1, "forward 0"), (2, "forward 1")]


def test_device_clock_reads_events_after_the_step(monkeypatch):
    class Event:
        now_ms = 0.0

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            Event.now_ms += 250.0
            self.ms = Event.now_ms

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return end.ms - self.ms

    monkeypatch.setattr("torch.cuda.Event", Event)
    clock = DeviceClock()
    for _ in range(2):  # the second step uses the events of the first
        clock.start()
        marks = [clock.mark() for _ in range(3)]
        times = clock.seconds(marks)
        assert clock.lead_s(marks[1], marks[1][1] + 0.5) == pytest.approx(0.5)
        assert [times[1] - times[0], times[2] - times[1]] == pytest.approx([0.25, 0.25])
    assert len(clock._events) == 3


def test_a_signal_asks_once():
    before = signal.getsignal(signal.SIGUSR2)
    asked = TimelineSignal()
    assert not asked.take()
    os.kill(os.getpid(), signal.SIGUSR2)
    assert asked.take() and not asked.take()
    asked.close()
    assert signal.getsignal(signal.SIGUSR2) == before


@pytest.mark.parametrize(("flags", "message"), [
    ({"log_interval": 0}, "--log-interval 0 is below 1"),
    ({"timeline_interval": -1}, "--timeline-interval -1 is below 0"),
    ({"timeline_interval": 5, "timeline": False}, "--timeline-interval 5 needs --timeline"),
    ({"profile_steps": "10"}, "--profile-steps 10 is not FIRST:LAST"),
    ({"profile_steps": "0:2"}, "--profile-steps 0:2 is not FIRST:LAST"),
    ({"profile_steps": "5:4"}, "--profile-steps 5:4 is not FIRST:LAST"),
    ({"profile_steps": "21:22"}, "--profile-steps 21:22 begins after the run's last iteration, 20"),
    ({"profile_steps": "1:2", "profile_ranks": "0,x"}, "--profile-ranks 0,x is not a list of ranks"),
    ({"profile_steps": "1:2", "profile_ranks": "0,4"}, "--profile-ranks 0,4: this run has ranks 0 to 3"),
    ({"profile_ranks": "1"}, "--profile-ranks 1 needs --profile-steps or --memory-snapshot"),
])
def test_impossible_flags_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        ObserveConfig(**flags).check()
        check_observe(ObserveConfig(**flags), 4, 20, dry_run=False)


@pytest.mark.parametrize(("flags", "flag"), [({"nvtx": True}, "--nvtx"),
                                             ({"memory_snapshot": True}, "--memory-snapshot")])
def test_flags_for_gpus_are_refused_on_a_cpu(flags, flag):
    check_device(ObserveConfig(**flags), "cuda")
    with pytest.raises(ValueError, match=f"{flag} needs CUDA, and this run is on cpu"):
        check_device(ObserveConfig(**flags), "cpu")


def test_traces_cover_the_chosen_steps_of_the_chosen_ranks(tmp_path):
    flags = ObserveConfig(run_dir=str(tmp_path), profile_steps="2:3", profile_ranks="1")
    flags.check()
    check_observe(flags, 2, None, dry_run=False)
    listening = {0: [], 1: []}
    for rank, seen in listening.items():
        spans = Spans(None, {"language": 0})
        profiler = StepProfiler(flags, spans, rank, cuda=False)
        for iteration in range(1, 5):
            profiler.begin_step(iteration)
            seen.append(spans.active)
            with spans.span(Kind.FORWARD, "forward", microbatch=0):
                pass
            assert profiler.ends_after(iteration, 4) == (iteration == 3)
            assert profiler.is_running == (rank == 1 and iteration in (2, 3))
            if iteration == 3:
                assert (profiler.close() is not None) == (rank == 1)
        assert profiler.close() is None
        assert [profiler.ends_after(iteration, 2) for iteration in (1, 2)] == [False, True], "the run ends inside"
    assert listening == {0: [False] * 4, 1: [False, True, True, False]}
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["rank-1.json.gz"]
