"""Exchange messages between the nodes of a job over one TCP store on the first node. Needs no GPU network."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, TCPStore

# Seconds between two polls of nodes that have not answered.
PAUSE_S = 0.2


@dataclass(frozen=True)
class JobNode:
    """This node among the nodes of the job.

    Attributes:
        node: index of this node.
        hosts: names of all nodes, in order.
        address, port: address and port at which the first node listens.
        gpus_per_node: number of processes that a node starts for a check.
    """

    node: int
    hosts: tuple[str, ...]
    address: str
    port: int
    gpus_per_node: int

    @property
    def name(self) -> str:
        return self.hosts[self.node]

    @property
    def is_first(self) -> bool:
        """Whether this node decides and reports."""
        return self.node == 0


class MessageBoard:
    """Messages of the nodes by topic."""

    def __init__(self, place: JobNode, timeout_s: float) -> None:
        """Connect. Raises ValueError if the first node does not answer in time or its port is taken."""
        self.place = place
        try:
            self._store = TCPStore(place.address, place.port, is_master=place.is_first, wait_for_workers=False,
                                   timeout=timedelta(seconds=timeout_s))
        except DistError as error:
            raise ValueError(f"{place.name}: no connection to {place.address}:{place.port}, where the first node "
                             f"listens, in {timeout_s:g} s: {str(error).splitlines()[0]}") from error
        self.port = int(self._store.port)

    def post(self, topic: str, said: Any) -> None:
        self._store.set(f"{topic}/{self.place.node}", json.dumps(said))

    def announce(self, what: str) -> None:
        """Announce an event. It does not matter which node announces it."""
        self._store.set(what, "")

    def announced(self, what: str) -> bool:
        return bool(self._store.check([what]))

    def collect(self, topic: str, nodes: range | list[int], timeout_s: float) -> dict[int, Any]:
        """Collect the messages of nodes on a topic. Nodes that do not answer in time are left out."""
        end = time.monotonic() + timeout_s
        missing, found = list(nodes), {}
        while missing:
            said = [node for node in missing if self._store.check([f"{topic}/{node}"])]
            found.update({node: json.loads(self._store.get(f"{topic}/{node}")) for node in said})
            missing = [node for node in missing if node not in found]
            if missing and time.monotonic() > end:
                break
            time.sleep(PAUSE_S if missing else 0)
        return found

    def ask_first(self, topic: str, timeout_s: float) -> Any:
        """Return the message of the first node on a topic.

        Raises:
            ValueError: the first node does not answer in time, or is gone.
        """
        try:
            self._store.wait([f"{topic}/0"], timedelta(seconds=timeout_s))
            return json.loads(self._store.get(f"{topic}/0"))
        except DistError as error:
            raise ValueError(f"{self.place.name}: {self.place.hosts[0]} sent no message {topic!r} in {timeout_s:g} s"
                             ) from error
