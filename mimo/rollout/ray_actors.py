"""Replicas of an engine under Ray: an actor for each node of a replica.

Placement groups reserve nodes for them, unless they share the GPUs of trainer ranks: then it is known where they run,
and Ray only starts them there. The actors of a replica of several nodes start vLLM's own executor for several
nodes, because vLLM's executors for Ray have no workers on CPUs and need an IP address for each node. Weights travel
directly from the trainer's ranks to the actors' workers.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from mimo.refit.rendezvous import RefitError
from mimo.rollout.engine import EngineOptions, NodePlace, at_meeting_point, start_engine_node
from mimo.rollout.process import EngineLostError, answer_of, make_engine
from mimo.rollout.replicas import RolloutClient, one_client

# Seconds within which a cluster has to accept a connection.
CONNECT_S = 10.0
# Seconds in which an actor that does nothing else answers.
PING_S = 5.0
# Part of Ray's message if its processes start too slowly.
LATE_START = "timed out during startup"
# Length of the ends of an actor's output that an error of its start has.
PRINTED_BYTES = 4000
# With this variable, Ray leaves CUDA_VISIBLE_DEVICES of an actor that asks for no GPU as it is.
KEEPS_VISIBLE = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
# With this variable, CUDA counts GPUs in another order. The trainer's ranks have given their numbers in theirs.
DEVICE_ORDER = "CUDA_DEVICE_ORDER"
# Errors that Ray raises if a cluster does not exist or has ended.
CLUSTER_ERRORS = (RayError, ConnectionError, RuntimeError, ValueError, TimeoutError)


class EngineActor:
    """A replica, or its workers on one node, in the process of a Ray actor. Call `start` first."""

    def locate(self) -> tuple[str, str, int]:
        """Return the process and node in words, the node's address, and a free port of it."""
        address = str(ray.util.get_node_ip_address())
        with socket.socket() as free:
            free.bind(("", 0))
            return f"process {os.getpid()} on {socket.gethostname()} ({address})", address, free.getsockname()[1]

    def start(self, options: EngineOptions, setup: Callable[[], None] | None,
              place: NodePlace | None = None) -> tuple[bool, str]:
        """Make the engine, or its workers on this node. Return whether that succeeded, and what went wrong."""
        try:
            if not Path(options.model).is_dir():
                return False, f"sees no folder {options.model}: it has to be on a file system of all nodes"
            if place is not None:
                # On a node with several networks vLLM might choose another one than Ray.
                os.environ["VLLM_HOST_IP"] = str(ray.util.get_node_ip_address())
            if place is None or place.number == 0:
                self._engine = make_engine(options, setup, place)
            else:
                if setup is not None:
                    setup()
                self._node = start_engine_node(options, place)
        except Exception:  # Any error is reported to the process that started this actor.
            return False, traceback.format_exc() + _printed()
        return True, ""

    def watch(self) -> None:
        """Return never: the end of this call is that of the process, which ends with its workers."""
        threading.Event().wait()

    def call(self, method: str, arguments: Sequence[Any]) -> tuple[bool, Any]:
        """Call any method of the engine, with the result of `mimo.rollout.process.answer_of`."""
        return answer_of(self._engine, method, arguments)


def _printed() -> str:
    """Return the ends of what this actor and its workers have printed, which Ray keeps in files of the node.

    Why a worker has failed is only there: vLLM's own error says that one has.
    """
    found = ""
    for path in map(Path, ("/proc/self/fd/1", "/proc/self/fd/2")):
        with contextlib.suppress(OSError):
            if path.is_file():
                with path.open("rb") as file:
                    file.seek(max(0, file.seek(0, os.SEEK_END) - PRINTED_BYTES))
                    end = file.read().decode(errors="replace").strip()
                found += f"The end of {path.resolve()}:\n{end}\n" if end else ""
    return found


@dataclass(frozen=True)
class RayEngineHandle(RolloutClient):
    """Calls the engine of an actor. Only the process that has started the actor can use it.

    Attributes:
        actor: Ray's handle of the actor.
        name: name of the engine, for errors.
        num_workers: number of workers that take in weights.
        timeout_s: seconds that a call may take.
        others: actors of the replica's other nodes, as Ray's reference to a call that never returns, and in words.
    """

    actor: Any
    name: str
    num_workers: int
    timeout_s: float
    others: tuple[tuple[Any, str], ...] = ()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call any method of the engine.

        Raises:
            RefitError: it raised.
            EngineLostError: one of its processes has ended, or it did not answer in time.
        """
        try:
            answer = self.actor.call.remote(method, arguments)
            # The first node would wait for ever for an answer of one that is lost.
            done, _ = ray.wait([answer, *(each for each, _ in self.others)], timeout=self.timeout_s)
            for other, name in self.others:
                if other in done:
                    raise EngineLostError(f"{self.name}: {name} has ended, so {method} got no answer "
                                          f"({_ending(other)})")
            succeeded, value = ray.get(answer, timeout=0 if not done else None)
        except GetTimeoutError as error:
            raise EngineLostError(f"{self.name} did not answer {method} within {self.timeout_s:g} s") from error
        except RayActorError as error:
            raise EngineLostError(f"{self.name} has ended: {method} got no answer ({_short(error)})") from error
        except RayError as error:
            raise EngineLostError(f"{self.name}: {method} got no answer from Ray ({_short(error)})") from error
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
                with _ray_starts(self.gpus):
                    ray.init(**arguments, log_to_driver=False, logging_level=logging.ERROR)
                return
            except Exception as error:  # Ray raises its own errors, those of its network, and plain ones.
                ray.shutdown()
                # Ray leaves the processes of a failed start behind.
                left = set(psutil.Process().children()) - before
                for process in left:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                psutil.wait_procs(left, timeout=10)
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


@contextlib.contextmanager
def _ray_starts(gpus: Sequence[str]) -> Iterator[None]:
    """Context in which Ray starts here, seeing only these GPUs, if any are given.

    Ray replaces this process's handler of SIGTERM, which ends a run after its iteration, so it is put back.

    Ray's processes get sessions of their own. To stop a run, the launcher sends a signal to the whole process group of
    this process. The run then finishes its iteration, and needs its engine for that. The kernel ends Ray's processes
    when this one ends, whatever their group.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handler, popen, visible = (signal.getsignal(signal.SIGTERM), subprocess.Popen.__init__,
                               os.environ.get("CUDA_VISIBLE_DEVICES"))

    def start(self: subprocess.Popen[Any], *arguments: Any, **options: Any) -> None:
        popen(self, *arguments, **options | {"start_new_session": True})

    subprocess.Popen.__init__ = start  # type: ignore[method-assign]
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    try:
        yield
    finally:
        subprocess.Popen.__init__ = popen  # type: ignore[method-assign]
        if is_main:
            signal.signal(signal.SIGTERM, handler)
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        elif gpus:
            del os.environ["CUDA_VISIBLE_DEVICES"]


@dataclass(frozen=True)
class Seat:
    """Place of a replica's workers on one of its nodes, if they share the devices of trainer ranks there.

    Attributes:
        host: number of the host among the trainer's.
        name: the host in words.
        addresses: its network addresses.
        gpus: CUDA's names of the workers' GPUs; empty on the CPU.
    """

    host: int
    name: str
    addresses: tuple[str, ...]
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class _Place:
    """Node, resources and environment of the actor of one node of a replica.

    Attributes:
        replica: number of the replica.
        node_id: Ray's name of the node.
        options: Ray's options of the actor, with its resources.
        variables: environment variables that only this actor gets.
    """

    replica: int
    node_id: str
    options: dict[str, Any]
    variables: dict[str, str] = field(default_factory=dict)


@dataclass
class _Part:
    """Actor of one node of a replica.

    Attributes:
        actor: Ray's handle of the actor.
        replica, node: number of the replica, and of the node among those of the replica.
        where: its process and node in words; the node alone until the process runs.
        watch: a call that ends with the process, on all nodes of a replica but the first.
    """

    actor: Any
    replica: int
    node: int
    where: str
    watch: Any = None


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
        meanwhile: called once in this process, while the engines start.
        seats: for each replica, its seat on each of its nodes. Its actors then ask Ray for no resources. Empty: Ray
            chooses the nodes, and gives each worker a resource of its own.

    Attributes:
        client: calls all replicas.
        address: name or address under which actors reach this process.

    Raises:
        ValueError: there is no Ray cluster, it has no node on the host of a seat, or Ray did not start.
        RefitError: the cluster has no resources for them in time, or one did not start, with its own traceback.
    """

    def __init__(self, options: Sequence[EngineOptions], cluster: RayCluster, resource: str, start_timeout_s: float,
                 call_timeout_s: float, environment: Mapping[str, str], setup: Callable[[], None] | None,
                 trainer_address: str, meanwhile: Callable[[], None] | None = None,
                 seats: Sequence[Sequence[Seat]] = ()) -> None:
        self._deadline, self._start_timeout_s = time.monotonic() + start_timeout_s, start_timeout_s
        self._options, self._resource = options, resource
        self._groups: list[PlacementGroup] = []
        self._parts: list[_Part] = []
        self._has_connected = not ray.is_initialized()
        try:
            if self._has_connected:
                cluster.connect(sum(int(self._bundle(each)["CPU"]) * each.num_nodes for each in options),
                                start_timeout_s)
            places = self._seat_places(cluster.address, seats) if seats else self._reserved_places()
            self._start(places, dict(environment), setup, meanwhile)
            self.address = _reachable(trainer_address) if cluster.address else trainer_address
        except BaseException:  # No actor is left behind, whatever ends the start, Ctrl-C included.
            self.close()
            raise
        handles = []
        for number, each in enumerate(options):
            first, *others = [part for part in self._parts if part.replica == number]
            for part in others:
                part.watch = part.actor.watch.remote()
            handles.append(RayEngineHandle(
                first.actor, f"the engine in {first.where} (a Ray actor)", each.num_workers, call_timeout_s,
                tuple((part.watch, f"its {part.where}") for part in others)))
        self.client: RolloutClient = one_client(handles, call_timeout_s, options[0].data_parallel_size > 1)

    def fault(self) -> str:
        """Say which actor has ended; empty if all are there, whatever they do."""
        for part in self._parts:
            # Those of other nodes are in a call that never returns.
            call = part.watch or part.actor.locate.remote()
            if ray.wait([call], timeout=0 if part.watch else PING_S)[0]:
                try:
                    ray.get(call)
                except CLUSTER_ERRORS as error:
                    return f"replica {part.replica}: {part.where} has ended ({_short(error)})"
        return ""

    def silent(self, within_s: float) -> str:
        """Say which replica does not answer within some seconds, because it hangs; empty if all do."""
        calls = {part.actor.call.remote("ping", ()): part for part in self._parts if part.node == 0}
        answered, _ = ray.wait(list(calls), num_returns=len(calls), timeout=within_s)
        late = [part for call, part in calls.items() if call not in answered]
        return f"replica {late[0].replica}: {late[0].where} hangs and does not answer" if late else ""

    def close(self) -> None:
        """End the actors and free their resources. Also disconnect from Ray, or end it if it was started for them."""
        for part in self._parts:
            with contextlib.suppress(*CLUSTER_ERRORS):  # The actor or Ray may have ended already.
                ray.kill(part.actor, no_restart=True)
        self._parts = []
        groups, self._groups = self._groups, []
        for group in groups:
            with contextlib.suppress(*CLUSTER_ERRORS):
                remove_placement_group(group)
        if self._has_connected:
            ray.shutdown()

    def _bundle(self, options: EngineOptions) -> dict[str, float]:
        """Return the resources of a replica on each of its nodes."""
        workers = float(options.num_workers // options.num_nodes)
        return {"CPU": 1.0, "GPU": workers} if self._resource == "GPU" else {"CPU": workers}

    def _reserved_places(self) -> list[_Place]:
        """Reserve resources, wait for them, and return the place of each actor.

        A bundle is always on one node. Replicas of one node share a placement group. A replica of several nodes has
        one of its own, in which no two bundles are on the same node.

        Raises:
            RefitError: the cluster does not have them in time.
        """
        bundles = [self._bundle(each) for each in self._options]
        if all(each.num_nodes == 1 for each in self._options):
            self._groups = [placement_group(bundles, strategy="PACK")]
        else:
            self._groups = [placement_group([bundle] * each.num_nodes, strategy="STRICT_SPREAD")
                            for bundle, each in zip(bundles, self._options, strict=True)]
        if not all(group.wait(max(0.0, self._deadline - time.monotonic())) for group in self._groups):
            raise self._no_place(bundles)
        found = []
        for number, (bundle, each) in enumerate(zip(bundles, self._options, strict=True)):
            shared = len(self._groups) < len(self._options)
            group = self._groups[0 if shared else number]
            nodes = placement_group_table(group)["bundles_to_node_id"]
            for index in [number] if shared else range(each.num_nodes):
                found.append(_Place(number, nodes[index], {
                    "num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0),
                    "scheduling_strategy": PlacementGroupSchedulingStrategy(
                        group, placement_group_bundle_index=index, placement_group_capture_child_tasks=False)}))
        return found

    def _no_place(self, bundles: Sequence[Mapping[str, float]]) -> RefitError:
        nodes = max(each.num_nodes for each in self._options)
        asked = sum(bundle[self._resource] * each.num_nodes for bundle, each in zip(bundles, self._options,
                                                                                     strict=True))
        there, free = (float(found.get(self._resource, 0)) for found in (ray.cluster_resources(),
                                                                         ray.available_resources()))
        each_of = f"each of {nodes} nodes" if nodes > 1 else "one node"
        return RefitError(
            f"no place for the engine within {self._start_timeout_s:g} s: its {len(bundles)} replicas ask Ray for "
            f"{asked:g} {self._resource}s, {max(bundle[self._resource] for bundle in bundles):g} of them on {each_of}; "
            f"the cluster has {there:g}, {free:g} of them free, on {sum(node['Alive'] for node in ray.nodes())} nodes")

    def _seat_places(self, address: str, seats: Sequence[Sequence[Seat]]) -> list[_Place]:
        """Find Ray's node on the host of each seat, and return the place of each actor.

        Raises:
            ValueError: a host has no node.
        """
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in sorted(
            ray.nodes(), key=lambda node: str(node["NodeID"])) if node["Alive"]}
        by_host: dict[int, str] = {}
        found = []
        for number, own in enumerate(seats):
            for seat in own:
                if seat.host not in by_host:
                    there = [node for node, its_address in nodes.items() if its_address in seat.addresses]
                    if not there:
                        raise ValueError(
                            f"--ray-address {address}: the cluster has no node on {seat.name}, whose addresses are "
                            f"{', '.join(seat.addresses)}; it has nodes on {', '.join(sorted(set(nodes.values())))}. "
                            "--engine-placement colocated needs one on each of the trainer's hosts (ray start)")
                    # If there are several launchers on one machine, each has a node of its own, or all share one.
                    free = [node for node in there if node not in by_host.values()]
                    by_host[seat.host] = (free or there)[0]
                visible = {"CUDA_VISIBLE_DEVICES": ",".join(seat.gpus), KEEPS_VISIBLE: "1",
                           DEVICE_ORDER: os.environ.get(DEVICE_ORDER, "FASTEST_FIRST")} if seat.gpus else {}
                found.append(_Place(number, by_host[seat.host], {
                    "num_cpus": 0, "num_gpus": 0,
                    "scheduling_strategy": NodeAffinitySchedulingStrategy(by_host[seat.host], soft=False)}, visible))
        return found

    def _start(self, places: Sequence[_Place], environment: dict[str, str], setup: Callable[[], None] | None,
               meanwhile: Callable[[], None] | None) -> None:
        """Start an actor at each place, and the engines in them. Raises RefitError like `_results`."""
        remote: Any = ray.remote(EngineActor)
        names = {node["NodeID"]: f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
                 for node in ray.nodes()}
        counts = [0] * len(self._options)
        for place in places:
            variables = environment | self._options[place.replica].environment | place.variables
            actor = remote.options(**place.options, max_restarts=0, runtime_env={"env_vars": variables}).remote()
            self._parts.append(_Part(actor, place.replica, counts[place.replica],
                                     names.get(place.node_id, "a node that is gone")))
            counts[place.replica] += 1
        found = self._results([part.actor.locate.remote() for part in self._parts])
        first: dict[int, tuple[str, int]] = {}
        for part, (where, address, port) in zip(self._parts, found, strict=True):
            part.where = where
            first.setdefault(part.replica, (address, port))
        starts = []
        for part in self._parts:
            each = self._options[part.replica]
            if each.data_parallel_size > 1:
                each = at_meeting_point(each, *first[0])
            node = NodePlace(part.node, *first[part.replica]) if each.num_nodes > 1 else None
            starts.append(part.actor.start.remote(each, setup, node))
        if meanwhile is not None:
            meanwhile()
        self._results(starts, lambda result: "" if result[0] else result[1])

    def _results(self, calls: Sequence[Any], fault: Callable[[Any], str] = lambda result: "") -> list[Any]:
        """Return the results of a call of each actor.

        Raises:
            RefitError: one has ended, has a fault or does not answer before the start's time is over.
        """
        waiting = dict(zip(calls, self._parts, strict=True))
        results: dict[Any, Any] = {}
        while waiting:
            done, _ = ray.wait(list(waiting), timeout=max(0.0, self._deadline - time.monotonic()))
            if not done:
                late = ", ".join(dict.fromkeys(str(part.replica) for part in waiting.values()))
                where = "; ".join(part.where for part in waiting.values())
                raise RefitError(f"replica {late}: the engine, a Ray actor, did not start within "
                                 f"{self._start_timeout_s:g} s: no answer from {where}")
            part = waiting.pop(done[0])
            try:
                results[done[0]] = ray.get(done[0])
                problem = fault(results[done[0]])
            except RayError as error:
                problem = f"its Ray actor has ended: {_short(error)}"
            if problem:
                raise RefitError(f"replica {part.replica}: the engine did not start: {part.where}: {problem}")
        return [results[call] for call in calls]


def _ending(call: Any) -> str:
    """Return the reason for the end of an actor, given its call that never returns."""
    try:
        ray.get(call, timeout=PING_S)
    except CLUSTER_ERRORS as error:
        return _short(error)
    return "no reason is known"


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
