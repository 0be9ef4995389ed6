"""A stream by index: every layout sees the same global batch, and a lane continues where it stopped."""

import numpy as np
import pytest

from data.indexed import IndexedStream
from mimo.protocols import Lane, Sample


def build(index: int) -> Sample:
    return Sample(str(index), np.array([index]), np.array([True]))


def lane(index: int, count: int, seed: int = 0) -> IndexedStream:
    return IndexedStream(Lane("language", index, count, seed), build)


def read(stream: IndexedStream, count: int) -> list[int]:
    return [int(next(stream).key) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_lanes_interleave_to_the_same_global_order(count):
    lanes = [lane(index, count) for index in range(count)]
    rounds = [read(stream, 8 // count) for stream in lanes]
    assert [rounds[index % count][index // count] for index in range(8)] == list(range(8))


def test_skip_passes_over_samples_without_building_them():
    built = []
    stream = IndexedStream(Lane("language", 1, 2, 0), lambda index: built.append(index) or build(index))
    next(stream)
    stream.skip(3)
    assert next(stream).key == "9"
    assert built == [1, 9]


def test_a_restored_lane_continues():
    stream = lane(1, 3)
    read(stream, 4)
    state = stream.state_dict()
    expected = read(stream, 3)
    fresh = lane(1, 3)
    fresh.load_state_dict(state)
    assert read(fresh, 3) == expected


@pytest.mark.parametrize("new_count", [1, 2, 4, 8])
def test_other_lane_counts_continue_at_the_same_global_sample(new_count):
    stream = lane(1, 4)
    read(stream, 6)
    for index in range(new_count):
        fresh = lane(index, new_count)
        fresh.load_state_dict(stream.state_dict())
        assert read(fresh, 1) == [24 + index]


def test_a_lane_count_that_does_not_divide_the_position_is_refused():
    stream = lane(0, 4)
    read(stream, 6)
    with pytest.raises(ValueError, match=r"--llm-dp 5: cannot continue a run of --llm-dp 4 after 24 samples"):
        lane(0, 5).load_state_dict(stream.state_dict())


def test_a_negative_seed_is_refused():
    with pytest.raises(ValueError, match="--seed -1"):
        lane(0, 1, seed=-1)
