"""The one text that says which rank everybody waits for, and where all the others are. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mimo.observe.stall_judge import Suspect, Verdict, judge
from mimo.observe.stall_status import RankProcess, RankStatus, format_ranks

# Suspects of an unclear verdict that are shown one by one; of ranks that wait alike, those named one by one.
NUM_SUSPECTS, NUM_ALIKE = 8, 1
NUM_STACK_LINES = 6


@dataclass(frozen=True)
class RankPlace:
    """A rank's place in the layout.

    Attributes:
        who: in words: `rank 3 (language grid, tp 1 cp 0 dp 0 pp 0, lane 0)`.
        grids: names of its grids.
        role: what it shares with the ranks that do the same work.
    """

    who: str
    grids: tuple[str, ...] = ()
    role: tuple[object, ...] = ()


def write_summary(statuses: Mapping[int, RankStatus], processes: Mapping[int, RankProcess],
                  places: Mapping[int, RankPlace], stamp: str) -> str:
    """The summary of a stall.

    Args:
        statuses: of the ranks that answered.
        processes: of the ranks that told theirs.
        places: of every rank of the world.
        stamp: the time, in words.
    """
    verdict = judge(statuses, processes, {rank: place.role for rank, place in places.items()})
    lines = [f"stall summary [{stamp}]: {_headline(verdict, processes, places)}"]
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
            lines.append(f"candidates as well: ranks {format_ranks(rest)}")
    lines.append(f"all {len(places)} rank{'s' * (len(places) > 1)}:")
    return "\n".join([*lines, *_all_ranks(statuses, processes, places)]) + "\n"


def _headline(verdict: Verdict, processes: Mapping[int, RankProcess], places: Mapping[int, RankPlace]) -> str:
    if verdict.kind == "unclear":
        return "it cannot be told which rank everybody waits for"
    suspect = verdict.suspects[0]
    who = _who(suspect.rank, processes, places)
    if len(places) == 1:
        return f"{who} does not go on"
    return f"everybody waits for {who}" if verdict.kind == "one" else f"everybody probably waits for {who}"


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
    """A line for each rank, or for those that wait alike."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for rank in sorted(places):
        alike.setdefault((places[rank].grids, _key(statuses.get(rank))), []).append(rank)
    lines = []
    for ranks in alike.values():
        first = ranks[0]
        who = _who(first, processes, places)
        if len(ranks) > NUM_ALIKE:
            who = f"ranks {format_ranks(ranks)} ({', '.join(places[first].grids)} grid)"
        lines.append(f"  {who}: {_state([statuses[rank] for rank in ranks if rank in statuses])}")
    return lines


def _key(status: RankStatus | None) -> tuple[object, ...] | None:
    if status is None:
        return None
    schedule = status.schedule
    return (status.iteration, status.microbatch, schedule, tuple(wait.what for wait in status.waits),
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
        ranks = format_ranks(rank for status in statuses for rank in status.blocked.ranks)
        parts.append(f"in {blocked.operation} with rank{'s' * (not ranks.isdigit())} {ranks}")
    if not first.waits:
        parts.append(f"no progress for {_span(idle)}" + (f", at {first.stack[0]}" if first.stack else ""))
    return ", ".join(parts)


def _span(seconds: list[float]) -> str:
    low, high = f"{min(seconds):.1f}", f"{max(seconds):.1f}"
    return f"{low} s" if low == high else f"{low}-{high} s"
