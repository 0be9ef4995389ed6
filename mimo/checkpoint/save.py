"""Saving: plan with the wheel, write here, publish only what is complete on every rank."""

from __future__ import annotations

import io
import json
import logging
import pickle
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from mimo.checkpoint import paths
from mimo.checkpoint.agree import gather, raise_together
from mimo.checkpoint.optimizer_state import steps_of
from mimo.checkpoint.reader import CHECKSUMS, COMMON
from mimo.checkpoint.rng import rng_objects
from mimo.checkpoint.state import (
    Progress,
    RunState,
    common_state,
    model_entries,
    optimizer_entries,
    stream_object,
)
from mimo.checkpoint.writer import HostBuffer, Write, use_local_results
from mimo.observe.watchdog import Watchdog

logger = logging.getLogger(__name__)

# Files that a rank writes side by side.
WRITERS_PER_RANK = 2
CONFIG_FILE = "run_config.toml"


@dataclass
class _Pending:
    """A save whose files are being written."""

    iteration: int
    write: Write
    common: dict[str, Any]


class Saver:
    """Saves the checkpoints of a run. Every method is collective over the world.

    Args:
        state: what is saved.
        watchdog: told about waits; a save may take as long as it takes.

    Attributes:
        last_iteration: iteration of the last save begun; None before the first.
        last_stall_s: seconds the last `save` kept the caller.
        last_bytes: bytes of tensors this rank wrote in it.
    """

    def __init__(self, state: RunState, watchdog: Watchdog) -> None:
        flags = state.config.checkpoint
        assert flags.save is not None, "a run without --save has no saver"
        self._state, self._flags, self._watchdog = state, flags, watchdog
        self.root = Path(flags.save)
        self._buffer = HostBuffer(state.platform.device) if flags.async_save else None
        # Plans are the same every time: the wheel reuses the first one after it has seen it twice.
        self._strategy = TorchDistSaveShardedStrategy(thread_count=WRITERS_PER_RANK, cached_metadata=True)
        self._stream_owners: dict[str, int] | None = None
        self._validated = False
        self._pending: _Pending | None = None
        self.last_iteration: int | None = None
        self.last_stall_s = 0.0
        self.last_bytes = 0

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes a checkpoint in the background."""
        return self._pending is not None and self._pending.write.is_running

    def save(self, progress: Progress) -> None:
        """Save the run as it stands; with --async-save the files are written after this returns.

        Raises:
            ValueError: the folder cannot be written, or a data stream's state is not plain data; no checkpoint that was
                there before is touched.
        """
        began = time.perf_counter()
        with self._watchdog.limit(float("inf")), self._watchdog.waiting("checkpoint", iteration=progress.iteration):
            self.finish()
            self._begin(progress.iteration)
            write, common = self._plan(progress)
            self._pending = _Pending(progress.iteration, write, common)
            self.last_iteration, self.last_bytes = progress.iteration, write.num_bytes
            if self._buffer is not None:
                write.start()
            else:
                write.run()
                self.finish()
        self.last_stall_s = time.perf_counter() - began

    def poll(self, any_writing: bool) -> None:
        """Publish a checkpoint written in the background once every rank has written its part.

        Args:
            any_writing: `is_writing` of any rank, agreed by all.
        """
        if self._pending is not None and not any_writing:
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint being written, if any, and publish it.

        Raises:
            ValueError: a rank could not write its part; names it and the last complete checkpoint.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        iteration = pending.iteration
        with self._watchdog.limit(float("inf")), self._watchdog.waiting("checkpoint files", iteration=iteration):
            error = pending.write.wait()
            self._agree(pending.iteration, error)
            for finalize in pending.write.request.finalize_fns:
                finalize()
            checksums = gather(self._state.grids, pending.write.checksums)
            self._on_first_rank(pending.iteration, lambda: self._publish(pending, checksums))
        logger.info("saved checkpoint of iteration %d in %s", pending.iteration, self.root)

    def _begin(self, iteration: int) -> None:
        error = None
        if self._state.grids.rank == 0:
            try:
                paths.begin(self.root, iteration)
            except OSError as problem:
                error = f"--save {self.root}: cannot be written: {problem}"
        raise_together(self._state.grids, error)

    def _plan(self, progress: Progress) -> tuple[Write, dict[str, Any]]:
        """Have the wheel plan the save and copy what this rank writes."""
        use_local_results()
        state, steps = self._state, None
        saved = state.saved()
        sharded: dict[str, Any] = {"model": model_entries(state, saved)}
        if self._flags.save_optim:
            held = state.held(saved)
            sharded["optimizer"] = optimizer_entries(held)
            steps = _merged(gather(state.grids, steps_of(held)))
        if self._flags.save_rng:
            sharded["rng"] = rng_objects(state.platform, state.grids)
        sharded["loader"] = self._stream_objects()
        common = common_state(state, progress, steps)
        folder = paths.unfinished_dir(self.root, progress.iteration)
        request = dist_checkpointing.save(
            {**sharded, "common": {"iteration": progress.iteration}}, str(folder), self._strategy,
            validate_access_integrity=not self._validated, async_sharded_save=True, async_strategy="mcore")
        self._validated = True
        return Write(request, folder, self._buffer), common

    def _stream_objects(self) -> dict[str, Any]:
        streams = self._state.streams["streams"]
        rank = self._state.grids.rank
        if self._stream_owners is None:
            error = None
            for name, value in streams.items():
                error = error or _plain_data_error(name, value)
            raise_together(self._state.grids, error)
            readers = gather(self._state.grids, list(streams))
            self._stream_owners = {}
            for owner, names in enumerate(readers):
                for name in names:
                    self._stream_owners.setdefault(name, owner)
        return {name: stream_object(name, value, main=self._stream_owners[name] == rank)
                for name, value in streams.items()}

    def _agree(self, iteration: int, error: str | None) -> None:
        """Stop every rank if one could not write; what was written is removed, a full disk has room again."""
        grids = self._state.grids
        if any(gather(grids, error is not None)) and grids.rank == 0:
            paths.discard(self.root, iteration)
        steps = paths.saved_iterations(self.root)
        kept = f"the last complete checkpoint is that of iteration {steps[-1]}" if steps else "there is none before it"
        if error is not None:
            error = f"--save {self.root}: rank {grids.rank} could not save iteration {iteration}: {error}; {kept}"
        raise_together(grids, error)

    def _on_first_rank(self, iteration: int, action: Any) -> None:
        error = None
        if self._state.grids.rank == 0:
            try:
                action()
            except OSError as problem:
                error = f"{type(problem).__name__}: {problem}"
        self._agree(iteration, error)

    def _publish(self, pending: _Pending, checksums: list[dict[str, dict[int, int]]]) -> None:
        folder = paths.unfinished_dir(self.root, pending.iteration)
        merged = {name: items for of_rank in checksums for name, items in of_rank.items()}
        (folder / CHECKSUMS).write_text(json.dumps(merged), encoding="utf-8")
        torch.save(pending.common, folder / COMMON)
        (folder / CONFIG_FILE).write_text(pending.common["config"], encoding="utf-8")
        paths.publish(self.root, pending.iteration, self._flags.keep_last)


def _merged(by_rank: list[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    """Step counts of all ranks. A rank may hold no element of a part; those that do agree."""
    merged: dict[str, dict[str, int]] = {}
    for steps in by_rank:
        for module, parts in steps.items():
            for part, step in parts.items():
                known = merged.setdefault(module, {}).setdefault(part, step)
                assert known == step, f"ranks count {known} and {step} updates of {part} of {module}"
    return merged


def _plain_data_error(name: str, value: Any) -> str | None:
    """Why a stream's state could not be loaded again, or None."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True)
    except pickle.UnpicklingError as error:
        return (f"the data stream {name} gives a state_dict that is not plain data (numbers, strings, lists, "
                f"dictionaries, tensors), which a checkpoint cannot hold: {str(error).splitlines()[0]}")
    return None


