"""Connects trainer ranks and the engine's workers through a TCPStore, with tables of the set-up and flags of each sync.

Every wait is a poll with a deadline that also looks for failures of the others. So an error of one process reaches all
within a fraction of a second, and a process that stays silent is named when time is up. Weights do not travel here.
"""

from __future__ import annotations

import gc
import ipaddress
import json
import secrets
import socket
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from hmac import compare_digest
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

POLL_S = 0.002
MAX_POLL_S = 0.01
# Error of an engine, and of each of its workers, if it is asked to generate before it has all of its weights.
NO_WEIGHTS = ("this engine has no complete weights: no refit has succeeded since it started, or the last one failed; "
              "it generates again after one that does")
# Key under which a store holds the secret of its run.
_SERVED = "served"


class RefitError(RuntimeError):
    """A refit that failed. The engine then refuses to serve until another one has succeeded."""


def format_error(error: BaseException) -> str:
    """Describe an error for other processes."""
    return str(error) if isinstance(error, RefitError) else f"{type(error).__name__}: {error}"


def participants(num_trainers: int, num_workers: int) -> list[str]:
    """Return the names of all participants of a refit, for messages and keys of the store; the trainer's come first."""
    return [*(f"trainer rank {rank}" for rank in range(num_trainers)),
            *(f"worker {worker}" for worker in range(num_workers))]


@contextmanager
def without_collections() -> Iterator[None]:
    """Context in which Python does not look for cycles of objects that nothing refers to.

    A set-up makes millions of objects that stay. With them, and those of a model and its libraries, the searches would
    take a quarter of its time and find nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class StoreAddress:
    """Address of the store of a run."""

    address: str
    port: int
    secret: str = field(repr=False)


def own_address(name: str) -> str:
    """Return the address to which a store on this machine has to bind so that others reach it under `name`.

    A loopback address stays as it is, because all participants are on this machine then. A machine's own name may stand
    for a loopback address on the machine itself (as on Debian) and for another address elsewhere. The result is then
    the address of the default route.

    Raises:
        OSError: the name is unknown.
    """
    address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    if not ipaddress.ip_address(address).is_loopback or name in (address, "localhost"):
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; the address is reserved for documentation
        except OSError:
            return address  # there is no network, so all participants are here
        return str(probe.getsockname()[0])


class Rendezvous:
    """Connection of a participant to the store.

    Args:
        store: the store.
        who: name of this participant in messages: `trainer rank 3`, `worker 0`.
        timeout_s: seconds to wait for others.
    """

    def __init__(self, store: Store, who: str, timeout_s: float) -> None:
        self.store = store
        self.who = who
        self.timeout_s = timeout_s

    @classmethod
    def host(cls, name: str, who: str, timeout_s: float) -> tuple[Rendezvous, StoreAddress]:
        """Serve a store for one run, on a free port of one address of this machine.

        The others reach this machine under `name`, a loopback address if all are on it.

        Returns:
            The rendezvous, and the address by which the others join it.

        Raises:
            RefitError: the address is not one of this machine.
        """
        address = name
        try:
            address = own_address(name)
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = socket.create_server((address, 0), family=family, backlog=1024)
        except OSError as error:
            raise RefitError(f"{who} cannot serve the refit store at {name} ({address}): {error}") from error
        store_address = StoreAddress(address, listener.getsockname()[1], secrets.token_hex(32))
        # The store closes the socket.
        return cls.join(store_address, who, timeout_s, listener.detach()), store_address

    @classmethod
    def join(cls, store_address: StoreAddress, who: str, timeout_s: float, listener: int | None = None) -> Rendezvous:
        """Connect to the store of a run.

        `listener` is the descriptor of the socket on which this participant serves the store; None if another
        participant serves it.

        Raises:
            RefitError: nobody answers there, or it is the store of another run.
        """
        address, port, secret = store_address.address, store_address.port, store_address.secret
        try:
            store = TCPStore(address, port, None, listener is not None, timedelta(seconds=timeout_s),
                             wait_for_workers=False, master_listen_fd=listener)
            # The run's keys begin with its secret, so nobody can name them without it.
            own = PrefixStore(secret, store)
            if listener is not None:
                own.set(_SERVED, secret)
            is_ours = own.check([_SERVED]) and compare_digest(own.get(_SERVED), secret.encode())
        except (RuntimeError, ValueError) as error:
            raise RefitError(f"{who} cannot reach the refit store at {address}:{port}: {error}") from error
        if not is_ours:
            raise RefitError(f"{who}: the refit store at {address}:{port} is not that of this run")
        return cls(own, who, timeout_s)

    def publish(self, key: str, value: Any) -> None:
        """Publish plain data under a key."""
        self.store.set(key, zlib.compress(json.dumps(value).encode(), 1))  # type: ignore[arg-type]  # it takes bytes

    def read(self, key: str, scope: str, what: str) -> Any:
        """Wait for plain data that a participant publishes.

        Args:
            key: key of the data.
            scope: scope whose failures end the wait (`set-up`, `sync 3`).
            what: description of the data, for messages.

        Raises:
            RefitError: a participant failed, or nothing came in time.
        """
        self.until(scope, lambda: self.store.check([key]), lambda: f"{self.who} waits for {what}")
        return json.loads(zlib.decompress(self.store.get(key)))

    def publish_bytes(self, values: Mapping[str, bytes]) -> None:
        """Publish bytes under several keys, in one call of the store."""
        if values:
            # torch's stubs lack this method.
            self.store.multi_set(list(values), list(values.values()))  # type: ignore[attr-defined]

    def read_bytes(self, keys: Sequence[str]) -> list[bytes]:
        """Return bytes that have been published. Others announce by another key that they are there."""
        try:
            return [bytes(value) for value in self.store.multi_get(list(keys))] if keys else []
        except RuntimeError as error:
            raise self._lost(error) from error

    def glimpse(self, key: str, within_s: float) -> Any:
        """Wait a moment for plain data, even after a failure; None if it does not come."""
        deadline = time.monotonic() + within_s
        try:
            while not self.store.check([key]):
                if time.monotonic() > deadline:
                    return None
                time.sleep(POLL_S)
            return json.loads(zlib.decompress(self.store.get(key)))
        except RuntimeError:
            return None  # the store is gone

    def claim(self, key: str, who: str) -> str | None:
        """Take a key that only one participant may have. Return None, or the participant that has it already."""
        mark = f"{uuid.uuid4()} {who}"
        try:
            holder = self.store.compare_set(key, "", mark).decode()
        except RuntimeError as error:
            raise self._lost(error) from error
        return None if holder == mark else holder.partition(" ")[2]

    def arrive(self, scope: str, stage: str) -> None:
        """Announce that this participant has reached a stage."""
        self.store.set(f"{scope}/{stage}/{self.who}", "here")

    def wait_for(self, scope: str, stage: str, everybody: Sequence[str], grace_s: float = 0.0) -> None:
        """Wait until all have reached a stage, `grace_s` seconds longer than usual.

        Raises:
            RefitError: a participant failed, or some did not come in time; names them.
        """
        missing = [f"{scope}/{stage}/{who}" for who in everybody]

        def absent() -> str:
            late = [who for who, key in zip(everybody, missing, strict=True) if not self.store.check([key])]
            return f"{scope}, stage {stage!r}: {self.who} waits for {', '.join(late)}"

        self.until(scope, lambda: self.store.check(missing), absent, grace_s)

    def meet(self, scope: str, stage: str, everybody: Sequence[str]) -> None:
        """Announce that this participant has reached a stage, and wait until all have. Raises as `wait_for`."""
        self.arrive(scope, stage)
        self.wait_for(scope, stage, everybody)

    def until(self, scope: str, is_done: Callable[[], bool], waiting: Callable[[], str], grace_s: float = 0.0) -> None:
        """Wait until something is done.

        Args:
            scope: scope whose failures end the wait.
            is_done: called repeatedly.
            waiting: describes who waits for what, for messages.
            grace_s: seconds to wait longer than usual.

        Raises:
            RefitError: a participant failed, or it was not done in time.
        """
        limit_s = self.timeout_s + grace_s
        deadline, pause = time.monotonic() + limit_s, POLL_S
        while True:
            self.check(scope)
            try:
                if is_done():
                    return
            except RuntimeError as error:
                raise self._lost(error) from error
            if time.monotonic() > deadline:
                raise RefitError(f"{waiting()}; nothing came within {limit_s:g} s")
            time.sleep(pause)
            pause = min(MAX_POLL_S, pause * 1.5)

    def fail(self, scope: str, reason: str) -> None:
        """Announce that a scope has failed, unless it has already. Never raises, because errors are being handled."""
        try:
            self.store.compare_set(f"{scope}/failed", "", f"{self.who}: {reason}")
        except RuntimeError:
            return  # the store is gone, so nobody can read it

    def check(self, scope: str) -> None:
        """Raise RefitError if a scope has failed, or if the trainer's first rank, which serves the store, has ended."""
        try:
            if not self.store.check([f"{scope}/failed"]):
                return
            reason = self.store.get(f"{scope}/failed").decode()
        except RuntimeError as error:
            raise self._lost(error) from error
        raise RefitError(f"{scope} failed: {reason}")

    def _lost(self, error: RuntimeError) -> RefitError:
        return RefitError(f"{self.who} has lost the refit store, which the trainer's first rank serves: {error}")
