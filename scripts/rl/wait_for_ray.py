"""Wait until a Ray cluster has its nodes and GPUs. The program runs on one of its nodes.

    python scripts/rl/wait_for_ray.py HOST:PORT --nodes 3 --gpus 16 --timeout-s 300

The exit code is 0 when they are there. After the time limit it is 1, and a message says how many there were.
"""

from __future__ import annotations

import argparse
import logging
import socket
import sys
import time

POLL_S = 1.0


def answers(address: str, timeout_s: float) -> bool:
    """Whether a server listens at host:port. Ray itself would try for minutes and print messages."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout_s).close()
    except OSError:
        return False
    return True


def count(address: str) -> tuple[int, float, str]:
    """Return the number of living nodes, that of their GPUs, and the reason if this node cannot ask for them."""
    import ray
    from ray.exceptions import RayError

    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (RayError, ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            return 0, 0.0, f"; {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return len(nodes), sum(float(node["Resources"].get("GPU", 0)) for node in nodes), ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", metavar="HOST:PORT", help="address of the head node")
    parser.add_argument("--nodes", type=int, default=1, help="number of nodes to wait for (default: 1)")
    parser.add_argument("--gpus", type=float, required=True, help="number of GPUs to wait for")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="seconds to wait (default: 300)")
    given = parser.parse_args(arguments)
    if not given.address.rpartition(":")[2].isdecimal():
        parser.error(f"{given.address} is not HOST:PORT")
    until, nodes, gpus, reason = time.monotonic() + given.timeout_s, 0, 0.0, "; nothing answers at that address"
    while True:
        if answers(given.address, given.timeout_s):
            nodes, gpus, reason = count(given.address)
        if nodes >= given.nodes and gpus >= given.gpus:
            print(f"Ray at {given.address}: {gpus:g} GPUs, {nodes} nodes")
            return 0
        if time.monotonic() > until:
            print(f"error: Ray at {given.address} has {gpus:g} GPUs ({given.gpus:g} wanted) on {nodes} nodes "
                  f"({given.nodes} wanted) after {given.timeout_s:g} s{reason}", file=sys.stderr)
            return 1
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main())
