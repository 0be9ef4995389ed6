"""What a thread's Python stack shows of the thing it waits for. torch is looked at only where it is on the stack."""

from __future__ import annotations

import dis
import linecache
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from mimo.observe.stall_status import Blocked

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
