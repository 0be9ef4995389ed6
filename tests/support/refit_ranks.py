"""Trainer ranks and an engine in processes of their own, which are killed, stopped or made to raise during a refit."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mimo.refit.sender import Trainer, WeightSender
from mimo.rollout import process as host
from mimo.rollout.process import EngineHandle, EngineProcess
from tests.support.echo_engine import engine_options
from tests.support.refit_faults import OPTIONS, PlainWeights, use_plain_engine
from tests.support.spawn import forkserver_context

ANSWERS_WITHIN_S = 60.0


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault in the middle of a refit.

    Attributes:
        rank: trainer rank that does it.
        at: tensor before which it does it, or a call of the engine: `finish_weight_update`.
        pid: id of the process that is signalled; None: the rank raises; 0: its own.
        signal: that it gets.
    """

    rank: int
    at: str
    pid: int | None = None
    signal: int = signal.SIGKILL

    def strike(self) -> None:
        """Do it."""
        if self.pid is None:
            raise OSError(f"made to fail at {self.at}")
        os.kill(self.pid or os.getpid(), self.signal)


class Client:
    """A handle, and a fault before one of its calls."""

    def __init__(self, handle: EngineHandle, fault: Fault | None) -> None:
        self._handle, self._fault = handle, fault

    def _reach(self, name: str) -> None:
        if self._fault is not None and self._fault.at == name:
            self._fault.strike()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._reach("init_weight_transfer_engine")
        self._handle.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self._reach("start_weight_update")
        self._handle.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._reach("update_weights")
        self._handle.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._reach("finish_weight_update")
        self._handle.finish_weight_update(weight_version)


def rank_process(rank: int, world_size: int, folder: str, handle: EngineHandle, connection: Connection) -> None:
    """Run a trainer rank that obeys orders and reports each result with its duration."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world_size), rank=rank,
                            world_size=world_size)

    def broadcast(value: Any) -> Any:
        told = [value]
        dist.broadcast_object_list(told, src=0)
        return told[0]

    weights = PlainWeights(rank, world_size, 0)
    sender: WeightSender | None = None
    while True:
        try:
            what, seed, fault, options = connection.recv()
        except EOFError:
            return
        weights.set(seed)
        own = fault if fault is not None and fault.rank == rank else None
        weights.before_view = lambda name, own=own: own.strike() if own is not None and own.at == name else None
        client = Client(handle, own)
        began = time.monotonic()
        try:
            if what == "connect":
                trainer = Trainer(rank, world_size, broadcast, "127.0.0.1", torch.device("cpu"))
                sender = WeightSender(weights, trainer, client, handle.num_workers, options)
            else:
                assert sender is not None
                sender.client = client
                sender.send(f"policy {seed}")
        except (RuntimeError, ValueError, OSError) as error:
            connection.send((f"{type(error).__name__}: {error}", time.monotonic() - began))
        else:
            connection.send(("", time.monotonic() - began))


@dataclasses.dataclass
class Fleet:
    """An engine and trainer ranks.

    Attributes:
        engine: the process of the engine.
        processes: processes of the ranks.
        connections: to the ranks.
    """

    engine: EngineProcess
    processes: list[Any]
    connections: list[Connection]

    def do(self, what: str, seed: int = 0, fault: Fault | None = None, timeout_s: float = 60) -> list[Any]:
        """Tell every rank to `connect` or `send`; of each what it raised and seconds, None of one that has ended."""
        options = dataclasses.replace(OPTIONS, timeout_s=timeout_s)
        for connection in self.connections:
            connection.send((what, seed, fault, options))
        return [self._answer(connection) for connection in self.connections]

    def _answer(self, connection: Connection) -> Any:
        assert connection.poll(ANSWERS_WITHIN_S), "a rank hangs"
        try:
            return connection.recv()
        except (EOFError, ConnectionResetError):
            return None


def forkserver() -> Any:
    """Context whose processes have imported vLLM and all else: that takes longer than a test."""
    return forkserver_context(
        ["vllm.v1.worker.gpu_worker", "tests.support.refit_ranks"], VLLM_CPU_CI_ENV="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_ALLOW_INSECURE_SERIALIZATION="1")


@contextmanager
def engine_in(context: Any) -> Iterator[EngineProcess]:
    """An engine of the small model with two workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "multiprocessing", SimpleNamespace(
            get_context=lambda kind: context, AuthenticationError=multiprocessing.AuthenticationError))
        process = EngineProcess(engine_options(2, "dummy"), call_timeout_s=120.0, setup=use_plain_engine)
    try:
        yield process
    finally:
        process.close()


@contextmanager
def ranks_of(context: Any, engine: EngineProcess, folder: Path, world_size: int = 2) -> Iterator[Fleet]:
    """Trainer ranks for an engine."""
    folder.mkdir()
    fleet = Fleet(engine, [], [])
    try:
        for rank in range(world_size):
            here, there = context.Pipe()
            process = context.Process(target=rank_process, args=(rank, world_size, str(folder), engine.handle, there))
            process.start()
            there.close()
            fleet.processes.append(process)
            fleet.connections.append(here)
        yield fleet
    finally:
        for process in fleet.processes:
            process.kill()
            process.join()
