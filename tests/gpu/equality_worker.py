"""One rank of the equality test on GPUs: `torchrun equality_worker.py FOLDER oracle|layout FLAGS...`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch


def main(folder: str, what: str, *flags: str) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    from mimo.platform import get_platform

    platform = get_platform("cuda")
    platform.set_device(int(os.environ["LOCAL_RANK"]))
    platform.init_process_group(rank, world_size, 120)
    from tests.support.equality import run_layout, run_oracle

    flags = (*flags, "--device", "cuda")
    outcome = run_oracle(rank, flags) if what == "oracle" else run_layout(rank, flags, world_size)
    torch.save(outcome, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
