"""Runs on shards that are killed: the samples and losses of one that was left alone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.digit_shards import MODEL, NOTED, PACKED, data_flags, write_shards
from tests.support.launch import finish, losses, start_torchrun, torchrun
from tests.support.noted_energon import FOLDER, noted_rows

pytestmark = pytest.mark.slow

NUM_KILLS, KILLED_ITERATIONS = 20, 60


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards") / "digits")


@pytest.mark.timeout(1500)
def test_killed_at_random_and_resumed(shards: Path, tmp_path: Path) -> None:
    """Kill -9 of a rank, workers and all, at random moments: the samples and losses are those of a run left alone."""
    flags = (*MODEL, *PACKED, *NOTED, *data_flags(shards), "--packing-buffer-size", "8", "--save-interval", "1",
             "--keep-last", "3", "--train-iters", str(KILLED_ITERATIONS))
    expected_notes, notes = tmp_path / "expected-notes", tmp_path / "notes"
    expected_notes.mkdir()
    notes.mkdir()
    done = torchrun(3, *flags, "--save", str(tmp_path / "expected"), "--run-dir", str(tmp_path / "expected-run"),
                    **{FOLDER: str(expected_notes)})
    assert done.returncode == 0, done.stdout[-3000:]
    generator, save, run = random.Random(11), tmp_path / "save", tmp_path / "run"
    again = (*flags, "--save", str(save), "--load", str(save), "--run-dir", str(run))
    kills = 0
    while kills < NUM_KILLS:
        process = start_torchrun(3, *again, **{FOLDER: str(notes)})
        ended = kill_at_random(process, save, generator)
        assert not ended, f"the run came to its end after {kills} kills"
        kills += 1
    done = finish(start_torchrun(3, *again, **{FOLDER: str(notes)}), 280)
    assert done.returncode == 0, done.stdout[-3000:]
    assert losses(run) == losses(tmp_path / "expected-run")
    rows, expected = noted_rows(notes), noted_rows(expected_notes)
    assert {place: rows[place] for place in expected} == expected


def kill_at_random(process: subprocess.Popen[str], save: Path, generator: random.Random) -> bool:
    """Kill all processes of a run a random time after its next checkpoint. Returns whether it ended before."""
    tracker = save / "latest_checkpointed_iteration.txt"
    before = tracker.read_text() if tracker.exists() else ""
    deadline = time.monotonic() + 120
    while (tracker.read_text() if tracker.exists() else "") == before:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(process.communicate()[0][-3000:])
        time.sleep(0.01)
    time.sleep(generator.random() * 0.6)
    ended = process.poll() is not None
    for pid in [process.pid, *descendants(process.pid)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.communicate()
    return ended


def descendants(pid: int) -> list[int]:
    """List all processes below one."""
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return children + [grandchild for child in children for grandchild in descendants(child)]
