"""Reading of run folders: whole ones, those of runs that died, and folders that are none."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from mimo.report.run_reader import evenly, read_run
from tests.support.report_runs import step_record, timeline, usual_records, write_run, write_stall


def test_iterations_and_evaluations_are_apart(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, usual_records(), timelines=(timeline(10, {"vision": 1, "language": 2}),)))
    assert run.problems == ()
    assert run.steps.iterations.tolist() == list(range(1, 51))
    assert run.steps.get("lm loss")[[0, 49]].tolist() == pytest.approx([3.0, 2.02])
    assert run.evaluations.iterations.tolist() == [25, 50]
    assert run.evaluations.get("exact match validation").tolist() == [0.5, 0.954]
    assert run.modules == ["vision", "language"]
    assert run.planned_iterations == 50
    assert list(run.timelines) == [10] and run.num_timelines == 1
    assert not run.learns_from_rewards


def write_steps(folder: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    return write_run(folder, [{"iteration-time": 1.0, **record} for record in records])


def test_values_that_are_no_numbers(tmp_path: Path) -> None:
    records = [{"iteration": 1, "a": None, "b": "NaN", "c": "Infinity", "d": True},
               {"iteration": 2, "a": 0.5, "b": "-Infinity", "c": "word", "d": [1], "e": 4}]
    table = read_run(write_steps(tmp_path, records)).steps
    assert table.get("a")[1] == 0.5 and math.isnan(table.get("a")[0])
    assert math.isnan(table.get("b")[0]) and table.get("b")[1] == -math.inf
    assert table.get("c")[0] == math.inf and math.isnan(table.get("c")[1])
    assert table.get("d")[0] == 1.0 and math.isnan(table.get("d")[1])
    assert math.isnan(table.get("e")[0]) and table.get("e")[1] == 4
    assert not table.has("f") and not table.has("c") and table.has("a")


def test_the_last_record_of_an_iteration_counts_and_order_is_restored(tmp_path: Path) -> None:
    records = [{"iteration": 3, "a": 1.0}, {"iteration": 1, "a": 2.0}, {"iteration": 3, "a": 3.0}]
    table = read_run(write_steps(tmp_path, records)).steps
    assert table.iterations.tolist() == [1, 3]
    assert table.get("a").tolist() == [2.0, 3.0]


def test_many_records_with_changing_keys(tmp_path: Path) -> None:
    records = [{"iteration": step, "a": 2.0 * step, **({"b": 1.0} if step % 10 == 0 else {})} for step in range(1, 101)]
    table = read_run(write_steps(tmp_path, records)).steps
    assert table.get("a").tolist() == [2.0 * step for step in range(1, 101)]
    assert np.flatnonzero(np.isfinite(table.get("b"))).tolist() == list(range(9, 100, 10))


def num_calls(folder: Path) -> int:
    """Calls that `read_run` makes: a measure of its work that no clock disturbs."""
    found = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        read_run(folder)
    finally:
        sys.setprofile(None)
    return found


def test_work_grows_as_the_records_and_not_as_their_square_where_keys_change(tmp_path: Path) -> None:
    records = [{"iteration": step, "a": 1.0, **({"b": 1.0} if step % 2 else {}), **({"c": 1.0} if step % 5 else {})}
               for step in range(1, 1601)]
    many, few = write_steps(tmp_path / "many", records), write_steps(tmp_path / "few", records[:400])
    assert num_calls(many) < 5 * num_calls(few)


def test_a_run_that_died_while_it_wrote(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [step_record(step, 1.0) for step in (1, 2, 3)], planned=500)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(json.dumps(step_record(4, 1.0)).encode()[:50])
    run = read_run(folder)
    assert len(run.steps) == 3
    assert any("last line" in problem and "cannot be read" in problem for problem in run.problems)
    assert any("end at iteration 3 of 500" in problem for problem in run.problems)


def test_broken_lines_skipped_steps_and_losses_that_are_not_finite(tmp_path: Path) -> None:
    records = [step_record(1, 1.0), step_record(2, 1.0, success=False), step_record(3, math.nan), step_record(6, 1.0)]
    records[2]["lm loss"] = "NaN"
    folder = write_run(tmp_path, records)
    text = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(b"\xff\xfe\n[1, 2]\n" + text)
    problems = " ".join(read_run(folder).problems)
    assert "2 lines of metrics.jsonl cannot be read and are left out." in problems
    assert "1 iterations were skipped" in problems
    assert "The loss of 1 iterations is not finite" in problems
    assert "2 iterations between the first and the last have no figures" in problems


def test_flags_steps_and_starts_that_cannot_be_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path, usual_records(), timelines=(timeline(10, {"vision": 1}),))
    (folder / "run_config.toml").write_text("[train")
    (folder / "timeline" / "step-20.json").write_text('{"iteration": 20, "ranks": [')
    (folder / "timeline" / "step-30.json").write_text('{"iteration": 30, "ranks": []}')
    (folder / "startup.json").write_text("[]")
    run = read_run(folder)
    assert list(run.timelines) == [10] and run.flags == {} and run.start == {}
    for name in ("run_config.toml", "step-20.json", "step-30.json", "startup.json"):
        assert sum(name in problem for problem in run.problems) == 1, run.problems


def test_a_stall_is_told_by_its_summary_or_by_a_rank(tmp_path: Path) -> None:
    folder = write_run(tmp_path, usual_records())
    write_stall(folder, "stall-rank3.txt", "stall on rank 3", after_s=700)
    assert read_run(folder).stall == "stall on rank 3"
    write_stall(folder, "stall-rank4.txt", "stall on rank 4", after_s=703)
    write_stall(folder, "stall-summary.txt", "everybody waits for rank 1", after_s=702)
    run = read_run(folder)
    assert run.stall == "everybody waits for rank 1", "of one stall, whose last rank reported after it"
    assert any("stall-summary.txt" in problem for problem in run.problems)


def test_the_summary_of_an_earlier_stall_does_not_hide_the_last_one(tmp_path: Path) -> None:
    folder = write_run(tmp_path, usual_records())
    write_stall(folder, "stall-summary.txt", "the first one", after_s=700)
    write_stall(folder, "stall-rank0.txt", "rank 0 in the first one", after_s=699)
    write_stall(folder, "stall-rank2.txt", "rank 2 in the second one", after_s=2000)
    run = read_run(folder)
    assert run.stall == "rank 2 in the second one"
    assert [problem for problem in run.problems if "stall" in problem] == [
        "A stall ended the run, or an earlier one in this folder: see stall-rank2.txt below."]


def test_a_stall_from_before_the_run_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path, usual_records())
    write_stall(folder, "stall-summary.txt", "of the run before", after_s=-60)
    assert (read_run(folder).stall, read_run(folder).problems) == ("", ())
    folder = write_run(tmp_path, [step_record(1, 1.0) | {"wall_time": None}])
    assert read_run(folder).stall == "of the run before", "whose begin is not known"


def test_no_finished_iteration(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, []))
    assert len(run.steps) == 0
    assert run.problems == ("No iteration was finished: there are no figures to show.",)


def test_folders_that_are_no_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere: there is no such folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"there is no .*metrics\.jsonl.*run_config\.toml"):
        read_run(tmp_path)


def test_only_a_few_steps_of_many_are_read(tmp_path: Path) -> None:
    steps = tuple(timeline(step, {"vision": 1}) for step in range(10, 210, 10))
    run = read_run(write_run(tmp_path, usual_records(), timelines=steps))
    assert run.num_timelines == 20
    assert len(run.timelines) == 6 and {10, 200} <= run.timelines.keys()


def test_evenly_has_both_ends() -> None:
    assert evenly(3, 6) == [0, 1, 2]
    assert evenly(100, 3) == [0, 50, 99] or evenly(100, 3) == [0, 49, 99]
    assert evenly(0, 3) == []


def test_length_in_samples(tmp_path: Path) -> None:
    folder = write_run(tmp_path, usual_records())
    for samples, iterations in ((800, 100), (801, 101), (807, 101)):  # the last one may go past them
        (folder / "run_config.toml").write_text(f"[train]\ntrain-samples = {samples}\nglobal-batch-size = 8\n")
        assert read_run(folder).planned_iterations == iterations
