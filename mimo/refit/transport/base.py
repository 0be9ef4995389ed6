"""How messages travel between trainer ranks and workers: one interface, and what stands behind it by the options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.distributed import PrefixStore

from mimo.refit.options import RefitOptions
from mimo.refit.rendezvous import RefitError, Rendezvous
from mimo.refit.transport.ipc import Incoming, TrainerEnd, WorkerEnd
from mimo.refit.transport.p2p import Wire
from mimo.refit.transport.shared_memory import device_identity


class Transport(Protocol):
    """How messages travel: `Wire`, or one of the two ends below."""

    def exchange(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
                 ) -> list[tuple[str, Any]]:
        """Start a chunk's messages; see `Wire.exchange`. Every rank calls it for every chunk, in order."""
        ...

    def wait(self, works: Sequence[tuple[str, Any]], check: Callable[[], None], grace_s: float = 0.0) -> None:
        """Wait for a chunk's messages; see `Wire.wait`."""
        ...

    def release(self, check: Callable[[], None], grace_s: float = 0.0) -> None:
        """Give back what was taken for a sync, after its last chunk. Raises as `wait`."""
        ...

    def close(self) -> None:
        ...


def open_wire(rendezvous: Rendezvous, scope: str, options: RefitOptions, rank: int, num_trainers: int,
              device: torch.device, names: Sequence[str], incoming: Sequence[Mapping[int, int]] = ()) -> Transport:
    """Connect one participant with all others.

    Args:
        rendezvous: this participant's.
        scope: whose failures end the wait.
        options: with the backend.
        rank: of this participant; the trainer's ranks come first.
        num_trainers: ranks of the trainer.
        device: where this participant's messages lie.
        names: what each rank is called in messages.
        incoming: a worker's: of each chunk, trainer rank -> bytes of its message.

    Raises:
        ValueError: the backend cannot be used here.
        RefitError: a worker has no trainer rank on its GPU, or the others did not come.
    """
    if options.backend != "ipc":
        return Wire(rendezvous.store, "weights", rank, len(names), options.backend, options.timeout_s, names)
    flags = PrefixStore("ipc", rendezvous.store)
    table = Incoming([dict(each) for each in incoming])
    rendezvous.publish(f"ipc/{rank}", {"device": device_identity(device), "incoming": table.as_json()})
    told = [rendezvous.read(f"ipc/{each}", scope, f"the device of {name}") for each, name in enumerate(names)]
    devices = [each["device"] for each in told]
    found = proxies(devices[:num_trainers], devices[num_trainers:])
    if rank >= num_trainers:
        return WorkerEnd(flags, rank, names[found[rank - num_trainers]], table, device, options.timeout_s)
    among = None
    if num_trainers > 1:
        backend = "nccl" if device.type == "cuda" else "gloo"
        among = Wire(rendezvous.store, "trainers", rank, num_trainers, backend, options.timeout_s, names)
    tables = {num_trainers + worker: Incoming.from_json(told[num_trainers + worker]["incoming"])
              for worker, proxy in enumerate(found) if proxy == rank}
    by_worker = dict(enumerate(found, num_trainers))
    return TrainerEnd(flags, rank, by_worker, tables, among, device, options.timeout_s, names)


def proxies(trainers: Sequence[str], workers: Sequence[str]) -> list[int]:
    """Choose for each worker the trainer rank that hands it its messages.

    Args:
        trainers: each rank's device, see `device_identity`.
        workers: each worker's.

    Raises:
        RefitError: some worker's device has no trainer rank, or a GPU has several.
    """
    ranks = {device: [rank for rank, each in enumerate(trainers) if each == device] for device in workers}
    wrong = [f"worker {worker} is on {device}, where there "
             + (f"are trainer ranks {', '.join(map(str, ranks[device]))}" if ranks[device] else "is none")
             for worker, device in enumerate(workers)
             if not ranks[device] or (len(ranks[device]) > 1 and device.startswith("GPU"))]
    if wrong:
        raise RefitError(f"refit backend 'ipc' needs one trainer rank on each worker's GPU: {'; '.join(wrong)}; the "
                         "trainer has " + ", ".join(f"rank {rank} on {each}" for rank, each in enumerate(trainers)))
    # Workers of one host that has no GPU are spread over its ranks.
    return [ranks[device][worker % len(ranks[device])] for worker, device in enumerate(workers)]
