"""Training from shards: the losses of the same samples in memory, and runs that go on exactly where they stopped."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.support.digit_shards import LAYOUT, MODEL, NOTED, PACKED, data_flags, run_training, write_shards
from tests.support.launch import losses, records
from tests.support.noted_energon import FOLDER, noted_rows
from tests.support.spawn import WorkerPool

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards") / "digits")


def run(pool: WorkerPool, notes: Path | None, *flags: object) -> None:
    """Train on three ranks; with `notes`, the rows that were read are noted there."""
    pool.run(noting_training, tuple(map(str, flags)), 3, None if notes is None else str(notes), world_size=3,
             timeout_s=250)


def noting_training(rank: int, flags: tuple[str, ...], world_size: int, notes: str | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if notes is not None:
            patch.setenv(FOLDER, notes)
        run_training(rank, flags, world_size)


def order_of(rows: dict[tuple[int, int], set[str]], lanes: int) -> list[list[tuple[int, bool]]]:
    """Return `(index, text only)` of each lane's samples. A key has the data set and the index."""
    order: list[list[tuple[int, bool]]] = [[] for _ in range(lanes)]
    for (lane, _), (key,) in sorted((place, tuple(keys)) for place, keys in rows.items()):
        name = key.rsplit("/", 1)[-1]
        order[lane].append((int(name.split("-")[1]), key.startswith("text/")))
    return order


def test_shards_give_the_losses_of_the_same_samples_in_memory(pool: WorkerPool, shards: Path, tmp_path: Path) -> None:
    run(pool, tmp_path, *MODEL, *LAYOUT, *NOTED, *data_flags(shards), "--train-iters", 4, "--run-dir",
        tmp_path / "shards")
    rows = noted_rows(tmp_path)
    assert {len(keys) for keys in rows.values()} == {1}
    order = order_of(rows, 2)
    assert {text_only for lane in order for _, text_only in lane} == {True, False}, "both parts of the blend"
    (tmp_path / "order.json").write_text(json.dumps(order))
    run(pool, None, *MODEL, *LAYOUT, "--dataset-provider", "tests.support.listed_digits:provider", "--digits-order",
        tmp_path / "order.json", "--train-iters", 4, "--run-dir", tmp_path / "memory")
    assert losses(tmp_path / "shards") == pytest.approx(losses(tmp_path / "memory"), rel=1e-5)


@pytest.mark.parametrize("mode", ["routed", "per-lane"])
def test_packed_rows_train_and_go_on_exactly(pool: WorkerPool, shards: Path, tmp_path: Path, mode: str) -> None:
    flags = (*MODEL, *PACKED, *NOTED, *data_flags(shards), "--packing-buffer-size", 8, "--packing-balance",
             "--shuffle-buffer-size", 4, "--lane-loader", mode)
    found = {}
    for name, parts in (("whole", (6,)), ("resumed", (2, 3, 6))):
        folder, save, notes = tmp_path / name, tmp_path / f"{name}-save", tmp_path / f"{name}-notes"
        notes.mkdir()
        for iterations in parts:
            run(pool, notes, *flags, "--train-iters", iterations, "--save", save, "--load", save, "--run-dir", folder)
        found[name] = losses(folder), noted_rows(notes)
    whole, resumed = found["whole"], found["resumed"]
    assert resumed[0] == whole[0], "losses differ"
    assert {place: resumed[1][place] for place in whole[1]} == whole[1]
    (keys,) = whole[1][0, 0]
    assert " " in keys, "a row of several samples"
    last = records(tmp_path / "whole")[-1]
    assert last["packing-utilisation"] > 0.6 and last["encoder-imbalance"] >= 1
    assert last["encoder-imbalance-unbalanced"] >= 1


def test_dropout_goes_on_exactly_beside_workers(pool: WorkerPool, shards: Path, tmp_path: Path) -> None:
    """Starting the workers must not draw from the generator of dropout, which on CPUs is torch's default one."""
    flags = (*MODEL, *data_flags(shards), "--dataset-provider", "energon", "--layout", "colocated", "--encoder-tp", 2,
             "--llm-tp", 2, "--micro-batch-size", 4, "--global-batch-size", 4, "--hidden-dropout", 0.1,
             "--eval-iters", 1, "--eval-interval", 2, "--save-interval", 2)
    for name, parts in (("whole", (4,)), ("resumed", (2, 4))):
        for iterations in parts:
            words = (*flags, "--train-iters", iterations, "--save", tmp_path / f"{name}-save", "--load",
                     tmp_path / f"{name}-save", "--run-dir", tmp_path / name)
            pool.run(noting_training, tuple(map(str, words)), 2, None, world_size=2, timeout_s=250)
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")


def test_lanes_may_change_where_their_workers_stay(pool: WorkerPool, shards: Path, tmp_path: Path) -> None:
    """Two lanes of two workers become one of four without losing or repeating a sample; other numbers are refused."""
    before, after, save = tmp_path / "before", tmp_path / "after", tmp_path / "save"
    before.mkdir()
    after.mkdir()
    flags = (*MODEL, *LAYOUT, *NOTED, *data_flags(shards), "--save", save, "--load", save,
             "--run-dir", tmp_path / "run")
    run(pool, before, *flags, "--train-iters", 2)
    one_lane = (*flags, "--llm-dp", 1, "--encoder-tp", 2)
    run(pool, after, *one_lane, "--num-workers", 4, "--train-iters", 3)
    rows = {place: key for place, (key,) in ((place, tuple(keys)) for place, keys in noted_rows(before).items())}
    trained = [key for (_, position), key in rows.items() if position < 16]
    ahead = {key for (_, position), key in rows.items() if position >= 16}
    continued = [key for keys in noted_rows(after).values() for key in keys]
    assert len(trained) == 32 and len(set(trained)) == 32 and len(set(continued)) == len(continued)
    assert not set(trained) & set(continued), "samples that were trained on came again"
    assert ahead <= set(continued), "samples that were only read ahead are lost"
    errors = pool.run(error_of_training, tuple(map(str, (*one_lane, "--num-workers", 2, "--train-iters", 4))), 3,
                      world_size=3)
    assert any("--llm-dp 1 --num-workers 4 would continue it" in error for error in errors), errors


def test_bad_samples_count_over_all_readers_and_starts(pool: WorkerPool, shards: Path, tmp_path: Path) -> None:
    """Two encoder ranks read a lane each, and neither of them comes to the limit."""
    def start(name: str, iterations: int, limit: int) -> list[str]:
        flags = (*MODEL, *LAYOUT, *data_flags(shards), "--encoder-dp", 2, "--dataset-provider", "energon",
                 "--seq-length", 20, "--max-bad-samples", limit, "--train-iters", iterations,
                 "--save", tmp_path / name, "--load", tmp_path / name, "--run-dir", tmp_path / f"{name}-run")
        return pool.run(error_of_training, tuple(map(str, flags)), 4, world_size=4, timeout_s=250)

    start("whole", 4, 1000)
    counts = [record["bad-samples"] for record in records(tmp_path / "whole-run")]
    assert len(counts) == 4 and 0 < counts[0] < counts[1] < counts[3], counts
    limit = counts[3] - 1
    assert start("broken", 2, limit) == ["nothing was raised"] * 4
    first, *others = start("broken", 4, limit)
    assert [record["bad-samples"] for record in records(tmp_path / "broken-run")] == counts, "goes on from the sum"
    assert first.startswith(f"--max-bad-samples {limit}: {counts[3]} samples of the run could not be used; the last: ")
    assert "train-00" in first and "more than --seq-length 20" in first, "shard, key and reason"
    assert others == ["rank 0 reports what is wrong"] * 3


@pytest.mark.timeout(600)
def test_a_run_goes_on_with_the_data_that_it_began_with(pool: WorkerPool, shards: Path, tmp_path: Path) -> None:
    """Flags and files that decide the samples are compared; a blend's weights may change where the data starts anew."""
    data = shutil.copytree(shards, tmp_path / "data")
    flags = (*MODEL, *LAYOUT, *data_flags(data), "--dataset-provider", "energon", "--save", tmp_path / "save", "--load",
             tmp_path / "save", "--run-dir", tmp_path / "run")

    def start(iterations: int, *more: object) -> str:
        words = tuple(map(str, (*flags, "--train-iters", iterations, *more)))
        return str(pool.run(error_of_training, words, 3, world_size=3, timeout_s=250)[0])

    assert start(1) == "nothing was raised"
    said = start(2, "--max-patches", 512, "--image-tag-type", "internvl")
    assert "the data cannot go on where it was" in said and "--no-load-data" in said
    assert "--max-patches 512 (checkpoint: not set)" in said and "--image-tag-type internvl (checkpoint: none)" in said
    template = data / "tokenizer" / "chat_template.jinja"
    before = template.read_text() if template.exists() else None
    template.write_text("{% for message in messages %}{{ message.content }}<eos>{% endfor %}")
    assert "--tokenizer content " in start(2)
    template.unlink() if before is None else template.write_text(before)
    blend = data / "blend.yaml"
    blend.write_text(re.sub(r"weight: \S+", "weight: 5", blend.read_text(), count=1))
    assert "--data-path content " in start(2)
    assert start(2, "--no-load-data") == "nothing was raised"
    assert start(3) == "nothing was raised", "the new weights are those of the checkpoint now"


def error_of_training(rank: int, flags: tuple[str, ...], world_size: int) -> str:
    from mimo.watchdog.process_exit import ReportedElsewhereError

    try:
        run_training(rank, flags, world_size)
    except (ValueError, ReportedElsewhereError) as error:
        return str(error)
    return "nothing was raised"
