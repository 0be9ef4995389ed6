"""One rank of a case of scripts/bench/bridge.py; the first one writes what all have measured.

Its argument is the case and the bench's settings as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mimo.grid.spec import GridSpec, Layout
from mimo.platform import get_platform
from mimo.platform.base import Platform
from mimo.platform.megatron_import import quieten_wheel
from mimo.protocols import LANGUAGE
from mimo.watchdog.process_exit import fail_fast

if TYPE_CHECKING:
    import torch

    from mimo.bridge.disjoint import Bridge
    from mimo.grid.groups import Grids
    from mimo.observability.spans import Spans
    from mimo.watchdog.watchdog import Watchdog
    from scripts.bench.bridge_arms import Operations, Payload

Step = Callable[..., None]
MB = 1e6


def layout_of(case: dict[str, int]) -> Layout:
    """The grids of a case, `ENCODER` first."""
    from scripts.bench.bridge_arms import ENCODER

    encoder = GridSpec(ENCODER, dp=case["encoder_dp"], tp=case["encoder_tp"])
    language = GridSpec(LANGUAGE, offset=encoder.size, dp=case["language_dp"], tp=case["language_tp"])
    return Layout("disjoint", encoder.size + language.size, (encoder,), language)


class Bench:
    """The arms of one case on this rank.

    Args:
        settings: of the bench.
        grids: process groups.
        platform: device and backend.
        watchdog: told about every wait.
    """

    def __init__(self, settings: dict[str, Any], grids: Grids, platform: Platform, watchdog: Watchdog) -> None:
        import torch
        import torch.distributed as dist

        self.settings, self.grids, self.platform, self.watchdog = settings, grids, platform, watchdog
        self.dtype: torch.dtype = getattr(torch, settings["dtype"])
        (encoder,) = grids.layout.encoders
        self.encodes = grids.rank in encoder.ranks
        self.all_ranks = dist.new_group(backend=platform.backend)
        # Its communicator: what comes first in a group has to be of all its ranks.
        dist.all_reduce(torch.zeros(1, device=platform.device), group=self.all_ranks)
        self.bridge, self.spans = self._own_bridge(self._payload(1.0))
        self.wheels = self._wheels_bridge() if "upstream" in settings["arms"] else None

    def _payload(self, size_mb: float) -> Payload:
        from scripts.bench.bridge_arms import Payload

        return Payload(self.grids.layout, size_mb * MB, self.settings["hidden_size"], self.dtype,
                       uneven=self.settings["uneven"])

    def _wheels_bridge(self) -> Any:
        from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator

        (encoder,) = self.grids.layout.encoders
        return BridgeCommunicator(self.grids.grids[encoder.name], self.grids.grids[LANGUAGE],
                                  dim_mapping={"s": 0, "b": 1, "h": 2}, comm_dtype=self.dtype, tensor_ndim=2)

    def _own_bridge(self, payload: Payload) -> tuple[Bridge, Spans]:
        """Our bridge as the trainer makes it, timeline included."""
        from mimo.bridge.disjoint import Bridge
        from mimo.observability.spans import DeviceClock, HostClock, Spans

        spans = Spans(DeviceClock() if self.platform.name == "cuda" else HostClock(),
                      dict.fromkeys(self.grids.modules, 0))
        bridge = Bridge(self.grids, payload.encoder.name, micro_batch_size=payload.micro_batch_size,
                        hidden_size=payload.hidden_size, dtype=payload.dtype, needs_grad=True,
                        device=self.platform.device, backend=self.platform.backend, watchdog=self.watchdog,
                        spans=spans)
        return bridge, spans

    def measure(self, size_mb: float) -> dict[str, Any]:
        """All arms at one size. Raises ValueError for a value that arrives otherwise than it was sent."""
        from scripts.bench.bridge_arms import BACKWARD, FORWARD, NUM_DISTINCT, RawP2P, run_microbatches

        rank, device, count = self.grids.rank, self.platform.device, self.settings["microbatches"]
        payload = self._payload(size_mb)
        out, back = (FORWARD, BACKWARD) if self.encodes else (BACKWARD, FORWARD)
        sent = [payload.values(rank, out, number, device) for number in range(NUM_DISTINCT)]
        expected = [payload.values(rank, back, number, device) for number in range(NUM_DISTINCT)]
        rows = [payload.rows(rank)] * count

        def ours(**take: Any) -> None:
            self.spans.begin_step()
            self.bridge.begin_step(rows)
            run_microbatches(self.bridge, sent, count, encodes=self.encodes, **take)
            self.spans.end_step()

        def plain(operations: Operations) -> Step:
            return lambda **take: run_microbatches(operations, sent, count, encodes=self.encodes, **take)

        steps: dict[str, Step] = {"ours": ours,
                                  "raw": plain(RawP2P(payload, rank, device, self.all_ranks))}
        if self.wheels is not None:
            for tensor in sent if self.encodes else ():  # as the wheel's encoder marks its output
                tensor._mimo_bridge_split_sizes = payload.rows(rank)  # type: ignore[attr-defined]
            steps["upstream"] = plain(self.wheels)
        return {"size_mb": size_mb, "bytes": payload.num_bytes, "arms": self._compare(steps, expected)}

    def _compare(self, steps: dict[str, Step], expected: list[torch.Tensor]) -> dict[str, Any]:
        """Check, count, time in turns and check the arms again; figures of all ranks."""
        from scripts.bench.bridge_arms import checker

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
        """Release the groups."""
        import torch.distributed as dist

        self.bridge.destroy()
        if self.wheels is not None:
            self.wheels.destroy_broadcast_pgs()
            self.wheels.destroy_bridge_pgs()
        dist.destroy_process_group(self.all_ranks)

    def _counts(self, step: Step) -> dict[str, float]:
        """Of one microbatch: all ranks together, but for the host's waits, which are of the rank that has most."""
        import torch
        import torch.distributed as dist

        from scripts.bench.bridge_arms import counted

        with counted(self.platform.name) as counts:
            step()
        self.platform.synchronize()
        total, most = (torch.tensor(counts.to_list(), dtype=torch.float64) for _ in range(2))
        dist.all_reduce(total, group=self.grids.host)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.grids.host)
        names, number = list(asdict(counts)), self.settings["microbatches"]
        found = dict(zip(names, (total / number).tolist(), strict=True))
        return found | {"host_syncs": (most / number).tolist()[names.index("host_syncs")]}

    def _timed(self, step: Step) -> float:
        """Seconds of a block on the slowest rank, the device drained at both ends."""
        import torch
        import torch.distributed as dist

        self.platform.synchronize()
        dist.barrier(group=self.grids.host)
        began = time.perf_counter()
        step()
        self.platform.synchronize()
        seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=self.grids.host)
        return seconds.item()


def main(settings: dict[str, Any]) -> int:
    """Run one case."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    quieten_wheel()
    platform = get_platform(settings["device"])
    with fail_fast(f"rank {rank} of case {settings['case']['name']}"):
        # Imported here: megatron must come after the platform is installed.
        import torch.distributed as dist

        from mimo.grid.groups import Grids
        from mimo.watchdog.watchdog import Watchdog

        platform.set_device(int(os.environ["LOCAL_RANK"]))
        platform.init_process_group(rank, world_size, settings["timeout_s"])
        with Grids(layout_of(settings["case"]), platform.backend) as grids, fail_fast(grids.describe()):
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
