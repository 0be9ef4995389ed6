"""Dynamic microbatches: a partition within the budget, as many on every rank."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo.rl import batching
from mimo.rl.batching import plan_microbatches


@st.composite
def batches(draw):
    dp = draw(st.integers(1, 4))
    max_tokens = draw(st.integers(1, 60))
    count = dp * draw(st.integers(1, 12))
    return draw(st.lists(st.integers(1, max_tokens), min_size=count, max_size=count)), dp, max_tokens


def sizes(plan, lengths):
    return [[sum(lengths[index] for index in members) for members in rank] for rank in plan]


def first_fit_decreasing(lengths, max_tokens):
    bins = []
    for length in sorted(lengths, reverse=True):
        fitting = next((place for place, size in enumerate(bins) if size + length <= max_tokens), None)
        if fitting is None:
            bins.append(length)
        else:
            bins[fitting] += length
    return len(bins)


@settings(max_examples=300)
@given(batches())
def test_a_plan_is_a_partition_within_the_budget_of_about_as_few_as_fit(case):
    lengths, dp, max_tokens = case
    plan = plan_microbatches(lengths, dp, max_tokens)
    assert sorted(itertools.chain.from_iterable(itertools.chain.from_iterable(plan))) == list(range(len(lengths)))
    assert len(plan) == dp and len({len(rank) for rank in plan}) == 1
    assert all(0 < size <= max_tokens for rank in sizes(plan, lengths) for size in rank)
    assert all(members == sorted(members) for rank in plan for members in rank)
    assert plan == plan_microbatches(list(lengths), dp, max_tokens)
    count, bound = len(plan[0]) * dp, first_fit_decreasing(lengths, max_tokens)
    assert -(-sum(lengths) // max_tokens) <= count <= -(-bound // dp) * dp
    # Microbatches of the same place are neighbours.
    for fuller, emptier in itertools.pairwise(zip(*sizes(plan, lengths), strict=True)):
        assert min(fuller) >= max(emptier)


@pytest.mark.parametrize(("lengths", "dp", "max_tokens", "plan"), [
    ([10, 8, 7, 3], 2, 10, [[[0], [3]], [[1], [2]]]),  # no rank gets the larger one every time
    ([3, 1, 2, 2], 2, 100, [[[0, 1]], [[2, 3]]]), ([3, 1, 2, 2], 1, 8, [[[0, 1, 2, 3]]]),
    ([1] * 3, 3, 3, [[[0]], [[1]], [[2]]]),  # every rank gets one though fewer would do
])
def test_plans_by_hand(lengths, dp, max_tokens, plan):
    assert plan_microbatches(lengths, dp, max_tokens) == plan


@pytest.mark.parametrize(("lengths", "dp", "max_tokens", "expected"), [
    ([90, 10, 50, 50, 30, 70, 20, 80], 2, 100, [[100, 100], [100, 100]]),
    # Balanced: 14, 9 3 3 and 8 4, which overflows. First fit decreasing: 14, 9 4 and 8 3 3.
    ([14, 9, 8, 4, 3, 3], 3, 14, [[14], [14], [13]]), ([14, 9, 8, 4, 3, 3], 1, 14, [[14, 14, 13]]),
])
def test_ranks_share_the_work(lengths, dp, max_tokens, expected):
    assert sizes(plan_microbatches(lengths, dp, max_tokens), lengths) == expected


@given(batches())
def test_first_fit_alone_gives_every_rank_as_many(case):
    lengths, dp, max_tokens = case
    with pytest.MonkeyPatch.context() as patch:
        # Balanced packing rarely fails, so it is made to.
        patch.setattr(batching, "_balanced", lambda order, lengths, count: [[*order] * (max_tokens + 1)])
        plan = plan_microbatches(lengths, dp, max_tokens)
    assert sorted(itertools.chain.from_iterable(itertools.chain.from_iterable(plan))) == list(range(len(lengths)))
    bound = first_fit_decreasing(lengths, max_tokens)
    assert {len(rank) for rank in plan} == {-(-bound // dp)}
    assert all(0 < size <= max_tokens for rank in sizes(plan, lengths) for size in rank)


def test_a_sequence_longer_than_a_microbatch_is_refused():
    with pytest.raises(ValueError, match=(
            "--max-tokens-per-microbatch 10: 2 of 4 sequences are longer, the longest .number 3. has 12 tokens; it "
            "must be at least 12")):
        plan_microbatches([1, 11, 10, 12], 2, 10)


@pytest.mark.parametrize(("count", "dp"), [(3, 2), (0, 1), (1, 4)])
def test_sequences_that_do_not_divide_over_the_ranks_are_refused(count, dp):
    with pytest.raises(ValueError, match=f"{count} sequences do not divide over --llm-dp {dp}"):
        plan_microbatches([1] * count, dp, 10)
