"""The benchmark of schedules on sleeping modules: it finds what was put in, on the last line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.launch import ROOT

pytestmark = pytest.mark.slow
ENCODER_MS, LANGUAGE_MS, MICROBATCHES = 45.0, 90.0, 4


def run(*flags: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bench" / "schedule.py"), "--device", "cpu", "--blocks", "2",
         "--warmup-blocks", "1", "--steps", "1", *flags], check=False, capture_output=True, text=True, timeout=280,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("stages", [1, 2])
def test_it_finds_what_was_put_in(stages):
    # A sleep is never shorter than it was told to be, but parts of a step are differences of times: on a busy machine
    # they are told apart only by far.
    found = run("--synthetic", f"{ENCODER_MS},{LANGUAGE_MS}", "--global-batch-size", str(MICROBATCHES), "--encoder-dp",
                "1", "--llm-pp", str(stages))
    language, vision, parts = found["grids"]["language"], found["grids"]["vision"], found["parts_ms"]
    assert (found["ranks"], found["microbatches"], found["critical"]) == (1 + stages, MICROBATCHES, "language")
    assert language["microbatch_ms"] >= LANGUAGE_MS and vision["microbatch_ms"] >= ENCODER_MS
    assert language["ideal_ms"] >= MICROBATCHES * LANGUAGE_MS and vision["ideal_ms"] >= MICROBATCHES * ENCODER_MS
    assert found["step_ms"] > (MICROBATCHES + stages - 1) * LANGUAGE_MS + ENCODER_MS
    # The first forward and the last backward pass of the encoder, and a microbatch for each further stage.
    assert parts["fill and drain"] >= 0.5 * ENCODER_MS
    assert (parts["bubble"] >= 0.5 * LANGUAGE_MS) == (stages > 1) and language["bubble_share"] == (stages - 1) / 5
    assert abs(sum(parts.values()) / found["step_ms"] - 1) <= 0.03
    assert 0 < found["eta"] < 1 < found["prefetch"]["bound"] < 2


def test_lanes_of_different_length_are_stragglers():
    found = run("--synthetic", "10,60,0.5", "--global-batch-size", "8", "--encoder-dp", "1", "--llm-dp", "2")
    assert found["grids"]["language"]["straggler_factor"] > 1 and found["parts_ms"]["imbalance"] > 0
    assert found["ranks"] == 3 and found["microbatches"] == 4


def test_run_ahead_off_and_on_in_one_run():
    found = run("--synthetic", "60,50,0.5,0.5", "--global-batch-size", "6", "--encoder-dp", "1", "--llm-dp", "1",
                "--encoder-run-ahead", "3")
    ahead = found["run_ahead"]
    # Equal work in both arms, and neither is faster than the encoder.
    assert found["critical"] == "vision" and min(ahead["off_ms"], ahead["on_ms"]) > 6 * 60
    assert 0 < min(ahead["eta_off"], ahead["eta_on"]) and max(ahead["eta_off"], ahead["eta_on"]) <= 1.05
    assert found["encoder_run_ahead"] == 3 and found["bound_of_eta"] == 1


def test_prefetch_off_and_on_in_one_run():
    found = run("--synthetic", "40,40", "--global-batch-size", "2", "--encoder-dp", "1", "--llm-dp", "1", "--freeze",
                "vision", "--encoder-prefetch-depth", "3")
    prefetch = found["prefetch"]
    assert min(prefetch["off_ms"], prefetch["on_ms"]) > 2 * 40 and prefetch["speedup"] > 0
    assert 1 < prefetch["bound_of_step"] < prefetch["bound"] <= 2
    assert found["grids"]["vision"]["microbatch_ms"] >= 40
