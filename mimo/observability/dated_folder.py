"""Dated folders for runs without --run-dir, one for each run, and the link `runs/latest` to the newest."""

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
    """Make a folder of its own for a run: `runs/<date>-<time>-<names>`.

    The names are those of the model and data providers; `pkg.module:attr` appears as `module`.

    Raises:
        OSError: the folder cannot be made.
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
    """Return whether the name of a folder is one that `make_run_folder` gives."""
    return Path(run_dir).parent == RUNS and _CHOSEN.fullmatch(Path(run_dir).name) is not None


def point_latest_to(folder: Path) -> str | None:
    """Make `runs/latest` a link to a folder of `runs`, in one step. Return the reason if that fails, else None."""
    if folder.parent != RUNS:
        return None
    if LATEST.is_dir() and not LATEST.is_symlink():
        return f"{LATEST} is a folder of an earlier run and stays: move it away, so that later runs can make the link"
    link = RUNS / f".latest-{os.getpid()}-{folder.name}"
    try:
        link.symlink_to(folder.name)
        link.replace(LATEST)
    except OSError as error:
        link.unlink(missing_ok=True)
        return f"{LATEST} could not be made a link to {folder.name}: {error}"
    return None


def refuse_latest(run_dir: str) -> None:
    """Raise ValueError if --run-dir names the link, whose folder belongs to another run."""
    path = Path(run_dir)
    if path.name == LATEST.name and path.is_symlink():
        raise ValueError(f"--run-dir {run_dir} is a link to the folder of the newest run, {path.readlink()}: leave "
                         "--run-dir out for a new folder (a run that resumes from its own checkpoint keeps the one "
                         "that it had), or name another folder")
