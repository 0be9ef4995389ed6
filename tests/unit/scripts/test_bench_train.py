"""The benchmark of training: figures of made-up metrics, one table for all layouts, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mimo.config.trainer import RunConfig
from scripts.bench import train as bench

FLAGS = ["--run", "apart=--encoder-dp 1 --llm-dp 2", "--run", "together=--layout colocated --encoder-dp 2 --llm-dp 2",
         "--model-provider", "mock", "--dataset-provider", "mock", "--seq-length", "128", "--steps", "4",
         "--warmup-steps", "2"]


def record(iteration: int, seconds: float, loss: float) -> dict[str, Any]:
    return {"iteration": iteration, "lm loss": loss, "grad-norm": 1.0, "batch-size": 8, "iteration-time": seconds,
            "image-tokens": 300, "text-tokens": 100, "packing-utilisation": 0.5, "data-wait-s": 0.1,
            "bridge-wait-s": 0.2,
            "forward-backward-s/vision": 0.3, "forward-backward-s/language": 0.4, "optimizer-s/vision": 0.05,
            "optimizer-s/language": 0.06, "peak-memory-bytes/vision": 2**30 * iteration,
            "peak-memory-bytes/language": 2**31, "flops/vision": 3e12, "flops/language": 4e12 * iteration,
            "hardware-flops/vision": 1e15, "timeline/vision/forward-s": 0.1, "timeline/vision/backward-s": 0.2,
            "timeline/language/forward-s": 0.5, "timeline/language/backward-s": iteration / 2}


@pytest.fixture
def trained(monkeypatch) -> dict[str, RunConfig]:
    """The runs that were asked for, each with four steps whose first two are slow."""
    made: dict[str, RunConfig] = {}

    def train(config: RunConfig, folder: Path) -> list[dict[str, Any]]:
        made[folder.name] = config
        if config.layout.layout == "colocated" and config.train.seed == 1:
            raise RuntimeError("the run ended with code 1:\nout of memory")
        return [record(step, seconds, loss) for step, (seconds, loss) in
                enumerate([(9.0, 5.0), (9.0, 4.5), (1.0, 4.2), (3.0, 4.0)], start=1)]

    monkeypatch.setattr(bench, "train", train)
    return made


def result(capsys) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_figures_are_those_of_the_steps_after_the_first(trained, capsys):
    assert bench.main(FLAGS) == 0
    apart, together = result(capsys)["runs"]
    assert (apart["name"], apart["ranks"], together["name"], together["ranks"]) == ("apart", 3, "together", 2)
    assert apart["step_ms"] == 2000 and apart["tokens_per_s_per_gpu"] == pytest.approx(800 / 4 / 3)
    assert together["tokens_per_s_per_gpu"] == pytest.approx(800 / 4 / 2)
    assert apart["peak_memory_gib"] == {"vision": 4.0, "language": 2.0}
    assert (apart["loss_first"], apart["loss_last"], apart["packing_utilisation"]) == (5.0, 4.0, 0.5)
    assert apart["losses"] == [5.0, 4.5, 4.2, 4.0]
    assert apart["time_ms"] == pytest.approx({
        "data_wait": 100, "bridge_wait": 200, "forward_backward/vision": 300, "forward_backward/language": 400,
        "optimizer/vision": 50, "optimizer/language": 60, "rest": 2000 - 100 - 400 - 60})
    assert apart["tflops_per_gpu"] == pytest.approx((3 + 4 * 3 + 3 + 4 * 4) / 4 / 3)
    assert apart["pass_tflops_per_gpu"] == pytest.approx({"vision": 10, "language": 28 / (1 + 3.5) / 2})
    assert "--encoder-dp 1 --llm-dp 2 --model-provider mock" in apart["command"]


def test_a_model_that_does_not_say_what_it_computes_has_no_flops():
    found = {name: value for name, value in record(1, 1.0, 5.0).items() if not name.startswith("flops/")}
    config = bench.plan_runs(["run=--llm-dp 1 --encoder-dp 1"], FLAGS[4:-4], 1)["run"][1]
    assert bench.figures(config, [found], 0)["tflops_per_gpu"] is None
