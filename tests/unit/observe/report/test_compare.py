"""Two runs side by side: where their losses differ, figures that only one of them has, flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from mimo.report.page import page
from mimo.report.run_reader import Run
from mimo.report.sections import difference
from tests.support.report_runs import figures, headings, policy_record, run_of, step_record, usual_records


def test_two_runs_side_by_side(usual: Run, tmp_path: Path) -> None:
    records = [step_record(step, 3.0 - 0.02 * (step - 1) + (0.1 if step > 5 else 0.0), seconds=0.5)
               for step in range(1, 41)]
    other = run_of(tmp_path / "other", records, lr=2e-3)
    found = difference(usual, other)
    assert found is not None
    assert found.iterations.tolist() == list(range(1, 41)) and found.first_unequal == 6
    assert (found.two - found.one).tolist() == pytest.approx([0.0] * 5 + [0.1] * 35)
    html = page([usual, other])
    assert "A against B" in headings(html)
    assert "equal to the last digit before iteration 6" in html
    assert "takes 0.5 times as long as one of A, with 2 times the tokens/s" in html
    assert '<td class="num">2.22</td><td class="num">2.32</td><td class="num">0.1</td>' in html
    assert "<code>--lr</code></td><td>0.001</td><td>0.002</td>" in html
    assert "--global-batch-size</code>" not in html, "equal in both"
    found = figures(html)
    shown = {trace["name"]: trace["y"] for figure in found.values() for trace in figure["data"]}
    assert {"A: training", "B: training"} <= shown.keys()
    bars = [found[f"Mean step of a rank of each grid, run {letter}"] for letter in "AB"]
    forward = [seconds for figure in bars for seconds in figure["data"][0]["x"]]
    assert [each / forward[0] for each in forward] == pytest.approx([1, 3, 0.5, 1.5], rel=0.01)
    assert bars[0]["layout"]["xaxis"]["range"] == bars[1]["layout"]["xaxis"]["range"], "one scale"
    assert shown["B minus A"] == pytest.approx([0.0] * 5 + [0.1] * 35)


def test_equal_runs(usual: Run) -> None:
    found = difference(usual, usual)
    assert found is not None and found.first_unequal is None
    html = page([usual, usual])
    assert "They are equal to the last digit in all 50 iterations" in html
    assert "B minus A</h3>" not in html, "nothing to draw"


def broken_run(folder: Path, lost: set[int], count: int = 10) -> Run:
    """Like the usual run of so many iterations, without these losses."""
    records = usual_records(count)
    for record in records:
        if record["iteration"] in lost and "lm loss" in record:
            record["lm loss"] = "NaN"
    return run_of(folder, records)


def test_a_loss_that_one_run_has_and_the_other_not_is_a_difference(tmp_path: Path) -> None:
    whole, broken = broken_run(tmp_path / "a", set()), broken_run(tmp_path / "b", {6, 7, 8, 9, 10})
    html = page([whole, broken])
    headings(html)
    assert ("They are equal to the last digit in the 5 iterations in which both are finite. In 5 of the 10 iterations "
            "that both have, only one run's figure is finite, first in iteration 6 (B's is not).") in html
    assert "B minus A</h3>" not in html, "nothing to draw"
    assert difference(whole, broken).first_unequal == difference(broken, whole).first_unequal == 6
    assert "first in iteration 6 (A's is not)" in page([broken, whole])


def test_the_first_unequal_iteration_is_the_earlier_of_both_kinds(tmp_path: Path) -> None:
    records = [step_record(step, 3.0 - 0.02 * (step - 1) + (0.1 if step > 3 else 0.0)) for step in range(1, 11)]
    records[6]["lm loss"] = "Infinity"
    found = difference(broken_run(tmp_path / "a", {1, 10}), run_of(tmp_path / "b", records))
    assert found.first_unequal == 1 and found.one_sided.tolist() == [1, 7, 10]
    both = broken_run(tmp_path / "c", {7})
    assert difference(both, run_of(tmp_path / "d", records)).first_unequal == 4
    assert difference(both, both).first_unequal is None, "not finite in both"
    assert "They are equal to the last digit in the 9 iterations in which both are finite.</p>" in page([both, both])


def test_runs_without_a_common_finite_loss(tmp_path: Path) -> None:
    whole, broken = broken_run(tmp_path / "a", set(), 4), broken_run(tmp_path / "b", {1, 2, 3, 4}, 4)
    html = page([whole, broken])
    headings(html)
    assert "In 4 of the 4 iterations that both have, only one run's figure is finite, first in iteration 1" in html
    assert difference(broken, broken) is None


def test_runs_of_different_kinds_have_no_difference(usual: Run, tmp_path: Path) -> None:
    other = run_of(tmp_path / "rl", [policy_record(step, 0.1) for step in (1, 2)])
    assert difference(usual, other) is None
    headings(page([usual, other]))
