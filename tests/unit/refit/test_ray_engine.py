"""Engines as Ray actors, with a real Ray that is told of two GPUs, and engines that only take calls."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from mimo.refit.rendezvous import RefitError
from mimo.rollout.ray_actors import RayCluster, RayEngines, Seat
from tests.support.echo_engine import engine_options, fail_to_start, sleep_long, use_noting_engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Ray with the GPUs 4 and 5, started by a process of a launcher."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "3")
        patch.setenv("PYTHONPATH", str(ROOT))
        RayCluster("", ("4", "5")).connect(4, 600)
        assert "CUDA_VISIBLE_DEVICES" not in os.environ
    yield
    ray.shutdown()


@contextmanager
def engines(folder: Path, count: int, start_timeout_s: float = 600, call_timeout_s: float = 300,
            setup: Callable[[], None] = use_noting_engine, **environment: str) -> Iterator[list[Any]]:
    """Clients of so many engines of one GPU each."""
    options = [dataclasses.replace(engine_options(), model=str(folder)) for _ in range(count)]
    started = RayEngines(options, RayCluster(""), "GPU", start_timeout_s, call_timeout_s, environment, setup, "here")
    try:
        client: Any = started.client
        yield list(client.replicas) if count > 1 else [client]
    finally:
        started.close()
    wait_for(lambda: ray.available_resources().get("GPU") == 2)


def wait_for(is_done: Callable[[], bool]) -> None:
    """Wait up to a minute."""
    deadline = time.monotonic() + 60
    while not is_done() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert is_done()


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def process_of(client: Any) -> psutil.Process:
    return psutil.Process(int(re.findall(r"process (\d+)", client.name)[0]))


def test_each_actor_has_gpus_of_its_own_and_what_was_forwarded_and_no_rank(tmp_path: Path) -> None:
    with engines(tmp_path, 2, HF_HOME="/hub") as clients:
        assert sorted(each.call("variable", "CUDA_VISIBLE_DEVICES") for each in clients) == ["4", "5"]
        assert [each.call("variable", "HF_HOME") for each in clients] == ["/hub"] * 2
        assert [each.call("variable", "RANK") for each in clients] == [None, None]
        with pytest.raises(RefitError, match="^the weights are of another model$"):
            clients[0].update_weights({"name": "a", "error": RefitError("the weights are of another model")})
        with pytest.raises(RefitError, match=r"Traceback(.|\n)*ZeroDivisionError: by nothing"):
            clients[0].update_weights({"name": "a", "error": ZeroDivisionError("by nothing")})
        killed, stopped = process_of(clients[0]), process_of(clients[1])
        workers = [psutil.Process(each.call("start_worker")) for each in clients]
        killed.kill()
        began = time.monotonic()
        with pytest.raises(RefitError, match=rf"the engine in process {killed.pid} on .* \(a Ray actor\) has ended: "
                                             "prompt_logprobs got no answer"):
            clients[0].prompt_logprobs([])
        assert time.monotonic() - began < 60, "long before the limit of a call"
        wait_for(lambda: has_ended(workers[0]))
        os.kill(stopped.pid, signal.SIGSTOP)
        impatient = dataclasses.replace(clients[1], timeout_s=0.5)
        with pytest.raises(RefitError, match=rf"process {stopped.pid} .* did not answer prompt_logprobs within 0\.5 s"):
            impatient.prompt_logprobs([])
    wait_for(lambda: all(map(has_ended, [stopped, *workers])))


def test_an_actor_that_shares_gpus_sees_those_of_its_seat_and_takes_none_from_ray(tmp_path: Path) -> None:
    addresses = ("10.9.8.7", ray.util.get_node_ip_address())
    options = [dataclasses.replace(engine_options(), model=str(tmp_path))] * 2
    # Two launchers of one machine share Ray's only node there.
    places = [[Seat(host, "a host", addresses, gpus)] for host, gpus in enumerate((("1", "GPU-3f"), ("7",)))]
    started = RayEngines(options, RayCluster(""), "GPU", 600, 300, {"CUDA_VISIBLE_DEVICES": "0"}, use_noting_engine,
                         "here", seats=places)
    try:
        client: Any = started.client
        assert [each.call("variable", "CUDA_VISIBLE_DEVICES") for each in client.replicas] == ["1,GPU-3f", "7"]
        assert ray.available_resources()["GPU"] == 2
        assert started.fault() == ""
    finally:
        started.close()
    elsewhere = [Seat(1, "host b, the host of trainer ranks 8 to 15", ("10.9.8.7",), ("0",))]
    with pytest.raises(ValueError, match="the cluster has no node on host b, the host of trainer ranks 8 to 15, "
                                         r"whose addresses are 10\.9\.8\.7"):
        RayEngines(options, RayCluster("auto"), "GPU", 600, 300, {}, use_noting_engine, "here",
                   seats=[places[0], elsewhere])


def test_a_signal_to_the_group_of_this_process_is_not_for_ray(tmp_path: Path) -> None:
    with engines(tmp_path, 1) as (client,):
        # This process may have children of other tests, such as multiprocessing's fork server, whose arguments have a
        # path of Ray's.
        lines = {each: " ".join(each.cmdline()) for each in psutil.Process().children()}
        ray_itself = {each.name(): os.getpgid(each.pid) for each, line in lines.items()
                      if f"{os.sep}ray{os.sep}" in line and "multiprocessing" not in line}
        assert {"gcs_server", "raylet"} <= ray_itself.keys()
        assert os.getpgid(0) not in {*ray_itself.values(), os.getpgid(process_of(client).pid)}


def test_a_start_that_is_late_is_begun_again_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def late(**arguments: Any) -> None:
        started.append(subprocess.Popen(["sleep", "1000"]))
        if len(started) < 3:
            raise Exception("The current node timed out during startup. This could happen because")

    monkeypatch.setattr(ray, "init", late)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    RayCluster("").connect(1, 60)
    assert [each.poll() is None for each in started] == [False, False, True]
    started[2].kill()
    with pytest.raises(ValueError, match="--engine-placement ray: Ray did not start here: Exception: The current node"):
        started.clear()
        RayCluster("").connect(1, 0)


def test_an_address_where_nobody_answers_is_said_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"--ray-address {address}: nobody answers at {address}"):
            RayCluster(address).connect(1)


def test_more_gpus_than_there_are_is_said_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(RefitError, match="no place for the engine within 2 s: its 3 replicas ask Ray for 3 GPUs, 1 of "
                                         "them on one node; the cluster has 2, .* of them free, on 1 nodes"):
        with engines(tmp_path, 3, start_timeout_s=2):
            pass
    groups = ray.util.placement_group_table().values()
    assert {group["state"] for group in groups} <= {"REMOVED"}


@pytest.mark.parametrize(("folder", "expected"), [
    ("", r"replica 0: the engine did not start: process \d+ on .*: Traceback(.|\n)*OSError: there is no such model\n"
         r"The end of .*\.out:\n(.|\n)*a worker finds no model\nThe end of .*\.err:\n(.|\n)*its last words"),
    ("nowhere", r"replica 0: the engine did not start: process \d+ on .* sees no folder .*nowhere: it has to be on a "
                "file system of all nodes")])
def test_an_engine_that_does_not_start_says_why_and_leaves_its_place(tmp_path, folder, expected):
    with pytest.raises(RefitError, match=expected):
        with engines(tmp_path / folder, 1, setup=fail_to_start):
            pass
    wait_for(lambda: ray.available_resources().get("GPU") == 2)


def test_an_error_of_the_caller_while_actors_start_ends_them(tmp_path: Path) -> None:
    def work() -> None:
        raise ValueError("no rule for a tensor")

    options = [dataclasses.replace(engine_options(), model=str(tmp_path))]
    with pytest.raises(ValueError, match="no rule for a tensor"):
        RayEngines(options, RayCluster(""), "GPU", 600, 300, {}, sleep_long, "here", work)
    wait_for(lambda: ray.available_resources().get("GPU") == 2)


def test_an_engine_that_takes_too_long_to_start_is_ended_in_time(tmp_path: Path) -> None:
    with pytest.raises(RefitError, match="replica 0: the engine, a Ray actor, did not start within 30 s"):
        with engines(tmp_path, 1, start_timeout_s=30, setup=sleep_long):
            pass
    wait_for(lambda: ray.available_resources().get("GPU") == 2)
