"""Ranks and lanes as arithmetic, parameters of a rank and bytes of the bridge."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo.grid.dry_run import bridge_bytes, parameters_per_rank, total_parameters
from mimo.grid.spec import GridSpec, Layout, lane_shares, lane_sources
from mimo.protocols import ParameterShape

SIZES = st.integers(1, 5)
GRIDS = st.builds(GridSpec, name=st.just("language"), offset=st.integers(0, 9), tp=SIZES, cp=SIZES, dp=SIZES, pp=SIZES)


@st.composite
def lane_cases(draw):
    """(encoder_dp, language_dp, micro_batch_size): one divides the other, and every encoder rank has a sample."""
    base, ratio = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    if draw(st.booleans()):
        return base, base * ratio, draw(st.integers(1, 8))
    return base * ratio, base, draw(st.integers(ratio, ratio + 8))


@given(GRIDS)
def test_coordinates_and_rank_at_are_inverse_and_cover_the_grid(grid):
    positions = [grid.coordinates(rank) for rank in grid.ranks]
    assert [grid.rank_at(**position) for position in positions] == list(grid.ranks)
    every = {tuple(position[axis] for axis in ("tp", "cp", "dp", "pp")) for position in positions}
    assert every == set(product(range(grid.tp), range(grid.cp), range(grid.dp), range(grid.pp)))


@given(GRIDS)
def test_a_negative_stage_counts_from_the_last(grid):
    assert grid.coordinates(grid.rank_at(pp=-1))["pp"] == grid.pp - 1


def test_tp_varies_fastest_then_dp_then_pp():
    grid = GridSpec("language", offset=3, tp=2, dp=2, pp=2)
    assert [tuple(grid.coordinates(rank).values()) for rank in (3, 4, 5, 7)] == [
        (0, 0, 0, 0), (1, 0, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]


def test_a_rank_outside_is_refused_by_name():
    with pytest.raises(ValueError, match=r"rank 7 is not in grid 'vision' \(ranks 2-5\)"):
        GridSpec("vision", offset=2, dp=4).coordinates(7)


def test_the_expert_view_shares_the_ranks_of_a_stage():
    assert GridSpec("language", tp=2, dp=4, pp=3, ep=2, expt_tp=2).expt_dp == 2


@given(lane_cases())
def test_every_sample_of_every_lane_is_served_exactly_once(case):
    encoder_dp, language_dp, size = case
    served = [(share.lane, sample) for dp in range(encoder_dp)
              for share in lane_shares(encoder_dp, language_dp, size, dp) for sample in range(share.start, share.stop)]
    # Not only the same set: ranks in order serve lanes in order, so concatenating their outputs restores the batch.
    assert served == list(product(range(language_dp), range(size)))


@given(lane_cases())
def test_no_encoder_rank_is_without_samples_and_loads_differ_by_at_most_one(case):
    encoder_dp, language_dp, size = case
    loads = [sum(share.stop - share.start for share in lane_shares(encoder_dp, language_dp, size, dp))
             for dp in range(encoder_dp)]
    assert min(loads) >= 1
    assert max(loads) - min(loads) <= 1


@given(lane_cases())
def test_the_sources_of_a_lane_are_sorted_and_join_without_gap(case):
    encoder_dp, language_dp, size = case
    for lane in range(language_dp):
        sources = lane_sources(encoder_dp, language_dp, size, lane)
        assert [dp for dp, _ in sources] == sorted({dp for dp, _ in sources})
        assert [share.lane for _, share in sources] == [lane] * len(sources)
        bounds = [(share.start, share.stop) for _, share in sources]
        assert bounds[0][0] == 0 and bounds[-1][1] == size
        assert all(before[1] == after[0] for before, after in zip(bounds, bounds[1:], strict=False))
        assert all(share in lane_shares(encoder_dp, language_dp, size, dp) for dp, share in sources)


def test_a_layout_knows_the_modules_of_a_rank():
    layout = Layout("disjoint", 3, (GridSpec("vision"),), GridSpec("language", offset=1, dp=2))
    assert [layout.modules_of(rank) for rank in range(3)] == [("vision",), ("language",), ("language",)]
    assert layout.num_lanes == 2
    both = Layout("colocated", 2, (GridSpec("vision", dp=2),), GridSpec("language", tp=2))
    assert both.modules_of(1) == ("vision", "language")


SHAPES = [ParameterShape("embedding", (100, 8), split="tp", stage="first"),
          ParameterShape("attention", (8, 8), 4, "tp"), ParameterShape("norm", (8,), 4),
          ParameterShape("experts", (8, 16), 4 * 8, "expert"),
          ParameterShape("output", (100, 8), split="tp", stage="last")]


def test_one_rank_holds_everything():
    whole = 800 + 4 * 64 + 4 * 8 + 32 * 128 + 800
    assert total_parameters(SHAPES) == parameters_per_rank(SHAPES, GridSpec("language"), 0) == whole


@pytest.mark.parametrize(("grid", "stage", "expected"), [
    (GridSpec("language", tp=2), 0, 400 + 128 + 32 + 32 * 128 + 400),
    (GridSpec("language", dp=4), 0, 800 + 256 + 32 + 4096 + 800),
    (GridSpec("language", dp=4, ep=4), 0, 800 + 256 + 32 + 1024 + 800),
    (GridSpec("language", tp=2, dp=2, ep=2, expt_tp=2), 0, 400 + 128 + 32 + 1024 + 400),
    (GridSpec("language", pp=2), 0, 800 + 128 + 16 + 2048),
    (GridSpec("language", pp=2), 1, 128 + 16 + 2048 + 800),
    (GridSpec("language", pp=4), 1, 64 + 8 + 1024),
])
def test_splits(grid, stage, expected):
    assert parameters_per_rank(SHAPES, grid, stage) == expected


@given(st.integers(1, 40), st.integers(1, 8))
def test_stages_hold_every_layer_once(layers, pp):
    grid, shapes = GridSpec("language", pp=pp), [ParameterShape("weight", (3,), layers)]
    held = [parameters_per_rank(shapes, grid, stage) // 3 for stage in range(pp)]
    assert sum(held) == layers
    assert max(held) - min(held) <= 1


def test_an_uneven_split_counts_the_fullest_rank():
    assert parameters_per_rank([ParameterShape("weight", (7,), split="tp")], GridSpec("language", tp=2), 0) == 4


def test_a_stage_outside_the_grid_is_refused():
    with pytest.raises(ValueError, match=r"stage 2 is not in 0-1 of grid 'language'"):
        parameters_per_rank(SHAPES, GridSpec("language", pp=2), 2)


def test_bridge_bytes():
    assert bridge_bytes(image_tokens=576, hidden_size=4096, dtype_bytes=2) == 4_718_592
    assert bridge_bytes(image_tokens=0, hidden_size=4096, dtype_bytes=2) == 0
