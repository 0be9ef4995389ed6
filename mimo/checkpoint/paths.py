"""The folder of a run's checkpoints: names, the tracker file, publishing, tidying. One process does each of these.

A checkpoint is written under a name of its own (`.saving_iter_0000010`) and renamed once it is complete, and one that
is deleted loses its name first, so a folder `iter_*` is always whole. The tracker names a checkpoint once it has its
name. Whatever interrupts a save leaves both as they were.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
# A data stream is named `module/lane`; what is read once for all modules has this in place of one.
SHARED_STREAM = "data"
RELEASE = "release"
METADATA = "metadata.json"
_ITERATION = re.compile(r"iter_(\d{7,})")
_UNFINISHED = ".saving_"
_REPLACED = ".replaced_"
_DELETED = ".deleted_"


def iteration_dir(root: Path, iteration: int) -> Path:
    """Folder of one iteration's checkpoint, as Megatron names it."""
    return root / f"iter_{iteration:07d}"


def begin(root: Path, iteration: int) -> Path:
    """An empty folder to write a checkpoint into; what an interrupted save left behind is removed first.

    Raises:
        OSError: the folder cannot be made.
    """
    root.mkdir(parents=True, exist_ok=True)
    _restore_replaced(root)
    for prefix in (_UNFINISHED, _REPLACED, _DELETED):
        for leftover in root.glob(f"{prefix}*"):
            shutil.rmtree(leftover)
    folder = root / f"{_UNFINISHED}{iteration_dir(root, iteration).name}"
    folder.mkdir()
    return folder


def unfinished_dir(root: Path, iteration: int) -> Path:
    """The folder that `begin` makes."""
    return root / f"{_UNFINISHED}{iteration_dir(root, iteration).name}"


def publish(root: Path, iteration: int, keep_last: int | None) -> Path:
    """Give the written checkpoint its name, make it the latest, delete those beyond `keep_last`."""
    written, final = unfinished_dir(root, iteration), iteration_dir(root, iteration)
    _sync_folder(written)
    replaced = root / f"{_REPLACED}{final.name}"
    if final.exists():
        final.rename(replaced)
    written.rename(final)
    _sync_folder(root)
    write_tracker(root, str(iteration))
    if replaced.exists():
        shutil.rmtree(replaced)
    if keep_last is not None:
        for old in [step for step in saved_iterations(root) if step != iteration][: -(keep_last - 1) or None]:
            deleted = root / f"{_DELETED}{iteration_dir(root, old).name}"
            iteration_dir(root, old).rename(deleted)
            shutil.rmtree(deleted)
    return final


def write_tracker(root: Path, latest: str) -> None:
    """Name the latest checkpoint: an iteration, or `release` for imported weights. Replaced in one step."""
    temporary = root / f".{TRACKER}.new"
    write_file(temporary, latest.encode())
    temporary.replace(root / TRACKER)
    _sync_folder(root)


def write_file(path: Path, data: bytes) -> None:
    """Write a whole file that survives a crash of the machine."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def check_writable(root: Path, name: str) -> None:
    """Write a file into the folder and remove it.

    Args:
        root: folder of the checkpoints; must be there.
        name: distinguishes processes that do this together.

    Raises:
        OSError: it cannot be done.
    """
    probe = root / f".probe_{name}"
    write_file(probe, b"probe")
    probe.unlink()


def discard(root: Path, iteration: int) -> None:
    """Remove what a failed save has written; the disk may be full."""
    shutil.rmtree(unfinished_dir(root, iteration), ignore_errors=True)


def saved_iterations(root: Path) -> list[int]:
    """Iterations with a complete checkpoint, ascending."""
    found = [_ITERATION.fullmatch(path.name) for path in root.glob("iter_*") if (path / METADATA).is_file()]
    return sorted(int(match.group(1)) for match in found if match is not None)


def latest(root: Path) -> str | None:
    """What the tracker names, an iteration or `release`; None where there is no tracker.

    Raises:
        ValueError: the tracker holds something else.
    """
    tracker = root / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if text != RELEASE and not text.isdecimal():
        raise ValueError(f"{tracker} holds {text!r}: neither an iteration nor {RELEASE!r}. Write the iteration of a "
                         f"complete checkpoint into it ({_listed(root)}), or give --ckpt-step")
    return text


def find(root: Path, step: int | None, flag: str = "--load", *, repair: bool = True) -> Path | None:
    """The checkpoint to load: that of `step`, or the latest. None where the folder holds none at all.

    The latest is what the tracker names, without one the last complete iteration.

    A checkpoint's own folder may be given too. `repair` undoes an interrupted publication first; without it nothing is
    changed, for a folder that another process may be saving into.

    Raises:
        ValueError: a checkpoint is named and is not there, or not complete; `root` is another one than that of `step`.
    """
    if (root / METADATA).is_file():
        if step is not None and root.name != iteration_dir(root, step).name:
            raise ValueError(f"{flag} {root} is one checkpoint's own folder, which is not called "
                             f"{iteration_dir(root, step).name}: leave out --ckpt-step {step}, or name the folder that "
                             "holds the checkpoints")
        return root
    if repair:
        _restore_replaced(root)
    name = latest(root) if step is None else str(step)
    source = str(root / TRACKER) if step is None else f"--ckpt-step {step}"
    if name is None:
        # A first save that was stopped between its folder's name and the tracker has left a whole checkpoint.
        steps = saved_iterations(root)
        return iteration_dir(root, steps[-1]) if steps else None
    folder = root / RELEASE if name == RELEASE else iteration_dir(root, int(name))
    if not (folder / METADATA).is_file():
        what = "is not complete, it has no metadata.json" if folder.is_dir() else "is not there"
        raise ValueError(f"{flag} {root}: {source} names {folder.name}, which {what}; complete: {_listed(root)}")
    return folder


def _restore_replaced(root: Path) -> None:
    """Undo a publication that stopped between moving the old checkpoint of an iteration away and the new one in."""
    for replaced in root.glob(f"{_REPLACED}*"):
        final = root / replaced.name.removeprefix(_REPLACED)
        if not final.exists():
            replaced.rename(final)


def _listed(root: Path) -> str:
    steps = saved_iterations(root)
    return ", ".join(str(step) for step in steps) if steps else "none"


def _sync_folder(folder: Path) -> None:
    """Make names in a folder survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
