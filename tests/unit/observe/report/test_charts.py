"""Charts: values and times are those of the run, many points become few without hiding extremes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mimo.observability.timeline import OTHER_MODULES, PARTS
from mimo.report.charts import Bar, Line, chosen_rows, gantt_chart, line_chart, rows_of, stacked_bars, thin
from mimo.report.html import TEMPLATE
from mimo.report.page import CSS, page
from mimo.report.run_reader import Run
from mimo.report.summary import KIND_OF_PART, KIND_OF_RL, ORDER, WORDS, number, percent, rounded, seconds, size
from tests.support.report_runs import figures, interval, policy_record, run_of, timeline


def line(values: list[float], **further: Any) -> Line:
    return Line("name", np.arange(1, 1 + len(values), dtype=float), np.array(values), **further)


def only(html: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Traces and layout of the one figure."""
    [figure] = figures(html).values()
    return figure["data"], figure["layout"]


def test_plotly_knows_every_property_of_the_figures(usual: Run, tmp_path: Path) -> None:
    from plotly.graph_objects import Figure

    rl = run_of(tmp_path / "rl", [policy_record(step, 0.5) for step in range(1, 700)])
    found = figures(page([usual, usual])) | figures(page([rl]))
    assert len(found) > 15
    for title, figure in (found | {"template": {"data": [], **TEMPLATE}}).items():
        coloured = json.loads(re.sub(r'"var\(--[\w-]+\)"', '"#102030"', json.dumps(figure)))
        assert Figure(coloured).to_dict()["data"] == coloured["data"], title


@pytest.mark.parametrize(("values", "log", "x", "mode"), [
    ([3.0, 1.0, 2.0], False, [1, 2, 3], "lines"), ([5.0, 5.0], False, [1, 2], "lines"),
    ([5.0], False, [1], "lines+markers"),  # a dot
    ([1.0, 0.0, 10.0, 100.0], True, [1, 3, 4], "lines"),  # what is not above zero has no logarithm
])
def test_a_line_has_the_values_of_the_run(values, log, x, mode):
    [trace], layout = only(line_chart("t", [line(values)], log=log))
    assert (trace["x"], trace["y"], trace["mode"]) == (x, [values[each - 1] for each in x], mode)
    assert "range" not in layout["yaxis"] if not log else layout["yaxis"]["type"] == "log"


def test_a_chart_without_a_finite_value_is_none() -> None:
    assert line_chart("t", []) == "" and line_chart("t", [line([float("nan")] * 3)]) == ""
    assert line_chart("t", [line([0.0, -1.0])], log=True) == ""


def test_a_logarithmic_axis_has_ticks_with_full_values_within_its_range():
    for low in (0.0021, 1.0, 2.1, 4.9, 5.1, 9.9, 65536.0):
        for factor in (1, 2, 4.9, 5, 20, 900, 1e4):
            _, layout = only(line_chart("t", [line([low, low * factor])], log=True))
            ticks = layout["yaxis"].get("tickvals")
            # Plotly's own ticks are right for less than a decade and for several.
            assert (ticks is not None) == (5 <= factor <= 1000)
            assert ticks is None or sum(low <= tick <= low * factor for tick in ticks) >= 2


def test_gaps_and_names() -> None:
    html = line_chart("t", [line([1.0, float("nan"), 3.0]), line([2.0, 2.0, 2.0], colour=1, dashed=True)])
    (first, second), layout = only(html)
    assert first["x"] == [1, 3] and layout["showlegend"]
    assert second["line"]["dash"] == "dash" and second["line"]["color"] != first["line"]["color"]


def test_thinning_keeps_means_and_extremes() -> None:
    y = np.ones(100_000)
    y[77_777] = 500.0
    x, mean, low, high = thin(np.arange(1, 100_001, dtype=float), y)
    assert len(x) <= 260
    assert high.max() == 500.0 and low.min() == 1.0
    assert x[0] < x[-1] <= 100_000
    assert float((mean > 1.0).sum()) == 1
    assert len(thin(np.arange(500.0), np.arange(500.0))[0]) == 500
    html = line_chart("t", [line(y.tolist())])
    (low, high, mean), _ = only(html)
    assert (max(high["y"]), min(low["y"])) == (500.0, 1.0) and [1.0, 500.0] in mean["customdata"]
    assert "Line: mean of neighbouring iterations; shade: their range." in html


def test_a_towering_value_is_cut_off_and_told() -> None:
    html = line_chart("t", [line([100.0] + [1.0] * 199)], zero=True)
    assert "Cut off: up to 100 at iteration 1" in html
    [trace], layout = only(html)
    assert layout["yaxis"]["range"] == [0.0, 2.0] and trace["y"][0] == 100.0
    assert "Cut off" not in line_chart("t", [line([3.0] + [1.0] * 199)], zero=True)


def test_names_are_escaped() -> None:
    html = line_chart("a < b", [Line("</script><b>", np.array([1.0, 2.0]), np.array([1.0, 2.0]))])
    assert "<b>" not in html and html.count("</script>") == 1
    assert only(html)[0][0]["name"] == "&lt;/script&gt;&lt;b&gt;", "Plotly takes names as HTML"


def test_stacked_bars_are_as_long_as_their_seconds() -> None:
    kinds = {"work": "forward", "wait": "idle"}
    bars = [Bar("a", {"work": 1.0, "wait": 3.0}), Bar("b", {"work": 2.0, "wait": 0.0})]
    (work, wait), layout = only(stacked_bars("t", bars, kinds, marker=(3.0, "ideal")))
    assert (work["y"], work["x"]) == ([0, 1], [1.0, 2.0])
    assert (wait["y"], wait["x"], wait["hovertext"]) == ([0], [3.0], ["a: wait 3 s, 75 %"])
    assert "pattern" in wait["marker"] and "pattern" not in work["marker"]
    assert layout["barmode"] == "stack" and layout["yaxis"]["ticktext"] == ["<b>a</b><br>4 s", "<b>b</b><br>2 s"]
    assert [(shape["x0"], shape["name"]) for shape in layout["shapes"]] == [(3.0, "ideal")]


def test_short_times_are_in_milliseconds() -> None:
    [trace], layout = only(stacked_bars("t", [Bar("a", {"work": 0.25})], {"work": "forward"}))
    assert trace["x"] == [250.0] and layout["xaxis"]["ticksuffix"] == " ms"


def test_every_part_of_the_timeline_has_words_and_a_colour() -> None:
    assert set(ORDER) == set(PARTS) and OTHER_MODULES in ORDER
    assert len(KIND_OF_PART) == len(ORDER) == len({WORDS[part] for part in ORDER})
    for kind in {*KIND_OF_PART.values(), *KIND_OF_RL.values()}:
        assert CSS.count(f" --{kind}: #") == 2, "light and dark"


def bars_of(html: str) -> list[tuple[str, float, float, float]]:
    """Name, row, begin and length of every interval, row by row."""
    return sorted(((trace["name"], *one) for trace in only(html)[0]
                   for one in zip(trace["y"], trace["base"], trace["x"], strict=True)), key=lambda each: each[1:])


def test_gantt_intervals_lie_at_their_times() -> None:
    step = {"iteration": 7, "ranks": [
        {"rank": 1, "modules": {"language": {"tp": 0}}, "intervals": [
            interval("bridge-wait", 0.0, 0.25, "language", 0), interval("forward", 0.25, 1.0, "language", 0)]},
        {"rank": 0, "modules": {"vision": {"tp": 0}}, "intervals": [
            interval("forward", 0.0, 0.5, "vision", 3), interval("other", 0.5, 1.0, "vision")]},
    ]}
    html = gantt_chart(step, 1000)
    assert bars_of(html) == [("forward", 1, 0.0, 0.5), ("waiting at the bridge", 3, 0.0, 0.25),
                             ("forward", 3, 0.25, 0.75)]
    traces, layout = only(html)
    assert layout["yaxis"]["ticktext"] == ["<b>vision grid</b>", "rank 0", "<b>language grid</b>", "rank 1"]
    assert layout["yaxis"]["range"] == [3.5, -0.5], "half a row more than the four rows, the first at the top"
    assert traces[0]["hovertext"][0] == "forward, microbatch 3: 0.5 s, from 0 us" and traces[0]["text"][0] == "3"
    assert "Iteration 7" in html


def test_gantt_says_what_the_empty_parts_of_a_row_are() -> None:
    html = gantt_chart(timeline(10, {"vision": 2}), 100)
    assert ("If a row begins with a gap, its rank had not started the step yet: the rank that writes the run&#x27;s "
            "records starts late.") in html
    assert "Small gaps are other work of the host." in html


def test_ranks_of_two_modules_have_two_rows() -> None:
    intervals = [interval("forward", 0.0, 0.4, "vision", 0), interval("forward", 0.4, 1.0, "language", 0)]
    step = {"iteration": 1, "ranks": [{"rank": 0, "modules": {"vision": {"dp": 0}, "language": {"dp": 0}},
                                       "intervals": intervals}]}
    rows = rows_of(step)
    assert {name: [round(row.busy_s, 6) for row in found] for name, found in rows.items()} == {
        "vision": [0.4], "language": [0.6]}
    assert [row for _, row, _, _ in bars_of(gantt_chart(step, 100))] == [1, 3]


def test_large_grids_show_some_ranks_and_say_so() -> None:
    def num_rows(html: str) -> int:
        return sum(name.startswith("rank ") for name in only(html)[1]["yaxis"]["ticktext"])

    step = timeline(10, {"vision": 100, "language": 400})
    shown = chosen_rows(rows_of(step)["language"], 8)
    assert len(shown) == 8 and {100, 499} <= {row.rank for row in shown}, "least and most work"
    html = gantt_chart(step, 10_000)
    assert num_rows(html) == 32
    assert "16 of the 100 ranks of vision and 16 of the 400 ranks of language" in html
    small = gantt_chart(step, 60)
    assert 4 <= num_rows(small) < 32 and len(bars_of(small)) <= 60


def test_very_many_intervals_leave_out_the_shortest() -> None:
    html = gantt_chart(timeline(10, {"vision": 2}, microbatches=500), 200)
    assert len(bars_of(html)) == 200 and "The 1,800 shortest intervals are left out" in html
    assert {name for name, *_ in bars_of(html)} == {"forward"}, "waits are shorter"


def test_a_step_of_nothing_but_other_time_is_shown(tmp_path: Path) -> None:
    step = timeline(1, {"vision": 1})
    step["ranks"][0]["intervals"] = [interval("other", 0.0, 0.5, "vision")]
    assert "One step, all ranks" in page([run_of(tmp_path, [policy_record(1, 0.5)], timelines=(step,))])


def test_numbers_for_people() -> None:
    assert [number(value) for value in (12345.0, 12345.6, 0.04321, 4.3e-13, 3.5653)] == [
        "12,345", "12,346", "0.04321", "4.3e-13", "3.565"]
    assert [seconds(value) for value in (3e-5, 0.0032, 0.243, 121, 700, 7500)] == [
        "30 us", "3.2 ms", "0.243 s", "121 s", "11 min 40 s", "2 h 5 min"]
    assert [percent(value) for value in (0.073, 0.93, 0.0)] == ["7.3 %", "93 %", "0.0 %"]
    assert [size(value) for value in (512, 1.5 * 2**30)] == ["512 B", "1.5 GiB"]
    assert [rounded(value) for value in (2.8149, 0.15591, float("nan"))] == ["2.81", "0.156", "not finite"]
