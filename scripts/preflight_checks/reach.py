"""Check that the GPUs of a job reach each other: all-reduces in each node, over all nodes and, if that fails, in pairs.

Every check starts new processes, one per GPU, because a failed communicator cannot be used again, and one that hangs
has to be killed from outside. `python reach.py JSON` is such a process.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from preflight_checks.board import JobNode, MessageBoard

# Elements of the float32 tensor that is summed. On CUDA, it is as large as a gradient bucket.
ELEMENTS = {"cuda": 64 * 2**20, "cpu": 2**16}
REPEATS = 3
# Seconds for the other processes to report their own errors after one has failed.
GRACE_S = 5.0
# Seconds between two polls of the processes.
PAUSE_S = 0.25
ENDED = "ended, because another process has failed"


@dataclass(frozen=True)
class Process:
    """One process of a check.

    Attributes:
        address, port: address of the board.
        prefix: name of the group on the board.
        rank, world_size: rank in the group and its size.
        local_rank: index of the GPU.
        device: `cuda` or `cpu`.
        timeout_s: time limit for connecting and summing.
    """

    address: str
    port: int
    prefix: str
    rank: int
    world_size: int
    local_rank: int
    device: str
    timeout_s: float


def sum_over_group(process: Process) -> float:
    """Sum over a group and check the result. Returns the bus bandwidth of nccl-tests (busbw) in bytes/s.

    Raises:
        ValueError: the sum is wrong.
    """
    import torch
    import torch.distributed as dist

    timeout = timedelta(seconds=process.timeout_s)
    if process.device == "cuda":
        torch.cuda.set_device(process.local_rank)
    device = torch.device(process.device, process.local_rank if process.device == "cuda" else None)
    store = dist.TCPStore(process.address, process.port, is_master=False, timeout=timeout)
    dist.init_process_group("nccl" if process.device == "cuda" else "gloo", rank=process.rank,
                            world_size=process.world_size, timeout=timeout,
                            store=dist.PrefixStore(process.prefix, store))
    numbers = torch.empty(ELEMENTS[process.device], device=device)
    # This is exact in float32 for fewer than 5,793 ranks.
    expected = process.world_size * (process.world_size + 1) / 2
    seconds = []
    for _ in range(1 + REPEATS):
        numbers.fill_(process.rank + 1)
        if process.device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        dist.all_reduce(numbers)
        low, high = numbers.min().item(), numbers.max().item()
        seconds.append(time.perf_counter() - began)
        if not low == high == expected:
            raise ValueError(f"wrong sum: {low:g} to {high:g} instead of {expected:g}")
    dist.barrier()
    dist.destroy_process_group()
    moved = numbers.nbytes * 2 * (process.world_size - 1) / process.world_size
    return moved / min(seconds[1:])


def run_check(board: MessageBoard, topic: str, group: list[int], device: str, timeout_s: float) -> None:
    """Run this node's processes of a check over the nodes of `group`, and post how each ended."""
    place, prefix = board.place, f"{topic}/{group[0]}"
    children = []
    for local_rank in range(place.gpus_per_node):
        process = Process(place.address, board.port, prefix, group.index(place.node) * place.gpus_per_node + local_rank,
                          len(group) * place.gpus_per_node, local_rank, device, timeout_s)
        output = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        child = subprocess.Popen([sys.executable, __file__, json.dumps(asdict(process))], stdout=output,
                                 stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        children.append((child, output))
    ended = _wait([child for child, _ in children], timeout_s, board, prefix)
    failed, rates = {}, []
    for local_rank, (child, output) in enumerate(children):
        output.seek(0)
        lines = [line.strip() for line in output.read().splitlines() if line.strip()]
        output.close()
        if child.returncode:
            failed[local_rank] = _reason(child.returncode, lines, ended)
        else:
            rates.append(json.loads(lines[-1]))
    board.post(topic, {"failed": failed, "bytes_per_s": min(rates, default=0.0)})


def pairs_of(place: JobNode, turn: int) -> list[list[int]]:
    """Return the pairs of a turn: first 0 with 1, 2 with 3, ...; then 1 with 2, ..., and the last with 0."""
    count = len(place.hosts)
    found = [[node, node + 1] for node in range(turn, count - 1, 2)]
    if turn == 1 and count > 2 and count % 2 == 0:
        found.append([count - 1, 0])
    return found


def _wait(processes: list[subprocess.Popen[Any]], timeout_s: float, board: MessageBoard, prefix: str) -> str:
    """Wait for all processes. Kills those that still run when the time is up or soon after a failure in the group.

    Returns:
        The reason for killing processes, if any were killed.
    """
    # Twice the time limit, because Python and torch have to start from a shared file system first.
    end, why = time.monotonic() + 2 * timeout_s, f"no answer from the others within {2 * timeout_s:g} s"
    told = False
    while any(child.poll() is None for child in processes) and time.monotonic() < end:
        failed_here = any(child.returncode for child in processes)
        if failed_here and not told:
            board.announce(f"{prefix} failed")
        if not told and (failed_here or board.announced(f"{prefix} failed")):
            told, end, why = True, min(end, time.monotonic() + GRACE_S), ENDED
        time.sleep(PAUSE_S)
    if any(child.returncode for child in processes):
        board.announce(f"{prefix} failed")
    for child in processes:
        if child.poll() is None:
            child.kill()
        child.wait()
    return why


def _reason(code: int, lines: list[str], ended: str) -> str:
    """Return the reason why a process failed as one line."""
    named = [line for line in lines if "Error" in line]
    if code == -signal.SIGKILL and not named:
        return ended
    return (named or lines or [f"exit code {code}"])[-1][:300]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("process", type=json.loads, help="JSON with the fields of Process")
    print(json.dumps(sum_over_group(Process(**parser.parse_args().process))))
