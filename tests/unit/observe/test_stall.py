from __future__ import annotations

from mimo.grid.spec import GridSpec, Layout
from mimo.watchdog.diagnosis import RankPlace
from mimo.watchdog.status import RankProcess, RankStatus
from mimo.watchdog.watchdog import Alone, rank_places


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
    alone = Alone(process, lambda statuses, processes: written.append((statuses, processes)))
    status = RankStatus(0)
    assert alone.conclude(status) == ()
    assert written == [({0: status}, {0: process})]
