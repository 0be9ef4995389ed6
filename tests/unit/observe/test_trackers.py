from __future__ import annotations

import base64
import io
import json
import math
import resource
import sys

import numpy as np
import pytest
from PIL import Image

from mimo.observability import trackers
from mimo.observability.metrics import StepRecord
from mimo.observability.trackers import (
    Answer,
    FileTracker,
    Generation,
    GenerationsTracker,
    JsonlTracker,
    TensorBoardTracker,
    curves,
    tag_of,
)


def strict_lines(path):
    """Return every line of a JSON Lines file; NaN and Infinity, which JSON lacks, are refused."""
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


def shown_by_tensorboard(folder):
    """Points of every curve, by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize("by_samples", [False, True])
def test_tensorboard_has_groups_and_on_request_both_axes(tmp_path, by_samples):
    tracker = TensorBoardTracker(tmp_path, by_samples=by_samples)
    for step in (1, 2):
        tracker.log(step, step * 8, {"iteration": step, "consumed_samples": step * 8, "success": True,
                                     "lm loss": 3.0 / step, "grad-norm": None if step == 1 else 1.5,
                                     "seq_load_balancing_loss": 1.0, "skipped-iterations": 2 - step,
                                     "timeline/vision/forward-s": 0.5})
    tracker.close()
    tracker.close()
    by_iteration = {"train/lm loss": [(1, 3.0), (2, 1.5)], "optim/grad-norm": [(2, 1.5)],
                    "moe/seq_load_balancing_loss": [(1, 1.0), (2, 1.0)],
                    "optim/skipped-iterations": [(1, 1.0), (2, 0.0)],
                    "perf/timeline/vision/forward-s": [(1, 0.5), (2, 0.5)]}
    more = {"train/lm loss vs samples": [(8, 3.0), (16, 1.5)], "optim/grad-norm vs samples": [(16, 1.5)],
            "moe/seq_load_balancing_loss vs samples": [(8, 1.0), (16, 1.0)]}
    assert shown_by_tensorboard(tmp_path) == by_iteration | (more if by_samples else {})


@pytest.mark.parametrize(("name", "tag"), [
    ("lm loss", "train/lm loss"), ("mtp_1 loss", "train/mtp_1 loss"), ("loss", "train/loss"),
    ("lm loss validation", "val/lm loss"), ("reward validation", "val/reward"),
    ("exact match validation", "val/exact match"),
    ("learning-rate/vision", "optim/learning-rate/vision"), ("moe/seq_load_balancing_loss_layer_3",
                                                             "moe/seq_load_balancing_loss_layer_3"),
    ("forward-backward-s/vision", "perf/forward-backward-s/vision"), ("data-wait-s", "perf/data-wait-s"),
    ("hardware-flops/language", "perf/hardware-flops/language"), ("mfu", "perf/mfu"), ("refit-s", "perf/refit-s"),
    ("image-tokens", "data/image-tokens"), ("encoder-imbalance", "data/encoder-imbalance"), ("tokens", "data/tokens"),
    ("reward", "rollout/reward"), ("completion-length-max", "rollout/completion-length-max"),
    ("rollout-s", "perf/rollout-s"),
    ("gen-kl", "policy/gen-kl"), ("clipped-low", "policy/clipped-low"), ("max-abs-dlogp", "policy/max-abs-dlogp"),
])
def test_every_figure_has_a_group(name, tag):
    assert tag_of(name) == tag


def test_the_loss_is_the_first_of_its_group():
    figures = StepRecord(iteration=1, consumed_samples=8, lm_loss=1.0, grad_norm=1.0, learning_rate=1e-3, batch_size=8,
                         iteration_time_s=0.1, mtp_losses={"mtp_1 loss": 2.0}, flops={"language": 1.0},
                         moe_losses={"seq_load_balancing_loss": 1.0}).to_dict()
    tags = sorted(curves(figures))
    assert [tag for tag in tags if tag.startswith("train/")] == ["train/lm loss", "train/mtp_1 loss"]
    assert {tag.partition("/")[0] for tag in tags} == {"data", "moe", "optim", "perf", "train"}


def test_answers_are_text_and_images(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = FileTracker(tmp_path, TensorBoardTracker(tmp_path), print)
    grey = np.full((4, 6, 1), 128, np.uint8)
    held_out = [Generation("digits/valid/1", [Answer("4|2")], "42", images=[grey, grey]),
                Generation("other", [Answer("a\nb", 1.0)], "?")]
    tracker.show(7, held_out, "held-out")
    tracker.show(8, held_out, "training")
    tracker.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    (text,) = events.Tensors("generations/answers/text_summary")
    said = text.tensor_proto.string_val[0].decode()
    assert text.step == 7 and "| digits/valid/1 | 4\\|2 | is '42' |" in said and "| other | a<br>b | reward 1 |" in said
    assert sorted(events.Tags()["images"]) == ["generations/digits/valid/1", "generations/digits/valid/1/1"]
    (image,) = events.Images("generations/digits/valid/1")
    assert (image.height, image.width, image.step) == (4, 6, 7)


def test_answers_are_kept_up_to_a_size_and_continue_exactly(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (64, 48, 3), np.uint8)
    plain = np.zeros((8, 8, 1), np.uint8)

    def prompts(step):
        answers = [Answer(f"{step} {number} " + "long " * 500, number / 2, 1.5 - number, number == 3)
                   for number in range(10)]
        return [Generation(f"p{step}", answers, "#### 4", "2 + 2 = ?", [noise, plain, *[plain] * 5])]

    def write(path, steps, resume=0, limit=10**6):
        said = []
        tracker = GenerationsTracker(path, resume, limit, said.append)
        for step in steps:
            tracker.show(step, prompts(step), "training")
        tracker.close()
        return said

    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    assert write(whole, (1, 2, 4)) == []
    write(parts, (1, 2, 3))
    assert write(parts, (4,), resume=2) == [] and parts.read_bytes() == whole.read_bytes()
    first = strict_lines(whole)[0]
    assert (first["iteration"], first["kind"], first["key"], first["prompt"]) == (1, "training", "p1", "2 + 2 = ?")
    assert first["num_answers"] == 10 and len(first["answers"]) == 8
    assert first["answers"][3] | {"text": ""} == {"text": "", "reward": 1.5, "advantage": -1.5, "truncated": True}
    text = first["answers"][0]["text"]
    assert len(text) < 1600 and text.startswith("1 0 long") and "[... 1,004 characters ...]" in text
    assert first["num_images"] == 7 and len(first["images"]) == 4
    kinds, shapes = [], []
    for url in first["images"][:2]:
        head, _, data = url.partition(";base64,")
        kinds.append(head)
        shapes.append(np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))).shape)
    assert kinds == ["data:image/jpeg", "data:image/png"] and shapes == [(64, 48, 3), (8, 8)]

    size = len(whole.read_bytes().splitlines()[0])
    (said,) = write(parts, (1, 2, 4), limit=2 * size + 10)
    assert "--generations-mib" in said and [line["iteration"] for line in strict_lines(parts)] == [1, 2]


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
    assert [(event.step, event.value) for event in events.Scalars("train/lm loss")] == [(3, 3.0)]


def test_tensorboard_not_installed_names_the_flag(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ValueError, match="--tensorboard-dir .*tensorboard is not installed"):
        TensorBoardTracker(tmp_path)
