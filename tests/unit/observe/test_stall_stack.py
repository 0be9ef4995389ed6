from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist

from mimo.watchdog.status import Blocked, called_name, find_blocked, stack_lines


@contextmanager
def frame_of(function: Callable[[], object]) -> Iterator[FrameType]:
    """The innermost frame of a thread that runs `function` and is blocked in it."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    time.sleep(0.3)
    assert thread.ident is not None
    yield sys._current_frames()[thread.ident]


class Handle:
    """A handle whose `wait` is a call into C, as that of a collective is."""

    def __init__(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        self.wait = self.item = self.to = self._cuda_synchronize = lock.acquire


def handle_in(folder: Path, source: str) -> Callable[[], None]:
    """Return a function of a file in that folder, which is gone by the time it runs."""
    scope: dict[str, Any] = {"handle": Handle(), "handles": {"a": Handle()}, "float": Handle().wait}
    exec(compile(source, str(folder / "module.py"), "exec"), scope)
    return scope["blocked"]


@pytest.mark.parametrize(("call", "name"), [("handle.wait()", "wait"),
                                            ("handles[str('a')].wait(True, len('abc') * 10)", "wait"),
                                            ("x = [handle.wait(\n        timeout=int('30'))]", "wait"),
                                            ("print(handle.item())", "item"),
                                            ("(lambda: 1)() and handle.wait()", "wait")])
def test_the_name_of_a_call_is_found_without_its_source(tmp_path: Path, call: str, name: str) -> None:
    with frame_of(handle_in(tmp_path, f"def blocked():\n    {call}\n")) as frame:
        assert called_name(frame) == name


def test_a_handle_is_one_of_torch_only_in_code_that_has_such(tmp_path: Path) -> None:
    source = "def blocked():\n    handle.wait()\n"
    with frame_of(handle_in(tmp_path / "megatron" / "core", source)) as frame:
        assert find_blocked(frame) == Blocked("handle", "wait")
    with frame_of(handle_in(tmp_path / "ray", source)) as frame:
        assert find_blocked(frame) == Blocked()


def test_a_synchronisation_waits_where_there_is_an_accelerator(tmp_path: Path) -> None:
    with frame_of(handle_in(tmp_path, "def blocked():\n    handle.item()\n")) as frame:
        assert find_blocked(frame, on_device=True) == Blocked("device", "item")
        assert find_blocked(frame) == Blocked()


@pytest.mark.parametrize("call", ["handle._cuda_synchronize()", "handle.to()", "float()"])
def test_other_calls_that_wait_for_the_accelerator(tmp_path: Path, call: str) -> None:
    with frame_of(handle_in(tmp_path, f"def blocked():\n    {call}\n")) as frame:
        assert find_blocked(frame, on_device=True).kind == "device"


def test_a_stack_can_do_without_lines_of_code() -> None:
    with frame_of(lambda: time.sleep(30)) as frame:
        assert stack_lines(frame, code=False)[0].endswith(" <lambda>")


def test_locks_and_sleep() -> None:
    with frame_of(threading.Event().wait) as frame:
        assert find_blocked(frame).kind == "host"
    with frame_of(lambda: time.sleep(30)) as frame:
        assert find_blocked(frame) == Blocked()
        assert called_name(frame) == "sleep"
        assert stack_lines(frame)[0].endswith("<lambda>: with frame_of(lambda: time.sleep(30)) as frame:")


def fake_distributed(group: object, **variables: object) -> Callable[[], None]:
    """Return a call of torch.distributed that blocks, with these variables."""
    names = ", ".join(variables)
    source = f"def all_reduce(group, {names}):\n    handle.wait()\ndef recv(group, {names}):\n    handle.wait()\n"
    scope: dict[str, Any] = {"handle": Handle()}
    exec(compile(source, "/x/torch/distributed/distributed_c10d.py", "exec"), scope)
    operation = "recv" if "src" in variables else "all_reduce"
    wrapped: dict[str, Any] = {"call": lambda: scope[operation](group, **variables)}
    exec(compile("def blocked():\n    call()\n", "/x/torch/distributed/c10d_logger.py", "exec"), wrapped)
    return wrapped["blocked"]


def test_a_call_of_torch_distributed_shows_its_group_and_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", {"a group": [3, 5]}.__getitem__)
    with frame_of(fake_distributed("a group", tensor=0)) as frame:
        assert find_blocked(frame) == Blocked("collective", "all_reduce", (3, 5))
    with frame_of(fake_distributed("a group", src=5)) as frame:
        assert find_blocked(frame) == Blocked("transfer", "recv", (5,))
    with frame_of(fake_distributed("a group", src=None, group_src=0)) as frame:
        assert find_blocked(frame) == Blocked("transfer", "recv", (3,))
    with frame_of(fake_distributed("destroyed", tensor=0)) as frame:
        assert find_blocked(frame) == Blocked("handle", "all_reduce"), "not a group of this rank any more"


def test_a_call_of_torch_distributed_without_a_group_shows_its_own_name() -> None:
    scope: dict[str, Any] = {"handle": Handle()}
    source = "def batch_isend_irecv(p2p_op_list):\n    handle.wait()\n"
    exec(compile(source, "/x/torch/distributed/distributed_c10d.py", "exec"), scope)
    with frame_of(lambda: scope["batch_isend_irecv"]([])) as frame:
        assert find_blocked(frame) == Blocked("handle", "batch_isend_irecv")
