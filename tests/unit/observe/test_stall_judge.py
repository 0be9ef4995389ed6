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


FULL = {"on_device": True, "schedule": Schedule(5, 4, 3, 3)}
OPTIMIZER, NORMS = Wait("optimizer step", group=(0, 1, 2), seconds=60.0), Blocked("collective", "all_reduce", (0, 1, 2))
PAIR = Blocked("collective", "all_reduce", (1, 2))
DATA = Wait("data", on_loader=True)
# Rank 0 reads for all. Its main thread waits for rank 1, which waits for samples of rank 0's loader.
OF_RANK_0 = LoaderStatus(True, "samples of lane 0 from rank 0, their reader", peers=(0,))
ENGINE = Wait("completions of the rollout engine", details="version 3", seconds=61.0)
OTHERS = Wait("completions and rewards, which the first rank asks for")
SHARED = Blocked("collective", "broadcast", (0, 1, 2), source=0)
AT_DEVICE = {"blocked": Blocked("device", "item"), "on_device": True}


def groups(*found: GroupStatus) -> dict[str, object]:
    return {"groups": found}


# Statuses, kind of the verdict, suspects, what the first one's reason has, and how many ranks wait for it.
CASES = {
    "a rank that computes or sleeps": (
        [rank(0, bridge(1, 2)), rank(1, bridge(0)), rank(2)], "one", [2],
        ("not in a tracked wait", "mimo/x.py:1 work"), 2),
    "a rank that computes inside a tracked wait of a group": (
        [rank(0, OPTIMIZER, blocked=NORMS), rank(1, OPTIMIZER), rank(2, OPTIMIZER, blocked=NORMS)], "one", [1],
        ("it waits for optimizer step for 60.0 s", "mimo/x.py:1"), None),
    # The peer of a sleeping rank is not in a tracked wait either: its stack shows that it waits, and for whom.
    "an untracked collective leads to the rank that is missing": (
        [rank(0, bridge(1)), rank(1, blocked=PAIR), rank(2)], "one", [2], (), None),
    "so does a handle": ([rank(0, bridge(1)), rank(1, blocked=AT_HANDLE), rank(2)], "one", [2], (), None),
    "a rank that waits for its data loader": (
        [rank(0, bridge(1)), rank(1, DATA, loader=LoaderStatus(True, "waiting for worker 1, which reads shard-3.tar")),
         rank(2, bridge(0))], "one", [1],
        ("data loader has no data: waiting for worker 1, which reads shard-3.tar",), None),
    "data that another rank's loader should bring": (
        [rank(0, bridge(1), loader=LoaderStatus(True, "waiting for worker 0 (lane 0, pid 7)")),
         rank(1, DATA, loader=OF_RANK_0), rank(2, DATA, loader=OF_RANK_0)], "one", [0],
        ("worker 0 (lane 0, pid 7)",), None),
    "a reader that was not asked waits for its own main thread": (
        [rank(0, loader=LoaderStatus(False, "nothing")), rank(1, DATA, loader=OF_RANK_0),
         rank(2, DATA, loader=OF_RANK_0)], "one", [0], ("not in a tracked wait",), None),
    # All ranks of reinforcement learning wait for the first one, and that for the rollout engine.
    "a wait for something that is no rank": (
        [rank(0, ENGINE, blocked=Blocked("host", "wait")), rank(1, OTHERS, blocked=SHARED),
         rank(2, OTHERS, blocked=SHARED)], "one", [0],
        ("it waits for completions of the rollout engine (version 3) for 61.0 s",), None),
    "a rank that does not answer and whose process is stopped": (
        [rank(0, bridge(1, 2), stopped_pids=(102,)), rank(1, WORLD, blocked=AT_HANDLE)], "one", [2],
        ("its process is stopped",), None),
    "a rank that does not answer": (
        [rank(0, bridge(1, 2)), rank(1, WORLD, blocked=AT_HANDLE)], "one", [2], ("interpreter's lock",), None),
    "two ranks that do not answer": ([rank(0, bridge(1, 2))], "unclear", [1, 2], (), None),
    "a silent rank comes before one that computes": ([rank(0, bridge(1, 2)), rank(1)], "likely", [2, 1], (), None),
    # It has gone on to the end of the step; the encoder still has a microbatch for it.
    "a rank with another number of microbatches": (
        [rank(0, bridge(1, 2)), rank(1, WORLD, blocked=AT_HANDLE),
         rank(2, WORLD, blocked=AT_HANDLE, schedule=Schedule(5, 3, 3, 3))], "one", [2],
        ("its step has 3 microbatches, that of the other ranks 4",), None),
    "a rank that is a round of passes behind": (
        [rank(0, WORLD, blocked=AT_HANDLE), rank(1, WORLD, blocked=AT_HANDLE),
         rank(2, bridge(0), schedule=Schedule(4, 4, 1, 0))], "likely", [2], ("begun 4 rounds",), None),
    "a collective to which all have come": (
        [rank(number, WORLD, blocked=NORMS) for number in range(3)], "unclear", [], ("network",), None),
    "two ranks that wait for nobody": ([rank(0, bridge(1, 2)), rank(1), rank(2)], "unclear", [1, 2], (), None),
    "of which one has only just moved": (
        [rank(0, bridge(1, 2)), replace(rank(1), idle_s=1.0), rank(2)], "likely", [2, 1], (), None),
    # Ranks 0 and 1 wait for each other whatever rank 2 does.
    "an end beside a circle": (
        [rank(0, bridge(1)), rank(1, bridge(0)), rank(2)], "likely", [2],
        ("ranks 0-1 wait for each other in a circle",), None),
    "a stack is no proof on an accelerator": (
        [rank(0, bridge(1, 2)), rank(1, bridge(0)), rank(2, on_device=True)], "likely", [2], (), None),
    "a rank that has finished counts as long as those that wait for it": (
        [rank(0, bridge(2)), rank(1), RankStatus(2, ended="finished")], "unclear", [2, 1],
        ("2 ranks wait for no other rank",), None),
    "a rank before its first pass is behind those with full queues": (
        [rank(0, **FULL), rank(1, **FULL), replace(rank(2, on_device=True), schedule=None)], "likely", [2], (), None),
    "a rank without a record of its groups is not late": (
        [rank(0, **AT_DEVICE, **groups(GroupStatus("1", (0, 1, 2), 4, 4, "nccl:all_reduce"))), rank(1, **AT_DEVICE),
         rank(2, on_device=True, **groups(GroupStatus("1", (0, 1, 2), 3)))], "likely", [2], (), None),
    # All hosts wait for their devices. Rank 2 has not joined the fourth collective of group 1, and its own have ended.
    # Its device may hang, or somebody may not have sent it something. So nobody is blamed for certain.
    "the record of the process groups shows who has not joined a collective": (
        [rank(0, **AT_DEVICE, **groups(GroupStatus("1", (0, 1, 2), 4, 4, "nccl:all_reduce"))),
         rank(1, **AT_DEVICE, **groups(GroupStatus("1", (0, 1, 2), 4, 4, "nccl:all_reduce"),
                                       GroupStatus("2", (1, 2), 7, 7, "nccl:all_gather"))),
         rank(2, **AT_DEVICE, **groups(GroupStatus("1", (0, 1, 2), 3), GroupStatus("2", (1, 2), 7)))],
        "likely", [2], (), None),
    # Rank 0 waits for rank 1 in one group, that for rank 2 in another, which computes.
    "the record tells ranks in the same synchronisation apart": (
        [rank(0, **AT_DEVICE, **groups(GroupStatus("1", (0, 1), 4, 4, "nccl:all_reduce"))),
         rank(1, **AT_DEVICE, **groups(GroupStatus("1", (0, 1), 3), GroupStatus("2", (1, 2), 9, 9, "nccl:all_reduce"))),
         rank(2, on_device=True)], "likely", [2], (), 2),
    # Rank 2 took its part and has gone on: it computes, and nobody waits for it.
    "a broadcast is waited for from its source alone": (
        [rank(0, Wait("rewards")), rank(1, blocked=SHARED), rank(2, bridge(1))], "one", [0], (), None),
    # Ranks 0 and 1 are there; rank 1 is in no graph's way: only rank 2 is missing, which waits for rank 7.
    "a rank that came to a collective is not waited for": (
        [rank(0, WORLD, blocked=NORMS), rank(1, WORLD, blocked=NORMS), rank(2, bridge(7))], "one", [7], (), 3),
}


@pytest.mark.parametrize("case", CASES)
def test_whom_everybody_waits_for(case: str):
    statuses, kind, suspects, words, waiters = CASES[case]
    more = "not waited for" in case
    verdict = found(*statuses, roles=ROLES | {7: ("vision", 0)} if more else ROLES,
                    processes=PROCESSES | {7: RankProcess(7, "host-a", 107, 1)} if more else PROCESSES)
    assert (verdict.kind, [each.rank for each in verdict.suspects]) == (kind, suspects), verdict
    told = verdict.explanation + "".join(each.reason for each in verdict.suspects[:1])
    assert all(word in told for word in words), told
    assert waiters is None or verdict.suspects[0].waiters == waiters


def test_a_rank_that_took_its_part_of_a_broadcast_has_nobody_waiting():
    busy = found(rank(0, Wait("rewards")), rank(1, blocked=SHARED), replace(rank(2), idle_s=1.0))
    assert [(each.rank, each.waiters) for each in busy.suspects] == [(0, 1), (2, 0)]


def test_a_host_of_which_no_rank_answers():
    away = PROCESSES | {2: RankProcess(2, "host-b", 102, 1)}
    assert "nor does any rank of host host-b" in the_one(found(rank(0, bridge(1, 2)), rank(1, bridge(0)),
                                                               processes=away))[1]
    unknown = {number: process for number, process in PROCESSES.items() if number != 2}
    assert "never registered" in the_one(found(rank(0, bridge(1, 2)), rank(1, bridge(0)), processes=unknown))[1]


def test_two_ranks_cannot_say_which_of_them_is_wrong():
    verdict = judge({0: rank(0, bridge(1)), 1: rank(1, WORLD, blocked=AT_HANDLE, schedule=Schedule(5, 3, 3, 3))},
                    PROCESSES, {0: ("vision", 0), 1: ("language", 0)})
    assert verdict.kind == "unclear"
    assert {suspect.rank for suspect in verdict.suspects} == {0, 1}
    assert "circle" in verdict.explanation


def test_a_rank_in_another_collective_than_those_that_do_the_same_work():
    roles = {number: ("language", 0) for number in range(4)}
    reduction = Wait("gradient reduction", group=(0, 1, 2, 3))
    here, there = Blocked("collective", "all_reduce", (0, 1, 2, 3)), Blocked("collective", "all_gather", (0, 1, 2, 3))
    verdict = found(*(rank(number, reduction, blocked=here) for number in range(3)), rank(3, reduction, blocked=there),
                    roles=roles)
    assert verdict.kind == "likely" and [suspect.rank for suspect in verdict.suspects] == [3]
    assert "in all_gather of ranks 0-3" in verdict.suspects[0].reason


def test_a_rank_that_has_finished_is_blamed_only_by_those_that_wait_for_it():
    gone = RankStatus(2, ended="finished")
    assert the_one(found(rank(0, bridge(1)), rank(1), gone))[0] == 1
    number, reason = the_one(found(rank(0, bridge(1)), rank(1, bridge(2)), gone))
    assert number == 2 and "finished" in reason


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
