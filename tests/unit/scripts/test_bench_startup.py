"""The benchmark of starts without a start: parts sum to the whole, the middle repetition is shown."""

from __future__ import annotations

import json
import platform

import pytest
import torch

from scripts.bench import startup, train
from scripts.bench.harness import plan_runs
from scripts.bench.startup import markdown, parse_arguments, parts, summary

FLAGS = ["--device", "cpu", "--model-provider", "mock", "--dataset-provider", "mock"]


def started(whole_s: float, first_s: float) -> dict:
    found = {"ended_unix_s": 1000.0 + whole_s, "seconds": whole_s - 2.0,
             "phases": {"imports": whole_s - 3.0, "update": 1.0}}
    return parts(1000.0, found) | {"first_s": first_s, "steady_s": 0.5, "process_groups": 9,
                                   "process_groups_of_a_rank": 5}


def test_the_middle_repetition_is_shown():
    found = summary([started(30.0, 4.0), started(10.0, 1.0), started(20.0, 2.0)], [4.0, 5.0, 6.0])
    assert (found["whole_s"], found["parts_s"]["imports"], found["all_whole_s"]) == (20.0, 17.0, [30.0, 10.0, 20.0])
    assert (found["first_over_steady"], found["first_iteration_s"]) == (4.0, 2.0)
    assert found["imports_over_baseline"] == 17.0 / 5.0
    lines = markdown([{"name": "one", "ranks": 2, **found}, {"name": "two", "ranks": 2, "error": "ended"}]).splitlines()
    cells = lines[2].split(" | ")
    assert len(lines) == 3 and cells[2:5] == ["20.00", "2.00", "17.00"] and cells[-1] == "5 |"
    assert len(cells) == len(lines[0].split(" | "))


def test_runs_have_the_steps_of_the_benchmark():
    chosen, further = parse_arguments([*FLAGS, "--run", "a=--encoder-dp 1 --llm-dp 1", "--run",
                                       "b=--layout colocated"])
    runs = plan_runs(chosen.run, further, chosen.steps)
    assert list(runs) == ["a", "b"] and runs["a"][1].train.train_iters == 20


@pytest.mark.parametrize(("bench", "flags"), [(startup, []), (train, ["--run", "one="])])
def test_a_host_with_gpus_names_its_processor_where_that_was_measured(monkeypatch, capsys, bench, flags):
    def no_run(*_):
        raise RuntimeError("not started")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "the GPU")
    monkeypatch.setattr(startup, "baseline", no_run)
    monkeypatch.setattr(train, "train", no_run)
    for device, name in (("cpu", platform.machine()), ("cuda", "the GPU")):
        assert bench.main([*flags, "--model-provider", "mock", "--dataset-provider", "mock", "--device", device]) == 1
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (found["device"], found["device_name"]) == (device, name)
