"""One rank of the test of encoder prefetch on GPUs: `torchrun prefetch_worker.py FOLDER DEPTH,DEPTH... FLAGS...`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch


def main(folder: str, depths: str, *flags: str) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    from mimo.platform import get_platform

    platform = get_platform("cuda")
    platform.make_deterministic()
    platform.set_device(int(os.environ["LOCAL_RANK"]))
    platform.init_process_group(rank, world_size, 120)
    from tests.support.prefetching import train_with_each

    found = train_with_each(rank, (*flags, "--device", "cuda"), world_size, tuple(map(int, depths.split(","))))
    torch.save(found, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
