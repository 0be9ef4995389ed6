"""Training from a folder as LLaVA publishes its data: the same on every layout, and exact after stops and kills."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.e2e.test_energon_kills import kill_at_random
from tests.support.digit_shards import LAYOUT, MODEL, PACKED, run_training, write_shards
from tests.support.launch import finish, losses, start_torchrun
from tests.support.noted_energon import FOLDER, noted_rows
from tests.support.spawn import WorkerPool

pytestmark = pytest.mark.slow
NUM_KILLS, KILLED_ITERATIONS = 3, 30


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Flags of the data. Its forms are those of the script that users run."""
    out = write_shards(tmp_path_factory.mktemp("files") / "digits", "--llava")
    return ("--dataset-provider", "tests.support.noted_energon:conversations", "--data-path", str(out / "llava"),
            "--tokenizer", str(out / "tokenizer"), "--num-workers", "2", "--image-mean", "0.2873035294117647",
            "--image-std", "0.3539294117647059")


def run(pool: WorkerPool, notes: Path, world_size: int, *words: object) -> None:
    notes.mkdir(exist_ok=True)
    pool.run(noting_training, tuple(map(str, words)), world_size, str(notes), world_size=world_size, timeout_s=250)


def noting_training(rank: int, flags: tuple[str, ...], world_size: int, notes: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, notes)
        run_training(rank, flags, world_size)


@pytest.mark.timeout(600)
def test_every_layout_trains_on_the_same_batches(pool: WorkerPool, flags: tuple[str, ...], tmp_path: Path) -> None:
    found = {}
    for name, world_size, layout in (
        ("one encoder", 3, ()),
        ("two encoders", 4, ("--encoder-dp", 2)),
        ("a reader on each rank", 4, ("--llm-dp", 2, "--encoder-dp", 2, "--lane-loader", "per-lane")),
        ("colocated", 2, ("--layout", "colocated", "--encoder-dp", 2)),
    ):
        run(pool, tmp_path / f"{name}-notes", world_size, *MODEL, *LAYOUT, *flags, *layout, "--train-iters", 3,
            "--run-dir", tmp_path / name)
        rows = noted_rows(tmp_path / f"{name}-notes")
        # Readers read ahead by different numbers of rows.
        found[name] = losses(tmp_path / name), {place: rows[place] for place in rows if place[1] < 3 * 8}
    (expected, batches), *others = found.values()
    assert len(batches) == 48 and {len(keys) for keys in batches.values()} == {1}
    for other, rows in others:
        assert other == pytest.approx(expected, rel=1e-5)
        assert rows == batches


@pytest.mark.timeout(600)
def test_packed_rows_go_on_exactly_after_kills(flags: tuple[str, ...], tmp_path: Path) -> None:
    """Kill -9 of a rank, workers and all, at random moments: the samples and losses are those of a run left alone."""
    words = (*MODEL, *PACKED, *flags, "--packing-buffer-size", "8", "--save-interval", "1", "--keep-last", "3",
             "--train-iters", str(KILLED_ITERATIONS))
    notes = {name: tmp_path / f"{name}-notes" for name in ("whole", "killed")}
    for folder in notes.values():
        folder.mkdir()

    def start(name: str) -> tuple[str, ...]:
        save = str(tmp_path / f"{name}-save")
        return (*words, "--save", save, "--load", save, "--run-dir", str(tmp_path / name))

    done = finish(start_torchrun(3, *start("whole"), **{FOLDER: str(notes["whole"])}), 280)
    assert done.returncode == 0, done.stdout[-3000:]
    generator = random.Random(7)
    for count in range(NUM_KILLS):
        process = start_torchrun(3, *start("killed"), **{FOLDER: str(notes["killed"])})
        assert not kill_at_random(process, tmp_path / "killed-save", generator), f"ended after {count} kills"
    done = finish(start_torchrun(3, *start("killed"), **{FOLDER: str(notes["killed"])}), 280)
    assert done.returncode == 0, done.stdout[-3000:]
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    rows, expected = noted_rows(notes["killed"]), noted_rows(notes["whole"])
    assert {place: rows[place] for place in expected} == expected
