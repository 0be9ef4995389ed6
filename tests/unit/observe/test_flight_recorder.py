from __future__ import annotations

import os
import pickle

import pytest

from mimo.watchdog import flight_recorder
from mimo.watchdog.status import GroupStatus

STALL = """
import os, sys, time
from functools import partial
from pathlib import Path
from mimo.watchdog import flight_recorder
from mimo.watchdog.status import GroupStatus
flight_recorder.turn_on()
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/meeting", rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
from mimo.watchdog.watchdog import Watchdog
watchdog = Watchdog(0.5, "rank 0")
watchdog.on_stall.append(lambda: time.sleep(600))
watchdog.on_stall.append(partial(flight_recorder.dump, Path(sys.argv[1]) / "flight-recorder", 0, "gloo"))
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in flight_recorder.SIZE_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
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


def entry(group: str, number: int, **more: object) -> dict[str, object]:
    return {"process_group": (group, "undefined"), "collective_seq_id": number, "is_p2p": False, "retired": True,
            "state": "completed", "profiling_name": f"nccl:all_reduce {number}"} | more


def test_the_record_shows_the_first_collective_of_a_group_that_has_not_ended():
    running = {"retired": False, "state": "started"}
    record = {"entries": [entry("0", 1), entry("3", 1), entry("0", 2, **running), entry("0", 3, **running),
                          entry("1", 9, **running), entry("0", 8, is_p2p=True, **running)]}
    ranks = {"0": (0, 1, 2), "1": (4,), "3": (0, 4)}
    assert flight_recorder.find_groups(record, ranks) == (
        GroupStatus("0", (0, 1, 2), 3, 2, "nccl:all_reduce 2"), GroupStatus("3", (0, 4), 1))
    assert flight_recorder.find_groups({}, ranks) == ()


def test_no_group_is_shown_where_nothing_is_recorded():
    assert flight_recorder.group_statuses("gloo") == ()
