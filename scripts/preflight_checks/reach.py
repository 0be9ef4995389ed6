"""Check that the GPUs of a job reach each other: all-reduces in each node, over all nodes and, if that fails, in pairs.

The nodes exchange messages over one TCP store on the first node, which needs no GPU network.
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
from typing import Any

from torch.distributed import DistError, TCPStore

# Elements of the float32 tensor that is summed. On CUDA, it is as large as a gradient bucket.
ELEMENTS = {"cuda": 64 * 2**20, "cpu": 2**16}
REPEATS = 3
# Seconds for the other processes to report their own errors after one has failed.
GRACE_S = 5.0
# Seconds between two polls of the processes.
PAUSE_S = 0.25
# Seconds between two polls of nodes that have not answered.
NODES_PAUSE_S = 0.2
ENDED = "ended, because another process has failed"


@dataclass(frozen=True)
class JobNode:
    """This node among the nodes of the job.

    Attributes:
        node: index of this node.
        hosts: names of all nodes, in order.
        address, port: address and port at which the first node listens.
        gpus_per_node: number of processes that a node starts for a check.
    """

    node: int
    hosts: tuple[str, ...]
    address: str
    port: int
    gpus_per_node: int

    @property
    def name(self) -> str:
        return self.hosts[self.node]

    @property
    def is_first(self) -> bool:
        """Whether this node decides and reports."""
        return self.node == 0


class MessageBoard:
    """Messages of the nodes by topic."""

    def __init__(self, place: JobNode, timeout_s: float) -> None:
        """Connect. Raises ValueError if the first node does not answer in time or its port is taken."""
        self.place = place
        try:
            self._store = TCPStore(place.address, place.port, is_master=place.is_first, wait_for_workers=False,
                                   timeout=timedelta(seconds=timeout_s))
        except DistError as error:
            raise ValueError(f"{place.name}: no connection to {place.address}:{place.port}, where the first node "
                             f"listens, in {timeout_s:g} s: {str(error).splitlines()[0]}") from error
        self.port = int(self._store.port)

    def post(self, topic: str, said: Any) -> None:
        self._store.set(f"{topic}/{self.place.node}", json.dumps(said))

    def announce(self, what: str) -> None:
        """Announce an event. It does not matter which node announces it."""
        self._store.set(what, "")

    def announced(self, what: str) -> bool:
        return bool(self._store.check([what]))

    def collect(self, topic: str, nodes: range | list[int], timeout_s: float) -> dict[int, Any]:
        """Collect the messages of nodes on a topic. Nodes that do not answer in time are left out."""
        end = time.monotonic() + timeout_s
        missing, found = list(nodes), {}
        while missing:
            said = [node for node in missing if self._store.check([f"{topic}/{node}"])]
            found.update({node: json.loads(self._store.get(f"{topic}/{node}")) for node in said})
            missing = [node for node in missing if node not in found]
            if missing and time.monotonic() > end:
                break
            time.sleep(NODES_PAUSE_S if missing else 0)
        return found

    def ask_first(self, topic: str, timeout_s: float) -> Any:
        """Return the message of the first node on a topic.

        Raises:
            ValueError: the first node does not answer in time, or is gone.
        """
        try:
            self._store.wait([f"{topic}/0"], timedelta(seconds=timeout_s))
            return json.loads(self._store.get(f"{topic}/0"))
        except DistError as error:
            raise ValueError(f"{self.place.name}: {self.place.hosts[0]} sent no message {topic!r} in {timeout_s:g} s"
                             ) from error


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
