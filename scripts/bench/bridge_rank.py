"""One rank of a case of scripts/bench/bridge.py. The first rank writes what all ranks have measured.

The argument is the case and the benchmark's settings as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from unittest.mock import patch

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mimo.grid.spec import GridSpec, Layout, lane_shares, lane_sources
from mimo.platform import get_platform, quieten_megatron
from mimo.platform.base import Platform
from mimo.protocols import LANGUAGE
from mimo.watchdog.process_exit import FailFast
from scripts.bench.harness import slowest

if TYPE_CHECKING:
    from mimo.bridge.disjoint import Bridge
    from mimo.grid.groups import Grids
    from mimo.observability.spans import Spans
    from mimo.watchdog.watchdog import Watchdog

Step = Callable[..., None]
MB = 1e6
ENCODER = "vision"
FORWARD, BACKWARD = 0, 1
# Primes near 256: whole numbers below them are exact in bfloat16, and rows, columns and lanes do not repeat together.
MODULI = (251, 241)
# Number of different tensors that microbatches use in turn.
NUM_DISTINCT = 2
# Reads of a tensor's values by Python. On a CPU, they are the only sign that a GPU would have to be waited for.
HOST_READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__")
DEVICE_WAITS = ((torch.cuda, "synchronize"), (torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize"))


class Operations(Protocol):
    """Methods of a bridge that Megatron Core's schedule calls."""

    def send_forward(self, tensor_to_send: torch.Tensor) -> None: ...
    def recv_forward(self) -> torch.Tensor: ...
    def send_backward(self, grad_tensor: torch.Tensor) -> None: ...
    def recv_backward(self) -> torch.Tensor: ...
    def send_forward_recv_backward(self, tensor_to_send: torch.Tensor) -> torch.Tensor: ...
    def send_backward_recv_forward(self, grad_tensor: torch.Tensor) -> torch.Tensor: ...


class Payload:
    """Rows of each lane's samples in a microbatch, and their values.

    Args:
        layout: grids of one encoder and the language model.
        lane_bytes: size of a lane's microbatch, one way. It is rounded to whole rows of samples.
        hidden_size: number of columns.
        dtype: type of the values.
        uneven: whether samples have 50 % more and 50 % fewer rows in turn.
    """

    def __init__(self, layout: Layout, lane_bytes: float, hidden_size: int, dtype: torch.dtype, *,
                 uneven: bool = False) -> None:
        self.layout, self.hidden_size, self.dtype = layout, hidden_size, dtype
        (self.encoder,) = layout.encoders
        self.micro_batch_size = max(self.encoder.dp // layout.num_lanes, 1)
        sample_bytes = lane_bytes / self.micro_batch_size
        rows = max(round(sample_bytes / (hidden_size * dtype.itemsize)), 2)
        numbers = range(layout.num_lanes * self.micro_batch_size)
        sizes = [rows + (rows // 2 if number % 2 == 0 else -(rows // 2)) * uneven for number in numbers]
        self.sample_rows = [sizes[lane * self.micro_batch_size :][: self.micro_batch_size]
                            for lane in range(layout.num_lanes)]

    @property
    def row_bytes(self) -> int:
        return self.hidden_size * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of all lanes with every row counted once, both ways."""
        return 2 * self.row_bytes * sum(sum(lane) for lane in self.sample_rows)

    def pieces(self, rank: int) -> list[tuple[int, int, int, int]]:
        """List the pieces of a rank's tensors: lane, encoder replica, first row in the lane, row after the last."""
        shares = []
        if rank in self.encoder.ranks:
            dp = self.encoder.coordinates(rank)["dp"]
            shares = [(dp, share) for share in lane_shares(self.encoder.dp, self.layout.num_lanes,
                                                           self.micro_batch_size, dp)]
        elif rank in self.layout.language.ranks:
            lane = self.layout.language.coordinates(rank)["dp"]
            shares = list(lane_sources(self.encoder.dp, self.layout.num_lanes, self.micro_batch_size, lane))
        return [(share.lane, dp, sum(self.sample_rows[share.lane][: share.start]),
                 sum(self.sample_rows[share.lane][: share.stop])) for dp, share in shares]

    def rows(self, rank: int) -> list[int]:
        return [stop - start for _, _, start, stop in self.pieces(rank)]

    def values(self, rank: int, direction: int, microbatch: int, device: torch.device) -> torch.Tensor:
        """Return the `[rows, hidden]` tensor that a rank sends or has to receive in a microbatch."""
        columns = 5 * torch.arange(self.hidden_size, dtype=torch.int32, device=device)
        parts = []
        for lane, _, start, stop in self.pieces(rank):
            rows = 3 * torch.arange(start, stop, dtype=torch.int32, device=device)
            offset = 7 * lane + 11 * (microbatch % NUM_DISTINCT) + 101 * direction
            parts.append(((rows[:, None] + columns + offset) % MODULI[direction]).to(self.dtype))
        return torch.cat(parts)


class RawP2P:
    """Batched P2P with the fewest bytes: each rank gets the rows that it needs from one rank that has them.

    Receive buffers are made once. Tensor-parallel ranks of the receiving side are shared out among the sending ranks.

    Args:
        payload: the rows to move.
        rank: this rank.
        device: device of the tensors.
        group: process group of all ranks.
    """

    def __init__(self, payload: Payload, rank: int, device: torch.device, group: dist.ProcessGroup) -> None:
        encoder, language = payload.encoder, payload.layout.language
        here, there = (encoder, language) if rank in encoder.ranks else (language, encoder)
        place = here.coordinates(rank)["tp"]
        self._group = group
        # For each piece: the ranks of the other side that it is sent to, and the one that it comes from.
        self._targets: list[list[int]] = []
        self._sources: list[int] = []
        for lane, dp, _, _ in payload.pieces(rank):
            replica = lane if here is encoder else dp
            self._targets.append([there.rank_at(tp=tp, dp=replica) for tp in range(there.tp) if tp % here.tp == place])
            self._sources.append(there.rank_at(tp=place % there.tp, dp=replica))
        self._rows = payload.rows(rank)
        self._received = torch.empty(sum(self._rows), payload.hidden_size, dtype=payload.dtype, device=device)

    def _exchange(self, sent: torch.Tensor | None, receives: bool) -> torch.Tensor:
        operations = []
        if sent is not None:
            operations += [dist.P2POp(dist.isend, piece, target, self._group)
                           for piece, targets in zip(sent.split(self._rows), self._targets, strict=True)
                           for target in targets]
        if receives:
            operations += [dist.P2POp(dist.irecv, piece, source, self._group)
                           for piece, source in zip(self._received.split(self._rows), self._sources, strict=True)]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return self._received

    def send_forward(self, tensor_to_send: torch.Tensor) -> None:
        self._exchange(tensor_to_send, False)

    def recv_forward(self) -> torch.Tensor:
        return self._exchange(None, True)

    send_backward, recv_backward = send_forward, recv_forward

    def send_forward_recv_backward(self, tensor_to_send: torch.Tensor) -> torch.Tensor:
        return self._exchange(tensor_to_send, True)

    send_backward_recv_forward = send_forward_recv_backward


def run_microbatches(operations: Operations, sent: Sequence[torch.Tensor], num_microbatches: int, *, encodes: bool,
                     take: Callable[[int, torch.Tensor], None] = lambda microbatch, tensor: None) -> None:
    """Run one step's transfers in the order of 1F1B over two stages.

    Args:
        operations: the bridge.
        sent: the `NUM_DISTINCT` tensors that this rank sends in turn.
        num_microbatches: number of microbatches in the step.
        encodes: whether this rank belongs to the encoder.
        take: called with the microbatch's number and each tensor that is received.
    """
    last = num_microbatches - 1
    if encodes:
        operations.send_forward(sent[0])
        for microbatch in range(last):
            take(microbatch, operations.send_forward_recv_backward(sent[(microbatch + 1) % NUM_DISTINCT]))
        take(last, operations.recv_backward())
        return
    take(0, operations.recv_forward())
    for microbatch in range(last):
        take(microbatch + 1, operations.send_backward_recv_forward(sent[microbatch % NUM_DISTINCT]))
    operations.send_backward(sent[last % NUM_DISTINCT])


def checker(where: str, expected: Sequence[torch.Tensor]) -> Callable[[int, torch.Tensor], None]:
    """Return a callback for `run_microbatches` that raises ValueError for a tensor with other values than expected."""
    def take(microbatch: int, tensor: torch.Tensor) -> None:
        if not torch.equal(tensor.detach(), expected[microbatch % len(expected)]):
            raise ValueError(f"{where}, microbatch {microbatch}: what arrived is not what was sent")

    return take


@dataclass
class Counts:
    """Transfers and waits of one rank.

    Attributes:
        messages: P2P messages sent, including those that carry shapes.
        p2p_bytes: bytes of these messages.
        collectives: broadcasts and all-gathers inside replicas, each counted by one of its ranks.
        collective_bytes: bytes that the ranks of their groups received from others, summed.
        host_syncs: number of times the host waited for the device, or would have on a GPU.
    """

    messages: int = 0
    p2p_bytes: int = 0
    collectives: int = 0
    collective_bytes: int = 0
    host_syncs: int = 0

    def sent(self, tensor: torch.Tensor) -> None:
        self.messages += 1
        self.p2p_bytes += tensor.nbytes

    def collective(self, tensor: torch.Tensor, group: dist.ProcessGroup, *, here: bool) -> None:
        """Count a collective that leaves `tensor` on all ranks, if it is counted `here`."""
        self.collectives += here
        self.collective_bytes += here * tensor.nbytes * (group.size() - 1)


@contextmanager
def counted(device_type: str) -> Iterator[Counts]:
    """Count what the block does. On `cuda`, torch reports operations that wait; elsewhere, reads of values count."""
    counts = Counts()
    batch_p2p, send, broadcast, gather = (dist.batch_isend_irecv, dist.send, dist.broadcast,
                                          dist.all_gather_into_tensor)

    def count_batch(operations: list[dist.P2POp]) -> Any:
        for operation in operations:
            if operation.op is dist.isend:
                counts.sent(operation.tensor)
        return batch_p2p(operations)

    def count_send(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        counts.sent(tensor)
        return send(tensor, *args, **kwargs)

    def count_broadcast(tensor: torch.Tensor, src: int, group: dist.ProcessGroup) -> Any:
        counts.collective(tensor, group, here=src == dist.get_rank())
        return broadcast(tensor, src=src, group=group)

    def count_gather(output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup) -> Any:
        counts.collective(output, group, here=group.rank() == 0)
        return gather(output, tensor, group=group)

    def count_wait(call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            counts.host_syncs += 1
            return call(*args, **kwargs)

        return counting

    with ExitStack() as stack:
        for name, count in (("batch_isend_irecv", count_batch), ("send", count_send), ("broadcast", count_broadcast),
                            ("all_gather_into_tensor", count_gather)):
            stack.enter_context(patch.object(dist, name, count))
        reads = [] if device_type == "cuda" else [(torch.Tensor, name) for name in HOST_READS]
        for owner, name in (*DEVICE_WAITS, *reads):
            stack.enter_context(patch.object(owner, name, count_wait(getattr(owner, name))))
        caught = stack.enter_context(_sync_warnings(device_type))
        yield counts
    counts.host_syncs += sum("called a synchronizing" in str(warning.message) for warning in caught)


@contextmanager
def _sync_warnings(device_type: str) -> Iterator[list[warnings.WarningMessage]]:
    """Collect torch's warnings of operations that wait for the device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if device_type != "cuda":
            yield caught
            return
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield caught
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def layout_of(case: dict[str, int]) -> Layout:
    encoder = GridSpec(ENCODER, dp=case["encoder_dp"], tp=case["encoder_tp"])
    language = GridSpec(LANGUAGE, offset=encoder.size, dp=case["language_dp"], tp=case["language_tp"])
    return Layout("disjoint", encoder.size + language.size, (encoder,), language)


class Bench:
    """Arms of one case on this rank.

    Args:
        settings: the benchmark's settings.
        grids: process groups of the case.
        platform: device and backend.
        watchdog: ends the case when a wait takes too long.
    """

    def __init__(self, settings: dict[str, Any], grids: Grids, platform: Platform, watchdog: Watchdog) -> None:
        self.settings, self.grids, self.platform, self.watchdog = settings, grids, platform, watchdog
        self.dtype: torch.dtype = getattr(torch, settings["dtype"])
        (encoder,) = grids.layout.encoders
        self.encodes = grids.rank in encoder.ranks
        self.all_ranks = dist.new_group(backend=platform.backend)
        # Creates the communicator: the first operation in a group must be one of all its ranks.
        dist.all_reduce(torch.zeros(1, device=platform.device), group=self.all_ranks)
        from mimo.bridge import disjoint

        self.spans = self._own_spans()
        self.bridges = {"ours": self._own_bridge(self._payload(1.0))}
        if "sliced" in settings["arms"]:
            with patch.object(disjoint, "host_of_clock", lambda: str(grids.rank)):
                self.bridges["sliced"] = self._own_bridge(self._payload(1.0))
        self.upstream = self._upstream_bridge() if "upstream" in settings["arms"] else None

    def _payload(self, size_mb: float) -> Payload:
        return Payload(self.grids.layout, size_mb * MB, self.settings["hidden_size"], self.dtype,
                       uneven=self.settings["uneven"])

    def _upstream_bridge(self) -> Any:
        from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator

        (encoder,) = self.grids.layout.encoders
        return BridgeCommunicator(self.grids.grids[encoder.name], self.grids.grids[LANGUAGE],
                                  dim_mapping={"s": 0, "b": 1, "h": 2}, comm_dtype=self.dtype, tensor_ndim=2)

    def _own_spans(self) -> Spans:
        from mimo.observability.clock import DeviceClock, HostClock
        from mimo.observability.spans import Spans

        return Spans(DeviceClock() if self.platform.name == "cuda" else HostClock(),
                     dict.fromkeys(self.grids.modules, 0))

    def _own_bridge(self, payload: Payload) -> Bridge:
        from mimo.bridge.disjoint import Bridge

        return Bridge(self.grids, payload.encoder.name, micro_batch_size=payload.micro_batch_size,
                      hidden_size=payload.hidden_size, dtype=payload.dtype, needs_grad=True, run_ahead=0,
                      device=self.platform.device, backend=self.platform.backend, watchdog=self.watchdog,
                      spans=self.spans)

    def measure(self, size_mb: float) -> dict[str, Any]:
        """Measure all arms at one size. Raises ValueError if a value arrives changed."""
        rank, device, count = self.grids.rank, self.platform.device, self.settings["microbatches"]
        payload = self._payload(size_mb)
        out, back = (FORWARD, BACKWARD) if self.encodes else (BACKWARD, FORWARD)
        sent = [payload.values(rank, out, number, device) for number in range(NUM_DISTINCT)]
        expected = [payload.values(rank, back, number, device) for number in range(NUM_DISTINCT)]
        rows = [payload.rows(rank)] * count

        def own(bridge: Bridge) -> Step:
            def step(**take: Any) -> None:
                self.spans.begin_step()
                bridge.begin_step(rows)
                run_microbatches(bridge, sent, count, encodes=self.encodes, **take)
                self.spans.end_step()

            return step

        def plain(operations: Operations) -> Step:
            return lambda **take: run_microbatches(operations, sent, count, encodes=self.encodes, **take)

        steps = {name: own(bridge) for name, bridge in self.bridges.items()}
        steps["raw"] = plain(RawP2P(payload, rank, device, self.all_ranks))
        if self.upstream is not None:
            for tensor in sent if self.encodes else ():  # as Megatron Core's encoder marks its output
                tensor._mimo_bridge_split_sizes = payload.rows(rank)  # type: ignore[attr-defined]
            steps["upstream"] = plain(self.upstream)
        return {"size_mb": size_mb, "bytes": payload.num_bytes, "arms": self._compare(steps, expected)}

    def _compare(self, steps: dict[str, Step], expected: list[torch.Tensor]) -> dict[str, Any]:
        """Check the arms, count and time them in turns, and check them again. Returns figures of all ranks."""
        arms: dict[str, Any] = {}
        for name, step in steps.items():
            step(take=checker(f"arm {name}, rank {self.grids.rank}", expected))
            arms[name] = self._counts(step)
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        warmup = self.settings["warmup_blocks"]
        for block in range(warmup + self.settings["blocks"]):
            for name in list(steps)[:: 1 if block % 2 == 0 else -1]:
                found = self._timed(steps[name])
                if block >= warmup:
                    seconds[name].append(found / self.settings["microbatches"])
        for name, step in steps.items():
            step(take=checker(f"arm {name}, rank {self.grids.rank}", expected))
            arms[name] |= {"seconds": statistics.median(seconds[name]), "all_seconds": seconds[name]}
        return arms

    def close(self) -> None:
        for bridge in self.bridges.values():
            bridge.destroy()
        if self.upstream is not None:
            self.upstream.destroy_broadcast_pgs()
            self.upstream.destroy_bridge_pgs()
        dist.destroy_process_group(self.all_ranks)

    def _counts(self, step: Step) -> dict[str, float]:
        """Counts of one microbatch, summed over ranks, except the host's waits: those are of the rank with the most."""
        with counted(self.platform.name) as counts:
            step()
        self.platform.synchronize()
        total, most = (torch.tensor(list(asdict(counts).values()), dtype=torch.float64) for _ in range(2))
        dist.all_reduce(total, group=self.grids.host)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.grids.host)
        names, number = list(asdict(counts)), self.settings["microbatches"]
        found = dict(zip(names, (total / number).tolist(), strict=True))
        return found | {"host_syncs": (most / number).tolist()[names.index("host_syncs")]}

    def _timed(self, step: Step) -> float:
        """Seconds of a block on the slowest rank, with the device drained at both ends."""
        self.platform.synchronize()
        dist.barrier(group=self.grids.host)
        began = time.perf_counter()
        step()
        self.platform.synchronize()
        return slowest(time.perf_counter() - began, self.grids.host)


def main(settings: dict[str, Any]) -> int:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    quieten_megatron()
    platform = get_platform(settings["device"])
    with FailFast(f"rank {rank} of case {settings['case']['name']}"):
        # Imported here because megatron must come after the platform is installed.

        from mimo.grid.groups import Grids
        from mimo.watchdog.watchdog import Watchdog

        platform.set_device(int(os.environ["LOCAL_RANK"]))
        platform.init_process_group(rank, world_size, settings["timeout_s"])
        with Grids(layout_of(settings["case"]), platform.backend) as grids, FailFast(grids.describe()):
            watchdog = Watchdog(settings["timeout_s"], grids.describe())
            bench = Bench(settings, grids, platform, watchdog)
            found = [bench.measure(size) for size in settings["sizes_mb"]]
            if rank == 0:
                result = {"device_name": platform.device_name or platform.name, "sizes": found}
                Path(settings["out"]).write_text(json.dumps(result), encoding="utf-8")
            bench.close()
            watchdog.close()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", type=json.loads, help="JSON, as bridge.py writes it")
    sys.exit(main(parser.parse_args().settings))
