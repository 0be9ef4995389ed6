"""The timeline of steps on grids of several processes: its parts sum to the step, and it shows deliberate delays."""

from __future__ import annotations

import gzip
import itertools
import json
import logging
import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.spawn import WorkerPool

NUM_MICROBATCHES = 4
FLAGS = ("--global-batch-size", str(NUM_MICROBATCHES))
LAYOUTS = {
    "disjoint-pp2": ("--llm-pp", "2"),
    "disjoint-encoder-pp2": ("--encoder-pp", "2"),
    "two-lanes": ("--llm-dp", "2"),
    "colocated": ("--layout", "colocated", "--encoder-dp", "2", "--llm-dp", "1", "--llm-tp", "2",
                  "--micro-batch-size", "2"),
}
RANKS = {"disjoint-pp2": 3, "disjoint-encoder-pp2": 3, "two-lanes": 3, "colocated": 2}
DELAY_S = 0.4


def train(rank: int, flags: tuple[str, ...], world_size: int, run_dir: str, delayed: str) -> list[Any]:
    """`run_loop` with a delay in every microbatch's encoder forward, or in every step's data, of the encoder's rank.

    `signal` instead of a delay: the rank gets SIGUSR2 in the second step.
    """
    from mimo.training import loop
    from tests.support.steps import run_loop

    def delay_encoder(parts: Any) -> None:
        if "vision" in parts.grids.modules:
            parts.built.model.modality_submodules["vision"].register_forward_pre_hook(
                lambda *_: time.sleep(DELAY_S / NUM_MICROBATCHES))

    def signal_once(parts: Any) -> None:
        if "vision" in parts.grids.modules:
            calls = itertools.count(1)
            parts.built.model.modality_submodules["vision"].register_forward_pre_hook(
                lambda *_: os.kill(os.getpid(), signal.SIGUSR2) if next(calls) == NUM_MICROBATCHES + 1 else None)

    def delay_data(parts: Any) -> None:
        if "vision" in parts.grids.modules:
            next_step = loop.StepLoader.next_step

            def wait_then_load(loader: Any) -> Any:
                time.sleep(DELAY_S)
                return next_step(loader)

            patch.setattr(loop.StepLoader, "next_step", wait_then_load)

    with pytest.MonkeyPatch.context() as patch:
        change = {"encoder": delay_encoder, "data": delay_data, "signal": signal_once, "": lambda parts: None}[delayed]
        return [(record.to_dict(), record.lm_loss) for record in run_loop(rank, flags, world_size, run_dir, change)]


def train_beside_a_clock(rank: int, flags: tuple[str, ...], world_size: int, run_dir: str) -> list[Any]:
    """`run_loop`; of each step its figures, seconds from before its first moment to after its last, sums of its parts.

    The sums are this rank's, by module.
    """
    from mimo.observability.timeline import parts_of
    from tests.support.steps import run_loop

    begins: list[float] = []
    beside: list[tuple[float, dict[str, float]]] = []

    def watch(trainer: Any) -> None:
        spans = trainer.spans
        begin, end = spans.begin_step, spans.end_step

        def begin_step() -> None:
            begins.append(time.perf_counter())
            begin()

        def end_step() -> None:
            end()
            seconds = time.perf_counter() - begins[-1]
            sums = {name: sum(parts_of(spans.intervals(), name).values()) for name in trainer.grids.modules}
            beside.append((seconds, sums))

        vars(spans).update(begin_step=begin_step, end_step=end_step)

    records = run_loop(rank, flags, world_size, run_dir, watch)
    return [(record.to_dict(), *each) for record, each in zip(records, beside, strict=True)]


def timed(pool: WorkerPool, run_dir: Path, layout: str, *flags: str, delayed: str = "") -> list[list[dict[str, float]]]:
    """Figures of each rank and iteration; those of the timeline are the same on all ranks."""
    ranks = RANKS[layout]
    results = pool.run(train, (*FLAGS, *LAYOUTS[layout], *flags), ranks, str(run_dir), delayed, world_size=ranks,
                       timeout_s=250)
    return [[figures for figures, _ in result] for result in results]


def parts(figures: dict[str, float], module: str, key: str = "-s") -> dict[str, float]:
    begin, end = f"timeline/{module}/", key
    return {name[len(begin):-len(end)]: value for name, value in figures.items()
            if name.startswith(begin) and name.endswith(end) and not name.endswith("max-s")}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_sum_to_the_step(pool: WorkerPool, tmp_path: Path, layout: str) -> None:
    ranks = RANKS[layout]
    by_rank = pool.run(train_beside_a_clock, (*FLAGS, *LAYOUTS[layout]), ranks, str(tmp_path), world_size=ranks,
                       timeout_s=250)
    slack = []
    for by_iteration in zip(*by_rank, strict=True):
        for figures, around_s, sums in by_iteration:
            # The loop's clock is read inside the step's first and last moment, the test's outside: however busy the
            # machine is, what the parts leave out or count twice leads over one of the two.
            inside_s = figures["iteration-time"]
            assert all(inside_s <= total <= around_s for total in sums.values()), (inside_s, sums, around_s)
            slack.append(1 - inside_s / around_s)
        for module in ("vision", "language"):
            found = parts(by_iteration[0][0], module)
            step = found.pop("step")
            mean = statistics.mean(sums[module] for _, _, sums in by_iteration if module in sums)
            assert sum(found.values()) == pytest.approx(mean, rel=1e-6)
            assert step == pytest.approx(mean, rel=1e-6)
            assert found["forward"] > 0 and found["backward"] > 0 and found["optimizer"] > 0
            assert found["other"] < step / 2
    assert statistics.median(slack) < 0.03, "bounds so far apart say nothing"
    check_gantt(json.loads((tmp_path / "timeline" / "step-3.json").read_text()), layout)
    trace = json.loads((tmp_path / "timeline" / "step-3.trace.json").read_text())
    processes = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert sorted(processes) == ["language grid", "vision grid"]


def check_gantt(gantt: dict[str, Any], layout: str) -> None:
    """Every rank's intervals follow each other on one clock, and every microbatch has its passes."""
    assert [rank["rank"] for rank in gantt["ranks"]] == list(range(RANKS[layout]))
    for rank in gantt["ranks"]:
        intervals = rank["intervals"]
        assert intervals[0]["begin_s"] >= 0
        assert all(one["end_s"] == two["begin_s"] for one, two in zip(intervals, intervals[1:], strict=False))
        for kind in ("forward", "backward"):
            for module in rank["modules"]:
                seen = {each["microbatch"] for each in intervals if each["kind"] == kind and each["module"] == module}
                # A text-only microbatch has no backward pass through the encoder of a rank that holds more.
                assert seen == set(range(len(seen))) or layout == "colocated", (module, kind, seen)
                assert seen
    lanes = 2 if layout == "two-lanes" else 1
    assert {kind: len(tokens) for kind, tokens in gantt["tokens_per_lane"].items()} == {"image": lanes, "text": lanes}


def test_a_slow_encoder_is_busy_and_keeps_the_language_model_waiting(pool: WorkerPool, tmp_path: Path) -> None:
    figures = timed(pool, tmp_path, "disjoint-pp2", "--profile-steps", "2:2", "--profile-ranks", "0,1",
                    delayed="encoder")[0][-1]
    vision, language = parts(figures, "vision"), parts(figures, "language")
    assert vision["forward"] > DELAY_S
    assert language["forward"] + language["backward"] < vision["forward"]
    # Its first stage waits for the bridge, for the first microbatch alone all of the delay; the second for the first.
    assert figures["timeline/language/bridge-wait-max-s"] > DELAY_S / NUM_MICROBATCHES
    assert figures["timeline/language/pipeline-wait-max-s"] > DELAY_S / NUM_MICROBATCHES
    for rank, name in ((0, "vision stage 0 forward microbatch 3"), (1, "language stage 0 recv_forward microbatch 0")):
        with gzip.open(tmp_path / "profile" / f"rank-{rank}.json.gz", "rt") as file:
            assert name in {event.get("name") for event in json.load(file)["traceEvents"]}


def stop_inside_a_trace(rank: int, run_dir: str) -> list[str]:
    """Stop a run after its first iteration, and return what the log says of the trace."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("mimo").addHandler(handler)
    try:
        train(rank, (*FLAGS, *LAYOUTS["colocated"], "--profile-steps", "1:3", "--exit-duration-in-mins", "1e-6"),
              RANKS["colocated"], run_dir, "")
    finally:
        logging.getLogger("mimo").removeHandler(handler)
    return [line for line in told if line.startswith("trace")]


def test_the_log_says_where_the_trace_of_a_run_is_that_stops_inside_it(pool: WorkerPool, tmp_path: Path) -> None:
    trace = tmp_path / "profile" / "rank-0.json.gz"
    assert pool.run(stop_inside_a_trace, str(tmp_path), world_size=2) == [[f"trace: {trace}"], []]
    assert trace.is_file()


@pytest.mark.slow
def test_slow_data_is_a_data_wait(pool: WorkerPool, tmp_path: Path) -> None:
    figures = timed(pool, tmp_path, "disjoint-pp2", delayed="data")[0][-1]
    vision, language = parts(figures, "vision"), parts(figures, "language")
    assert vision["data-wait"] > DELAY_S
    assert language["data-wait"] < DELAY_S
    assert figures["timeline/language/idle-max-s"] > DELAY_S / 2, "it meets the encoder's rank before the first pass"


@pytest.mark.slow
def test_a_signal_asks_for_the_step_under_way(pool: WorkerPool, tmp_path: Path) -> None:
    timed(pool, tmp_path, "disjoint-pp2", delayed="signal")
    assert sorted(path.name for path in (tmp_path / "timeline").iterdir()) == [
        "step-2.json", "step-2.trace.json", "step-3.json", "step-3.trace.json"]
    check_gantt(json.loads((tmp_path / "timeline" / "step-2.json").read_text()), "disjoint-pp2")


@pytest.mark.slow
def test_further_steps_by_interval(pool: WorkerPool, tmp_path: Path) -> None:
    timed(pool, tmp_path, "two-lanes", "--timeline-interval", "1")
    assert len(list((tmp_path / "timeline").glob("step-?.json"))) == 3


@pytest.mark.slow
def test_losses_are_the_same_without(pool: WorkerPool, tmp_path: Path) -> None:
    flags = (*FLAGS, *LAYOUTS["colocated"])
    losses = {}
    for switch in ("--timeline", "--no-timeline"):
        result = pool.run(train, (*flags, switch), 2, str(tmp_path / switch), "", world_size=2)[0]
        losses[switch] = [loss for _, loss in result]
        assert any(name.startswith("timeline/") for name in result[-1][0]) == (switch == "--timeline")
        assert (tmp_path / switch / "timeline").exists() == (switch == "--timeline")
    assert losses["--timeline"] == losses["--no-timeline"]
