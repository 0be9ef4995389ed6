"""Finds the rank that all others wait for, from the statuses of all ranks. Pure: no torch, no clock, no files.

Ranks and their data loaders are the nodes of a graph. Edges lead to the nodes that a node waits for. A node without
edges is an end: it computes, waits for something that is not a rank, or does not answer. If every node leads to the
same end, that end is the cause. Nodes that lead to no end wait for each other in a circle, because one of them is at
another point of the program. It is named if the others agree. In all other cases the verdict is a list of candidates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from mimo.text import counted, ranges
from mimo.watchdog.status import RankProcess, RankStatus

Part = Literal["main", "loader"]
Node = tuple[int, Part]
Edges = dict[Node, set[Node]]
Position = tuple[object, ...]
# An end that has been idle for less than this fraction of the longest idle time is probably still moving.
STILL_MOVING = 0.5


@dataclass(frozen=True)
class Suspect:
    """A rank that may be the cause.

    Attributes:
        rank: global rank.
        reason: what it does, in words.
        waiters: number of ranks that wait for it, directly or through others.
    """

    rank: int
    reason: str
    waiters: int


@dataclass(frozen=True)
class Verdict:
    """Result of a diagnosis.

    Attributes:
        kind: `one` (the first suspect is the cause), `likely` (it probably is) or `unclear` (any of them, or none).
        suspects: suspects, the likeliest first.
        explanation: why the verdict is not `one`, and what else is odd; may be empty.
    """

    kind: Literal["one", "likely", "unclear"]
    suspects: tuple[Suspect, ...]
    explanation: str = ""


def judge(statuses: Mapping[int, RankStatus], processes: Mapping[int, RankProcess],
          roles: Mapping[int, tuple[object, ...]]) -> Verdict:
    """Find the rank that everybody waits for.

    Args:
        statuses: statuses of the ranks that answered.
        processes: processes of the ranks, as far as they registered when the run began.
        roles: what each rank of the world has in common with ranks that do the same work, for example its module and
            pipeline stage.
    """
    edges = _edges(statuses, roles)
    ends = [node for node, targets in edges.items() if not targets]
    leads = {end: _leading_to(end, edges) for end in ends}
    # A finished rank is the cause only if others still wait for it. A failed one is always a suspect.
    leads = {end: nodes for end, nodes in leads.items()
             if len(nodes) > 1 or end[0] not in statuses or statuses[end[0]].ended != "finished"}
    done = {node for node in ends if node not in leads}
    circle = set(edges).difference(done, *leads.values())
    suspects = {}

    def priority(node: Node) -> tuple[bool, bool, float]:
        """Order silent ranks before others, loaders before main threads, and the longest idle ranks first."""
        status = statuses.get(node[0])
        return status is not None, node[1] == "main", -status.idle_s if status else 0.0

    for end in sorted(leads, key=priority):
        rank = end[0]
        if rank not in suspects:  # a rank may be an end twice, with its loader and its main thread
            waiters = {node[0] for node in leads[end]} - {rank}
            suspects[rank] = Suspect(rank, _reason(end, statuses, processes), len(waiters))
    if not suspects:
        return _judge_circle({node[0] for node in circle}, statuses, roles)
    return _judge_ends(list(suspects.values()), {node[0] for node in circle}, statuses)


def _judge_ends(suspects: list[Suspect], circle: set[int], statuses: Mapping[int, RankStatus]) -> Verdict:
    # In the order of certainty: a rank that has failed, one that does not answer, and the one that is idle longest.
    failed = [each for each in suspects if each.rank in statuses and statuses[each.rank].ended == "failed"]
    if failed:
        # The others cannot continue without it, whatever they do.
        others = [each for each in suspects if each not in failed]
        if len(failed) > 1:
            return Verdict("unclear", (*failed, *others), f"{len(failed)} ranks have ended with an error")
        return Verdict("likely" if others or circle else "one", (*failed, *others))
    silent = [each for each in suspects if each.rank not in statuses]
    notes = []
    if silent:
        if len(silent) == 1 and len(suspects) == 1 and not circle:
            return Verdict("one", tuple(suspects))
        # A rank that answers may wait for a silent one without a tracked wait. The reverse cannot be.
        kind: Literal["likely", "unclear"] = "likely" if len(silent) == 1 else "unclear"
        return Verdict(kind, tuple(suspects), "" if kind == "likely" else f"{len(silent)} ranks do not answer")
    if circle:
        notes.append(f"ranks {ranges(circle)} wait for each other in a circle")
    # Ends that moved a short time ago are late, but they do not hang.
    idle = {each.rank: math.inf if (status := statuses[each.rank]).ended else status.idle_s for each in suspects}
    oldest = max((seconds for seconds in idle.values() if math.isfinite(seconds)), default=0.0)
    standing = [each for each in suspects if idle[each.rank] >= STILL_MOVING * oldest]
    rest = [each for each in suspects if each not in standing]
    ordered = tuple(sorted(standing, key=lambda each: -each.waiters)) + tuple(rest)
    if len(standing) > 1:
        notes.insert(0, f"{len(standing)} ranks wait for no other rank")
        return Verdict("unclear", ordered, "; ".join(notes))
    status = statuses[standing[0].rank]
    # Kernels run asynchronously, so the host's position says little, unless it waits for something that is not a rank.
    wait = status.waits[0] if status.waits else None
    is_clear = not status.on_device or not (wait is None or wait.is_work or wait.group or wait.peers)
    is_certain = is_clear and not rest and not circle
    return Verdict("one" if is_certain and status.blocked.kind not in ("device", "handle") else "likely", ordered,
                   "; ".join(notes))


def _leading_to(end: Node, edges: Edges) -> set[Node]:
    """Return all nodes that lead to `end`, itself included."""
    sources: dict[Node, list[Node]] = {}
    for node, targets in edges.items():
        for target in targets:
            sources.setdefault(target, []).append(node)
    found, pending = {end}, [end]
    while pending:
        for source in sources.get(pending.pop(), ()):
            if source not in found:
                found.add(source)
                pending.append(source)
    return found


def _edges(statuses: Mapping[int, RankStatus], roles: Mapping[int, tuple[object, ...]]) -> Edges:
    edges: Edges = {}
    places = {rank: _position(status) for rank, status in statuses.items()}
    for rank in roles:
        status = statuses.get(rank)
        edges[rank, "main"] = set() if status is None else _main_edges(status, statuses, places, roles)
        if status is not None and status.loader is not None:
            if status.loader.busy:
                peers = set(status.loader.peers) - {rank}
                edges[rank, "loader"] = {
                    (peer, "loader") if peer in statuses and statuses[peer].loader is not None else (peer, "main")
                    for peer in peers}
            else:
                edges[rank, "loader"] = {(rank, "main")}  # the loader waits until its rank asks for more
    return edges


def _main_edges(status: RankStatus, statuses: Mapping[int, RankStatus], places: Mapping[int, Position],
                roles: Iterable[int]) -> set[Node]:
    wait = status.waits[0] if status.waits else None
    if wait is not None and wait.on_loader:
        # A loader that works is a node with edges of its own. Otherwise nobody can be named, and this rank is an end.
        if status.loader is None or not status.loader.busy:
            return set()
        return {(status.rank, "loader")}
    blocked = status.blocked
    ranks: Iterable[int] = ()
    # A tracked wait for peers names them. Without one, the stack tells what the main thread blocks in.
    if wait is not None and wait.peers:
        ranks = wait.peers
    elif blocked.kind == "transfer":
        ranks = blocked.ranks
    elif blocked.kind == "collective":
        ranks = _missing(status, blocked.ranks, places)
        if blocked.source is not None:  # its other ranks wait for that one alone
            ranks = [blocked.source] if blocked.source != status.rank else ranks
    elif wait is not None and wait.group and blocked.kind:
        ranks = _missing(status, wait.group, places)
    elif blocked.kind in ("handle", "device") and (wait is None or not wait.group):
        # The stack does not show the group, so any rank at another place may be meant.
        ranks = _missing(status, roles, places)
    elif status.on_device and not blocked.kind and (wait is None or wait.is_work):
        # The host may block in the launch of a kernel, because the queue of its device is full.
        ranks = _behind(status, statuses)
    # torch's record of collectives is surer than positions, where there is one.
    if status.groups and blocked.kind == "device":
        # If there is no such rank, this rank's own device is stuck.
        ranks = _late(status, statuses) or _behind(status, statuses)
    elif blocked.kind == "handle":
        ranks = _late(status, statuses) or ranks
    return {(rank, "main") for rank in ranks if rank != status.rank}


def _late(status: RankStatus, statuses: Mapping[int, RankStatus]) -> set[int]:
    """Return ranks that have not joined a collective that is unfinished here, according to torch's flight recorder.

    Ranks without a record may have joined it. They are returned only if there are no others.
    """
    late: set[int] = set()
    unknown: set[int] = set()
    for group in status.groups:
        for rank in group.ranks if group.pending else ():
            other = statuses.get(rank)
            if rank == status.rank:
                continue
            if other is not None and not other.groups and not other.ended:
                unknown.add(rank)
            elif other is None or not any(each.name == group.name and each.enqueued >= group.pending
                                          for each in other.groups):
                late.add(rank)
    return late or unknown


def _behind(status: RankStatus, statuses: Mapping[int, RankStatus]) -> set[int]:
    """Return ranks whose hosts have begun less work than this one's in every respect.

    A host runs ahead of its device until the queue of kernels is full, and then blocks in the call that queues the next
    kernel. By then it has queued everything that ranks behind it may wait for, so they do not wait for it.
    """
    return {rank for rank, other in statuses.items() if rank != status.rank and _is_behind(other, status)}


def _is_behind(one: RankStatus, two: RankStatus) -> bool:
    first, second = one.schedule, two.schedule
    if one.ended:
        return one.ended == "failed"
    if first is None or second is None:
        return first is None and second is not None
    if first.index != second.index:
        return first.index < second.index
    passes, others = (first.forward, first.backward), (second.forward, second.backward)
    return passes != others and passes[0] <= others[0] and passes[1] <= others[1]


def _missing(status: RankStatus, group: Iterable[int], places: Mapping[int, Position]) -> list[int]:
    """Return ranks of a group that have not reached the wait of this one; if all have, return all others."""
    own = places[status.rank]
    absent = [rank for rank in group if places.get(rank) != own]
    return absent or [rank for rank in group if rank != status.rank]


def _position(status: RankStatus) -> Position:
    """Describe what ranks that wait in the same collective have in common."""
    wait = status.waits[0].what if status.waits else ""
    return status.iteration, wait, status.blocked.kind, status.blocked.operation, status.blocked.ranks


def _judge_circle(circle: set[int], statuses: Mapping[int, RankStatus],
                  roles: Mapping[int, tuple[object, ...]]) -> Verdict:
    """Judge a circle of ranks: find one that is at another point of the program than ranks with the same work."""
    waiters = len(circle) - 1
    schedules = {rank: each for rank in circle if (each := statuses[rank].schedule) is not None}
    found: Verdict | None = None
    # Ranks in the same schedule whose number of microbatches differs can never finish it together.
    if len({each.index for each in schedules.values()}) == 1:
        found = _odd({rank: each.num_microbatches for rank, each in schedules.items()}, waiters, "one",
                     lambda rank, odd, usual: f"its step has {odd} microbatches, that of the other ranks {usual}; "
                                              f"{_words(statuses[rank])}")
    # A rank that has begun more or fewer schedules than the others is at another step than they are.
    found = found or _odd({rank: each.index for rank, each in schedules.items()}, waiters, "likely",
                          lambda rank, odd, usual: f"it has begun {odd} rounds of forward and backward passes, the "
                                                   f"other ranks {usual}; {_words(statuses[rank])}")
    # Ranks with the same work go through the same waits, so at least two that agree show that the other one is odd.
    for role in dict.fromkeys(roles[rank] for rank in sorted(circle)):
        found = found or _odd({rank: _position(statuses[rank]) for rank in circle if roles[rank] == role}, waiters,
                              "likely", lambda rank, odd, usual: f"{_words(statuses[rank])}, which the ranks that do "
                                                                 "the same work do not")
    if found is not None:
        return found
    places = {_position(statuses[rank]) for rank in circle}
    if len(places) == 1:
        return Verdict("unclear", (), "all ranks have come to the same wait and it does not end: look at the network "
                                      "and at the accelerators")
    suspects = sorted((Suspect(rank, _words(statuses[rank]), waiters) for rank in circle),
                      key=lambda each: -statuses[each.rank].idle_s)
    return Verdict("unclear", tuple(suspects), f"ranks {ranges(circle)} wait for each other in a circle, and "
                                               "nothing shows which one is at the wrong place of the program")


def _odd[T](values: Mapping[int, T], waiters: int, kind: Literal["one", "likely"],
            reason: Callable[[int, T, T], str]) -> Verdict | None:
    """Return the verdict if most ranks have one value; None if all agree or no value has a majority of at least two.

    If several ranks are odd, it is unclear which of them is the cause.
    """
    ordered = Counter(values.values()).most_common()
    if len(ordered) < 2:
        return None
    (usual, count), (_, next_count) = ordered[:2]
    if count < 2 or count == next_count:
        return None
    odd = sorted(rank for rank, value in values.items() if value != usual)
    suspects = tuple(Suspect(rank, reason(rank, values[rank], usual), waiters) for rank in odd)
    if len(odd) > 1:
        return Verdict("unclear", suspects, f"{len(odd)} ranks are at another point of the program than the others")
    return Verdict(kind, suspects)


def _reason(end: Node, statuses: Mapping[int, RankStatus], processes: Mapping[int, RankProcess]) -> str:
    rank, part = end
    status = statuses.get(rank)
    if status is None:
        # It does not answer. Ranks of the same host may show why.
        process = processes.get(rank)
        if process is None:
            return "it does not answer, and it never registered its process"
        beside = [other for other in statuses if other in processes and processes[other].host == process.host]
        if any(process.pid in statuses[other].stopped_pids for other in beside):
            return "it does not answer: its process is stopped (SIGSTOP, a debugger)"
        if not beside:
            return (f"it does not answer, nor does any rank of host {process.host}: the machine or its network may be "
                    "gone")
        return ("it does not answer: its process is gone, or a call into C keeps the interpreter's lock, or the host "
                "is overloaded")
    if part == "loader" or (status.waits and status.waits[0].on_loader):
        state = status.loader.state if status.loader is not None else "its state is not known"
        return f"its data loader has no data: {state}"
    return _words(status)


def _words(status: RankStatus) -> str:
    """Describe what the main thread of a rank does."""
    if status.ended:
        return ("it has finished its part of the run" if status.ended == "finished" else
                "its part of the run has ended with an error, which its own output shows")
    top = f"its main thread is at {status.stack[0]}" if status.stack else "its stack is not known"
    if not status.waits:
        return f"it is not in a tracked wait; it {_blocked_words(status, 'blocks ') or 'computes or sleeps'}; {top}"
    waits = " inside ".join(map(str, status.waits))
    return f"it waits for {waits}{_blocked_words(status, ', ')}; {top}"


def _blocked_words(status: RankStatus, before: str) -> str:
    blocked = status.blocked
    words = {"collective": f"in {blocked.operation} of ranks {ranges(blocked.ranks)}",
             "transfer": f"in {blocked.operation} with rank {ranges(blocked.ranks)}",
             "handle": "at the end of an asynchronous operation",
             "device": "in a synchronisation with its accelerator",
             "host": "on a lock, queue or socket of its host"}
    return before + words[blocked.kind] if blocked.kind in words else ""


# The summary as text, which a rank writes to its output and to the run folder.


# Number of suspects of an unclear verdict that are shown in full, and of similar ranks that are named one by one.
NUM_SUSPECTS, NUM_ALIKE = 8, 1
NUM_STACK_LINES = 6


@dataclass(frozen=True)
class RankPlace:
    """Position of a rank in the layout.

    Attributes:
        who: the rank in words: `rank 3 (language grid, tp 1 cp 0 dp 0 pp 0, lane 0)`.
        grids: names of its grids.
        role: what it has in common with ranks that do the same work.
    """

    who: str
    grids: tuple[str, ...] = ()
    role: tuple[object, ...] = ()


def write_summary(statuses: Mapping[int, RankStatus], processes: Mapping[int, RankProcess],
                  places: Mapping[int, RankPlace], stamp: str) -> str:
    """Write the summary of a stall."""
    verdict = judge(statuses, processes, {rank: place.role for rank, place in places.items()})
    if verdict.kind == "unclear":
        headline = "it is not clear which rank everybody waits for"
    else:
        who = _who(verdict.suspects[0].rank, processes, places)
        waits = "everybody waits for " if verdict.kind == "one" else "everybody probably waits for "
        headline = f"{who} makes no progress" if len(places) == 1 else waits + who
    lines = [f"stall summary [{stamp}]: {headline}"]
    if verdict.kind == "one":
        lines += _suspect(verdict.suspects[0], statuses)
    else:
        if verdict.explanation:
            lines.append(f"why: {verdict.explanation}")
        for index, suspect in enumerate(verdict.suspects[:NUM_SUSPECTS]):
            if index or verdict.kind == "unclear":
                lines.append(f"candidate: {_who(suspect.rank, processes, places)}")
            lines += _suspect(suspect, statuses)
        if len(verdict.suspects) > NUM_SUSPECTS:
            rest = [suspect.rank for suspect in verdict.suspects[NUM_SUSPECTS:]]
            lines.append(f"further candidates: ranks {ranges(rest)}")
    lines.append(f"all {counted(len(places), 'rank')}:")
    return "\n".join([*lines, *_all_ranks(statuses, processes, places)]) + "\n"


def _who(rank: int, processes: Mapping[int, RankProcess], places: Mapping[int, RankPlace]) -> str:
    process = processes.get(rank)
    return places[rank].who + (f" on host {process.host}, pid {process.pid}" if process is not None else "")


def _suspect(suspect: Suspect, statuses: Mapping[int, RankStatus]) -> list[str]:
    lines = [f"reason: {suspect.reason}"]
    status = statuses.get(suspect.rank)
    if status is not None:
        where = status.where()
        lines.append(f"place: {where + ', ' if where else ''}no progress for {status.idle_s:.1f} s")
        lines += [f"  at {line}" for line in status.stack[:NUM_STACK_LINES]]
    return lines


def _all_ranks(statuses: Mapping[int, RankStatus], processes: Mapping[int, RankProcess],
               places: Mapping[int, RankPlace]) -> list[str]:
    """Return one line for each rank, or for several ranks that wait alike."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for rank in sorted(places):
        alike.setdefault((places[rank].grids, _key(statuses.get(rank))), []).append(rank)
    lines = []
    for ranks in alike.values():
        first = ranks[0]
        who = _who(first, processes, places)
        if len(ranks) > NUM_ALIKE:
            who = f"ranks {ranges(ranks)} ({', '.join(places[first].grids)} grid)"
        lines.append(f"  {who}: {_state([statuses[rank] for rank in ranks if rank in statuses])}")
    return lines


def _key(status: RankStatus | None) -> tuple[object, ...] | None:
    if status is None:
        return None
    return (status.iteration, status.schedule, tuple(wait.what for wait in status.waits),
            status.blocked.kind, status.blocked.operation, None if status.waits else status.stack[:1])


def _state(statuses: list[RankStatus]) -> str:
    if not statuses:
        return "no answer"
    first = statuses[0]
    idle = [status.idle_s for status in statuses]
    parts = [part for part in (first.where(),) if part]
    for index, wait in enumerate(first.waits):
        seconds = [status.waits[index].seconds for status in statuses]
        details = f" ({wait.details})" if wait.details and len(statuses) == 1 else ""
        parts.append(f"{'inside' if index else 'waiting for'} {wait.what}{details} for {_span(seconds)}")
    blocked = first.blocked
    if blocked.kind in ("collective", "transfer"):
        ranks = ranges(rank for status in statuses for rank in status.blocked.ranks)
        parts.append(f"in {blocked.operation} with rank{'s' * (not ranks.isdigit())} {ranks}")
    if not first.waits:
        parts.append(f"no progress for {_span(idle)}" + (f", at {first.stack[0]}" if first.stack else ""))
    return ", ".join(parts)


def _span(seconds: list[float]) -> str:
    low, high = f"{min(seconds):.1f}", f"{max(seconds):.1f}"
    return f"{low} s" if low == high else f"{low}-{high} s"
