"""Description of a stall: the status of a rank as JSON, the place of a rank, the summary."""

from __future__ import annotations

import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from mimo.grid.spec import GridSpec, Layout
from mimo.text import ranges
from mimo.watchdog.diagnosis import RankPlace, write_summary
from mimo.watchdog.gather import StallStore
from mimo.watchdog.status import (
    Blocked,
    LoaderStatus,
    RankProcess,
    RankStatus,
    Schedule,
    Wait,
    parse_ranks,
    status_from_json,
)
from mimo.watchdog.watchdog import rank_places

WORLD = 800


def place(rank: int) -> RankPlace:
    name = "vision" if rank < 32 else "language"
    return RankPlace(f"rank {rank} ({name} grid, tp 0 cp 0 dp {rank} pp 0)", (name,), ((name, 0),))


def test_a_status_travels_as_json():
    status = RankStatus(3, iteration=2, idle_s=1.5,
                        waits=(Wait("data", "x 1", 2.0, (1, 2), (0, 4, 5), True), Wait("outer")),
                        blocked=Blocked("collective", "all_reduce", tuple(range(WORLD)), 0), stack=("a:1 f: g()",),
                        schedule=Schedule(1, 4, 2, 1), loader=LoaderStatus(True, "reads", (1,)), stopped_pids=(7,))
    assert status_from_json(status.to_json()) == status
    assert len(status.to_json()) < 1000, "a group of many ranks is short"
    bare = RankStatus(0)
    assert status_from_json(bare.to_json().encode()) == bare


@given(st.sets(st.integers(0, 60)))
def test_ranks_in_words_and_back(ranks: set[int]):
    assert parse_ranks(ranges(ranks)) == tuple(sorted(ranks))


def test_a_summary_of_many_ranks_is_short_and_names_the_one():
    loader = LoaderStatus(True, "reads shard-3.tar")
    bridge = Wait("bridge recv_forward", "module vision", 60.0, (5,))
    statuses = {rank: RankStatus(rank, iteration=7, idle_s=60.0, waits=(bridge,)) for rank in range(WORLD)}
    statuses[5] = RankStatus(5, iteration=7, waits=(Wait("data", "iteration 8", 70.0, on_loader=True),), loader=loader,
                             idle_s=70.0, stack=("mimo/data/loader.py:1 next_step: get()",))
    # Waits for one that waits for the one.
    statuses[700] = RankStatus(700, iteration=6, idle_s=60.0,
                               waits=(Wait("bridge send_forward", peers=(9,), seconds=60.0),))
    processes = {rank: RankProcess(rank, f"node{rank // 8}", 1000 + rank, 1) for rank in range(WORLD)}
    text = write_summary(statuses, processes, {rank: place(rank) for rank in range(WORLD)}, "now")
    lines = text.splitlines()
    assert lines[0] == ("stall summary [now]: everybody waits for rank 5 (vision grid, tp 0 cp 0 dp 5 pp 0) on host "
                        "node0, pid 1005")
    assert lines[1] == "reason: its data loader has no data: reads shard-3.tar"
    assert lines[2] == "place: iteration 7, no progress for 70.0 s"
    assert "all 800 ranks:" in lines
    assert "  ranks 0-4, 6-31 (vision grid): iteration 7, waiting for bridge recv_forward for 60.0 s" in lines
    assert "  ranks 32-699, 701-799 (language grid): iteration 7, waiting for bridge recv_forward for 60.0 s" in lines
    assert any(line.startswith("  rank 700 (language grid") and "iteration 6" in line for line in lines)
    assert len(lines) < 12


def test_a_rank_without_an_answer_has_its_line():
    statuses = {0: RankStatus(0, waits=(Wait("bridge send_forward", "peers 1", 8.0, (1,)),), stopped_pids=(11,))}
    processes = {0: RankProcess(0, "a", 10, 1), 1: RankProcess(1, "a", 11, 1)}
    places = {rank: place(rank) for rank in (0, 1)}
    text = write_summary(statuses, processes, places, "now")
    assert "everybody waits for rank 1 (vision grid, tp 0 cp 0 dp 1 pp 0) on host a, pid 11\n" in text
    assert "reason: it does not answer: its process is stopped" in text
    assert "  rank 1 (vision grid, tp 0 cp 0 dp 1 pp 0) on host a, pid 11: no answer\n" in text


def test_an_unclear_verdict_lists_its_candidates():
    statuses = {rank: RankStatus(rank, idle_s=9.0, stack=(f"m.py:{rank} f: g()",)) for rank in range(12)}
    text = write_summary(statuses, {}, {rank: place(rank) for rank in range(12)}, "now")
    assert "it is not clear which rank everybody waits for\nwhy: 12 ranks wait for no other rank\n" in text
    assert text.count("candidate: rank ") == 8
    assert "further candidates: ranks 8-11\n" in text


def test_one_rank_alone():
    text = write_summary({0: RankStatus(0, idle_s=5.0)}, {}, {0: place(0)}, "now")
    assert text.startswith("stall summary [now]: rank 0 (vision grid, tp 0 cp 0 dp 0 pp 0) makes no progress\n")
    assert "all 1 rank:\n" in text


def test_ranks_of_a_module_and_stage_have_one_role():
    layout = Layout("disjoint", 5, (GridSpec("vision"),), GridSpec("language", offset=1, tp=2, pp=2))
    places = rank_places(layout)
    assert places[0] == RankPlace("rank 0 (vision grid, tp 0 cp 0 dp 0 pp 0, lane 0)", ("vision",), (("vision", 0),))
    wide = Layout("disjoint", 6, (GridSpec("vision", dp=2),), GridSpec("language", offset=2, dp=4))
    assert wide.describe(1) == "rank 1 (vision grid, tp 0 cp 0 dp 1 pp 0, lanes 2-3)"
    assert places[4].who == "rank 4 (language grid, tp 1 cp 0 dp 0 pp 1, lane 0)"
    assert places[1].role == places[2].role == (("language", 0),)
    assert places[3].role == places[4].role == (("language", 1),)


def test_a_rank_of_colocated_grids_has_both():
    layout = Layout("colocated", 2, (GridSpec("vision", dp=2),), GridSpec("language", tp=2))
    place = rank_places(layout)[1]
    assert place.grids == ("vision", "language")
    assert place.who == "rank 1 (vision grid, tp 0 cp 0 dp 1 pp 0, lane 0; language grid, tp 1 cp 0 dp 0 pp 0, lane 0)"


def test_a_rank_alone_writes_its_summary():
    written = []
    process = RankProcess(0, "host", 1, 1)
    alone = StallStore(dist.HashStore(), process, 1, lambda statuses, processes: written.append((statuses, processes)))
    status = RankStatus(0)
    alone.start(lambda: None)
    assert alone.conclude(status) == ()
    assert written == [({0: status}, {0: process})]
