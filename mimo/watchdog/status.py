"""Status of a rank when a run stalls: plain data that can be sent as JSON, without torch."""

from __future__ import annotations

import dis
import json
import linecache
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from mimo.text import ranges

Ranks = tuple[int, ...]
# Names of the fields that hold ranks.
RANKS = ("peers", "group", "ranks")


def parse_ranks(text: str) -> Ranks:
    """Parse the format of `mimo.text.ranges`."""
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
        started: its start in the kernel's clock ticks since boot. Together with `pid` it identifies the process.
    """

    rank: int
    host: str
    pid: int
    started: int


@dataclass(frozen=True)
class Wait:
    """A tracked wait that was open, see `Watchdog.waiting`.

    Attributes:
        what: what the rank waits for, for example `bridge recv_forward`.
        details: details in words; may be empty.
        seconds: how long the wait has lasted.
        peers: for transfers, the ranks each of which has to do its part.
        group: for collectives, the ranks that have to reach the same wait.
        on_loader: whether the wait is for this rank's data loader, whose state says more.
        is_work: whether this is work with a name instead of a wait.
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
    """The call in which the main thread blocks, read from the innermost frame of its stack.

    Attributes:
        kind: `collective` (a call of torch.distributed with a known group), `transfer` (a call with a known peer),
            `handle` (waiting for an asynchronous operation whose group the stack does not show), `device` (a
            synchronisation with the accelerator), `host` (a lock, queue, socket or other process), or empty for
            anything else.
        operation: `all_reduce`, `recv`, and so on.
        ranks: the group of a collective or the peer of a transfer.
        source: the rank from which a collective's data comes, if it is one rank.
    """

    kind: str = ""
    operation: str = ""
    ranks: Ranks = ()
    source: int | None = None


@dataclass(frozen=True)
class Schedule:
    """Progress of a rank in its forward and backward passes.

    Attributes:
        index: number of schedules begun in this run, this one included.
        num_microbatches: microbatches of this schedule.
        forward, backward: passes done.
        is_over: whether the schedule belongs to an earlier iteration than the rank's present one.
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
        busy: whether it prepares data now.
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
        name: torch's name of the group, the same on all its ranks.
        ranks: members of the group.
        enqueued: number of the last collective that this rank has joined.
        pending: number of the first collective that has not ended on its device; 0 for none.
        operation: operation of the pending collective, for example `nccl:all_reduce`.
    """

    name: str
    ranks: Ranks
    enqueued: int
    pending: int = 0
    operation: str = ""


@dataclass(frozen=True)
class RankStatus:
    """Status of one rank.

    Attributes:
        rank: global rank.
        idle_s: seconds since its main thread last made progress.
        iteration: the last one that it reported.
        waits: open waits, innermost first.
        blocked: the call in which it blocks.
        stack: innermost frames of the main thread, the innermost first: `mimo/training/step.py:176 run_schedule: ...`.
        schedule: its forward and backward passes; None before the first.
        loader: its data loader; None without one.
        groups: its process groups, if torch's flight recorder is on.
        on_device: whether kernels of an accelerator run asynchronously to the main thread.
        ended: how its part of the run ended; empty if it has not.
        stopped_pids: other processes under the same launcher that a signal has stopped.
    """

    rank: int
    idle_s: float = 0.0
    iteration: int | None = None
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
        """Return the place in words, such as `iteration 3, microbatch 1 of 4`; empty before the first iteration."""
        parts = [f"iteration {self.iteration}"] if self.iteration is not None else []
        if self.schedule is not None and not self.schedule.is_over:
            done, total = self.schedule.forward, self.schedule.num_microbatches
            place = f"all {total} microbatches forward" if done >= total else f"microbatch {done} of {total}"
            parts.append(f"{place} (forward {done}, backward {self.schedule.backward} done)")
        return ", ".join(parts)

    def to_json(self) -> str:
        """Return one line of JSON. Ranks are in the format of `ranges`, because there may be hundreds."""
        data = asdict(self)
        for part in (*data["waits"], data["blocked"], data["loader"] or {}, *data["groups"]):
            part |= {name: ranges(part[name]) for name in RANKS if name in part}
        return json.dumps(data)


def status_from_json(line: str | bytes) -> RankStatus:
    """Parse the result of `RankStatus.to_json`."""
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


# Reading a thread's stack to find what it waits for. torch is imported only if it is on the stack.


NUM_FRAMES = 8
# Files of the standard library and of torch in which a thread blocks that waits for something on this host.
HOST_FILES = ("threading.py", "queue.py", "selectors.py", "connection.py", "pool.py", "subprocess.py", "popen_fork.py",
              "ssl.py", "socket.py", "_base.py")
# Calls that wait until the accelerator has finished its work.
DEVICE_CALLS = ("item", "tolist", "cpu", "synchronize", "_cuda_synchronize", "to", "nonzero", "equal", "float", "int",
                "bool")
# Folders in which `.wait()` waits for an asynchronous operation of torch.distributed.
HANDLE_FOLDERS = ("torch", "megatron", "mimo")
PEER_ARGUMENTS = {"recv": ("src", "group_src"), "send": ("dst", "group_dst")}
SOURCE_ARGUMENTS = ("src", "group_src")


def frames_inward(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of a stack, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def stack_lines(frame: FrameType, *, code: bool = True) -> tuple[str, ...]:
    """Format the innermost frames, the innermost first: `training/step.py:176 run_schedule: return schedule(`.

    With `code`, they include the lines of code, which are read from disk.
    """
    lines = []
    for each in frames_inward(frame):
        name, number = each.f_code.co_filename, each.f_lineno
        line = f"{'/'.join(Path(name).parts[-3:])}:{number} {each.f_code.co_name}"
        lines.append(f"{line}: {linecache.getline(name, number).strip()}" if code else line)
        if len(lines) == NUM_FRAMES:
            break
    return tuple(lines)


def find_blocked(frame: FrameType, *, on_device: bool = False) -> Blocked:
    """Find what a thread waits for.

    Calls of torch.distributed have their group, source and peer among their local variables.

    Args:
        frame: the thread's innermost frame.
        on_device: whether an accelerator computes, so that some calls wait for it.
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
    """Return the last name of the function that a frame is calling, read from bytecode: the source may have changed.

    For `self.handles[0].wait(timeout)` this is `wait`. It is empty outside of a call, or if the function has no name.
    """
    instructions = list(dis.get_instructions(frame.f_code))
    call = next((each for each in instructions if each.offset == frame.f_lasti), None)
    if call is None or call.positions is None or not call.opname.startswith("CALL"):
        return ""
    # Several loaded names may begin where the call begins. The function's name is the one that ends last.
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
    """Describe the call of torch.distributed in the innermost frames, or return None without one."""
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
    """Return the global rank that an argument names. The second name's value is a rank inside the group."""
    whole, inside = (values.get(name) for name in names)
    if isinstance(whole, int):
        return whole
    return ranks[inside] if isinstance(inside, int) and 0 <= inside < len(ranks) else None
