"""Parameters of a rank and bytes of the bridge, against figures counted by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo.grid.dry_run import bridge_bytes, parameters_per_rank, total_parameters
from mimo.grid.spec import GridSpec
from mimo.protocols import ParameterShape

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
