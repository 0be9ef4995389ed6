"""The benchmark of the timeline: both arms in one run, figures on the last line."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from scripts.bench.timeline import PATTERN, configure, parse_arguments, summary
from tests.support.launch import bench

FLAGS = """--device cpu --steps 8 --warmup-steps 2 --model-provider mock --dataset-provider mock --seq-length 128
--micro-batch-size 2 --global-batch-size 4 --encoder-dp 1 --llm-dp 1""".split()


def test_the_ratio_is_that_of_the_arms() -> None:
    found = summary([1.1 if on else 1.0 for on in PATTERN] * 3)
    assert (found["on_ms"], found["off_ms"]) == (1100.0, 1000.0)
    assert found["ratio"] == found["ratio_low"] == found["ratio_high"] == 1.1


def test_the_device_brings_its_precision_and_flags_win() -> None:
    config = configure(*parse_arguments(FLAGS))
    assert (config.train.device, config.model.bf16, config.model.transformer_impl) == ("cpu", False, "local")
    assert configure(*parse_arguments([*FLAGS, "--bf16"])).model.bf16
    assert config.observe.tensorboard_dir is None
    assert configure(*parse_arguments([*FLAGS, "--tensorboard-dir", "board"])).observe.tensorboard_dir == "board"


@pytest.mark.slow
def test_both_arms_run(tmp_path: Path) -> None:
    found = bench("timeline", *FLAGS, "--tensorboard-dir", str(tmp_path))
    assert (found["device"], found["device_name"]) == ("cpu", platform.machine())
    assert (found["ranks"], found["steps"]) == (2, 8)
    assert min(found["on_ms"], found["off_ms"], found["ratio_low"]) > 0
    board = EventAccumulator(str(tmp_path)).Reload()
    # One step more than those of warm-up and figures; the third is the first that counts.
    assert [event.step for event in board.Scalars("train/lm loss")] == list(range(1, 12))
    assert [event.step for event in board.Scalars("perf/timeline/vision/forward-s")] == [
        step for step in range(1, 12) if PATTERN[(step - 3) % len(PATTERN)]]
