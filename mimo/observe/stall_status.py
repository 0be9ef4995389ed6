"""What a rank says of itself when a run stalls, as plain data that travels as JSON. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

Ranks = tuple[int, ...]
# Fields that hold them.
RANKS = ("peers", "group", "ranks")


def format_ranks(ranks: Iterable[int]) -> str:
    """Ranks in words, runs shortened: `0-3, 7`."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def parse_ranks(text: str) -> Ranks:
    """The inverse of `format_ranks`."""
    ranks: list[int] = []
    for run in text.split(", ") if text else ():
        first, _, last = run.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    return tuple(ranks)


@dataclass(frozen=True)
class RankProcess:
    """The process of a rank.

    Attributes:
        rank: global rank.
        host: name of its machine.
        pid: process id there.
        started: when it began, in the kernel's clock ticks since boot; with `pid` it is one process for good.
    """

    rank: int
    host: str
    pid: int
    started: int


@dataclass(frozen=True)
class Wait:
    """An announced wait that was open.

    Attributes:
        what: what for, for example `bridge recv_forward`.
        details: more of it in words; may be empty.
        seconds: since it began.
        peers: ranks each of which has to do its part, where it is for ranks one by one.
        group: ranks that have to come to the same wait, where it is a collective's.
        on_loader: it is for this rank's data loader, whose state says more.
        is_work: it is no wait but work that has a name.
    """

    what: str
    details: str = ""
    seconds: float = 0.0
    peers: Ranks = ()
    group: Ranks = ()
    on_loader: bool = False
    is_work: bool = False

    def __str__(self) -> str:
        return f"{self.what}{f' ({self.details})' if self.details else ''} for {self.seconds:.1f} s"


@dataclass(frozen=True)
class Blocked:
    """What the innermost frame of the main thread's stack shows of a wait.

    Attributes:
        kind: `collective` (a call of torch.distributed with a known group), `transfer` (one of a known peer), `handle`
            (the end of an asynchronous operation, of which the stack shows no group), `device` (a synchronisation with
            the accelerator), `host` (a lock, queue, socket or other process), or empty: it runs something else.
        operation: `all_reduce`, `recv`, and so on.
        ranks: the group of a collective, the peer of a transfer.
        source: the rank a collective's data comes from, where it is one rank's.
    """

    kind: str = ""
    operation: str = ""
    ranks: Ranks = ()
    source: int | None = None


@dataclass(frozen=True)
class Schedule:
    """Where a rank is in its forward and backward passes.

    Attributes:
        index: schedules begun in this run, this one included.
        num_microbatches: of this schedule.
        forward, backward: passes done.
        is_over: it belongs to an iteration before the one that the rank has told.
    """

    index: int
    num_microbatches: int
    forward: int
    backward: int
    is_over: bool = False


@dataclass(frozen=True)
class LoaderStatus:
    """The data loader of a rank, which works on a thread of its own.

    Attributes:
        busy: it is preparing data now.
        state: what it does, in words.
        peers: ranks whose loaders it waits for.
    """

    busy: bool
    state: str
    peers: Ranks = ()


@dataclass(frozen=True)
class GroupStatus:
    """A process group as the flight recorder saw it; only collectives count.

    Attributes:
        name: torch's, the same on all its ranks.
        ranks: its members.
        enqueued: number of the last collective that this rank has joined.
        pending: number of the first that has not ended on its device; 0 for none.
        operation: of that one, for example `nccl:all_reduce`.
    """

    name: str
    ranks: Ranks
    enqueued: int
    pending: int = 0
    operation: str = ""


@dataclass(frozen=True)
class RankStatus:
    """Where one rank is.

    Attributes:
        rank: global rank.
        idle_s: seconds since its main thread last told of progress.
        iteration, microbatch: the last ones told.
        waits: open announced waits, innermost first.
        blocked: what the stack shows.
        stack: innermost frames of the main thread, the innermost first: `mimo/training/step.py:176 run_schedule: ...`.
        schedule: of forward and backward passes; None before the first.
        loader: of its data; None where there is none.
        groups: its process groups, where torch's flight recorder is on.
        on_device: kernels of an accelerator run behind the main thread's back.
        ended: how its part of the run came to its end, told when it did; empty while it has not.
        stopped_pids: processes beside its own, under the same launcher, that a signal has stopped.
    """

    rank: int
    idle_s: float = 0.0
    iteration: int | None = None
    microbatch: int | None = None
    waits: tuple[Wait, ...] = ()
    blocked: Blocked = Blocked()
    stack: tuple[str, ...] = ()
    schedule: Schedule | None = None
    loader: LoaderStatus | None = None
    groups: tuple[GroupStatus, ...] = ()
    on_device: bool = False
    ended: Literal["", "finished", "failed"] = ""
    stopped_pids: tuple[int, ...] = ()

    def where(self) -> str:
        """Iteration and microbatch in words; empty before the first."""
        parts = [f"iteration {self.iteration}"] if self.iteration is not None else []
        if self.microbatch is not None:
            parts.append(f"microbatch {self.microbatch}")
        elif self.schedule is not None and not self.schedule.is_over:
            parts.append(format_schedule(self.schedule))
        return ", ".join(parts)

    def to_json(self) -> str:
        """One line of JSON, groups of ranks as `format_ranks` has them: there may be hundreds."""
        data = asdict(self)
        for part in (*data["waits"], data["blocked"], data["loader"] or {}, *data["groups"]):
            part |= {name: format_ranks(part[name]) for name in RANKS if name in part}
        return json.dumps(data)


def format_schedule(schedule: Schedule) -> str:
    """Where a schedule is, in words: `microbatch 2 of 4 (forward 2, backward 1 done)`."""
    done, total = schedule.forward, schedule.num_microbatches
    passes = f"forward {done}, backward {schedule.backward} done"
    if done >= total:
        return f"all {total} microbatches forward ({passes})"
    return f"microbatch {done} of {total} ({passes})"


def status_from_json(line: str | bytes) -> RankStatus:
    """The inverse of `RankStatus.to_json`."""
    data = json.loads(line)
    for part in (*data["waits"], data["blocked"], data["loader"] or {}, *data["groups"]):
        part |= {name: parse_ranks(part[name]) for name in RANKS if name in part}
    return RankStatus(**data | {
        "waits": tuple(Wait(**wait) for wait in data["waits"]),
        "blocked": Blocked(**data["blocked"]),
        "schedule": Schedule(**data["schedule"]) if data["schedule"] else None,
        "loader": LoaderStatus(**data["loader"]) if data["loader"] else None,
        "groups": tuple(GroupStatus(**group) for group in data["groups"]),
        "stack": tuple(data["stack"]),
        "stopped_pids": tuple(data["stopped_pids"]),
    })
