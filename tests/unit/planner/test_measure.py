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
    _line,
    _profile,
    measured_passes,
    trainings_of,
    with_least_leads,
)
from mimo.planner.shapes import num_layers
from scripts.bench import presets
from tests.support.spawn import WorkerPool

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
    forward, backward, encoding = ("language", str(FORWARD)), ("language", str(BACKWARD)), ("vision", str(FORWARD))

    def step(*seconds: float, late: tuple[int, ...] = ()) -> dict[tuple[str, str, int], MeasuredPass]:
        leads = {forward: {number: 0.0 for number in late}, backward: {0: 0.0, 1: 0.0, 2: 0.0}, encoding: {}}
        return {(*kind, number): MeasuredPass(seconds[number], known.get(number, 1.0))
                for kind, known in leads.items() for number in range(3)}

    training = Training()
    training.take([step(1.0, 9.0, 5.0, late=(1,)), step(7.0, 9.0, 5.0, late=(0, 1)), step(3.0, 9.0, 6.0, late=(1,))])
    assert training.passes == {
        (*forward, 0): 2.0, (*forward, 2): 5.0, (*backward, 0): 3.0, (*backward, 1): 9.0, (*backward, 2): 5.0,
        (*encoding, 0): 3.0, (*encoding, 1): 9.0, (*encoding, 2): 5.0}
    # All backward passes are late, which take half of the language model's time.
    assert training.late == {backward} and training.host_bound == pytest.approx(0.5)
    assert training.spread == pytest.approx((7.0 - 1.0) / 3.0)
    training = Training()
    training.take([{(*forward, 0): MeasuredPass(1.0, 1.0), (*forward, 1): MeasuredPass(9.0, 0.0)}] * 2)
    assert training.passes == {(*forward, 0): 1.0} and not training.late and training.host_bound == 0.0


def least_leads(rank: int) -> dict[tuple[str, str, int], MeasuredPass]:
    import torch.distributed as dist

    # Rank 1 has no images in microbatch 0, and its host is late in microbatch 1.
    own = {("vision", str(FORWARD), 0): MeasuredPass(1.0, 0.5)} if rank == 0 else {}
    own[("language", str(FORWARD), 1)] = MeasuredPass(2.0 + rank, 0.25 - 0.25 * rank)
    return with_least_leads(own, ["vision", "language"], dist.group.WORLD)


def test_a_rank_is_late_where_another_one_is(pool: WorkerPool) -> None:
    first, second = pool.run(least_leads, world_size=2)
    assert first == {("vision", str(FORWARD), 0): MeasuredPass(1.0, 0.5),
                     ("language", str(FORWARD), 1): MeasuredPass(2.0, 0.0)}
    assert second == {("language", str(FORWARD), 1): MeasuredPass(3.0, 0.0)}


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
    host = replace(H200, name="CPU", tflops=1.0)
    slow = _profile(runs, trainings, host, "a model")
    gpu_s, host_s = (Costs(runs[0], Profile(gpu)).language(1, 1).forward_s for gpu in (H200, host))
    assert slow.modules["language"][0].forward == pytest.approx(0.9 * gpu_s / host_s)


def test_depths_are_compared_where_no_host_was_late_and_by_the_same_microbatches() -> None:
    config = parse([*presets.PRESETS["10b-uneven"], "--bf16"])
    shallow, deep, *_ = trainings_of(config, 2)
    cost, forward = Costs(deep, Profile(H200)).language(1, 1), ("language", str(FORWARD))

    def ratio(late: bool, *microbatches: dict[int, float]) -> float:
        runs = [Training(passes={(*forward, number): each for number, each in seconds.items()})
                for seconds in microbatches]
        runs[0].late = {forward} if late else set()
        return _profile([shallow, deep], runs, H200, "a model").modules["language"][0].forward

    layers = [2 * cost.forward_s, 6 * cost.forward_s]
    # The microbatches of 100 s are in only one of the trainings.
    assert ratio(False, {0: layers[0], 1: 100.0}, {0: layers[1]}) == pytest.approx(SUSTAINED)
    assert ratio(False, {0: layers[0]}, {0: layers[1], 2: 100.0}) == pytest.approx(SUSTAINED)
    whole_s = 6 * cost.forward_s + cost.ends_forward_s
    assert ratio(True, {0: 50.0}, {0: whole_s}) == pytest.approx(SUSTAINED)


def test_a_line_that_falls_is_not_fitted() -> None:
    assert _line([(1.0, 5.0), (2.0, 4.0)]) == (0.0, 3.5)
    assert _line([(1.0, 3.0), (2.0, 5.0)]) == pytest.approx((1.0, 2.0))
