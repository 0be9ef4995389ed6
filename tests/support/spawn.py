"""Run a function on several gloo processes, for tests.

This module imports no torch at the top: the processes set their environment before torch reads it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import multiprocessing
import os
import pickle
import random
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, reduction
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

_STOP = b""


# Processes with more are replaced: threads of gloo groups that Megatron still refers to, which slow down every call.
MAX_THREADS = 500


class WorkerPool:
    """Processes on the CPU platform that stay alive over many calls; `close` the pool at the end.

    Every call gets a fresh default process group, so no group of an earlier call is left. After a failure or `close`
    the processes are replaced at the next call. They are forked from one that has imported torch and Megatron Core,
    which takes a fraction of a second instead of the ten that the imports take.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._workers: list[int] = []
        self._connections: list[Connection] = []

    def run(
        self, fn: Callable[..., Any], *args: Any, world_size: int | None = None, timeout_s: float = 120
    ) -> list[Any]:
        """Run `fn(rank, *args)` on the first `world_size` processes (default: all); results in rank order.

        Args:
            fn: importable top-level function; its arguments and result are pickled.
            world_size: number of processes.
            timeout_s: seconds for the whole call.

        Raises:
            RuntimeError: a rank raised (its traceback is in the message) or died.
            TimeoutError: no result from some ranks in time. All processes are killed in either case.
        """
        world_size = world_size or self.world_size
        if world_size > self.world_size:
            raise ValueError(f"world_size {world_size} is more than the pool's {self.world_size} processes")
        task = pickle.dumps((fn, args))
        finished = False
        try:
            if any(_num_threads(worker) > MAX_THREADS for worker in self._workers):
                self.close()
            while len(self._workers) < world_size:
                self._start_one()
            port = _free_port()
            for connection in self._connections[:world_size]:
                connection.send_bytes(pickle.dumps((world_size, port, timeout_s, task)))
            results = self._collect(world_size, timeout_s)
            finished = True
        finally:
            if not finished:
                self._kill()
        return results

    def close(self) -> None:
        """Stop the processes."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(_STOP)
        for worker in self._workers:
            _fork_server().exit_code(worker)
        self._kill()

    def _start_one(self) -> None:
        worker, connection = _fork_server().start(len(self._workers))
        self._workers.append(worker)
        self._connections.append(connection)

    def _collect(self, world_size: int, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        while len(results) < world_size:
            missing = [rank for rank in range(world_size) if rank not in results]
            ready = wait([self._connections[rank] for rank in missing], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"no result from ranks {missing} of {world_size} within {timeout_s} s")
            for rank in missing:
                if self._connections[rank] in ready:
                    results[rank] = self._receive(rank)
        return [results[rank] for rank in range(world_size)]

    def _receive(self, rank: int) -> Any:
        try:
            succeeded, value = _load(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError) as error:
            raise RuntimeError(
                f"rank {rank} died with exit code {_fork_server().exit_code(self._workers[rank])}") from error
        if not succeeded:
            raise RuntimeError(f"rank {rank} raised:\n{value}")
        return value

    def _kill(self) -> None:
        for worker in self._workers:
            _fork_server().kill(worker)
        for connection in self._connections:
            connection.close()
        self._workers, self._connections = [], []


class ForkServer:
    """A process that has imported torch and Megatron Core and forks the workers of all pools.

    It is started by `spawn`, so it has nothing of the process that runs pytest but the environment. Workers are
    processes of the kind that may have children (checkpoint writers), so nothing but this server ends them.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, there = context.Pipe()
        with _environment(OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1"):
            self._process = context.Process(target=_serve_forks, args=(there, list(sys.path)))
            self._process.start()
        there.close()
        self._connection.recv()  # the limit of a call is for its function, not for the imports

    def start(self, rank: int) -> tuple[int, Connection]:
        """Fork a worker; its process id and the connection to it."""
        here, there = multiprocessing.Pipe()
        self._connection.send(("start", rank))
        reduction.send_handle(self._connection, there.fileno(), self._process.pid)
        there.close()
        return self._connection.recv(), here

    def exit_code(self, worker: int) -> int | None:
        """Exit code of a worker that ends within ten seconds."""
        self._connection.send(("exit_code", worker))
        code: int | None = self._connection.recv()
        return code

    def kill(self, worker: int) -> None:
        """Kill a worker, unless it has ended."""
        self._connection.send(("kill", worker))
        self._connection.recv()

    def close(self) -> None:
        """End the server, and with it its workers."""
        self._connection.send(("stop", 0))
        self._process.join(timeout=20)
        self._process.kill()


_server: ForkServer | None = None


def _fork_server() -> ForkServer:
    """Return the server of this process, started at the first use."""
    global _server
    if _server is None:
        _server = ForkServer()
        atexit.register(_server.close)
    return _server


def _serve_forks(control: Connection, path: list[str]) -> None:
    """Fork workers and tell how they ended, until the parent is gone."""
    sys.path[:] = path
    for quiet in (r"megatron\.", r"torch\.distributed"):  # what is deprecated or optional there is none of ours
        warnings.filterwarnings("ignore", module=quiet)
    from mimo.platform import get_platform

    get_platform("cpu")
    import torch

    import mimo.training.loop  # noqa: F401

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # workers look through all objects after each call; these are none of a test's
    context = multiprocessing.get_context("fork")
    workers: dict[int, Any] = {}
    control.send(None)
    with contextlib.suppress(EOFError):
        while (order := control.recv())[0] != "stop":
            name, argument = order
            if name == "start":
                connection = Connection(reduction.recv_handle(control))
                process = context.Process(target=_serve, args=(argument, connection, control))
                process.start()
                connection.close()
                workers[process.pid] = process
                control.send(process.pid)
            elif name == "kill":
                ended = workers.pop(argument)
                ended.kill()
                ended.join()
                control.send(None)
            else:
                workers[argument].join(timeout=10)
                control.send(workers[argument].exitcode)
    for process in workers.values():
        process.kill()
        process.join()


def forkserver_context(preload: list[str], **environment: str) -> Any:
    """Return multiprocessing's context whose processes are forked from one that has imported `preload`.

    A process has a single fork server, which never forgets what it imported. One that another test has started is
    therefore stopped first: with vLLM in it, for example, the CPU platform could no longer be installed.
    """
    forkserver._forkserver._stop()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preload)
    with _environment(OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1", **environment):
        starter = context.Process(target=os.getpid)
        starter.start()
        starter.join()
    return context


def _num_threads(worker: int) -> int:
    return len(list(Path(f"/proc/{worker}/task").iterdir()))


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Environment variables for processes started inside the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _free_port() -> int:
    """Find a port below those that the kernel gives to connections, one of which could take it before the ranks do."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _dump(answer: tuple[bool, Any]) -> bytes:
    """A worker's answer by torch.save: a tensor that is plainly pickled refers to Megatron once that is imported."""
    import torch

    buffer = io.BytesIO()
    torch.save(answer, buffer)
    return buffer.getvalue()


def _load(answer: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(answer), weights_only=False)


def _serve(rank: int, connection: Connection, control: Connection) -> None:
    """Worker: run tasks until told to stop or the parent is gone."""
    control.close()  # the server's alone, whose end the parent could not see otherwise
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            return
        if message == _STOP:
            return
        world_size, port, timeout_s, task = pickle.loads(message)
        with _ReportFailure(connection):
            result = _run_task(rank, world_size, port, timeout_s, task)
            connection.send_bytes(_dump((True, result)))


class _ReportFailure:
    """Sends the traceback of whatever the block raises to the parent, which then kills this process.

    The process stays until then: its open sockets keep the other ranks from failing on their own and hiding the cause.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if kind is not None:
            self._connection.send_bytes(_dump((False, "".join(traceback.format_exception(kind, error, trace)))))
        return True


def _run_task(rank: int, world_size: int, port: int, timeout_s: float, task: bytes) -> Any:
    """Run one call in a fresh process group, which is gone when it returns."""
    import torch.distributed as dist

    from mimo.platform import current_platform

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size),
                      LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    current_platform().init_process_group(rank, world_size, timeout_s)
    fn, args = pickle.loads(task)
    with _closed_watchdogs():
        result = fn(rank, *args)
    if dist.is_initialized():  # a function may end its process group itself
        dist.barrier()  # no rank closes its sockets while another still uses them
        dist.destroy_process_group()
    _forget_groups()
    return result


@contextlib.contextmanager
def _closed_watchdogs() -> Iterator[None]:
    """Close the watchdogs that a call makes: one that it leaves open would end the process during a later call."""
    from mimo.watchdog.watchdog import Watchdog

    made: list[Any] = []
    start = Watchdog.__init__

    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        made.append(self)

    Watchdog.__init__ = note  # type: ignore[method-assign]
    try:
        yield
    finally:
        Watchdog.__init__ = start  # type: ignore[method-assign]
    for watchdog in made:
        watchdog.close()


def _forget_groups() -> None:
    """Drop what Megatron keeps in classes and modules: groups, which die with the default one, and counts of layers."""
    bridge = sys.modules.get("megatron.core.pipeline_parallel.bridge_communicator")
    if bridge is not None:
        bridge.BridgeCommunicator._broadcast_pg_cache.clear()
        bridge.BridgeCommunicator._bridge_pg_cache.clear()
    moe_logging = sys.modules.get("megatron.core.transformer.moe.moe_logging")
    if moe_logging is not None:  # its rows are as many as the layers of the model that came first
        moe_logging.destroy_moe_metrics_tracker()
    _forget_models()


def _forget_models() -> None:
    """Free the models of a call, and with them their process groups: each gloo group keeps several threads.

    A model's configuration has callbacks that lead back to the model. It is also held from C++, where the garbage
    collector does not see the cycle.
    """
    configs = sys.modules.get("megatron.core.transformer.transformer_config")
    if configs is None:
        return
    kinds = (configs.TransformerConfig, configs.MLATransformerConfig)
    for found in gc.get_objects():
        if type(found) in kinds:
            found.finalize_model_grads_func = found.no_sync_func = None
            found.grad_sync_func = found.param_sync_func = found.grad_scale_func = found.timers = None
    gc.collect()
