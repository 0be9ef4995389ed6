"""What `mimo plan --measure` makes of the passes of its trainings."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from mimo.config.cli import parse
from mimo.observability.spans import Interval, Kind, Label
from mimo.planner.costs import Costs, Profile, Ratios
from mimo.planner.gpus import GPUS
from mimo.planner.measure import (
    IN_TIME_S,
    SUSTAINED,
    MeasuredPass,
    Training,
    _profile,
    measured_passes,
    medians,
    trainings_of,
)
from mimo.planner.shapes import num_layers
from scripts.bench import presets

H200 = GPUS["H200"]
FORWARD, BACKWARD = Kind.FORWARD, Kind.BACKWARD


def intervals(*stretches: tuple[str, Kind, int | None, float, float | None]) -> list[Interval]:
    """Return intervals of given modules, kinds, microbatches, seconds and leads of the host at their ends."""
    times = [sum(seconds for *_, seconds, _ in stretches[:number]) for number in range(len(stretches) + 1)]
    return [Interval(Label(kind, "work", module, microbatch), begin, end, lead)
            for (begin, end), (module, kind, microbatch, _, lead) in zip(pairwise(times), stretches, strict=True)]


def test_a_pass_is_in_time_if_the_host_is_ahead_at_all_its_ends() -> None:
    ahead, late = 2 * IN_TIME_S, IN_TIME_S / 2
    passes, rest = measured_passes(intervals(
        ("language", Kind.OTHER, None, 0.5, ahead), ("language", FORWARD, 0, 1.0, ahead),
        ("vision", FORWARD, 1, 2.0, late), ("language", FORWARD, 1, 4.0, ahead),
        ("language", BACKWARD, 0, 8.0, ahead), ("language", FORWARD, 0, 0.25, 3 * ahead),
        ("language", Kind.OTHER, None, 0.125, 0.0)))
    assert rest == {str(Kind.OTHER): 0.625}
    assert {key: each.seconds for key, each in passes.items()} == {
        ("language", str(FORWARD), 0): 1.25, ("vision", str(FORWARD), 1): 2.0, ("language", str(FORWARD), 1): 4.0,
        ("language", str(BACKWARD), 0): 8.0}
    assert [each.is_in_time for each in passes.values()] == [True, False, False, True]
    on_a_cpu, _ = measured_passes(intervals(("language", FORWARD, 0, 1.0, None), ("language", FORWARD, 1, 1.0, None)))
    assert all(each.is_in_time for each in on_a_cpu.values())


def test_late_passes_count_only_where_there_are_no_others() -> None:
    forward, backward = ("language", str(FORWARD)), ("language", str(BACKWARD))

    def step(*seconds: float, late: tuple[int, ...] = ()) -> dict[tuple[str, str, int], MeasuredPass]:
        return {(*kind, number): MeasuredPass(seconds[number], 0.0 if number in late or kind == backward else 1.0)
                for kind in (forward, backward) for number in range(3)}

    passes, late = medians([step(1.0, 9.0, 5.0, late=(1,)), step(7.0, 9.0, 5.0, late=(0, 1)),
                            step(3.0, 9.0, 6.0, late=(1,))])
    assert passes == {(*forward, 0): 2.0, (*forward, 2): 5.0, (*backward, 0): 3.0, (*backward, 1): 9.0,
                      (*backward, 2): 5.0}
    assert late == {backward}


def test_a_profile_has_the_costs_that_were_measured() -> None:
    """Trainings whose passes have known costs; the encoder's passes are late in those of two ranks and one sample."""
    config = parse([*presets.PRESETS["10b-uneven"], "--bf16"])
    runs, plain, trainings = trainings_of(config, 2), Profile(H200), list[Training]()
    for run in runs:
        costs, tp, training = Costs(run, plain), run.layout.llm_tp, Training(spread=0.01)
        cost, layers = costs.language(tp, run.train.micro_batch_size), costs.num_layers
        encoder = costs.encoder("vision", tp)
        is_late = tp == 2 and run.train.micro_batch_size == 1
        training.late = {("vision", str(kind)) for kind in (FORWARD, BACKWARD) if is_late}
        training.images = {number: [144 * (number + 1), 36] for number in range(6)}
        for number, tokens in training.images.items():
            seconds = [sum(costs.image_s("vision", tp, each)[index] for each in tokens) for index in (0, 2)]
            times = {("language", FORWARD): layers * 0.9 * cost.forward_s + 2 * cost.ends_forward_s,
                     ("language", BACKWARD): layers * 1.1 * cost.backward_s + cost.ends_backward_s,
                     ("vision", FORWARD): (5 if is_late else 0.8) * seconds[0] + encoder.forward.call_s,
                     ("vision", BACKWARD): (5 if is_late else 1.2) * seconds[1] + encoder.backward.call_s / 2}
            training.passes |= {(module, str(kind), number): each for (module, kind), each in times.items()}
        trainings.append(training)
    found = _profile(runs, trainings, H200, "a model")
    assert [(each.tp, each.micro_batch_size) for each in found.modules["language"]] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    for each in found.modules["language"]:
        assert (each.forward, each.backward) == pytest.approx((0.9 * SUSTAINED, 1.1 * SUSTAINED))
        assert (each.ends_forward, each.ends_backward) == pytest.approx((2 * SUSTAINED, SUSTAINED))
    assert [each.tp for each in found.modules["vision"]] == [1, 2]
    for each in found.modules["vision"]:
        expected = Ratios(each.tp, 0, 0.8 * SUSTAINED, 1.2 * SUSTAINED, SUSTAINED, SUSTAINED / 2,
                          layers=num_layers(Costs(config, plain).shapes["vision"]))
        assert vars(each) == pytest.approx(vars(expected))
    # The profile of a host without a GPU has no power limit in it.
    slow = _profile(runs, trainings, replace(H200, name="CPU", tflops=1.0), "a model")
    assert slow.modules["language"][0].forward == pytest.approx(
        0.9 * Costs(runs[0], plain).language(1, 1).forward_s
        / Costs(runs[0], Profile(replace(H200, name="CPU", tflops=1.0))).language(1, 1).forward_s)
