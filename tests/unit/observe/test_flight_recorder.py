from __future__ import annotations

import os
import pickle

import pytest

from mimo.observe import flight_recorder

STALL = """
import os, sys, time
from functools import partial
from pathlib import Path
from mimo.observe import flight_recorder
flight_recorder.turn_on()
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/meeting", rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
from mimo.observe.watchdog import Watchdog
watchdog = Watchdog(0.5, "rank 0")
watchdog.at_stall.append(lambda: time.sleep(600))
watchdog.at_stall.append(partial(flight_recorder.dump, Path(sys.argv[1]) / "flight-recorder", 0, "gloo"))
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in flight_recorder.SIZE_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_a_stall_leaves_the_last_collectives(start, tmp_path):
    process = start(STALL, tmp_path)
    process.communicate()
    assert process.returncode == 17, "whatever is done at a stall ends"
    found = pickle.loads((tmp_path / "flight-recorder" / "rank_0").read_bytes())
    assert [entry["profiling_name"] for entry in found["entries"]] == ["gloo:all_reduce"]


@pytest.mark.parametrize("name", flight_recorder.SIZE_VARIABLES)
def test_the_environment_has_the_last_word(monkeypatch, tmp_path, name):
    monkeypatch.setenv(name, "0")
    flight_recorder.turn_on()
    assert {each: os.environ.get(each) for each in flight_recorder.SIZE_VARIABLES if each in os.environ} == {name: "0"}
    flight_recorder.dump(tmp_path / "none", 0, "gloo")
    assert not (tmp_path / "none").exists()


def test_it_is_on_otherwise(monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "1")  # so that what follows is put back
    del os.environ["TORCH_FR_BUFFER_SIZE"]
    flight_recorder.turn_on()
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "2000"
