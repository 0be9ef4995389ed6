"""A reader's state: plain objects from which every lane reads on with the very next row."""

import random
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.energon.flavors.webdataset.sample_loader import SliceState
from megatron.energon.rng import SystemRng
from megatron.energon.savable_loader import SavableDatasetState
from megatron.energon.state import FlexState

from data.energon.provider import Config
from data.energon.state import from_plain, to_plain
from data.energon.workers import CHECKPOINT_EVERY, RowStream
from tests.support.shards import keys, open_reader, text_shards

# Rows before, at and after the places where a worker sends its state.
STOPS = (0, 1, 5, CHECKPOINT_EVERY - 1, CHECKPOINT_EVERY, CHECKPOINT_EVERY + 1, 3 * CHECKPOINT_EVERY + 5)
ORDERS = {"plain": {}, "unshuffled": {"shuffle": False},
          "shuffle buffer": {"shuffle_buffer_size": 7, "max_samples_per_sequence": 3},
          "packing": {"packing_buffer_size": 6, "shuffle_buffer_size": 5}}
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:multiprocessing", "ignore:This DataLoader will create:UserWarning"
)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """25 training samples in four shards, one of them bad."""
    folder = tmp_path_factory.mktemp("shards")
    return str(text_shards(folder, train=(9, 2, 6, 8), bad=("t00_004",)))


def stored(states, folder):
    """The states as a checkpoint holds them."""
    torch.save(states, Path(folder) / "state.pt")
    return torch.load(Path(folder) / "state.pt", weights_only=True)


def closing(reader, lane, count):
    found = keys(reader, lane, count)
    reader.close()
    return found


@pytest.mark.parametrize("order", ORDERS)
def test_a_lane_reads_on_after_any_row(shards, tmp_path, order):
    config = Config(data_path=shards, num_workers=0, **ORDERS[order])
    whole = keys(open_reader(config, [1], 2), 1, max(STOPS) + 20)
    for stop in STOPS:
        reader = open_reader(config, [1], 2)
        assert keys(reader, 1, stop) == whole[:stop]
        mark = reader.mark()
        keys(reader, 1, 9)  # what was read ahead does not count
        states = stored(reader.state_dict(mark), tmp_path)
        assert keys(open_reader(config, [1], 2, states=states), 1, 20) == whole[stop : stop + 20], stop


def test_a_worker_sends_its_state_once_in_so_many_rows(shards, monkeypatch):
    """States are large: sending one with every row would slow reading down and change nothing else."""
    counts, state_of = [], RowStream._state
    monkeypatch.setattr(RowStream, "_state", lambda stream, count: [counts.append(count), state_of(stream, count)][1])
    reader = open_reader(Config(data_path=shards, num_workers=0), [0], 1)
    keys(reader, 0, 3 * CHECKPOINT_EVERY + 5)
    assert counts == [CHECKPOINT_EVERY, 2 * CHECKPOINT_EVERY, 3 * CHECKPOINT_EVERY]


@pytest.mark.slow
def test_workers_of_several_lanes_read_on_after_any_row(shards, tmp_path):
    config = Config(data_path=shards, num_workers=2, **ORDERS["packing"])
    first = open_reader(config, [0, 1], 2)
    rows = 3 * CHECKPOINT_EVERY + 20
    marks, whole = {}, {0: [], 1: []}
    for stop in range(rows):
        marks[stop] = first.mark()
        for lane in (0, 1):
            whole[lane] += keys(first, lane, 1)
        if stop in (3, 2 * CHECKPOINT_EVERY + 3, rows - 1):
            age = min(stop, 3)
            states = stored(first.state_dict(marks[stop - age]), tmp_path)
            again = open_reader(config, [0, 1], 2, states=states)
            for lane in (0, 1):
                assert keys(again, lane, age + 1) == whole[lane][stop - age :]
            again.close()
    first.close()


@pytest.mark.parametrize(("workers", "between"), [
    *((0, between) for between in range(6)), *(pytest.param(1, between, marks=pytest.mark.slow) for between in (0, 2))])
def test_a_restored_reader_can_be_saved_again_at_once_and_after_a_few_rows(shards, tmp_path, workers, between):
    config = Config(data_path=shards, num_workers=workers, **ORDERS["packing"])
    stop = CHECKPOINT_EVERY + 3  # not where a worker sent its state
    reader = open_reader(config, [0], 1)
    keys(reader, 0, stop)
    states = reader.state_dict(reader.mark())
    expected = closing(reader, 0, 2 * between + 8)
    for _ in range(2):
        reader = open_reader(config, [0], 1, states=states)
        assert keys(reader, 0, between) == expected[:between]
        expected = expected[between:]
        states = stored(reader.state_dict(reader.mark()), tmp_path)
        reader.close()
    assert closing(open_reader(config, [0], 1, states=states), 0, 8) == expected


def test_a_state_of_a_worker_process_serves_the_training_process_and_back(shards):
    config = Config(data_path=shards, num_workers=1, **ORDERS["shuffle buffer"])
    inside = replace(config, num_workers=0)
    whole = keys(open_reader(inside, [0], 1), 0, 60)
    reader = open_reader(config, [0], 1)
    keys(reader, 0, 20)
    states = reader.state_dict(reader.mark())
    reader.close()
    reader = open_reader(inside, [0], 1, states=states)
    assert keys(reader, 0, 20) == whole[20:40]
    states = reader.state_dict(reader.mark())
    assert closing(open_reader(config, [0], 1, states=states), 0, 20) == whole[40:]


def rows_until(readers, num_lanes, rows):
    found = []
    for _ in range(rows):
        for lane in range(num_lanes):
            found += keys(readers[lane], lane, 1)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "new_lanes", "new_workers"), [(3, 4, 1), (49, 4, 1), (49, 1, 4)])
def test_other_lanes_of_as_many_workers_lose_and_repeat_nothing(shards, rows, new_lanes, new_workers):
    """Two lanes of two workers hand over: each worker's rows are, in all, those of an uninterrupted run."""
    config = Config(data_path=shards, num_workers=2, **ORDERS["shuffle buffer"])
    old = open_reader(config, [0, 1], 2)
    before = rows_until([old, old], 2, rows)
    states = old.state_dict(old.mark())
    counts = [old._router.positions[worker].count for worker in range(4)]
    old.close()
    changed = replace(config, num_workers=new_workers)
    new = open_reader(changed, range(new_lanes), new_lanes, states=states)
    after = rows_until([new] * new_lanes, new_lanes, 12 // new_lanes)
    new_counts = [new._router.positions[worker].count for worker in range(4)]
    new.close()
    alone = []
    for worker, count in enumerate(new_counts):
        alone += keys(open_reader(replace(config, num_workers=0), [worker], 4), worker, count)
    assert sorted(before + after) == sorted(alone)
    assert sum(new_counts) == sum(counts) + 12
    if new_lanes == 1:  # the workers that were behind have caught up
        assert max(new_counts) - min(new_counts) <= 1


@pytest.mark.parametrize(
    ("lanes", "workers", "fitting"), [(2, 1, "--llm-dp 2 --num-workers 2"), (3, 1, "--llm-dp 2 --num-workers 2"),
                                      (1, 2, "--llm-dp 1 --num-workers 4"), (4, 0, "")]
)
def test_another_number_of_workers_is_refused_with_one_that_fits(shards, lanes, workers, fitting):
    config = Config(data_path=shards, num_workers=2)
    old = open_reader(config, [0, 1], 2)
    states = old.state_dict(old.mark())
    old.close()
    if not fitting:  # in the training process each lane has one worker, and four lanes have four
        open_reader(replace(config, num_workers=workers), range(lanes), lanes, states=states)
        return
    with pytest.raises(ValueError, match=f"--llm-dp {lanes} --num-workers {workers}: .* 2 lanes of 2 .*{fitting}"):
        open_reader(replace(config, num_workers=workers), range(lanes), lanes, states=states)


def test_states_of_another_data_set_are_refused(shards, tmp_path):
    config = Config(data_path=shards, num_workers=0)
    with pytest.raises(ValueError, match=r"lane 0 belongs to another data set \(it has consumed, lanes\)"):
        open_reader(config, [0], 1, states={0: {"consumed": 4, "lanes": 1}})
    states = (reader := open_reader(config, [0], 1)).state_dict(reader.mark())
    other = text_shards(tmp_path / "other", train=(4,))
    with pytest.raises(ValueError, match=r"other: has \[4\] samples, the checkpoint's data had \[25\]"):
        open_reader(replace(config, data_path=str(other)), [0], 1, states=states)
    with pytest.raises(ValueError, match="--shuffle-buffer-size 8: the checkpoint's data was read with 0"):
        open_reader(replace(config, shuffle_buffer_size=8), [0], 1, states=states)
    with pytest.raises(ValueError, match="--seed 2: the checkpoint's data was read with 1"):
        open_reader(config, [0], 1, seed=2, states=states)
    with pytest.raises(ValueError, match=r"lacks workers \[1\]"):
        two = (reader := open_reader(config, [0, 1], 2)).state_dict(reader.mark())
        open_reader(config, [1], 2, states={0: two[0]})


def test_bad_samples_before_a_restore_count_and_replayed_ones_do_not_count_twice(shards):
    config = Config(data_path=shards, num_workers=0, shuffle=False, max_bad_samples=1)
    reader = open_reader(config, [0], 1)
    keys(reader, 0, 10)  # past the bad sample, before the first state
    states = reader.state_dict(reader.mark())
    again = open_reader(config, [0], 1, states=states)
    keys(again, 0, 10)
    with pytest.raises(ValueError, match="--max-bad-samples 1: 2 samples"):
        keys(again, 0, 20)


def test_a_state_comes_back_equal():
    random.seed(1)
    rng = SystemRng.save_state()
    inner = FlexState(__class__="X", rng=b"\x00\x01", keys=[("Webdataset", 3, ("a", 4))], slices=[SliceState(
        index=1, current=2), None], array=np.arange(6, dtype=np.uint32).reshape(2, 3), plain={1: 2.5})
    plain = to_plain(SavableDatasetState(rng=rng, dataset_state=inner, sample_index=7))
    back = from_plain(plain)
    assert type(back.dataset_state) is FlexState and back.sample_index == 7
    array = back.dataset_state.pop("array")
    assert array.dtype == np.uint32 and np.array_equal(array, inner.pop("array"))
    assert back.dataset_state == inner
    expected = random.random(), np.random.random(), torch.rand(1).item()
    SystemRng.restore_state(back.rng)
    assert (random.random(), np.random.random(), torch.rand(1).item()) == expected


class Unknown:
    pass


@pytest.mark.parametrize("value", [Unknown(), {1, 2}, np.int64(3), torch.zeros(2), OrderedDict(), np.array(["a"])])
def test_an_object_of_an_unknown_type_is_refused_by_name(value):
    with pytest.raises(TypeError, match=type(value).__qualname__):
        to_plain([{"deep": (value,)}])


@pytest.mark.parametrize("plain", [{"Unknown": []}, {"tuple": [], "list": []}, ()])
def test_plain_objects_of_another_origin_are_refused(plain):
    with pytest.raises(TypeError):
        from_plain(plain)
