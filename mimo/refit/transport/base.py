"""Opens the connections between trainer ranks and workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import torch
from torch.distributed import PrefixStore

from mimo.refit.options import RefitOptions
from mimo.refit.rendezvous import RefitError, Rendezvous
from mimo.refit.transport.ipc import Incoming, TrainerEnd, WorkerEnd, device_identity
from mimo.refit.transport.p2p import Wire
from mimo.watchdog.process_exit import on_daemon_thread

Transport = Wire | TrainerEnd | WorkerEnd
"""Carriers of messages. All have the methods of `Wire`."""


class Opening:
    """Connections of one participant with all others, which open in the background while it plans.

    With backend `ipc` they open at the end, because the plan decides what is shared.

    Args:
        rendezvous: rendezvous of this participant.
        scope: scope whose failures end a wait.
        options: options of the refit, with the backend.
        rank: rank of this participant. The trainer's ranks come first.
        num_trainers: number of ranks of the trainer.
        device: device of this participant's messages.
        names: name of each rank, for errors.
    """

    def __init__(self, rendezvous: Rendezvous, scope: str, options: RefitOptions, rank: int, num_trainers: int,
                 device: torch.device, names: Sequence[str]) -> None:
        self._rendezvous, self._scope, self._options = rendezvous, scope, options
        self._rank, self._num_trainers, self._device, self._names = rank, num_trainers, device, names
        self._wire: Future[Wire] = Future()
        if options.backend != "ipc":
            # The store gets a client of its own, because a wait in one holds up other calls of the same client.
            store = rendezvous.store.clone()  # type: ignore[attr-defined]  # torch's stubs lack this method
            own = Rendezvous(store, rendezvous.who, rendezvous.timeout_s)
            self._wire = on_daemon_thread(partial(self._connect, own), "refit-connections")

    def finish(self, incoming: Sequence[Mapping[int, int]] = ()) -> Transport:
        """Return the connections.

        Args:
            incoming: on a worker, for each chunk: trainer rank -> size of its message in bytes.

        Raises:
            ValueError: the backend cannot be used here.
            RefitError: a participant failed, a worker has no trainer rank on its GPU, or the others did not connect in
                time.
        """
        if self._options.backend == "ipc":
            return self._open_ipc(Incoming([dict(each) for each in incoming]))
        self._rendezvous.until(self._scope, self._wire.done, lambda: f"{self._scope}: {self._names[self._rank]} "
                                                                     "waits for connections with the others")
        return self._wire.result()

    def _open_ipc(self, incoming: Incoming) -> Transport:
        rendezvous, rank, num_trainers, names = self._rendezvous, self._rank, self._num_trainers, self._names
        flags, timeout_s = PrefixStore("ipc", rendezvous.store), self._options.timeout_s
        # From the devices of all participants, each of them chooses the same proxies.
        rendezvous.publish(f"ipc/{rank}", {"device": device_identity(self._device), "incoming": incoming.as_json()})
        published = [rendezvous.read(f"ipc/{each}", self._scope, f"the device of {name}")
                     for each, name in enumerate(names)]
        devices = [each["device"] for each in published]
        found = proxies(devices[:num_trainers], devices[num_trainers:])
        if rank >= num_trainers:
            return WorkerEnd(flags, rank, names[found[rank - num_trainers]], incoming, self._device, timeout_s)
        # What a worker gets from another GPU's rank travels to its proxy first, in a group of the trainer's ranks.
        among = None
        if num_trainers > 1:
            backend = "nccl" if self._device.type == "cuda" else "gloo"
            among = Wire(rendezvous.store, "trainers", rank, names[:num_trainers], backend, timeout_s)
        tables = {num_trainers + worker: Incoming.from_json(published[num_trainers + worker]["incoming"])
                  for worker, proxy in enumerate(found) if proxy == rank}
        return TrainerEnd(flags, rank, dict(enumerate(found, num_trainers)), tables, among, self._device, timeout_s,
                          names)

    def abandon(self) -> None:
        """Close the connections, now or when they have opened."""
        self._wire.add_done_callback(lambda wire: None if wire.exception() else wire.result().close())

    def _connect(self, own: Rendezvous) -> Wire:
        # NCCL would wait without a limit for a participant that refuses or dies before it gets here.
        own.meet(self._scope, "connecting", self._names)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # each thread has its own current device
        return Wire(own.store, "weights", self._rank, self._names, self._options.backend, self._options.timeout_s)


def proxies(trainers: Sequence[str], workers: Sequence[str]) -> list[int]:
    """Choose for each worker the trainer rank that passes it its messages.

    Args:
        trainers: device of each trainer rank, see `device_identity`.
        workers: device of each worker.

    Raises:
        RefitError: the device of a worker has no trainer rank, or a GPU has several.
    """
    ranks = {device: [rank for rank, each in enumerate(trainers) if each == device] for device in workers}
    wrong = [f"worker {worker} is on {device}, where there "
             + (f"are trainer ranks {', '.join(map(str, ranks[device]))}" if ranks[device] else "is none")
             for worker, device in enumerate(workers)
             if not ranks[device] or (len(ranks[device]) > 1 and device.startswith("GPU"))]
    if wrong:
        raise RefitError(f"refit backend 'ipc' needs one trainer rank on each worker's GPU: {'; '.join(wrong)}; the "
                         "trainer has " + ", ".join(f"rank {rank} on {each}" for rank, each in enumerate(trainers)))
    # Workers on a host without GPUs are distributed over the ranks of that host.
    return [ranks[device][worker % len(ranks[device])] for worker, device in enumerate(workers)]
