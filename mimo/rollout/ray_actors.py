"""Replicas of an engine under Ray: an actor for each, and a placement group that keeps each on one node.

Ray only decides where replicas run. Weights travel directly from the trainer's ranks to the actors' workers.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import re
import signal
import socket
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mimo.refit.rendezvous import RefitError
from mimo.rollout.engine import EngineOptions
from mimo.rollout.process import EngineCalls, answer_of, make_engine
from mimo.rollout.replicas import RolloutClient, one_client

# Seconds within which a cluster has to accept a connection.
CONNECT_S = 10.0
# Part of Ray's message if its processes start too slowly.
LATE_START = "timed out during startup"
# Errors that Ray raises if a cluster does not exist or has ended.
CLUSTER_ERRORS = (RayError, ConnectionError, RuntimeError, ValueError, TimeoutError)


class EngineActor:
    """A replica in the process of a Ray actor. Call `start` first."""

    def start(self, options: EngineOptions, setup: Callable[[], None] | None) -> tuple[bool, str]:
        """Make the engine. Return whether that succeeded, and where the engine runs or what went wrong."""
        where = f"process {os.getpid()} on {socket.gethostname()}"
        try:
            if not Path(options.model).is_dir():
                return False, f"{where} sees no folder {options.model}: it has to be on a file system of all nodes"
            self._engine = make_engine(options, setup)
        except Exception:  # Any error is reported to the process that started this actor.
            return False, f"{where}: {traceback.format_exc()}"
        return True, where

    def call(self, method: str, arguments: Sequence[Any]) -> tuple[bool, Any]:
        """Call any method of the engine, with the result of `mimo.rollout.process.answer_of`."""
        return answer_of(self._engine, method, arguments)


@dataclass(frozen=True)
class RayEngineHandle(EngineCalls):
    """Calls the engine of an actor. Only the process that has started the actor can use it.

    Attributes:
        actor: Ray's handle of the actor.
        name: name of the engine, for errors.
        num_workers: number of workers that take in weights.
        timeout_s: seconds that a call may take.
    """

    actor: Any
    name: str
    num_workers: int
    timeout_s: float

    def call(self, method: str, *arguments: Any) -> Any:
        """Call any method of the engine.

        Raises:
            RefitError: it raised, its process has ended, or it did not answer in time.
        """
        try:
            succeeded, value = ray.get(self.actor.call.remote(method, arguments), timeout=self.timeout_s)
        except GetTimeoutError as error:
            raise RefitError(f"{self.name} did not answer {method} within {self.timeout_s:g} s") from error
        except RayActorError as error:
            raise RefitError(f"{self.name} has ended: {method} got no answer ({_short(error)})") from error
        except RayError as error:
            raise RefitError(f"{self.name}: {method} got no answer from Ray ({_short(error)})") from error
        if not succeeded:
            raise RefitError(value)
        return value


@dataclass(frozen=True)
class RayCluster:
    """The Ray that this process connects to or starts.

    Attributes:
        address: `host:port` or `auto`; empty to start Ray here.
        gpus: CUDA's names of the GPUs of a Ray that is started here.
    """

    address: str
    gpus: Sequence[str] = ()

    def connect(self, num_cpus: int, within_s: float = 60.0) -> None:
        """Connect this process, or start Ray with `num_cpus`. Call this on the main thread, because Ray ends with it.

        Raises:
            ValueError: nobody answers at the address, or Ray did not start in time.
        """
        arguments: dict[str, Any] = {"address": self.address}
        if self.address:
            self._check_reachable()
        else:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            arguments = {"address": "local", "num_cpus": num_cpus, "num_gpus": len(self.gpus),
                         "include_dashboard": False}
        deadline = time.monotonic() + within_s
        while True:
            before = set(psutil.Process().children())
            try:
                with _kept_signals(), _own_sessions(), _visible(self.gpus):
                    ray.init(**arguments, log_to_driver=False, logging_level=logging.ERROR)
                return
            except Exception as error:  # Ray raises its own errors, those of its network, and plain ones.
                ray.shutdown()
                _end(set(psutil.Process().children()) - before)
                # On a busy machine, Ray's own limit of half a minute may be too short.
                if LATE_START in str(error) and time.monotonic() < deadline:
                    continue
                what = f"--ray-address {self.address}: no Ray cluster to connect to" if self.address else \
                    "--engine-placement ray: Ray did not start here"
                raise ValueError(f"{what}: {type(error).__name__}: {error}") from error

    def _check_reachable(self) -> None:
        """Check that a Ray cluster answers, because Ray itself would try for minutes. Raises ValueError."""
        address = os.environ.get("RAY_ADDRESS", "") if self.address == "auto" else self.address
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            return  # Ray resolves `auto`, and RAY_ADDRESS in other forms.
        try:
            socket.create_connection((host, int(port)), CONNECT_S).close()
        except OSError as error:
            raise ValueError(f"--ray-address {self.address}: nobody answers at {address}: {error}") from error


def _end(processes: Collection[psutil.Process]) -> None:
    """End the processes of a start that failed, which Ray leaves behind."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


@contextlib.contextmanager
def _kept_signals() -> Iterator[None]:
    """Context that keeps this process's handler of SIGTERM, which ends a run after its iteration. Ray replaces it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _own_sessions() -> Iterator[None]:
    """Context in which Ray starts its processes in sessions of their own.

    To stop a run, the launcher sends a signal to the whole process group of this process. The run then finishes its
    iteration, and needs its engine for that. The kernel ends Ray's processes when this one ends, whatever their group.
    """
    before = subprocess.Popen.__init__

    def start(self: subprocess.Popen[Any], *arguments: Any, **options: Any) -> None:
        before(self, *arguments, **options | {"start_new_session": True})

    subprocess.Popen.__init__ = start  # type: ignore[method-assign]
    try:
        yield
    finally:
        subprocess.Popen.__init__ = before  # type: ignore[method-assign]


@contextlib.contextmanager
def _visible(gpus: Sequence[str]) -> Iterator[None]:
    """Context that limits the GPUs that Ray sees on a node that it starts."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    try:
        yield
    finally:
        if gpus and before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        elif before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


class RayEngines:
    """Replicas under Ray. End them with `close`.

    Args:
        options: configuration of each replica.
        cluster: the Ray cluster.
        resource: `GPU` or `CPU`; each worker takes one.
        start_timeout_s: seconds until all replicas have started, including the wait for resources.
        call_timeout_s: seconds that a call may take.
        environment: variables of the actors' processes. Those of `options` take precedence.
        setup: importable function that each actor calls before it makes its engine.
        trainer_address: address of the first rank among the trainer's ranks.

    Attributes:
        client: calls all replicas.
        address: name or address under which actors reach this process.

    Raises:
        ValueError: there is no Ray cluster, or Ray did not start.
        RefitError: the cluster has no resources for them in time, or one did not start, with its own traceback.
    """

    def __init__(self, options: Sequence[EngineOptions], cluster: RayCluster, resource: str, start_timeout_s: float,
                 call_timeout_s: float, environment: Mapping[str, str], setup: Callable[[], None] | None,
                 trainer_address: str) -> None:
        self._deadline, self._start_timeout_s = time.monotonic() + start_timeout_s, start_timeout_s
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []
        self._has_connected = not ray.is_initialized()
        bundles = [{"CPU": 1.0, "GPU": float(each.num_workers)} if resource == "GPU" else
                   {"CPU": float(each.num_workers)} for each in options]
        try:
            if self._has_connected:
                cluster.connect(int(sum(bundle["CPU"] for bundle in bundles)), start_timeout_s)
            group = self._place(bundles, resource)
            where = self._start(options, bundles, group, dict(environment), setup)
            self.address = _reachable(trainer_address) if cluster.address else trainer_address
        except BaseException:
            self.close()
            raise
        names = [f"the engine in {place} (a Ray actor)" for place in where]
        self.client: RolloutClient = one_client(
            [RayEngineHandle(actor, name, each.num_workers, call_timeout_s)
             for actor, name, each in zip(self._actors, names, options, strict=True)], call_timeout_s)

    def close(self) -> None:
        """End the actors and free their resources. Also disconnect from Ray, or end it if it was started for them."""
        for actor in self._actors:
            with contextlib.suppress(*CLUSTER_ERRORS):  # The actor or Ray may have ended already.
                ray.kill(actor, no_restart=True)
        self._actors = []
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(*CLUSTER_ERRORS):
                remove_placement_group(group)
        if self._has_connected:
            ray.shutdown()

    def _place(self, bundles: Sequence[dict[str, float]], resource: str) -> PlacementGroup:
        """Reserve resources and wait for them. A bundle is always on one node, and so is a replica."""
        self._group = group = placement_group(list(bundles), strategy="PACK")
        if not group.wait(max(0.0, self._deadline - time.monotonic())):
            asked = sum(bundle[resource] for bundle in bundles)
            there, free = (float(found.get(resource, 0)) for found in (ray.cluster_resources(),
                                                                       ray.available_resources()))
            largest = max(bundle[resource] for bundle in bundles)
            raise RefitError(
                f"no place for the engine within {self._start_timeout_s:g} s: its {len(bundles)} replicas ask Ray for "
                f"{asked:g} {resource}s, {largest:g} of them on one node; the cluster has {there:g}, {free:g} of them "
                f"free, on {sum(node['Alive'] for node in ray.nodes())} nodes")
        return group

    def _start(self, options: Sequence[EngineOptions], bundles: Sequence[dict[str, float]], group: PlacementGroup,
               environment: dict[str, str], setup: Callable[[], None] | None) -> list[str]:
        """Start all replicas and return where each runs."""
        remote: Any = ray.remote(EngineActor)
        starts: dict[Any, int] = {}
        for number, (each, bundle) in enumerate(zip(options, bundles, strict=True)):
            actor = remote.options(
                num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=number, placement_group_capture_child_tasks=False),
                runtime_env={"env_vars": environment | each.environment}).remote()
            self._actors.append(actor)
            starts[actor.start.remote(each, setup)] = number
        places: dict[int, str] = {}
        while starts:
            done, _ = ray.wait(list(starts), timeout=max(0.0, self._deadline - time.monotonic()))
            if not done:
                late = ", ".join(map(str, sorted(starts.values())))
                raise RefitError(f"replica {late}: the engine, a Ray actor, did not start within "
                                 f"{self._start_timeout_s:g} s")
            number = starts.pop(done[0])
            try:
                is_up, told = ray.get(done[0])
            except RayError as error:
                is_up, told = False, f"its Ray actor has ended: {_short(error)}"
            if not is_up:
                raise RefitError(f"replica {number}: the engine did not start: {told}")
            places[number] = told
        return [places[number] for number in range(len(options))]


def _reachable(address: str) -> str:
    """Return the address, or this node's own address in place of a loopback address."""
    try:
        is_local = ipaddress.ip_address(socket.gethostbyname(address)).is_loopback
    except OSError:
        is_local = False  # Other nodes may know the name.
    return str(ray.util.get_node_ip_address()) if is_local else address


def _short(error: BaseException) -> str:
    """Shorten Ray's message to its beginning and end."""
    words = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())
    return words if len(words) <= 600 else f"{words[:300]} ... {words[-300:]}"
