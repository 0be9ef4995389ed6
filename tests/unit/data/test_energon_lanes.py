"""Energon shards on lanes: who reads a lane does not change what it reads, and what breaks is named."""

import logging
import os
import re
import signal
from collections import Counter
from dataclasses import replace

import pytest
from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset

from data.energon.provider import Config
from tests.support.marks import fast_only
from tests.support.shards import TextEncoder, keys, open_reader, open_valid, text_shards

# Energon's own loader, and forks of a process with threads.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.utils", "ignore::DeprecationWarning:multiprocessing")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """25 training samples in four shards of unlike sizes, 7 validation samples in two."""
    return str(text_shards(tmp_path_factory.mktemp("shards"), train=(9, 2, 6, 8), valid=(4, 3)))


def reference(path, lane, num_lanes, workers, rows, seed=1):
    """Return the lane's keys as Energon's own savable loader gives them, one loader a lane."""
    config = WorkerConfig(rank=lane, world_size=num_lanes, num_workers=workers, seed_offset=seed)
    dataset = get_train_dataset(path, worker_config=config, batch_size=None, shuffle_buffer_size=None,
                                max_samples_per_sequence=100, task_encoder=TextEncoder())
    loader = get_savable_loader(dataset, watchdog_timeout_seconds=None)
    rows_of_lane = iter(loader)
    found = [next(rows_of_lane).__key__ for _ in range(rows)]
    if workers:  # its workers would take seconds to end
        for process in loader._iterator._workers:
            process.kill()
    return found


@pytest.mark.parametrize(
    ("encoder_dp", "num_lanes", "workers"),
    fast_only([(2, 4, 0)], [(1, 2, 1), (1, 2, 2), (2, 4, 1), (1, 3, 1), (1, 1, 3), (1, 2, 0), (2, 4, 0)]),
)
def test_routed_lanes_read_what_energons_own_loader_of_each_lane_reads(shards, encoder_dp, num_lanes, workers):
    rows = 2 * 25 // num_lanes + 2  # more than two epochs of each worker
    share = num_lanes // encoder_dp
    for rank in range(encoder_dp):
        lanes = range(rank * share, (rank + 1) * share)
        reader = open_reader(Config(data_path=shards, num_workers=workers), lanes, num_lanes)
        found = {lane: [] for lane in lanes}
        for count in [1, 4, 2, *[3] * rows]:  # lanes advance together, several rows at a time
            for lane in lanes:
                found[lane] += keys(reader, lane, min(count, rows - len(found[lane])))
        reader.close()
        for lane in lanes:
            assert found[lane] == reference(shards, lane, num_lanes, workers, rows), lane


@pytest.mark.slow
def test_lanes_that_are_not_neighbours_read_the_same(shards):
    config = Config(data_path=shards)
    some = open_reader(config, [0, 2, 3], 4)
    each = [open_reader(config, [lane], 4) for lane in (0, 2, 3)]
    for reader, lane in zip(each, (0, 2, 3), strict=True):
        assert keys(some, lane, 14) == keys(reader, lane, 14)
    for reader in (some, *each):
        reader.close()


def test_no_worker_process_reads_in_the_order_of_one(shards):
    one = open_reader(Config(data_path=shards, shuffle_buffer_size=4), [1], 2)
    none = open_reader(Config(data_path=shards, shuffle_buffer_size=4, num_workers=0), [1], 2)
    assert keys(none, 1, 40) == keys(one, 1, 40)
    one.close()


def test_an_epoch_holds_every_sample_once_over_all_lanes_and_a_seed_of_its_own_reorders_it(shards):
    config = Config(data_path=shards, num_workers=0, max_samples_per_sequence=2)
    orders = []
    for seed in (1, 2):
        reader = open_reader(config, [0], 1, seed=seed)
        orders.append(keys(reader, 0, 50))
        assert set(Counter(orders[-1]).values()) == {2}
        assert len(set(orders[-1][:25])) == 25
    assert orders[0] != orders[1]
    lanes = [open_reader(config, [lane], 5) for lane in range(5)]
    assert len({key for lane, reader in enumerate(lanes) for key in keys(reader, lane, 5)}) == 25


def test_without_shuffling_samples_come_as_they_lie(shards):
    reader = open_reader(Config(data_path=shards, num_workers=0, shuffle=False), [0], 1)
    found = keys(reader, 0, 27)
    assert found[:25] == sorted(found[:25])
    assert found[25:] == found[:2]


def test_a_worker_that_is_killed_is_named_with_its_lane_and_what_it_did(shards):
    reader = open_reader(Config(data_path=shards), [0, 1], 2)
    keys(reader, 1, 1)
    victim = reader._sources[0]._rows._workers[1].pid
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=rf"killed by signal 9: worker 1 \(lane 1, pid {victim}\)"):
        keys(reader, 1, 20)
    reader.close()


def test_signals_for_the_trainer_do_not_end_its_workers(shards):
    reader = open_reader(Config(data_path=shards), [0], 1)
    keys(reader, 0, 1)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(reader._sources[0]._rows._workers[0].pid, number)
    keys(reader, 0, 20)
    reader.close()


def test_a_hanging_worker_is_described_and_does_not_outlive_its_reader(shards):
    reader = open_reader(Config(data_path=shards, shuffle=False), [0], 1, hang_at="t00_003")
    assert keys(reader, 0, 3) == ["t00_000", "t00_001", "t00_002"]
    worker = reader._sources[0]._rows._workers[0]
    while "encoding t00_003" not in reader.describe():
        assert worker.is_alive()
    assert f"worker 0 (lane 0, pid {worker.pid})" in reader.describe()
    reader.close()
    assert not worker.is_alive()


def test_readers_leave_the_trainers_signal_handlers_alone(shards):
    before = [signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)]
    reader = open_reader(Config(data_path=shards), [0], 1)
    assert [signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)] == before
    reader.close()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("packing", [0, 4])
def test_samples_of_a_truncated_shard_are_passed_over_up_to_the_limit(tmp_path, workers, packing):
    path = text_shards(tmp_path / "set", train=(6, 6))
    shard = path / "train" / "01.tar"
    shard.write_bytes(shard.read_bytes()[: 1024 * 3 + 515])  # three samples and a half
    config = Config(data_path=str(path), num_workers=workers, packing_buffer_size=packing)
    reader = open_reader(config, [0], 1)
    rows = [reader.read(0) for _ in range(8 if packing else 14)]
    reader.close()
    assert {key for row in rows for key in row.key.split()} == {f"t00_00{number}" for number in range(6)} | {
        "t01_000", "t01_001", "t01_002"}
    bad = [message for row in rows for message in row.skipped]
    assert {message.partition(": ")[0] for message in bad} == {f"train/01.tar sample {n}" for n in (3, 4, 5)}
    assert all(re.search(r"cannot read sample [345] of shard .*set/train/01\.tar: ReadError: unexp|Unexp", message)
               for message in bad)
    few = open_reader(replace(config, max_bad_samples=2), [0], 1)
    with pytest.raises(ValueError, match=r"--max-bad-samples 2: .*train/01\.tar sample [345]: "):
        keys(few, 0, 12)
    few.close()


def test_a_missing_shard_is_named(tmp_path):
    path = text_shards(tmp_path / "set", train=(6, 6))
    (path / "train" / "01.tar").unlink()
    reader = open_reader(Config(data_path=str(path), num_workers=0), [0], 1)
    with pytest.raises(ValueError, match=r"--data-path: cannot read sample \d of shard .*train/01\.tar: FileNotFound"):
        keys(reader, 0, 12)


def test_a_buffered_sample_of_a_shard_truncated_since_is_named_when_a_run_continues(tmp_path):
    """It was packed with others that are read again: the run cannot continue without it."""
    path = text_shards(tmp_path / "set", train=(24,))
    config = Config(data_path=str(path), num_workers=0, packing_buffer_size=16, shuffle=False)
    reader = open_reader(config, [0], 1)
    keys(reader, 0, 17)  # the state after row 16 holds samples of the buffer
    states = reader.state_dict(reader.mark())
    (path / "train" / "00.tar").write_bytes(b"")
    with pytest.raises(ValueError, match=r"--data-path: cannot read sample \d+ of shard .*train/00\.tar"):
        keys(open_reader(config, [0], 1, states=states), 0, 2)


def test_a_set_without_a_sample_for_each_worker_is_refused(tmp_path):
    path = text_shards(tmp_path / "set", train=(2, 1))
    with pytest.raises(ValueError, match=r"has 3 samples for --llm-dp 2 times --num-workers 2, 4 workers"):
        open_reader(Config(data_path=str(path), num_workers=2), [0], 2)


@pytest.mark.parametrize(
    ("folder", "message"),
    [("", "--data-path: name the folder"), ("absent", "--data-path .*absent: does not exist"),
     ("empty", "--data-path .*empty: is neither a folder prepared .* nor a metadataset YAML$"),
     ("files", "--data-path .*files: is neither .*; --dataset-provider conversations reads its files as they are$"),
     ("set", "--data-path .*set: cannot open the 'train' split: Invalid split")],
)
def test_a_folder_that_is_not_prepared_is_refused_with_the_flag(tmp_path, folder, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text("{}")
    split = text_shards(tmp_path / "set", train=(2,)) / ".nv-meta" / "split.yaml"
    split.write_text(split.read_text().replace("train:", "learn:"))
    with pytest.raises(ValueError, match=message):
        open_reader(Config(data_path=folder and str(tmp_path / folder)), [0], 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_are_logged_once_and_end_the_run_above_the_limit(tmp_path, caplog, workers):
    path = text_shards(tmp_path / "set", train=(8,), bad=("t00_001", "t00_005"))
    config = Config(data_path=str(path), num_workers=workers, shuffle=False, max_bad_samples=2)
    reader = open_reader(config, [0], 1)
    with caplog.at_level(logging.WARNING, "mimo.data"):
        found = keys(reader, 0, 5)
    assert sorted(found) == ["t00_000", "t00_002", "t00_003", "t00_004", "t00_006"]
    assert sorted(record.getMessage() for record in caplog.records) == [
        f"bad sample skipped: train/00.tar {key}: refused" for key in ("t00_001", "t00_005")]
    with pytest.raises(ValueError, match=r"--max-bad-samples 2: 3 samples .*train/00.tar t00_00\d: refused"):
        keys(reader, 0, 12)
    reader.close()


@pytest.mark.parametrize("num_lanes", [1, 2, 3, 4])
def test_lane_l_validates_samples_l_and_every_count_th_from_there(shards, num_lanes):
    split = [f"v00_00{number}" for number in range(4)] + [f"v01_00{number}" for number in range(3)]
    for lane in range(num_lanes):
        reader, encoder = open_valid(Config(data_path=shards), [lane], num_lanes)
        assert keys(reader, lane, 9) == [split[(lane + num_lanes * place) % 7] for place in range(9)]
        assert len(encoder.encoded) == 9  # nothing of other lanes


def test_a_bad_validation_sample_keeps_its_place_and_has_no_target(tmp_path):
    path = text_shards(tmp_path / "set", train=(1,), valid=(4,), bad=("v00_001",))
    reader, _ = open_valid(Config(data_path=str(path)), [0], 1)
    rows = [reader.read(0) for _ in range(4)]
    assert [row.key for row in rows] == ["v00_000", "valid/1 (not usable)", "v00_002", "v00_003"]
    assert not rows[1].target_mask.any()
    assert rows[2].skipped == ("val/00.tar v00_001: refused",)


def test_validation_can_lie_elsewhere_and_continues_from_a_state(shards, tmp_path):
    other = text_shards(tmp_path / "other", train=(1,), valid=(5,))
    config = Config(data_path=shards, valid_data_path=str(other))
    reader, _ = open_valid(config, [0, 1], 2)
    keys(reader, 1, 2)
    states = reader.state_dict(reader.mark())
    again, _ = open_valid(config, [0, 1], 2)
    again.load_state_dict(states)
    assert keys(again, 1, 2) == keys(reader, 1, 2) == ["v00_000", "v00_002"]
    assert keys(again, 0, 1) == ["v00_000"]
