"""One GPU trains, and offloads between its steps: `torchrun offload_worker.py FILE plain|moved FLAGS...`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch


def main(file: str, what: str, *flags: str) -> None:
    from mimo.platform import get_platform

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    platform = get_platform("cuda")
    platform.make_deterministic()
    platform.set_device(int(os.environ["LOCAL_RANK"]))
    platform.init_process_group(rank, world_size, 120)
    from tests.support import offloading

    seen: dict[str, list[tuple[int, int]]] = {"before": [], "away": []}

    def watch(when: str, parts: Any) -> None:
        torch.cuda.synchronize()
        seen[when].append((torch.cuda.memory_allocated(), offloading.num_bytes(parts)))

    trained = offloading.train(rank, (*flags, "--device", "cuda"), world_size, what == "moved", watch)
    torch.save({"trained": trained, "seen": seen}, Path(file))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
