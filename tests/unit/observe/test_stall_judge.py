"""Whom everybody waits for, case by case. The layout: encoder rank 0, language ranks 1 and 2 (lanes 0 and 1)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mimo.watchdog.diagnosis import Verdict, judge
from mimo.watchdog.status import Blocked, GroupStatus, LoaderStatus, RankProcess, RankStatus, Schedule, Wait

ROLES = {0: ("vision", 0), 1: ("language", 0), 2: ("language", 0)}
PROCESSES = {rank: RankProcess(rank, "host-a", 100 + rank, 1) for rank in ROLES}
FREE, AT_HANDLE = Blocked(), Blocked("handle", "wait")
STEP = RankStatus(0, iteration=4, idle_s=60.0, schedule=Schedule(5, 4, 2, 1))
WORLD = Wait("sum of losses and tokens over the world", group=(0, 1, 2))


def rank(number: int, *waits: Wait, blocked: Blocked = FREE, **more: object) -> RankStatus:
    return replace(STEP, rank=number, waits=waits, blocked=blocked, stack=("mimo/x.py:1 work: step()",), **more)


def bridge(*peers: int) -> Wait:
    return Wait("bridge send_forward", peers=peers)


def found(*statuses: RankStatus, processes: dict[int, RankProcess] = PROCESSES,
          roles: dict[int, tuple[object, ...]] = ROLES) -> Verdict:
    return judge({status.rank: status for status in statuses}, processes, roles)


def the_one(verdict: Verdict) -> tuple[int, str]:
    assert verdict.kind == "one", verdict
    return verdict.suspects[0].rank, verdict.suspects[0].reason


def test_a_rank_that_computes_or_sleeps():
    verdict = found(rank(0, bridge(1, 2)), rank(1, bridge(0)), rank(2))
    assert the_one(verdict)[0] == 2
    assert "not in a tracked wait" in verdict.suspects[0].reason and "mimo/x.py:1 work" in verdict.suspects[0].reason
    assert verdict.suspects[0].waiters == 2


def test_a_rank_that_computes_inside_a_tracked_wait_of_a_group():
    optimizer = Wait("optimizer step", group=(0, 1, 2), seconds=60.0)
    norms = Blocked("collective", "all_reduce", (0, 1, 2))
    number, reason = the_one(found(rank(0, optimizer, blocked=norms), rank(1, optimizer),
                                   rank(2, optimizer, blocked=norms)))
    assert number == 1
    assert "it waits for optimizer step for 60.0 s" in reason and "mimo/x.py:1" in reason


def test_untracked_collectives_lead_to_the_rank_that_is_missing():
    """The peer of a sleeping rank is not in a tracked wait either: its stack shows that it waits, and for whom."""
    tensor_parallel = Blocked("collective", "all_reduce", (1, 2))
    assert the_one(found(rank(0, bridge(1)), rank(1, blocked=tensor_parallel), rank(2)))[0] == 2
    assert the_one(found(rank(0, bridge(1)), rank(1, blocked=AT_HANDLE), rank(2)))[0] == 2


def test_a_rank_that_waits_for_its_data_loader():
    data = Wait("data", on_loader=True)
    loader = LoaderStatus(True, "waiting for worker 1 (lane 0, pid 7), which reads shard-3.tar")
    number, reason = the_one(found(rank(0, bridge(1)), rank(1, data, loader=loader), rank(2, bridge(0))))
    assert number == 1
    assert "data loader has no data: waiting for worker 1 (lane 0, pid 7), which reads shard-3.tar" in reason


def test_data_that_another_ranks_loader_should_bring():
    """Rank 0 reads for all. Its main thread waits for rank 1, which waits for samples of rank 0's loader."""
    reader = LoaderStatus(True, "waiting for worker 0 (lane 0, pid 7)")
    waiting = LoaderStatus(True, "samples of lane 0 from rank 0, their reader", peers=(0,))
    data = Wait("data", on_loader=True)
    number, reason = the_one(found(rank(0, bridge(1), loader=reader), rank(1, data, loader=waiting),
                                   rank(2, data, loader=waiting)))
    assert number == 0
    assert "worker 0 (lane 0, pid 7)" in reason


def test_a_reader_that_was_not_asked_waits_for_its_own_main_thread():
    data = Wait("data", on_loader=True)
    waiting = LoaderStatus(True, "samples of lane 0 from rank 0, their reader", peers=(0,))
    idle = LoaderStatus(False, "nothing")
    number, reason = the_one(found(rank(0, loader=idle), rank(1, data, loader=waiting), rank(2, data, loader=waiting)))
    assert number == 0 and "not in a tracked wait" in reason


def test_a_wait_for_something_that_is_no_rank():
    """All ranks of reinforcement learning wait for the first one, and that for the rollout engine."""
    engine = Wait("completions of the rollout engine", details="version 3", seconds=61.0)
    others = Wait("completions and rewards, which the first rank asks for")
    shared = Blocked("collective", "broadcast_object_list", (0, 1, 2), source=0)
    number, reason = the_one(found(rank(0, engine, blocked=Blocked("host", "wait")), rank(1, others, blocked=shared),
                                   rank(2, others, blocked=shared)))
    assert number == 0
    assert "it waits for completions of the rollout engine (version 3) for 61.0 s" in reason


@pytest.mark.parametrize(("stopped", "words"), [((102,), "its process is stopped"), ((), "interpreter's lock")])
def test_a_rank_that_does_not_answer(stopped: tuple[int, ...], words: str):
    number, reason = the_one(found(rank(0, bridge(1, 2), stopped_pids=stopped),
                                   rank(1, WORLD, blocked=AT_HANDLE)))
    assert number == 2 and words in reason


def test_a_host_of_which_no_rank_answers():
    away = PROCESSES | {2: RankProcess(2, "host-b", 102, 1)}
    assert "nor does any rank of host host-b" in the_one(found(rank(0, bridge(1, 2)), rank(1, bridge(0)),
                                                               processes=away))[1]
    unknown = {number: process for number, process in PROCESSES.items() if number != 2}
    assert "never registered" in the_one(found(rank(0, bridge(1, 2)), rank(1, bridge(0)), processes=unknown))[1]


def test_two_ranks_that_do_not_answer_are_candidates():
    verdict = found(rank(0, bridge(1, 2)))
    assert verdict.kind == "unclear"
    assert [suspect.rank for suspect in verdict.suspects] == [1, 2]


def test_a_silent_rank_comes_before_one_that_computes():
    verdict = found(rank(0, bridge(1, 2)), rank(1))
    assert verdict.kind == "likely"
    assert [suspect.rank for suspect in verdict.suspects] == [2, 1]


def test_a_rank_with_another_number_of_microbatches():
    """It has gone on to the end of the step; the encoder still has a microbatch for it."""
    number, reason = the_one(found(rank(0, bridge(1, 2)), rank(1, WORLD, blocked=AT_HANDLE), rank(
        2, WORLD, blocked=AT_HANDLE, schedule=Schedule(5, 3, 3, 3))))
    assert number == 2
    assert "its step has 3 microbatches, that of the other ranks 4" in reason


def test_two_ranks_cannot_say_which_of_them_is_wrong():
    verdict = judge({0: rank(0, bridge(1)), 1: rank(1, WORLD, blocked=AT_HANDLE, schedule=Schedule(5, 3, 3, 3))},
                    PROCESSES, {0: ("vision", 0), 1: ("language", 0)})
    assert verdict.kind == "unclear"
    assert {suspect.rank for suspect in verdict.suspects} == {0, 1}
    assert "circle" in verdict.explanation


def test_a_rank_that_is_a_round_of_passes_behind():
    verdict = found(rank(0, WORLD, blocked=AT_HANDLE), rank(1, WORLD, blocked=AT_HANDLE), rank(
        2, bridge(0), schedule=Schedule(4, 4, 1, 0)))
    assert verdict.kind == "likely" and verdict.suspects[0].rank == 2
    assert "begun 4 rounds" in verdict.suspects[0].reason


def test_a_rank_in_another_collective_than_those_that_do_the_same_work():
    roles = {number: ("language", 0) for number in range(4)}
    reduction = Wait("gradient reduction", group=(0, 1, 2, 3))
    here, there = Blocked("collective", "all_reduce", (0, 1, 2, 3)), Blocked("collective", "all_gather", (0, 1, 2, 3))
    verdict = found(*(rank(number, reduction, blocked=here) for number in range(3)), rank(3, reduction, blocked=there),
                    roles=roles)
    assert verdict.kind == "likely" and [suspect.rank for suspect in verdict.suspects] == [3]
    assert "in all_gather of ranks 0-3" in verdict.suspects[0].reason


def test_a_collective_to_which_all_have_come_blames_nobody():
    here = Blocked("collective", "all_reduce", (0, 1, 2))
    verdict = found(*(rank(number, WORLD, blocked=here) for number in range(3)))
    assert verdict.kind == "unclear" and not verdict.suspects
    assert "network" in verdict.explanation


def test_two_ranks_that_wait_for_nobody_are_candidates_unless_one_has_only_just_moved():
    verdict = found(rank(0, bridge(1, 2)), rank(1), rank(2))
    assert verdict.kind == "unclear" and {suspect.rank for suspect in verdict.suspects} == {1, 2}
    verdict = found(rank(0, bridge(1, 2)), replace(rank(1), idle_s=1.0), rank(2))
    assert verdict.kind == "likely" and verdict.suspects[0].rank == 2


def test_an_end_beside_a_circle_is_only_likely():
    """Ranks 0 and 1 wait for each other whatever rank 2 does."""
    verdict = found(rank(0, bridge(1)), rank(1, bridge(0)), rank(2))
    assert verdict.kind == "likely" and verdict.suspects[0].rank == 2
    assert verdict.explanation == "ranks 0-1 wait for each other in a circle"


def test_on_an_accelerator_the_stack_of_a_rank_that_computes_is_no_proof():
    verdict = found(rank(0, bridge(1, 2)), rank(1, bridge(0)), rank(2, on_device=True))
    assert verdict.kind == "likely" and verdict.suspects[0].rank == 2


def test_a_rank_that_has_finished_is_blamed_only_by_those_that_wait_for_it():
    gone = RankStatus(2, ended="finished")
    assert the_one(found(rank(0, bridge(1)), rank(1), gone))[0] == 1
    number, reason = the_one(found(rank(0, bridge(1)), rank(1, bridge(2)), gone))
    assert number == 2 and "finished" in reason


FULL = {"on_device": True, "schedule": Schedule(5, 4, 3, 3)}
FAILED = RankStatus(2, ended="failed")


def test_a_rank_that_has_failed_comes_first_whatever_the_others_do():
    number, reason = the_one(found(rank(0, bridge(1)), rank(1, bridge(2)), FAILED))
    assert number == 2 and "ended with an error" in reason
    verdict = found(rank(0, bridge(1, 2)), rank(1), FAILED)
    assert verdict.kind == "likely" and [each.rank for each in verdict.suspects] == [2, 1]
    assert the_one(found(rank(0, **FULL), rank(1, **FULL), FAILED))[0] == 2, "full queues lead to it"
    pending = rank(1, blocked=Blocked("device", "tolist"), groups=(GroupStatus("1", (1, 2), 4, 4),), **FULL)
    assert found(rank(0, **FULL), pending, FAILED).suspects[0].rank == 2
    verdict = found(rank(0, bridge(1)), replace(FAILED, rank=1), FAILED)
    assert verdict.kind == "unclear" and verdict.explanation == "2 ranks have ended with an error"


def test_a_rank_that_has_finished_counts_as_long_as_those_that_wait_for_it():
    verdict = found(rank(0, bridge(2)), rank(1), RankStatus(2, ended="finished"))
    assert {each.rank for each in verdict.suspects} == {1, 2}
    assert "2 ranks wait for no other rank" in verdict.explanation


def test_one_rank_alone():
    assert the_one(judge({0: rank(0)}, PROCESSES, {0: ("language", 0)}))[0] == 0


def on_device(number: int, kind: str, *groups: GroupStatus) -> RankStatus:
    return rank(number, blocked=Blocked(kind, "item" if kind else ""), on_device=True, groups=groups)


def test_a_synchronisation_with_the_accelerator_waits_for_those_that_are_not_in_one():
    verdict = found(on_device(0, "device"), on_device(1, "device"), on_device(2, ""))
    assert verdict.kind == "likely" and verdict.suspects[0].rank == 2
    engine = rank(2, Wait("completions of the rollout engine"), on_device=True)
    assert the_one(found(on_device(0, "device"), on_device(1, "device"), engine))[0] == 2


def test_a_host_whose_queue_is_full_waits_for_the_one_that_has_queued_less():
    """Kernels that wait for activations fill the queue; nothing in the stack of the host shows that it waits."""
    full = rank(1, on_device=True, schedule=Schedule(5, 4, 3, 3))
    sleeps = rank(0, on_device=True, schedule=Schedule(5, 4, 1, 0))
    verdict = judge({0: sleeps, 1: full}, PROCESSES, {0: ("vision", 0), 1: ("language", 0)})
    assert verdict.kind == "likely" and [each.rank for each in verdict.suspects] == [0]
    synchronises = replace(full, blocked=Blocked("device", "item"), groups=(GroupStatus("1", (0, 1), 3),))
    verdict = judge({0: sleeps, 1: synchronises}, PROCESSES, {0: ("vision", 0), 1: ("language", 0)})
    assert verdict.kind == "likely" and [each.rank for each in verdict.suspects] == [0]
    # Each has done something that the other has not: nobody is ahead.
    other = replace(full, schedule=Schedule(5, 4, 0, 1))
    assert len(judge({0: sleeps, 1: other}, PROCESSES, {0: ("vision", 0), 1: ("language", 0)}).suspects) == 2


def test_work_that_has_a_name_is_no_wait():
    """An encoder whose queue is full stands in its prefetch: that must not look like the end of all waits."""
    prefetch = Wait("encoder prefetch", is_work=True)
    verdict = found(rank(0, prefetch, **FULL), rank(1, **FULL), rank(2, on_device=True, schedule=Schedule(5, 4, 2, 2)))
    assert verdict.kind == "likely" and [each.rank for each in verdict.suspects] == [2]
    in_tolist = {"blocked": Blocked("device", "tolist"), "groups": (GroupStatus("1", (0, 1, 2), 4, 4),), **FULL}
    verdict = found(rank(0, prefetch, **FULL), rank(1, **in_tolist),
                    rank(2, on_device=True, schedule=FULL["schedule"], groups=(GroupStatus("1", (0, 1, 2), 4),)))
    assert verdict.kind != "one", "where a host stands proves nothing of its device"


def test_a_rank_before_its_first_pass_is_behind_those_with_full_queues():
    verdict = found(rank(0, **FULL), rank(1, **FULL), replace(rank(2, on_device=True), schedule=None))
    assert verdict.kind == "likely" and [each.rank for each in verdict.suspects] == [2]


def test_a_rank_without_a_record_of_its_groups_is_not_late():
    waits = {"blocked": Blocked("device", "item"), "on_device": True,
             "groups": (GroupStatus("1", (0, 1, 2), 4, 4, "nccl:all_reduce"),)}
    late = rank(2, on_device=True, groups=(GroupStatus("1", (0, 1, 2), 3),))
    verdict = found(rank(0, **waits), rank(1, on_device=True, blocked=Blocked("device", "item")), late)
    assert [each.rank for each in verdict.suspects][0] == 2


def test_the_record_of_the_process_groups_shows_who_has_not_joined_a_collective():
    """All hosts wait for their devices. Rank 2 has not joined the fourth collective of group 1, and its own have ended.

    Its device may hang, or somebody may not have sent it something. So nobody is blamed for certain.
    """
    waits = GroupStatus("1", (0, 1, 2), 4, 4, "nccl:all_reduce")
    pair = GroupStatus("2", (1, 2), 7, 7, "nccl:all_gather")
    verdict = found(on_device(0, "device", waits), on_device(1, "device", waits, pair),
                    on_device(2, "device", GroupStatus("1", (0, 1, 2), 3), GroupStatus("2", (1, 2), 7)))
    assert verdict.kind == "likely" and verdict.suspects[0].rank == 2


def test_the_record_tells_ranks_in_the_same_synchronisation_apart():
    """Rank 0 waits for rank 1 in one group, that for rank 2 in another, which computes."""
    first, second = GroupStatus("1", (0, 1), 4, 4, "nccl:all_reduce"), GroupStatus("2", (1, 2), 9, 9, "nccl:all_reduce")
    behind = GroupStatus("1", (0, 1), 3)
    verdict = found(on_device(0, "device", first), on_device(1, "device", behind, second), on_device(2, ""))
    assert verdict.kind == "likely" and [suspect.rank for suspect in verdict.suspects] == [2]
    assert verdict.suspects[0].waiters == 2


def test_a_broadcast_is_waited_for_from_its_source_alone():
    """Rank 2 took its part and has gone on: it computes, and nobody waits for it."""
    shared = Blocked("collective", "broadcast", (0, 1, 2), source=0)
    verdict = found(rank(0, Wait("rewards")), rank(1, blocked=shared), rank(2, bridge(1)))
    assert the_one(verdict)[0] == 0
    busy = judge({0: rank(0, Wait("rewards")), 1: rank(1, blocked=shared), 2: replace(rank(2), idle_s=1.0)}, PROCESSES,
                 ROLES)
    assert busy.suspects[0].rank == 0 and busy.suspects[0].waiters == 1
    assert busy.suspects[1].waiters == 0


def test_a_rank_that_came_to_a_collective_is_not_waited_for():
    """Ranks 0 and 1 are there; rank 1 is in no graph's way: only rank 2 is missing."""
    here = Blocked("collective", "all_reduce", (0, 1, 2))
    verdict = found(rank(0, WORLD, blocked=here), rank(1, WORLD, blocked=here), rank(2, bridge(7)),
                    roles=ROLES | {7: ("vision", 0)}, processes=PROCESSES | {7: RankProcess(7, "host-a", 107, 1)})
    assert the_one(verdict)[0] == 7
    assert verdict.suspects[0].waiters == 3
