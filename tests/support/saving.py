"""A process that does nothing but save, until it is killed: at its n-th change of a file, or from outside.

Every value of the checkpoint of iteration n is n: weights, fp32 copies and moments. So a checkpoint that mixes two
saves, or misses something, shows. Each new process first checks every checkpoint that the killed one has left.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from mimo.platform import get_platform

get_platform("cpu")  # before anything imports Megatron

from mimo.checkpoint import paths  # noqa: E402
from mimo.checkpoint.save import Saver  # noqa: E402
from mimo.checkpoint.state import Progress, RunState  # noqa: E402
from mimo.registry import model_provider  # noqa: E402
from mimo.training.setup import run_state, start  # noqa: E402
from tests.support.steps import trainer_of  # noqa: E402
from tests.support.stored import stored_tensors  # noqa: E402

FLAGS = ("--layout", "colocated", "--bf16", "--keep-last", "2")
# bf16 holds whole numbers up to 256 exactly.
MODULUS = 256


def keep_saving(folder: str, async_save: bool, die_at: int | str | None, connection: Connection) -> None:
    """Body of the process: check what is there, go on from the latest, save again and again.

    Sends the iteration it starts from (0: fresh), then each one that is published. It saves the loaded iteration once
    more, so that a checkpoint gets replaced.

    Args:
        folder: folder of the checkpoints; nothing else is in it.
        async_save: save in the background.
        die_at: kill this process right before a change of a file in there, see `die_before_change`; None goes on for
            ever.
        connection: to the process that watches.
    """
    torch.set_num_threads(1)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                      MASTER_PORT="0")
    get_platform("cpu").init_process_group(0, 1, 60.0)
    root = Path(folder)
    for iteration in paths.saved_iterations(root):
        check(paths.iteration_dir(root, iteration), iteration)
    assert all(path.name[5:].isdigit() for path in root.glob("iter_*"))
    assert len(list(root.glob("iter_*"))) == len(paths.saved_iterations(root)), "a folder without metadata.json"
    flags = (*FLAGS, "--save", folder, "--load", folder, *(("--async-save",) if async_save else ()))
    with trainer_of(0, flags, 1) as (parts, loader):
        state = run_state(parts, loader)
        progress, _ = start(state, model_provider("mock"), loader, parts.watchdog)
        if progress.iteration:
            values = {float(value) for tensor in filled(state) for value in tensor.unique()}
            assert values == {progress.iteration % MODULUS}, values
        connection.send(progress.iteration)
        if die_at is not None:
            die_before_change(root, die_at)
        save_for_ever(state, Saver(state, parts.watchdog), progress, connection)


def save_for_ever(state: RunState, saver: Saver, progress: Progress, connection: Connection) -> None:
    """Save every iteration, beginning with the one that was loaded."""
    progress.iteration = max(progress.iteration, 1)
    while True:
        with torch.no_grad():
            for tensor in filled(state):
                tensor.fill_(progress.iteration % MODULUS)
        saver.save(progress)
        saved = progress.iteration
        # The next values are in place while this save is still being written, as in training.
        with torch.no_grad():
            for tensor in filled(state):
                tensor.fill_((saved + 1) % MODULUS)
        saver.finish()
        connection.send(saved)
        progress.iteration += 1


def filled(state: RunState) -> list[torch.Tensor]:
    """Return the tensors that hold the iteration: parameters, fp32 copies, moments."""
    held = state.held(state.saved())
    found = [parameter.data for parameter in state.built.model.parameters()]
    for one in held:
        found += [one.main.data, one.inner.state[one.main]["exp_avg"], one.inner.state[one.main]["exp_avg_sq"]]
    return found


def check(folder: Path, iteration: int) -> None:
    """Read everything of a checkpoint; its checksums are compared on the way."""
    for key, tensor in stored_tensors(folder).items():
        values = tensor.float().unique().tolist()
        # Rows beyond the vocabulary are weights too.
        assert values == [iteration % MODULUS], f"{folder.name}: {key} holds {values[:5]}"


def die_before_change(root: Path, change: int | str) -> None:
    """Kill this process right before a change of the files below `root`.

    Args:
        root: folder of the checkpoints.
        change: the number of the change, from 1, or a part of its description: `open`, `os.rename` or the like, then
            the paths, seen from `root`.
    """
    lock, count = threading.Lock(), [0]

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        paths_of_event = changed_paths(event, arguments)
        if paths_of_event and paths_of_event[0].startswith(f"{root}/"):
            description = " ".join([event, *(path.removeprefix(f"{root}/") for path in paths_of_event)])
            with lock:
                count[0] += 1
                if change == count[0] or isinstance(change, str) and change in description:
                    os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def changed_paths(event: str, arguments: tuple[Any, ...]) -> list[str]:
    """Paths that an audit event of the interpreter is about to change; none for other events."""
    if event == "open":
        path, mode, _ = arguments
        return [os.fsdecode(path)] if isinstance(mode, str) and mode[:1] in "wxa" and not isinstance(path, int) else []
    if event == "os.rename":
        return [os.fsdecode(path) for path in arguments[:2]]
    if event in ("os.mkdir", "os.remove", "os.rmdir"):
        # shutil.rmtree names files inside the folder that it has opened.
        folder = "" if arguments[-1] == -1 else os.readlink(f"/proc/self/fd/{arguments[-1]}")
        return [os.path.join(folder, os.fsdecode(arguments[0]))]
    return []
