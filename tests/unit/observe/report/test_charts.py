"""Charts: values lie where the axes say, many points become few without hiding extremes, rows of large grids."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from mimo.observability.timeline import OTHER_MODULES, PARTS
from mimo.report.bars import Bar, stacked_bars
from mimo.report.charts import Line, Scale, fitting, line_chart, thin
from mimo.report.gantt_chart import chosen_rows, gantt_chart, rows_of
from mimo.report.summary import CSS_OF_PART, ORDER, WORDS, number, percent, rounded, seconds, short, size, time_ticks
from tests.support.report_runs import interval, timeline


def line(values: list[float], *, first: int = 1, **further: object) -> Line:
    return Line("name", np.arange(first, first + len(values), dtype=float), np.array(values), **further)


def drawn(svg: str, css: str = "line") -> list[tuple[float, float]]:
    """Points of the first path of a class, pixels."""
    path = re.search(rf'<path class="{css} [^"]*" d="M([^"z]*)z?"', svg)
    assert path is not None
    return [tuple(map(float, point.split(","))) for point in path[1].split("L")]


def value_axis(svg: str) -> list[tuple[float, float]]:
    """Values and their pixels on the vertical axis."""
    return [(float(text.replace(",", "")), float(y) - 4)
            for y, text in re.findall(r'<text x="46.0" y="([\d.]+)" class="end">([^<]*)</text>', svg)]


def hover(svg: str) -> dict:
    found = re.search(r'<script type="application/json">(.*?)</script>', svg)
    assert found is not None
    return json.loads(found[1])


def test_values_lie_between_the_lines_of_the_axis() -> None:
    svg = line_chart("t", [line([3.0, 1.0, 2.0])])
    (low, low_y), *_, (high, high_y) = value_axis(svg)
    for (_, y), value in zip(drawn(svg), [3.0, 1.0, 2.0], strict=True):
        assert low + (high - low) * (y - low_y) / (high_y - low_y) == pytest.approx(value, abs=0.02)
    xs = [x for x, _ in drawn(svg)]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2) and xs[0] < xs[1]
    assert hover(svg)["s"][0]["y"] == [3.0, 1.0, 2.0] and hover(svg)["s"][0]["x"] == [1, 2, 3]


def test_logarithmic_axis_leaves_out_what_is_not_above_zero() -> None:
    svg = line_chart("t", [line([1.0, 0.0, 10.0, 100.0])], log=True)
    points = drawn(svg)
    assert len(points) == 3
    assert points[0][1] - points[1][1] == pytest.approx(points[1][1] - points[2][1], abs=0.2)


def test_a_chart_without_a_finite_value_is_none() -> None:
    assert line_chart("t", []) == ""
    assert line_chart("t", [line([float("nan")] * 3)]) == ""
    assert line_chart("t", [line([0.0, -1.0])], log=True) == ""


@pytest.mark.parametrize("values", [[5.0], [5.0, 5.0, 5.0], [0.0, 0.0], [1e-13, 1e-13], [-3.0, -3.0]])
@pytest.mark.parametrize("zero", [False, True])
def test_one_value_and_constants(values: list[float], zero: bool) -> None:
    svg = line_chart("t", [line(values)], zero=zero)
    assert "nan" not in svg and "inf" not in svg
    heights = {y for _, y in drawn(svg)} if len(values) > 1 else {float(re.search(r'cy="([\d.]+)"', svg)[1])}
    assert len(heights) == 1 and 0 < heights.pop() < 230


def test_gaps_and_names() -> None:
    svg = line_chart("t", [line([1.0, float("nan"), 3.0]), line([2.0, 2.0, 2.0], colour=1, dashed=True)])
    assert len(drawn(svg)) == 2
    assert svg.count("<span>") == 2 and 'class="line c1 dashed"' in svg


def test_lines_that_hide_each_other_share_a_name() -> None:
    lines = [Line(name, np.array([1.0, 2.0]), np.array([1.0, 2.0])) for name in ("one", "two")]
    svg = line_chart("t", lines)
    assert svg.count('<path class="line') == 1 and "one, two" in svg


def test_thinning_keeps_means_and_extremes() -> None:
    y = np.ones(100_000)
    y[77_777] = 500.0
    found = thin(np.arange(1, 100_001, dtype=float), y)
    assert found.thinned and len(found.x) <= 260
    assert found.high.max() == 500.0 and found.low.min() == 1.0
    assert found.x[0] < found.x[-1] <= 100_000
    assert float((found.mean > 1.0).sum()) == 1
    few = thin(np.arange(500.0), np.arange(500.0))
    assert not few.thinned and len(few.x) == 500


def test_a_towering_value_is_cut_off_and_told() -> None:
    svg = line_chart("t", [line([100.0] + [1.0] * 199)], zero=True)
    assert "Cut off: up to 100 at iteration 1" in svg
    assert max(value for value, _ in value_axis(svg)) < 5
    assert "Cut off" not in line_chart("t", [line([3.0] + [1.0] * 199)], zero=True)


def test_names_are_escaped() -> None:
    svg = line_chart("a < b", [Line("</script><b>", np.array([1.0, 2.0]), np.array([1.0, 2.0]))])
    assert "<b>" not in svg and svg.count("</script>") == 1
    assert hover(svg)["s"][0]["n"] == "</script><b>"


def test_stacked_bars_are_as_long_as_their_seconds() -> None:
    css = {"work": "k-forward", "wait": "k-idle"}
    svg = stacked_bars("t", [Bar("a", {"work": 1.0, "wait": 3.0}), Bar("b", {"work": 2.0, "wait": 0.0})], css,
                       marker=(3.0, "ideal"))
    rects = [(kind, float(x), float(width)) for kind, x, width in
             re.findall(r'<rect class="([\w-]+)" x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', svg)]
    assert [kind for kind, _, _ in rects] == ["k-forward", "k-idle", "k-forward"]
    (_, first, one), (_, second, three), (_, _, two) = rects
    assert three == pytest.approx(3 * one, abs=0.05) and two == pytest.approx(2 * one, abs=0.05)
    assert second == pytest.approx(first + one, abs=0.02)
    marker = re.search(r'class="marker" x1="([\d.]+)"', svg)
    assert marker is not None and float(marker[1]) == pytest.approx(first + 3 * one, abs=0.1)
    assert "a: wait 3 s, 75 %" in svg


def test_every_part_of_the_timeline_has_words_and_a_colour() -> None:
    assert set(ORDER) == set(PARTS) and OTHER_MODULES in ORDER
    assert len(CSS_OF_PART) == len(ORDER) == len({WORDS[part] for part in ORDER})


def gantt_rects(svg: str) -> list[tuple[str, float, float, float]]:
    return [(kind, float(x), float(y), float(width)) for kind, x, y, width in
            re.findall(r'<rect class="(k-[\w-]+)" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"', svg)]


def test_gantt_intervals_lie_at_their_times() -> None:
    step = {"iteration": 7, "ranks": [
        {"rank": 1, "modules": {"language": {"tp": 0}}, "intervals": [
            interval("bridge-wait", 0.0, 0.25, "language", 0), interval("forward", 0.25, 1.0, "language", 0)]},
        {"rank": 0, "modules": {"vision": {"tp": 0}}, "intervals": [
            interval("forward", 0.0, 0.5, "vision", 3), interval("other", 0.5, 1.0, "vision")]},
    ]}
    svg = gantt_chart(step, 1000)
    axis = re.search(r'<rect class="row" x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', svg)
    assert axis is not None
    left, width = float(axis[1]), float(axis[2])
    rects = gantt_rects(svg)
    assert [kind for kind, *_ in rects] == ["k-forward", "k-bridge-wait", "k-forward"], "rank 0 first"
    for (_, x, _, wide), (begin, end) in zip(rects, [(0, 0.5), (0, 0.25), (0.25, 1)], strict=True):
        assert x == pytest.approx(left + begin * width, abs=0.02)
        assert wide == pytest.approx((end - begin) * width, abs=0.02)
    assert rects[0][2] != rects[1][2] == rects[2][2]
    assert "forward, microbatch 3: 0.5 s, from 0 us" in svg and "Iteration 7" in svg
    assert "language grid" in svg and "vision grid" in svg


def test_gantt_says_what_the_empty_parts_of_a_row_are() -> None:
    svg = gantt_chart(timeline(10, {"vision": 2}), 100)
    assert ("A row that is empty at its left: the rank had not begun the step yet; ranks begin it one after the other, "
            "the one that writes the run's records late.") in svg
    assert "Small gaps are other work of the host." in svg


def test_ranks_of_two_modules_have_two_rows() -> None:
    intervals = [interval("forward", 0.0, 0.4, "vision", 0), interval("forward", 0.4, 1.0, "language", 0)]
    step = {"iteration": 1, "ranks": [{"rank": 0, "modules": {"vision": {"dp": 0}, "language": {"dp": 0}},
                                       "intervals": intervals}]}
    rows = rows_of(step)
    assert {name: [round(row.busy_s, 6) for row in found] for name, found in rows.items()} == {
        "vision": [0.4], "language": [0.6]}
    (_, _, one, _), (_, _, two, _) = gantt_rects(gantt_chart(step, 100))
    assert one != two


def test_large_grids_show_some_ranks_and_say_so() -> None:
    step = timeline(10, {"vision": 100, "language": 400})
    rows = rows_of(step)
    shown = chosen_rows(rows["language"], 8)
    assert len(shown) == 8 and {100, 499} <= {row.rank for row in shown}, "least and most work"
    svg = gantt_chart(step, 10_000)
    assert svg.count('class="row"') == 32
    assert "16 of the 100 ranks of vision and 16 of the 400 ranks of language" in svg
    small = gantt_chart(step, 60)
    assert 4 <= small.count('class="row"') < 32 and len(gantt_rects(small)) <= 70


def test_very_many_intervals_leave_out_the_shortest() -> None:
    step = timeline(10, {"vision": 2}, microbatches=500)
    svg = gantt_chart(step, 200)
    assert 0 < len(gantt_rects(svg)) <= 300 and "shortest intervals are left out" in svg


@pytest.mark.parametrize(("low", "high", "log"), [(0, 1, False), (1e-9, 3e-9, False), (2.0, 2.001, False),
                                                   (1e-13, 1e3, True), (1.0, 1.5, True), (-5, 7, False)])
def test_ticks_are_few_and_on_the_axis(low: float, high: float, log: bool) -> None:
    axis = fitting(low, high, 0.0, 100.0, log=log)
    ticks = axis.ticks(6)
    assert 1 < len(ticks) <= 12
    assert all(-1e-6 <= axis(tick) <= 100 + 1e-6 for tick in ticks)
    assert 0 <= axis(low) < axis(high) < 100


def test_scale_ends() -> None:
    scale = Scale(10.0, 20.0, 100.0, 0.0)
    assert (scale(10.0), scale(15.0), scale(20.0)) == (100.0, 50.0, 0.0)
    assert Scale(1.0, 100.0, 0.0, 10.0, log=True)(10.0) == pytest.approx(5.0)


def test_numbers_for_people() -> None:
    assert [number(value) for value in (12345.0, 12345.6, 0.04321, 4.3e-13, 3.5653)] == [
        "12,345", "12,346", "0.04321", "4.3e-13", "3.565"]
    assert [short(value) for value in (250, 12_000, 1.5e6, 0.02, 1e-13, 2000)] == [
        "250", "12k", "1.5M", "0.02", "1e-13", "2,000"]
    assert [seconds(value) for value in (3e-5, 0.0032, 0.243, 121, 700, 7500)] == [
        "30 us", "3.2 ms", "0.243 s", "121 s", "11 min 40 s", "2 h 5 min"]
    assert [percent(value) for value in (0.073, 0.93, 0.0)] == ["7.3 %", "93 %", "0.0 %"]
    assert [size(value) for value in (512, 1.5 * 2**30)] == ["512 B", "1.5 GiB"]
    assert [rounded(value) for value in (2.8149, 0.15591, float("nan"))] == ["2.81", "0.156", "not finite"]
    assert time_ticks([0.0, 0.05, 0.1]) == ["0", "50 ms", "100 ms"]
    assert time_ticks([0.0, 0.5, 1.0]) == ["0", "0.5 s", "1 s"]
