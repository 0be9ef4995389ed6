"""The folder of a run's checkpoints: names, the tracker file, publishing and deleting. Only one process does these.

A checkpoint is written under a temporary name (`.saving_iter_0000010`) and renamed once it is complete. A checkpoint
that is deleted is renamed first. Therefore a folder `iter_*` is always complete. The tracker names a checkpoint only
after it has its name, so that an interrupted save changes neither. If something cannot be deleted, that is a warning.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
import time
from pathlib import Path

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
# A data stream is named `module/lane`. Streams that are read once for all modules have this name for the module.
SHARED_STREAM = "data"
RELEASE = "release"
METADATA = "metadata.json"
# Empty file in a checkpoint whose iteration was evaluated after it had been saved.
EVALUATED = "evaluated"
_ITERATION = re.compile(r"iter_(\d{7,})")
_UNFINISHED = ".saving_"
_REPLACED = ".replaced_"
_DELETED = ".deleted_"
# How often, and with which pause, a checkpoint is looked for that is being published. That takes milliseconds.
_LOOKS, _PAUSE_S = 10, 0.1
# Folders that this process has warned about. A file that somebody keeps open would cause a warning in every save.
_warned: set[Path] = set()


def iteration_dir(root: Path, iteration: int) -> Path:
    """Return the folder of an iteration's checkpoint, under Megatron's name."""
    return root / f"iter_{iteration:07d}"


def begin(root: Path, iteration: int) -> Path:
    """Make an empty folder for a checkpoint, after deleting what interrupted saves left behind.

    Raises:
        OSError: the folder cannot be made.
    """
    root.mkdir(parents=True, exist_ok=True)
    _restore_replaced(root)
    for prefix in (_UNFINISHED, _REPLACED, _DELETED):
        for leftover in root.glob(f"{prefix}*"):
            _delete(leftover)
    folder = unfinished_dir(root, iteration)
    folder.mkdir()
    return folder


def unfinished_dir(root: Path, iteration: int) -> Path:
    return root / f"{_UNFINISHED}{iteration_dir(root, iteration).name}"


def publish(root: Path, iteration: int, keep_last: int | None) -> Path:
    """Give the written checkpoint its name, make it the latest, and delete older ones beyond `keep_last`.

    Raises:
        OSError: the checkpoint could not be renamed or made the latest. Failed deletions raise nothing.
    """
    written, final = unfinished_dir(root, iteration), iteration_dir(root, iteration)
    _sync_folder(written)
    replaced = root / f"{_REPLACED}{final.name}"
    if final.exists():
        final.rename(replaced)
    written.rename(final)
    _sync_folder(root)
    write_tracker(root, str(iteration))
    if replaced.exists():
        _delete(replaced)
    if keep_last is None:
        return final
    steps = saved_iterations(root)
    for old in [step for step in steps if step <= iteration][:-keep_last]:
        _delete(iteration_dir(root, old))
    # Later checkpoints exist after --ckpt-step. They are left alone.
    later = [str(step) for step in steps if step > iteration]
    if later and root not in _warned:
        _warned.add(root)
        logger.warning("%s: checkpoints of iterations %s are later than %d, the latest of this run: --keep-last "
                       "neither counts nor deletes them", root, ", ".join(later), iteration)
    return final


def _delete(folder: Path) -> None:
    """Rename and then delete a checkpoint, or what is left of one. A failure is a warning, once for each path.

    On a network file system, a file that is still open may keep its folder. Other processes may delete here, too.
    """
    problems: list[BaseException] = []
    try:
        gone = folder
        if not folder.name.startswith(_DELETED):
            name = folder.name.removeprefix(_UNFINISHED).removeprefix(_REPLACED)
            # An earlier deletion may have left a folder of this name.
            names = (folder.with_name(f"{_DELETED}{name}" + (f".{number}" if number else ""))
                     for number in itertools.count())
            gone = next(each for each in names if not each.exists())
            folder.rename(gone)
        shutil.rmtree(gone, onexc=lambda _, __, error: problems.append(error))
    except OSError as error:
        problems.append(error)
    remains = gone if gone.exists() else folder
    if problems and remains.exists() and remains not in _warned:
        _warned.add(remains)
        logger.warning("%s could not be deleted: %s: %s", remains, type(problems[0]).__name__, problems[0])


def write_tracker(root: Path, latest: str) -> None:
    """Write the tracker atomically: an iteration, or `release` for imported weights."""
    replace_file(root / TRACKER, latest.encode())
    _sync_folder(root)


def write_file(path: Path, data: bytes) -> None:
    """Write a whole file that survives a crash of the machine."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Write a whole file, or replace it, in one step."""
    temporary = path.with_name(f".{path.name}.writing")
    write_file(temporary, data)
    temporary.replace(path)


def check_writable(root: Path, name: str) -> None:
    """Write a file into the folder and remove it.

    `name` distinguishes processes that do this together.

    Raises:
        OSError: it cannot be done.
    """
    probe = root / f".probe_{name}"
    write_file(probe, b"probe")
    probe.unlink()


def discard(root: Path, iteration: int) -> None:
    """Remove what a failed save has written; the disk may be full."""
    shutil.rmtree(unfinished_dir(root, iteration), ignore_errors=True)


def mark_evaluated(root: Path, iteration: int) -> None:
    """Note in a complete checkpoint that the evaluation of its iteration was made. A failure is a warning."""
    try:
        write_file(iteration_dir(root, iteration) / EVALUATED, b"")
    except OSError as problem:
        logger.warning("%s: the evaluation of iteration %d could not be noted there, so that a run which continues "
                       "from it makes it again: %s", root, iteration, problem)


def saved_iterations(root: Path) -> list[int]:
    """Iterations with a complete checkpoint, ascending."""
    found = [_ITERATION.fullmatch(path.name) for path in root.glob("iter_*") if (path / METADATA).is_file()]
    return sorted(int(match.group(1)) for match in found if match is not None)


def latest(root: Path) -> str | None:
    """Read the tracker: an iteration or `release`; None if there is no tracker.

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
    """Find the checkpoint to load: that of `step`, or the latest. Return None if the folder holds none at all.

    The latest is the one that the tracker names or, without a tracker, the last complete one.

    Args:
        root: folder of checkpoints, or a checkpoint's own folder.
        step: iteration of the checkpoint; None for the latest.
        flag: flag that names the folder, for messages.
        repair: undo an interrupted publication first. Otherwise nothing is changed, as is right for a folder into
            which another process may be saving; the checkpoint may then be found under the name that it has while
            another one takes its place.

    Raises:
        ValueError: the checkpoint does not exist or is not complete, or `root` is the folder of another step.
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
        # A first save that was stopped between naming its folder and writing the tracker leaves a whole one.
        steps = saved_iterations(root)
        return iteration_dir(root, steps[-1]) if steps else None
    folder = root / RELEASE if name == RELEASE else iteration_dir(root, int(name))
    if not repair:
        folder = _folder_or_replaced(folder)
    if not (folder / METADATA).is_file():
        what = "is not complete, it has no metadata.json" if folder.is_dir() else "is not there"
        raise ValueError(f"{flag} {root}: {source} names {folder.name}, which {what}; complete: {_listed(root)} "
                         "(--ckpt-step takes one of them)")
    return folder


def _folder_or_replaced(folder: Path) -> Path:
    """Return a checkpoint's folder or, where a publication has stopped halfway, that of the one before it."""
    replaced = folder.with_name(f"{_REPLACED}{folder.name}")
    for _ in range(_LOOKS):
        if (folder / METADATA).is_file() or not (replaced / METADATA).is_file():
            return folder
        time.sleep(_PAUSE_S)
    return replaced


def is_interrupted(root: Path) -> bool:
    """Return whether a publication has stopped halfway, which `find` with `repair` undoes."""
    return any(root.glob(f"{_REPLACED}*"))


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
