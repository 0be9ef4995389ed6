"""Flags to a layout, and each way a layout can be wrong."""

import dataclasses
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mimo.config.trainer import LayoutConfig
from mimo.grid.layout import build_layout, required_world_size, validate_layout
from mimo.grid.spec import GridSpec, Layout, lane_shares

VISION = ("vision",)


def make(world_size, encoders=VISION, micro=1, batch=None, experts=None, **flags):
    """Build and validate; the global batch fits unless given."""
    config = LayoutConfig(**flags)
    layout = build_layout(config, world_size, encoders)
    validate_layout(layout, micro_batch_size=micro, global_batch_size=micro * config.llm_dp if batch is None else batch,
                    num_experts=experts, sequence_parallel=config.sequence_parallel)
    return layout


def test_the_language_grid_starts_after_the_encoder():
    layout = make(10, encoder_dp=2, llm_tp=2, llm_dp=2, llm_pp=2)
    assert layout.grids == {"vision": GridSpec("vision", dp=2), "language": GridSpec("language", 2, tp=2, dp=2, pp=2)}
    assert make(10, encoder_dp=2, llm_tp=2, llm_dp=2, llm_pp=2, llm_offset=2) == layout


def test_pipeline_stages_of_a_colocated_layout_bring_encoder_windows():
    layout = make(4, layout="colocated", encoder_dp=4, llm_tp=2, llm_pp=2)
    assert layout.encoder_window == 2 and layout.encoders[0].ranks == layout.language.ranks == range(4)
    # The images of all lanes are dealt to all replicas, so their numbers need not divide each other.
    assert make(6, layout="colocated", encoder_dp=6, llm_dp=3, llm_pp=2, encoder_window=0).encoder_window == 0
    assert make(2, layout="colocated", encoder_dp=2, llm_tp=2, encoder_window=3).encoder_window == 3
    assert make(2, layout="colocated", encoder_dp=2, llm_dp=2).encoder_window is None


def test_the_encoder_of_a_homogeneous_layout_is_split_as_the_first_stage():
    layout = make(8, layout="homogeneous", llm_tp=2, llm_dp=2, llm_pp=2, llm_pp_layout="3,5")
    assert layout.grids == {"vision": GridSpec("vision", tp=2, dp=2),
                            "language": GridSpec("language", tp=2, dp=2, pp=2, stage_layers=(3, 5))}
    assert layout.modules_of(3) == ("vision", "language") and layout.modules_of(4) == ("language",)
    assert make(4, layout="homogeneous", llm_tp=2, llm_pp=2, encoder_tp=2).encoders[0].size == 2


def test_colocated_grids_share_the_ranks():
    layout = make(4, layout="colocated", encoder_dp=2, encoder_tp=2, llm_tp=4, micro=2)
    assert layout.encoders[0].ranks == layout.language.ranks == range(4)


@pytest.mark.parametrize(("encoders", "flags"), [(VISION, {"llm_only": True}), ((), {})])
def test_a_run_without_encoder_has_the_language_grid_alone(encoders, flags):
    layout = make(4, encoders, llm_tp=2, llm_dp=2, **flags)
    assert layout.encoders == () and layout.language == GridSpec("language", tp=2, dp=2)
    assert make(4, encoders, llm_tp=2, llm_dp=2, llm_offset=0, **flags) == layout


def test_the_world_size_that_the_flags_need():
    assert required_world_size(LayoutConfig(encoder_dp=2, llm_tp=4), VISION) == 6
    assert required_world_size(LayoutConfig(layout="colocated", encoder_dp=4, llm_tp=4), VISION) == 4
    assert required_world_size(LayoutConfig(llm_only=True, llm_tp=4), VISION) == 4


@pytest.mark.parametrize(("world", "flags", "expected"), [
    # flags that are wrong by themselves
    (2, {"encoder_tp": 0}, ["--encoder-tp 0 is below 1"]),
    (2, {"llm_dp": -1}, ["--llm-dp -1 is below 1"]),
    (2, {"llm_offset": -1}, ["--llm-offset -1 is below 0"]),
    (2, {"llm_cp": 2}, ["--llm-tp 1 * --llm-cp 2 * --llm-dp 1 * --llm-pp 1 = 2", "the world has 2; run 3 ranks"]),
    (2, {"encoders": ("vision", "audio")}, ["vision, audio", "GridSpecs"]),
    # --llm-only
    (2, {"llm_only": True, "encoder_dp": 2, "encoder_pp": 3}, ["--llm-only", "--encoder-dp 2, --encoder-pp 3"]),
    (2, {"encoders": (), "encoder_tp": 2}, ["a model without encoder", "--encoder-tp 2"]),
    (2, {"llm_only": True, "layout": "colocated"}, ["--layout colocated", "--llm-only"]),
    (2, {"llm_only": True, "llm_dp": 2, "llm_offset": 1}, ["--llm-offset 1", "set --llm-offset 0"]),
    # tiling
    (3, {"encoder_dp": 2, "micro": 2, "llm_offset": 1},
     ["--llm-offset 1", "--encoder-tp 1 * --encoder-dp 2 * --encoder-pp 1 = 2", "set --llm-offset 2"]),
    (4, {"encoder_dp": 2, "micro": 2, "llm_offset": 3}, ["--llm-offset 3", "set --llm-offset 2"]),
    (7, {"encoder_dp": 2, "llm_tp": 2, "llm_dp": 4}, ["need 10 ranks", "--llm-tp 2 * --llm-dp 4 * --llm-pp 1 = 8",
                                                      "the world has 7", "--encoder-dp 1 --llm-dp 3"]),
    (264, {"encoder_dp": 8, "llm_tp": 8, "llm_dp": 16}, ["need 136 ranks", "264", "--encoder-dp 8 --llm-dp 32"]),
    (3, {"llm_tp": 3}, ["need 4 ranks", "no --encoder-dp and --llm-dp can fill 3 ranks"]),
    (3, {"llm_only": True, "llm_tp": 2}, ["need 2 ranks", "no --llm-dp can fill 3 ranks"]),
    (4, {"llm_only": True, "llm_tp": 2}, ["need 2 ranks", "these fit 4 ranks: --llm-dp 2"]),
    (1, {}, ["need 2 ranks", "the world has 1", "--layout colocated"]),
    (3, {"llm_dp": 1}, ["need 2 ranks", "--encoder-dp 1 --llm-dp 2"]),
    (4, {"llm_dp": 2, "llm_ep": 2, "experts": 4}, ["need 3 ranks", "these fit 4 ranks: --encoder-dp 2 --llm-dp 2"]),
    # colocated
    (4, {"layout": "colocated", "encoder_dp": 2, "llm_tp": 4},
     ["differ in size", "--encoder-dp 2", "--llm-tp 4", "--encoder-dp 4 --llm-dp 1 --micro-batch-size 4"]),
    (4, {"layout": "colocated", "encoder_dp": 2, "llm_tp": 2},
     ["do not fill the world", "the world has 4", "--encoder-dp 4 --llm-dp 2 --micro-batch-size 2"]),
    (4, {"layout": "colocated", "encoder_dp": 2, "encoder_pp": 2, "llm_dp": 4}, ["--encoder-pp 2", "colocated"]),
    (4, {"layout": "colocated", "encoder_dp": 3, "llm_dp": 2, "llm_pp": 2},
     ["differ in size", "--encoder-dp 4 --llm-dp 2"]),
    # encoder windows
    (2, {"encoder_window": 2}, ["--encoder-window 2 with --layout disjoint", "leave it out"]),
    (2, {"llm_only": True, "llm_dp": 2, "encoder_window": 0}, ["--encoder-window 0 with a run without encoder"]),
    (2, {"layout": "colocated", "encoder_dp": 2, "llm_dp": 2, "encoder_chunk": 4},
     ["--encoder-chunk 4 needs --encoder-window"]),
    (2, {"encoder_balance": False}, ["--no-encoder-balance with --layout disjoint: only the colocated layout"]),
    (2, {"llm_only": True, "llm_dp": 2, "encoder_chunk": 2}, ["--encoder-chunk 2 with a run without encoder"]),
    (2, {"layout": "colocated", "encoder_window": -1}, ["--encoder-window -1 is below 0"]),
    (2, {"encoder_activation_gib": 2.0}, ["--encoder-activation-gib 2.0 with --layout disjoint: only the colocated"]),
    (2, {"layout": "homogeneous", "llm_pp": 2, "encoder_activation_gib": 0.0},
     ["--encoder-activation-gib 0.0 with --layout homogeneous: only the colocated"]),
    (2, {"layout": "colocated", "encoder_dp": 2, "llm_dp": 2, "encoder_activation_gib": 2.0},
     ["--encoder-activation-gib 2.0 needs --encoder-window"]),
    (2, {"llm_only": True, "llm_dp": 2, "encoder_activation_gib": 2.0},
     ["--encoder-activation-gib 2.0 with a run without encoder"]),
    (2, {"layout": "colocated", "encoder_dp": 2, "llm_pp": 2, "encoder_activation_gib": -1.0},
     ["--encoder-activation-gib -1.0 is not a number of GiB from 0 on"]),
    (2, {"layout": "colocated", "encoder_dp": 2, "llm_pp": 2, "encoder_activation_gib": float("nan")},
     ["--encoder-activation-gib nan"]),
    # homogeneous
    (4, {"layout": "homogeneous", "llm_tp": 2, "llm_pp": 2, "encoder_dp": 4},
     ["--encoder-dp 4", "split as the first language stage, --encoder-dp 1"]),
    (6, {"layout": "homogeneous", "llm_pp": 2, "llm_dp": 2}, ["needs 4 ranks", "the world has 6", "--llm-dp 3"]),
    (2, {"llm_only": True, "layout": "homogeneous"}, ["--layout homogeneous has no effect with --llm-only"]),
    # layers of the stages
    (3, {"llm_pp": 2, "llm_pp_layout": "1,x"}, ["--llm-pp-layout 1,x", "such as 16,24"]),
    (3, {"llm_pp": 2, "llm_pp_layout": "1,2,1"}, ["--llm-pp-layout 1,2,1 has 3 stages, but --llm-pp is 2"]),
    (2, {"llm_pp_layout": "4"}, ["--llm-pp-layout 4 needs --llm-pp above 1"]),
    (5, {"llm_pp": 4, "llm_pp_layout": "1,2,3,1"}, ["only the first and the last stage may differ"]),
    (2, {"layout": "colocated", "llm_offset": 1}, ["--llm-offset 1", "rank 0", "set --llm-offset 0"]),
    # lanes
    (7, {"encoder_dp": 3, "llm_dp": 4, "micro": 2},
     ["--encoder-dp 3", "--llm-dp 4", "divide", "--micro-batch-size 2", "--encoder-dp 1, 2, 4, 8"]),
    (6, {"encoder_dp": 4, "llm_dp": 2}, ["--encoder-dp 4 over --llm-dp 2", "--micro-batch-size 1 ",
                                         "the smallest that fits is --micro-batch-size 2"]),
    (3, {"llm_dp": 2, "micro": 4, "batch": 12}, ["--global-batch-size 12", "--micro-batch-size 4 * --llm-dp 2 = 8",
                                                 "nearest are 8 and 16"]),
    (3, {"llm_dp": 2, "micro": 4, "batch": 3}, ["--global-batch-size 3", "the smallest is 8"]),
    (3, {"llm_dp": 2, "micro": 0, "batch": 4}, ["--micro-batch-size 0 is below 1"]),
    (3, {"llm_dp": 2, "batch": 0}, ["--global-batch-size 0 is below 1"]),
    # experts and sequence parallelism
    (3, {"llm_dp": 2, "llm_ep": 2}, ["--llm-ep 2", "the model has none"]),
    (3, {"llm_dp": 2, "llm_expt_tp": 2}, ["--llm-expt-tp 2", "the model has none"]),
    (4, {"llm_dp": 3, "llm_ep": 3, "experts": 8}, ["--num-experts 8", "--llm-ep 3", "--llm-ep 1, 2, 4, 8"]),
    (5, {"llm_dp": 4, "llm_ep": 8, "experts": 8}, ["--llm-ep 8 * --llm-expt-tp 1 = 8", "4 ranks", "--llm-ep 1, 2, 4"]),
    (5, {"llm_dp": 4, "llm_expt_tp": 3, "experts": 8}, ["--llm-expt-tp 3 = 3", "--llm-dp 4"]),
    (2, {"sequence_parallel": True}, ["--sequence-parallel", "--llm-tp above 1"]),
    (3, {"llm_tp": 2, "experts": 8}, ["--num-experts 8", "--llm-tp 2", "--sequence-parallel"]),
])
def test_a_layout_that_cannot_work_is_explained(world, flags, expected):
    with pytest.raises(ValueError) as caught:
        make(world, **flags)
    for part in expected:
        assert part in str(caught.value)


LANGUAGE = GridSpec("language", offset=2, dp=2)


@pytest.mark.parametrize(("layout", "expected"), [
    (Layout("disjoint", 4, (GridSpec("vision", dp=2),), dataclasses.replace(LANGUAGE, offset=1)),
     ["'language' starts at rank 1, inside grid 'vision' (ranks 0-1)", "rank 2"]),
    (Layout("disjoint", 5, (GridSpec("vision", dp=2),), dataclasses.replace(LANGUAGE, offset=3)),
     ["ranks 2-2 before grid 'language' hold nothing", "start at rank 2"]),
    (Layout("disjoint", 7, (GridSpec("vision", dp=2), GridSpec("audio", offset=4, dp=2)), LANGUAGE),
     ["need 6 ranks", "audio: --encoder-tp 1 * --encoder-dp 2", "the world has 7"]),
    (Layout("disjoint", 4, (GridSpec("vision", cp=2),), LANGUAGE), ["--encoder-cp 2 is not supported yet"]),
    (Layout("disjoint", 4, (GridSpec("vision", dp=2, ep=2),), LANGUAGE), ["--encoder-ep 2 is not supported yet"]),
    (Layout("colocated", 4, (GridSpec("vision", dp=4),), GridSpec("language", dp=2, cp=2)),
     ["--llm-cp 2", "needs --encoder-window"]),
    (Layout("homogeneous", 4, (GridSpec("vision", dp=2),), GridSpec("language", dp=2, cp=2)),
     ["grid 'vision'", "is not split as the first language stage"]),
    (Layout("disjoint", 4, (GridSpec("vision", dp=2, tp=0),), LANGUAGE), ["--encoder-tp 0 is below 1"]),
    (Layout("disjoint", 4, (GridSpec("vision", offset=-1, dp=2),), LANGUAGE), ["'vision' starts at rank -1"]),
    (Layout("colocated", 4, (GridSpec("vision", dp=2),), LANGUAGE), ["'language' starts at rank 2", "--llm-offset 0"]),
    (Layout("colocated", 4, (GridSpec("vision", dp=4),), GridSpec("language", dp=2, pp=2)),
     ["--llm-pp 2", "needs --encoder-window"]),
    (Layout("homogeneous", 4, (GridSpec("vision", dp=4),), GridSpec("language", dp=2, pp=2)),
     ["grid 'vision'", "is not split as the first language stage"]),
    (Layout("ring", 4, (GridSpec("vision", dp=2),), LANGUAGE), ["--layout ring"]),
])
def test_a_layout_made_in_python_is_checked_too(layout, expected):
    with pytest.raises(ValueError) as caught:
        validate_layout(layout, micro_batch_size=1, global_batch_size=2)
    for part in expected:
        assert part in str(caught.value)


def test_several_encoders_may_stand_in_any_order():
    layout = Layout("disjoint", 6, (GridSpec("vision", dp=2), GridSpec("audio", offset=4, dp=2)), LANGUAGE)
    validate_layout(layout, micro_batch_size=1, global_batch_size=2)


@given(world=st.integers(1, 40), encoder_tp=st.integers(1, 3), encoder_dp=st.integers(1, 6), llm_tp=st.integers(1, 3),
       llm_dp=st.integers(1, 6), llm_pp=st.integers(1, 2), micro=st.integers(1, 3),
       kind=st.sampled_from(["disjoint", "colocated"]))
def test_every_suggestion_works_and_every_layout_that_passes_serves_all_lanes(
        world, encoder_tp, encoder_dp, llm_tp, llm_dp, llm_pp, micro, kind):
    flags = {"layout": kind, "encoder_tp": encoder_tp, "encoder_dp": encoder_dp, "llm_tp": llm_tp, "llm_dp": llm_dp,
             "llm_pp": llm_pp}
    try:
        layout = make(world, micro=micro, **flags)
    except ValueError as error:
        assume("these fit" in str(error) and " ranks: " in str(error))
        for words in str(error).split(" ranks: ")[1].split("; ")[0].split(", or "):
            found = dict(re.findall(r"--(\S+) (\d+)", words))
            make(world, micro=int(found.get("micro-batch-size", micro)),
                 **{**flags, "encoder_dp": int(found["encoder-dp"]), "llm_dp": int(found["llm-dp"])})
        return
    covered = {rank for grid in layout.grids.values() for rank in grid.ranks}
    assert covered == set(range(world))
    assert layout.encoder_window is not None or all(share.stop > share.start for dp in range(encoder_dp)
                                                    for share in lane_shares(encoder_dp, llm_dp, micro, dp))
