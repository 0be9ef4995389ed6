"""Who reads which lane: every need of every rank has exactly one reader, which serves it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo.config.cli import parse
from mimo.config.validate import row_multiple, validate
from mimo.grid.lanes import lanes_read_by, needs_from, needs_of, reader_of
from mimo.grid.spec import GridSpec, Layout

sizes = st.sampled_from([1, 2, 4])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    kind = draw(st.sampled_from(["disjoint", "colocated", "homogeneous", "llm-only"]))
    tp, pp, lanes = draw(sizes), draw(sizes), draw(sizes)
    if kind == "llm-only":
        language = GridSpec("language", 0, tp=tp, pp=pp, dp=lanes)
        return Layout("disjoint", language.size, (), language)
    if kind == "colocated":
        language = GridSpec("language", 0, tp=tp, dp=lanes)
        encoder_tp = draw(st.sampled_from([size for size in (1, 2, 4) if language.size % size == 0]))
        vision = GridSpec("vision", 0, tp=encoder_tp, dp=language.size // encoder_tp)
        return Layout("colocated", language.size, (vision,), language)
    if kind == "homogeneous":
        language = GridSpec("language", 0, tp=tp, pp=pp, dp=lanes)
        return Layout("homogeneous", language.size, (GridSpec("vision", 0, tp=tp, dp=lanes),), language)
    encoders, offset = [], 0
    for name in ("vision", "audio")[: draw(st.integers(1, 2))]:
        encoders.append(GridSpec(name, offset, tp=draw(sizes), pp=draw(sizes), dp=draw(sizes)))
        offset += encoders[-1].size
    language = GridSpec("language", offset, tp=tp, pp=pp, dp=lanes)
    return Layout("disjoint", offset + language.size, tuple(encoders), language)


@given(layouts(), st.sampled_from([1, 2, 4]))
def test_every_need_has_one_reader(layout: Layout, micro: int) -> None:
    readers = Counter(lane for rank in range(layout.world_size) for lane in lanes_read_by(layout, rank))
    assert readers == dict.fromkeys(range(layout.num_lanes), 1)
    for rank in range(layout.world_size):
        needs = needs_of(layout, rank, micro)
        served = [need for reader in range(layout.world_size) for need in needs_from(layout, reader, rank, micro)]
        assert sorted(map(repr, served)) == sorted(map(repr, needs))
        assert {need.module for need in needs} == set(layout.modules_of(rank))


@given(layouts(), st.sampled_from([1, 2, 4]))
def test_each_sample_is_encoded_once_for_every_encoder(layout: Layout, micro: int) -> None:
    for encoder in layout.encoders:
        encoded = Counter()
        for rank in encoder.ranks:
            position = encoder.coordinates(rank)
            if not position["tp"] and not position["pp"]:
                for need in needs_of(layout, rank, micro):
                    if need.module == encoder.name:
                        encoded.update((need.share.lane, row) for row in range(need.share.start, need.share.stop))
                        assert need.pixels
        assert encoded == dict.fromkeys(((lane, row) for lane in range(layout.num_lanes) for row in range(micro)), 1)


@given(tp=sizes, pp=sizes, lanes=sizes)
def test_with_encoder_windows_the_reader_of_a_lane_holds_its_pixels(tp: int, pp: int, lanes: int) -> None:
    language = GridSpec("language", 0, tp=tp, pp=pp, dp=lanes)
    layout = Layout("colocated", language.size, (GridSpec("vision", dp=language.size),), language, encoder_window=1)
    held = Counter()
    for rank in range(layout.world_size):
        for need in needs_of(layout, rank, 3):
            if need.module == "vision":
                assert need.pixels and (need.share.start, need.share.stop) == (0, 3)
                assert reader_of(layout, need.share.lane) == rank
                held[need.share.lane] += 1
    assert held == dict.fromkeys(range(lanes), 1)


@pytest.mark.parametrize(("encoder_dp", "lanes", "readers"), [
    (1, 4, [0, 0, 0, 0]), (2, 4, [0, 0, 2, 2]), (4, 2, [0, 4]), (2, 2, [0, 2]),
])
def test_on_disjoint_grids_the_encoder_rank_that_encodes_a_lane_reads_it(encoder_dp, lanes, readers):
    vision = GridSpec("vision", 0, tp=2, dp=encoder_dp)
    language = GridSpec("language", vision.size, dp=lanes)
    layout = Layout("disjoint", vision.size + lanes, (vision,), language)
    assert [reader_of(layout, lane) for lane in range(lanes)] == readers


def test_language_ranks_read_where_grids_are_not_disjoint() -> None:
    language = GridSpec("language", 0, tp=2, dp=2)
    colocated = Layout("colocated", 4, (GridSpec("vision", 0, dp=4),), language)
    assert [reader_of(colocated, lane) for lane in range(2)] == [0, 2]
    assert [reader_of(Layout("disjoint", 4, (), language), lane) for lane in range(2)] == [0, 2]


@pytest.mark.parametrize(("flags", "ranks", "expected"), [
    ("", 1, 256),
    ("--row-lengths 1", 1, 4096),
    ("--row-lengths 100", 1, 48),  # 41 tokens, in multiples of 8
    ("--row-lengths 4096", 1, 8),
    ("--row-lengths 100 --llm-tp 2 --llm-cp 4", 8, 48),  # each rank has two chunks
    ("--row-lengths 64 --llm-tp 2 --sequence-parallel --fp8-format e4m3 --fp8-recipe blockwise", 2, 256),
    ("--seq-length 100 --row-lengths 2", 1, 56),
    ("--num-experts 4 --llm-dp 2 --llm-ep 2", 2, 256),
    ("--num-experts 4 --llm-dp 2 --llm-ep 2 --moe-token-dispatcher-type allgather", 2, 4096),
    ("--num-experts 4 --llm-dp 2 --llm-expt-tp 2 --moe-token-dispatcher-type allgather", 2, 4096),
])
def test_rows_have_lengths_that_their_ranks_can_share(flags: str, ranks: int, expected: int) -> None:
    config = parse(["--model-provider", "causal_lm", "--dataset-provider", "mock", "--train-iters", "1", "--seq-length",
                    "4096", "--max-position-embeddings", "4096", *flags.split()])
    assert row_multiple(config, validate(config, ranks)) == expected


@pytest.mark.parametrize(("flags", "message"), [
    ("--row-lengths 0", "--row-lengths 0"),
    ("--num-experts 4 --llm-dp 2 --llm-ep 2 --moe-token-dispatcher-type allgather --row-lengths 2",
     "rows of one length"),
])
def test_row_lengths_that_cannot_be_are_refused(flags: str, message: str) -> None:
    config = parse(f"--model-provider causal_lm --dataset-provider mock --train-iters 1 {flags}".split())
    with pytest.raises(ValueError, match=message):
        validate(config, 2 if "--llm-dp 2" in flags else 1)
