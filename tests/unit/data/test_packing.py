"""Packs: every sample once, none too long, few of them, and with even image tokens on request."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.packing import imbalance, select_balanced, select_from_buffer, select_packs, utilisation

CAPACITY = 256
# A sample: text tokens, and image tokens that are often none and else a multiple of a tile's.
SAMPLES = st.lists(st.tuples(st.integers(1, 100), st.integers(0, 4).map(lambda tiles: 32 * tiles)), max_size=60)
few = settings(max_examples=60, deadline=None)


def next_fit(lengths, capacity):
    packs, free = [], 0
    for index, length in enumerate(lengths):
        if length > free:
            packs.append([])
            free = capacity
        packs[-1].append(index)
        free -= length
    return packs


def costs_of(packs, image_tokens):
    return [sum(int(image_tokens[index]) for index in pack) for pack in packs]


def check_packs(packs, lengths, capacity):
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    assert all(pack and sum(lengths[index] for index in pack) <= capacity for pack in packs)
    assert all(type(index) is int for pack in packs for index in pack)


@few
@given(st.lists(st.integers(1, CAPACITY), max_size=80), st.integers(0, 2**32))
def test_packs_hold_every_sample_once_and_waste_less_than_next_fit(lengths, seed):
    for rng in (np.random.default_rng(seed), random.Random(seed)):
        packs = select_packs(lengths, CAPACITY, rng)
        check_packs(packs, lengths, CAPACITY)
        assert utilisation(packs, lengths, CAPACITY) >= utilisation(next_fit(lengths, CAPACITY), lengths, CAPACITY)
        # Two packs of at most half the room would have been one.
        assert sum(2 * sum(lengths[index] for index in pack) <= CAPACITY for pack in packs) <= 1


def test_first_fit_decreasing_beats_the_order_of_arrival():
    lengths = [3, 7, 3, 7, 3, 7, 4, 6]
    assert len(next_fit(lengths, 10)) == 4
    interleaved = [3, 3, 7, 7, 4, 3, 6, 7]
    assert len(next_fit(interleaved, 10)) == 6
    packs = select_packs(interleaved, 10, random.Random(0))
    assert sorted(sorted(interleaved[index] for index in pack) for pack in packs) == [[3, 7], [3, 7], [3, 7], [4, 6]]


@pytest.mark.parametrize("make", [np.random.default_rng, random.Random])
def test_packs_are_a_function_of_the_generator_alone(make):
    lengths = [5] * 20 + [3] * 20
    image_tokens = [index % 3 for index in range(40)]
    np.random.seed(1)
    random.seed(1)
    first = select_packs(lengths, 16, make(7)), select_balanced(lengths, image_tokens, 16, make(7))
    np.random.seed(2)
    random.seed(2)
    assert first == (select_packs(lengths, 16, make(7)), select_balanced(lengths, image_tokens, 16, make(7)))
    assert first[0] != select_packs(lengths, 16, make(8))
    assert first[1][0] != select_balanced(lengths, image_tokens, 16, make(8))[0]


def test_equal_lengths_and_the_order_of_packs_are_shuffled():
    partners, fullest_first = set(), 0
    lengths = [8, 8, 8, 2, 2, 2, 1]
    for seed in range(60):
        packs = select_packs(lengths, 10, random.Random(seed))
        partners.add(next(pack[1] for pack in packs if 0 in pack))
        fullest_first += packs[-1] == [6]
    assert partners == {3, 4, 5}
    assert 0 < fullest_first < 60


@pytest.mark.parametrize("select", [select_packs, lambda lengths, *rest: select_balanced(lengths, [0] * 4, *rest)])
@pytest.mark.parametrize("length", [11, 0, -1])
def test_a_length_that_no_pack_holds_is_refused_by_index(select, length):
    with pytest.raises(ValueError, match=f"sample 2 of the buffer has {length} tokens: a pack holds 1 to 10"):
        select([10, 1, length, 99], 10, random.Random(0))


@few
@given(SAMPLES, st.integers(0, 2**32))
def test_balanced_packs_are_as_many_and_never_less_even(samples, seed):
    lengths = [text + image for text, image in samples]
    image_tokens = [image for _, image in samples]
    for make in (np.random.default_rng, random.Random):
        plain = select_packs(lengths, CAPACITY, make(seed))
        packs, before = select_balanced(lengths, image_tokens, CAPACITY, make(seed))
        check_packs(packs, lengths, CAPACITY)
        assert len(packs) == len(plain)
        assert before == costs_of(plain, image_tokens)
        assert imbalance(costs_of(packs, image_tokens)) <= imbalance(before)


# Buffers of 512 samples: share without images, most tiles of 256 tokens, median text, row, and what must be reached
# (in brackets: without balancing, and without the step that the case is about).
@pytest.mark.parametrize(("text_only", "tiles", "text", "capacity", "reached"), [
    (0.0, 1, 60, 4096, 1.10),  # (1.35; 1.26 without spreading)
    (0.0, 4, 250, 8192, 1.02),  # (1.36; 1.06 without spreading, 1.16 without exchanges)
    (0.0, 4, 250, 4096, 1.22),  # (1.40; 1.30 without exchanges)
    (0.0, 4, 500, 4096, 1.15),  # (1.59; 1.22 where a pack that nothing helps ends it, or from bounds alone)
    (0.4, 12, 250, 4096, 1.15),  # (1.30; 1.30 without bounds: there is hardly any room)
    (0.4, 12, 500, 4096, 1.25),  # (1.36; 1.31 with one bound instead of the lowest)
])
def test_balanced_packs_are_nearly_even(text_only, tiles, text, capacity, reached):
    rng = np.random.default_rng(3)
    image_tokens = 256 * np.where(rng.random(512) < text_only, 0, rng.integers(1, tiles + 1, 512))
    words = np.minimum(rng.lognormal(np.log(text), 1, 512), 1000).astype(int) + 1
    packs, before = select_balanced(image_tokens + words, image_tokens, capacity, rng)
    check_packs(packs, image_tokens + words, capacity)
    assert imbalance(costs_of(packs, image_tokens)) < reached < imbalance(before)


def test_balancing_evens_more_than_the_heaviest_pack():
    # One image outweighs every even share, so the largest over the mean cannot fall; the other packs are evened.
    image_tokens = [90] + [20] * 10 + [0] * 30
    lengths = [100] + [20] * 40
    packs, before = select_balanced(lengths, image_tokens, 100, np.random.default_rng(0))
    assert sorted(costs_of(packs, image_tokens)) == [20] * 6 + [40] * 2 + [90]
    assert sorted(before)[0] == 0 and sum(before) == 290


def test_no_pack_is_empty_where_balancing_would_do_with_fewer(monkeypatch):
    monkeypatch.setattr("data.packing.spread", lambda *_: None)
    lengths = [8, 5, 5, 13, 12, 5, 9, 6, 1, 7, 16, 8, 10]
    image_tokens = [0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 2, 0, 1]
    packs, before = select_balanced(lengths, image_tokens, 35, np.random.default_rng(0))
    check_packs(packs, lengths, 35)
    assert len(packs) == len(before) == 4


def test_text_alone_is_packed_as_tightly():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 200, 100).tolist()
    packs, before = select_balanced(lengths, [0] * 100, CAPACITY, rng)
    check_packs(packs, lengths, CAPACITY)
    assert before == [0] * len(packs)


def test_an_empty_buffer_has_no_packs():
    assert select_packs([], 8, random.Random(0)) == []
    assert select_balanced([], [], 8, random.Random(0)) == ([], [])
    assert select_balanced([3], [2], 8, random.Random(0)) == ([[0]], [2])


def test_utilisation_and_imbalance():
    assert utilisation([[0, 2], [1]], [4, 8, 3], 10) == 15 / 20
    assert utilisation([], [], 10) == 1.0
    assert imbalance([3, 1, 2]) == 1.5
    assert imbalance([0, 0]) == imbalance([]) == 1.0
    assert imbalance(np.array([4, 0])) == 2.0


@few
@given(st.lists(SAMPLES, max_size=6), st.booleans(), st.integers(0, 2**32))
def test_samples_of_the_emptiest_pack_wait_for_the_next_buffer_once(buffers, balances, seed):
    rng, waiting, packed = np.random.default_rng(seed), [], []
    for number, read in enumerate(buffers):
        samples = [*waiting, *((number, *sample) for sample in read)]
        lengths = [words + tokens for _, words, tokens in samples]
        costs = [tokens for *_, tokens in samples] if balances else None
        last = number == len(buffers) - 1
        packs, before, waits = select_from_buffer(lengths, costs, CAPACITY, rng, None if last else len(waiting))
        check_packs([*packs, waits] if waits else packs, lengths, CAPACITY)
        assert not waits or (packs and not last and min(waits) >= len(waiting)), "no sample waits twice"
        assert (len(before) == len(packs)) if balances else before == []
        packed += [samples[index] for pack in packs for index in pack]
        waiting = [samples[index] for index in waits]
    assert not waiting
    assert sorted(packed) == sorted((number, *sample) for number, read in enumerate(buffers) for sample in read)


def test_rows_are_full_although_buffers_are_small():
    rng, waiting, sizes = np.random.default_rng(0), [], []
    for _ in range(200):
        lengths = [*waiting, *rng.integers(60, 140, 12 - len(waiting)).tolist()]
        packs, _, waits = select_from_buffer(lengths, None, 500, rng, len(waiting))
        sizes += [sum(lengths[index] for index in pack) for pack in packs]
        waiting = [lengths[index] for index in waits]
    # Two or three rows to a buffer, the last of which would have been half empty.
    assert np.mean(sizes) / 500 > 0.9
