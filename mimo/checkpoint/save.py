"""Saves checkpoints: plans with Megatron Core once, copies and writes, and publishes what is complete on every rank.

A save has three stages. `save` agrees on what is written and copies it. A thread of each rank writes its files. Once
all files are written, a thread of rank 0 publishes the checkpoint. With --async-save, training continues during the
last two stages, and `poll` moves from one to the next. Later saves of a run use the plan of the first one, as long as
every tensor stays in the same memory.
"""

from __future__ import annotations

import io
import json
import logging
import pickle
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from mimo.checkpoint import paths
from mimo.checkpoint.entries import Optimized, steps_of
from mimo.checkpoint.lock import FolderLock
from mimo.checkpoint.reader import why_unreadable
from mimo.checkpoint.state import (
    Progress,
    RunState,
    common_state,
    model_entries,
    optimizer_entries,
    rng_objects,
    stream_object,
)
from mimo.checkpoint.writer import HostBuffer, Plan, make_plan, serialized_objects, write_files, write_shared_files
from mimo.comm import gather, gather_at, raise_known_errors, raise_on_any_rank
from mimo.watchdog.process_exit import on_daemon_thread
from mimo.watchdog.watchdog import Watchdog

CONFIG_FILE = "run_config.toml"
# Seconds for which the publishing thread lets the thread that started it go first.
START_S = 0.001
# Number of files that a rank writes in parallel.
WRITERS_PER_RANK = 2
logger = logging.getLogger(__name__)


def publish(root: Path, iteration: int, metadata: Metadata, written: list[bytes], common: dict[str, Any],
            keep_last: int | None) -> None:
    """Write the files that all ranks share and the flags for people, then give the folder its name.

    `written` has the result of `write_files` of each rank.

    Raises:
        OSError: a file cannot be written, or the folder cannot be renamed.
    """
    # The thread that has started this one goes first. Otherwise it would wait a whole switch interval.
    time.sleep(START_S)
    folder = paths.unfinished_dir(root, iteration)
    paths.write_file(folder / CONFIG_FILE, common["config"].encode())
    write_shared_files(folder, metadata, (item for of_rank in written for item in json.loads(of_rank)), common)
    paths.publish(root, iteration, keep_last)


@dataclass
class _Pending:
    """A save that is not published yet.

    Attributes:
        iteration: its iteration.
        common: its common state.
        written: this rank's files, see `write_files`.
        is_written: whether every rank has written its files.
        published: set on rank 0 once they have.
        is_evaluated: whether the evaluation of the iteration was made meanwhile.
    """

    iteration: int
    common: dict[str, Any]
    written: Future[bytes]
    is_written: bool = False
    published: Future[None] | None = None
    is_evaluated: bool = False


def _error_of(done: Future[Any] | None) -> str | None:
    """Wait, and return why a file could not be written, or None. Raises any other error."""
    error = None if done is None else done.exception()
    if error is not None and not isinstance(error, OSError):
        raise error
    return None if error is None else f"{type(error).__name__}: {error}"


class Saver:
    """Saves the checkpoints of a run. The constructor and, unless stated, every method are collective over the world.

    Attributes:
        last_iteration: iteration of the last `save`; None before the first.
        last_bytes: bytes of tensors that this rank wrote in the last `save`.

    Raises:
        ValueError: a rank cannot write in the folder, or another run saves there.
    """

    def __init__(self, state: RunState, watchdog: Watchdog) -> None:
        flags = state.config.checkpoint
        assert flags.save is not None, "a run without --save has no saver"
        self._state, self._flags, self._watchdog = state, flags, watchdog
        self.root = Path(flags.save)
        self._buffer = HostBuffer(state.platform.device) if flags.async_save else None
        self._plan: Plan | None = None
        self._copies: list[torch.Tensor] | None = None
        # Optimizer state in the plan, and one parameter of each part, which is asked for the number of updates.
        self._held: list[Optimized] = []
        self._counted: list[Optimized] = []
        # Result of `_tensor_places` when the plan was made.
        self._places: list[int] = []
        # The rank that writes each data stream, once the first save has found it.
        self._stream_owners: dict[str, int] | None = None
        self._pending: _Pending | None = None
        self.last_iteration: int | None = None
        self.last_bytes = 0
        self._unlock: Callable[[], object] | None = None
        # This may wait until the lock of a lost machine has expired.
        with watchdog.on_files("folder of --save", folder=str(self.root)):
            self._check_folder()

    @property
    def is_pending(self) -> bool:
        """Whether a checkpoint is not published yet. The same on every rank."""
        return self._pending is not None

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes a checkpoint in the background."""
        pending = self._pending
        return pending is not None and not (
            pending.written.done() and (pending.published is None or pending.published.done()))

    def save(self, progress: Progress) -> None:
        """Save the present state of the run. With --async-save the files are written after this returns.

        Raises:
            ValueError: the folder cannot be written, or a data stream's state is not plain data. Earlier checkpoints
                are not touched.
        """
        with self._watchdog.on_files("checkpoint", iteration=progress.iteration):
            self.finish()
            write, common = self._prepare(progress)
            if self._buffer is not None:
                self._buffer.fill()
            self._pending = _Pending(progress.iteration, common, on_daemon_thread(write, "checkpoint writer"))
            self.last_iteration = progress.iteration
            if self._buffer is None:
                self.finish()

    def poll(self, any_writing: bool) -> None:
        """Move a checkpoint that is written in the background to its next stage, if every rank is ready for that.

        Args:
            any_writing: whether `is_writing` is true on any rank; the same on every rank.

        Raises:
            ValueError: as `finish`.
        """
        if self._pending is not None and not any_writing:
            self._advance()

    def finish(self) -> None:
        """Wait for the checkpoint being written, if any, and publish it.

        Raises:
            ValueError: a rank could not write its part; names it and the last complete checkpoint.
        """
        if self._pending is None:
            return
        iteration = self._pending.iteration
        with self._watchdog.on_files("checkpoint files", iteration=iteration):
            while self._pending is not None:
                self._advance()

    def mark_evaluated(self, iteration: int) -> None:
        """Note in the last checkpoint, if it is that of `iteration`, that the evaluation was made. Not collective."""
        if self.last_iteration != iteration or self._state.grids.rank != 0:
            return
        if self._pending is None:
            paths.mark_evaluated(self.root, iteration)
        else:  # noted once it is published
            self._pending.is_evaluated = True

    def close(self) -> None:
        """Let other runs save into the folder. Nothing is saved afterwards."""
        if self._unlock is not None:
            self._unlock()

    def _advance(self) -> None:
        """Complete the present stage of the pending checkpoint. After the last stage, or an error, none is pending."""
        pending, self._pending = self._pending, None
        assert pending is not None
        if not pending.is_written:
            self._agree(pending.iteration, _error_of(pending.written))
            written = gather_at(self._state.grids, pending.written.result(), 0)
            if written is not None:
                assert self._plan is not None and self._plan.metadata is not None, "rank 0 plans for all"
                pending.published = on_daemon_thread(
                    partial(publish, self.root, pending.iteration, self._plan.metadata, written, pending.common,
                            self._flags.keep_last), "checkpoint publisher")
            pending.is_written = True
            self._pending = pending
            return
        self._agree(pending.iteration, _error_of(pending.published))
        if pending.is_evaluated:
            paths.mark_evaluated(self.root, pending.iteration)
        logger.info("saved checkpoint of iteration %d in %s", pending.iteration, self.root)

    def _check_folder(self) -> None:
        """Refuse a folder that some rank cannot write, at the start of a run instead of at its first save."""
        grids, error = self._state.grids, None
        try:
            if grids.rank == 0:
                self.root.mkdir(parents=True, exist_ok=True)
                self._unlock = weakref.finalize(self, FolderLock(self.root).release)
        except OSError as problem:
            error = f"--save {self.root}: cannot be written: {problem}"
        except ValueError as problem:
            error = str(problem)
        raise_on_any_rank(grids, error)
        try:
            paths.check_writable(self.root, f"rank_{grids.rank}")
        except OSError as problem:
            error = f"--save {self.root}: rank {grids.rank} cannot write there: {problem}"
            if not self.root.is_dir():
                error += "; rank 0 has created it, so the ranks do not share this folder"
        raise_on_any_rank(grids, error)

    def _prepare(self, progress: Progress) -> tuple[Callable[[], bytes], dict[str, Any]]:
        """Make the folder and the plan. The ranks exchange everything for a save in one message.

        Returns:
            A function that writes this rank's files, and the common state.
        """
        state, grids, iteration = self._state, self._state.grids, progress.iteration
        objects: dict[str, Any] = {"loader": self._stream_objects()}
        if self._flags.save_rng:
            objects["rng"] = rng_objects(state.platform, grids)
        state.built.finish_gathers("a checkpoint")
        places = self._tensor_places()
        is_planned = self._plan is not None and places == self._places
        tensors = {} if is_planned else self._tensors()
        error = None
        if grids.rank == 0:
            try:
                paths.begin(self.root, iteration)
            except OSError as problem:
                error = f"--save {self.root}: cannot be written: {problem}"
        reports = gather(grids, (error, is_planned, steps_of(self._counted)))
        raise_known_errors(grids, [report[0] for report in reports])
        if not all(report[1] for report in reports):
            self._plan = make_plan({**objects, **(tensors or self._tensors())}, grids, WRITERS_PER_RANK)
            self._copies = None if self._buffer is None else self._buffer.lay_out(self._plan.tensors)
        assert self._plan is not None
        steps: dict[str, dict[str, int]] | None = None
        if self._flags.save_optim:
            steps = {}
            for of_rank in (report[2] for report in reports):
                for module, parts in of_rank.items():
                    for part, step in parts.items():
                        # Ranks that hold elements of the same part have made the same updates.
                        known = steps.setdefault(module, {}).setdefault(part, step)
                        assert known == step, f"ranks count {known} and {step} updates of {part} of {module}"
        self.last_bytes = sum(tensor.numel() * tensor.element_size() for tensor in self._plan.tensors)
        write = partial(write_files, paths.unfinished_dir(self.root, iteration), self._plan,
                        serialized_objects(objects), self._copies)
        return write, common_state(state, progress, steps)

    def _tensors(self) -> dict[str, Any]:
        """Return weights and optimizer state, and remember where all of it lies in memory."""
        saved = self._state.saved()
        tensors: dict[str, Any] = {"model": model_entries(self._state, saved)}
        if self._flags.save_optim:
            self._held = self._state.held(saved)
            # This checks that counts are equal inside a part. From now on one parameter of each part is asked.
            steps_of(self._held)
            self._counted = list({(one.saved.module, one.saved.part): one for one in self._held}.values())
            tensors["optimizer"] = optimizer_entries(self._held)
        self._places = self._tensor_places()
        return tensors

    def _tensor_places(self) -> list[int]:
        """Return identities and addresses of everything that is saved. Equal lists mean the same tensors and memory.

        No address can belong to another tensor by now, because the plan keeps its tensors, in which weights come back
        that have memory only during updates (`Fp8Weights`).
        """
        places = []
        for module in self._state.built.model.modules():
            for _, tensor in (*module.named_parameters(recurse=False, remove_duplicate=False),
                              *module.named_buffers(recurse=False, remove_duplicate=False)):
                places += [id(tensor), tensor.data_ptr()]
        for inner in {id(one.inner): one.inner for one in self._held}.values():
            places += [id(parameter) for group in inner.param_groups for parameter in group["params"]]
        for one in self._held:
            places += [one.main.data_ptr(), *(value.data_ptr() for value in one.values().values())]
        return places

    def _stream_objects(self) -> dict[str, Any]:
        streams = self._state.streams["streams"]
        rank = self._state.grids.rank
        if self._stream_owners is None:
            error = None
            for name, value in streams.items():
                error = error or _plain_data_error(name, value)
            raise_on_any_rank(self._state.grids, error)
            readers = gather(self._state.grids, list(streams))
            self._stream_owners = {}
            for owner, names in enumerate(readers):
                for name in names:
                    self._stream_owners.setdefault(name, owner)
        return {name: stream_object(name, value, main=self._stream_owners[name] == rank)
                for name, value in streams.items()}

    def _agree(self, iteration: int, error: str | None) -> None:
        """Stop every rank if one could not write. Incomplete files are removed, because the disk may be full."""
        grids = self._state.grids
        if error is not None:
            error = f"rank {grids.rank} could not save iteration {iteration}: {error}"
        errors = gather(grids, error)
        if not any(errors):
            return
        if grids.rank == 0:
            paths.discard(self.root, iteration)
        steps = paths.saved_iterations(self.root)
        kept = f"the last complete checkpoint is that of iteration {steps[-1]}" if steps else "there is none before it"
        raise_known_errors(grids, [error and f"--save {self.root}: {error}; {kept}" for error in errors])


def _plain_data_error(name: str, value: Any) -> str | None:
    """Return why a stream's state could not be loaded again, or None."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        return (f"the data stream {name} gives a state_dict that is not plain data (numbers, strings, lists, "
                f"dictionaries, tensors), which a checkpoint cannot hold: {why_unreadable(error)}")
    return None
