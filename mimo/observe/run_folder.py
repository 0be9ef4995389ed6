"""The folder of a run without --run-dir: dated, one for each run, with `runs/latest` as a link to the newest."""

from __future__ import annotations

import itertools
import os
import re
import time
from pathlib import Path

RUNS = Path("runs")
LATEST = RUNS / "latest"
_CHOSEN = re.compile(r"\d{8}-\d{6}-[\w.-]+")


def make_run_folder(*names: str) -> Path:
    """Make a folder that no other run has: `runs/<date>-<time>-<names>`.

    Args:
        names: model and data providers; of `pkg.module:attr` the module's last part is taken.

    Raises:
        OSError: it cannot be made.
    """
    RUNS.mkdir(parents=True, exist_ok=True)
    words = [re.sub(r"[^\w.-]", "_", name.partition(":")[0].rpartition(".")[2]) for name in names]
    name = "-".join([time.strftime("%Y%m%d-%H%M%S"), *words])
    for number in itertools.count(1):
        folder = RUNS / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:  # another run began in the same second
            continue
        return folder
    raise AssertionError("counting does not end")


def is_chosen(run_dir: str) -> bool:
    """Return whether `make_run_folder` gave a folder its name."""
    return Path(run_dir).parent == RUNS and _CHOSEN.fullmatch(Path(run_dir).name) is not None


def point_latest_to(folder: Path) -> str | None:
    """Make `runs/latest` a link to a folder of `runs`, in one step; return why it is not one, or None."""
    if folder.parent != RUNS:
        return None
    if LATEST.is_dir() and not LATEST.is_symlink():
        return f"{LATEST} is a folder of an earlier run and stays: move it away to have a link to the newest run there"
    link = RUNS / f".latest-{os.getpid()}-{folder.name}"
    try:
        link.symlink_to(folder.name)
        link.replace(LATEST)
    except OSError as error:
        link.unlink(missing_ok=True)
        return f"{LATEST} could not be made a link to {folder.name}: {error}"
    return None


def refuse_latest(run_dir: str) -> None:
    """Raise ValueError where --run-dir names the link, whose folder belongs to another run."""
    path = Path(run_dir)
    if path.name == LATEST.name and path.is_symlink():
        raise ValueError(f"--run-dir {run_dir} is a link to the folder of the newest run, {path.readlink()}: leave "
                         "--run-dir out, and the run gets a folder of its own (one that goes on from a checkpoint: the "
                         "folder that it had), or name a folder")
