"""Status of a rank when a run stalls: plain data that travels as JSON, without torch."""

from __future__ import annotations

import dis
import json
import linecache
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
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


# What a thread's Python stack shows of the thing it waits for. torch is looked at only where it is on the stack.


NUM_FRAMES = 8
# Files of the standard library and of torch in which a thread that waits for something on this host stands.
HOST_FILES = ("threading.py", "queue.py", "selectors.py", "connection.py", "pool.py", "subprocess.py", "popen_fork.py",
              "ssl.py", "socket.py", "_base.py")
# Calls that wait until the accelerator has done what it was given.
DEVICE_CALLS = ("item", "tolist", "cpu", "synchronize", "_cuda_synchronize", "to", "nonzero", "equal", "float", "int",
                "bool")
# Folders whose `.wait()` is that of an asynchronous operation of torch.distributed.
HANDLE_FOLDERS = ("torch", "megatron", "mimo")
PEER_ARGUMENTS = {"recv": ("src", "group_src"), "send": ("dst", "group_dst")}
SOURCE_ARGUMENTS = ("src", "group_src")


def frames_inward(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of a stack, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def stack_lines(frame: FrameType, count: int = NUM_FRAMES, *, code: bool = True) -> tuple[str, ...]:
    """The innermost frames in words, the innermost first: `training/step.py:176 run_schedule: return schedule(`.

    Args:
        frame: the innermost one.
        count: frames at most.
        code: with the lines of code, which are read from disk.
    """
    lines = []
    for each in frames_inward(frame):
        path = Path(each.f_code.co_filename)
        place = f"{'/'.join(path.parts[-3:])}:{each.f_lineno} {each.f_code.co_name}"
        lines.append(f"{place}: {_source(each)}" if code else place)
        if len(lines) == count:
            break
    return tuple(lines)


def _source(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()


def find_blocked(frame: FrameType, *, on_device: bool = False) -> Blocked:
    """What a thread whose innermost frame this is waits for.

    A call of torch.distributed has its group, source and peer among its variables.

    Args:
        frame: the innermost one.
        on_device: whether an accelerator computes, for which some calls wait.
    """
    found = _distributed_call(frame)
    if found is not None:
        return found
    path = Path(frame.f_code.co_filename)
    if path.name in HOST_FILES:
        return Blocked("host", frame.f_code.co_name)
    called = called_name(frame)
    if called == "wait" and any(folder in path.parts for folder in HANDLE_FOLDERS):
        return Blocked("handle", "wait")
    if on_device and called in DEVICE_CALLS:
        return Blocked("device", called)
    return Blocked()


def called_name(frame: FrameType) -> str:
    """The last name of the function that a frame is calling, from its code: the source may have changed since.

    `wait` for `self.handles[0].wait(timeout)`; empty where no call is under way or what is called has no name.
    """
    instructions = list(dis.get_instructions(frame.f_code))
    call = next((each for each in instructions if each.offset == frame.f_lasti), None)
    if call is None or call.positions is None or not call.opname.startswith("CALL"):
        return ""
    # The function's name begins where the call begins, and of those that do so it ends last.
    begin, name, end = call.positions[0:3:2], "", (0, 0)
    for each in instructions:
        places = each.positions
        if (each.offset < call.offset and each.opname.startswith("LOAD_") and places is not None
                and isinstance(each.argval, str) and places[0:3:2] == begin):
            stop = (places.end_lineno or 0, places.end_col_offset or 0)
            if stop >= end:
                name, end = each.argval, stop
    return name


def _distributed_call(frame: FrameType) -> Blocked | None:
    """The outermost of the innermost frames that are torch.distributed's own."""
    call = None
    for each in frames_inward(frame):
        parts = Path(each.f_code.co_filename).parts
        if "torch" not in parts or "distributed" not in parts[parts.index("torch"):]:
            break
        if parts[-1] == "distributed_c10d.py":
            call = each
    if call is None:
        return None
    operation, values = call.f_code.co_name, dict(call.f_locals)
    if "group" not in values:
        return Blocked("handle", operation)
    import torch.distributed as dist  # it is imported: its frame is on the stack

    try:
        ranks = tuple(dist.get_process_group_ranks(values["group"]))
    except (KeyError, ValueError, RuntimeError, TypeError):  # a group that this rank is no member of, or destroyed
        return Blocked("handle", operation)
    if operation in PEER_ARGUMENTS:
        peer = _rank_argument(values, PEER_ARGUMENTS[operation], ranks)
        return Blocked("transfer", operation, (peer,)) if peer is not None else Blocked("handle", operation)
    return Blocked("collective", operation, ranks, _rank_argument(values, SOURCE_ARGUMENTS, ranks))


def _rank_argument(values: dict[str, object], names: tuple[str, str], ranks: tuple[int, ...]) -> int | None:
    """The global rank that an argument names; the second name's value counts inside the group."""
    whole, inside = (values.get(name) for name in names)
    if isinstance(whole, int):
        return whole
    return ranks[inside] if isinstance(inside, int) and 0 <= inside < len(ranks) else None
