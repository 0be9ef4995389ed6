from __future__ import annotations

import json
import math
import resource
import sys

import pytest

from mimo.observe import trackers
from mimo.observe.trackers import JsonlTracker, TensorBoardTracker


def strict_lines(path):
    """Every line of a JSON Lines file; NaN and Infinity, which JSON lacks, are refused."""
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_jsonl_is_strict_json_on_disk_at_once(tmp_path):
    tracker = JsonlTracker(tmp_path / "run" / "metrics.jsonl")
    tracker.log(3, 24, {"lm loss": math.nan, "grad-norm": None, "up": math.inf, "down": -math.inf, "success": False,
                        "num-zeros": 4, "iteration": 99})
    [line] = strict_lines(tmp_path / "run" / "metrics.jsonl")
    assert list(line)[:3] == ["iteration", "consumed_samples", "wall_time"]
    assert isinstance(line.pop("wall_time"), float)
    assert line == {"iteration": 3, "consumed_samples": 24, "lm loss": "NaN", "grad-norm": None, "up": "Infinity",
                    "down": "-Infinity", "success": False, "num-zeros": 4}
    tracker.close()
    tracker.close()


def test_jsonl_fresh_run_starts_empty_and_resumed_run_drops_later_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    for step in range(6):
        tracker.log(step, step * 8, {"lm loss": float(step)})
    tracker.close()
    with path.open("a") as file:
        file.write('{"iteration": 2, "lm lo')  # the process was killed here

    resumed = JsonlTracker(path, resume_iteration=3)
    resumed.log(4, 32, {"lm loss": 40.0})
    assert [(line["iteration"], line["lm loss"]) for line in strict_lines(path)] == [
        (0, 0), (1, 1), (2, 2), (3, 3), (4, 40)]
    resumed.close()

    JsonlTracker(path).close()
    assert path.read_text() == ""
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_jsonl_resume_without_an_earlier_file(tmp_path):
    JsonlTracker(tmp_path / "metrics.jsonl", resume_iteration=5).close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_tensorboard_has_both_axes(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker(tmp_path)
    for step in (1, 2):
        tracker.log(step, step * 8, {"iteration": step, "consumed_samples": step * 8, "success": True,
                                     "lm loss": 3.0 / step, "grad-norm": None if step == 1 else 1.5,
                                     "seq_load_balancing_loss": 1.0, "skipped-iterations": 2 - step,
                                     "timeline/vision/forward-s": 0.5})
    tracker.close()
    tracker.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    points = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert points == {
        "lm loss": [(1, 3.0), (2, 1.5)],
        "lm loss vs samples": [(8, 3.0), (16, 1.5)],
        "grad-norm": [(2, 1.5)],
        "grad-norm vs samples": [(16, 1.5)],
        "seq_load_balancing_loss": [(1, 1.0), (2, 1.0)],
        "seq_load_balancing_loss vs samples": [(8, 1.0), (16, 1.0)],
        "skipped-iterations": [(1, 1.0), (2, 0.0)],
        "timeline/vision/forward-s": [(1, 0.5), (2, 0.5)],
    }


def test_a_line_that_did_not_fit_is_gone_when_there_is_room_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(1, 8, {})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limits[1]))
    try:
        for _ in range(2):
            with pytest.raises(OSError):
                tracker.log(2, 16, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    tracker.log(3, 24, {})
    assert [line["iteration"] for line in strict_lines(path)] == [1, 3]
    path.unlink()
    tracker._file = open("/dev/full", "ab", buffering=0)
    with pytest.raises(OSError, match="No space left"):
        tracker.log(4, 32, {})
    tracker.log(5, 40, {})
    tracker.close()
    tracker.close()
    assert [line["iteration"] for line in strict_lines(path)] == [5]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_goes_on_in_a_new_file(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr(trackers, "REOPEN_S", 0.0)
    tracker = TensorBoardTracker(tmp_path / "gone")

    def refuse(data):
        raise OSError(5, "Input/output error")

    worker = tracker._writer.event_writer._async_writer._worker
    monkeypatch.setattr(worker._record_writer, "write", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        while True:  # the writer's thread notices first
            tracker.log(1, 8, {"lm loss": 1.0})
    (tmp_path / "gone").rename(tmp_path / "old")
    (tmp_path / "gone").write_text("")
    with pytest.raises(OSError):
        tracker.log(2, 16, {"lm loss": 2.0})
    (tmp_path / "gone").unlink()
    tracker.log(3, 24, {"lm loss": 3.0})
    tracker.close()
    events = EventAccumulator(str(tmp_path / "gone"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("lm loss")] == [(3, 3.0)]


def test_tensorboard_not_installed_names_the_flag(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ValueError, match="--tensorboard-dir .*tensorboard is not installed"):
        TensorBoardTracker(tmp_path)
