"""Training from shards: the losses of the same samples in memory, and runs that go on exactly where they stopped."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.launch import ROOT, finish, losses, records, start_torchrun, torchrun
from tests.support.noted_energon import FOLDER, noted_rows

MODEL = """--model-provider llava --device cpu --no-bf16 --transformer-impl local --vision-image-size 8
--vision-patch-size 4 --vision-num-channels 1 --vision-hidden-size 32 --vision-num-layers 1
--vision-num-attention-heads 4 --vision-ffn-hidden-size 64 --no-vision-class-token --num-layers 2 --hidden-size 32
--num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 --vocab-size 32 --make-vocab-size-divisible-by 32
--image-token-id 3 --seq-length 32 --lr 1e-3 --lr-decay-style constant --log-interval 1 --num-generations 0
--watchdog-timeout-s 100""".split()
LAYOUT = "--encoder-dp 1 --llm-dp 2 --micro-batch-size 4 --global-batch-size 16".split()
PACKED = "--encoder-dp 1 --llm-dp 2 --micro-batch-size 1 --global-batch-size 8 --seq-length 64".split()
NOTED = ("--dataset-provider", "tests.support.noted_energon:provider")
NUM_KILLS, KILLED_ITERATIONS = 20, 60


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards") / "digits"
    subprocess.run([sys.executable, "scripts/prepare_digits.py", str(folder), "--samples", "240", "--shards", "4",
                    "--image-size", "8"], cwd=ROOT, check=True, capture_output=True, text=True)
    return folder


def data_flags(shards: Path) -> tuple[str, ...]:
    return ("--data-path", str(shards / "blend.yaml"), "--tokenizer", str(shards / "tokenizer"), "--num-workers", "2",
            "--image-mean", "0.2873035294117647", "--image-std", "0.3539294117647059")


def order_of(rows: dict[tuple[int, int], set[str]], lanes: int) -> list[list[tuple[int, bool]]]:
    """For each lane `(index, text only)` of its samples. A key tells the data set and the index."""
    order: list[list[tuple[int, bool]]] = [[] for _ in range(lanes)]
    for (lane, _), (key,) in sorted((place, tuple(keys)) for place, keys in rows.items()):
        name = key.rsplit("/", 1)[-1]
        order[lane].append((int(name.split("-")[1]), key.startswith("text/")))
    return order


def test_shards_give_the_losses_of_the_same_samples_in_memory(shards: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    done = torchrun(3, *MODEL, *LAYOUT, *NOTED, *data_flags(shards), "--train-iters", "4", "--run-dir",
                    str(tmp_path / "shards"), **{FOLDER: str(notes)})
    assert done.returncode == 0, done.stdout[-3000:]
    rows = noted_rows(notes)
    assert {len(keys) for keys in rows.values()} == {1}
    order = order_of(rows, 2)
    assert {text_only for lane in order for _, text_only in lane} == {True, False}, "both parts of the blend"
    (tmp_path / "order.json").write_text(json.dumps(order))
    done = torchrun(3, *MODEL, *LAYOUT, "--dataset-provider", "tests.support.listed_digits:provider", "--digits-order",
                    str(tmp_path / "order.json"), "--train-iters", "4", "--run-dir", str(tmp_path / "memory"))
    assert done.returncode == 0, done.stdout[-3000:]
    assert losses(tmp_path / "shards") == pytest.approx(losses(tmp_path / "memory"), rel=1e-5)


@pytest.mark.parametrize("mode", ["routed", "per-lane"])
def test_packed_rows_train_and_go_on_exactly(shards: Path, tmp_path: Path, mode: str) -> None:
    flags = (*MODEL, *PACKED, *NOTED, *data_flags(shards), "--packing-buffer-size", "8", "--packing-balance",
             "--shuffle-buffer-size", "4", "--lane-loader", mode)
    found = {}
    for name, parts in (("whole", (6,)), ("resumed", (2, 3, 6))):
        run, save, notes = tmp_path / name, tmp_path / f"{name}-save", tmp_path / f"{name}-notes"
        notes.mkdir()
        for iterations in parts:
            done = torchrun(3, *flags, "--train-iters", str(iterations), "--save", str(save), "--load", str(save),
                            "--run-dir", str(run), **{FOLDER: str(notes)})
            assert done.returncode == 0, done.stdout[-3000:]
        found[name] = losses(run), noted_rows(notes)
    whole, resumed = found["whole"], found["resumed"]
    assert resumed[0] == whole[0], "losses differ"
    assert {place: resumed[1][place] for place in whole[1]} == whole[1]
    (keys,) = whole[1][0, 0]
    assert " " in keys, "a row of several samples"
    last = records(tmp_path / "whole")[-1]
    assert last["packing-utilisation"] > 0.6 and last["encoder-imbalance"] >= 1
    assert last["encoder-imbalance-unbalanced"] >= 1


@pytest.mark.slow
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
    """All processes below one."""
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return children + [grandchild for child in children for grandchild in descendants(child)]
