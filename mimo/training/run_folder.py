"""The agreement of all ranks on the folder of a run without --run-dir."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from mimo.checkpoint import paths
from mimo.checkpoint.agree import from_first_rank, raise_together
from mimo.checkpoint.differences import flat_config
from mimo.checkpoint.load import find_source
from mimo.checkpoint.reader import read_common
from mimo.config.checkpoint import CheckpointConfig
from mimo.config.run import RunConfig
from mimo.grid.groups import Grids
from mimo.observe.run_folder import is_chosen, make_run_folder, point_latest_to, refuse_latest

logger = logging.getLogger(__name__)


def with_run_folder[C: RunConfig](config: C, grids: Grids) -> C:
    """Return the configuration with the folder of the run, which rank 0 chooses and makes. Collective over the world.

    Raises:
        ValueError: the folder cannot be made, or the checkpoint that names it cannot be read.
    """
    folder, error = None, None
    if grids.rank == 0:
        try:
            folder = _choose(config)
        except ValueError as problem:
            error = str(problem)
        except OSError as problem:
            error = f"--run-dir is left out, and its folder cannot be made: {problem}; name another with --run-dir"
    raise_together(grids, error)
    return replace(config, observe=replace(config.observe, run_dir=from_first_rank(grids, folder)))


def without_chosen_folder[C: RunConfig](config: C) -> C:
    """Return the configuration without a folder that was chosen for this run: a repetition gets one of its own."""
    if not is_chosen(config.observe.run_dir):
        return config
    return replace(config, observe=replace(config.observe, run_dir=""))


def _choose(config: RunConfig) -> str:
    if config.observe.run_dir:
        refuse_latest(config.observe.run_dir)
        return config.observe.run_dir
    folder = _folder_of_checkpoint(config.checkpoint)
    if folder is None:
        folder = make_run_folder(config.model.model_provider, config.data.dataset_provider)
    elif not folder.is_dir():
        logger.warning("%s, the run's folder according to its checkpoint, is not there: it is made again, without the "
                       "records so far", folder)
        folder.mkdir(parents=True)
    logger.info("run folder: %s", folder)
    problem = point_latest_to(folder)
    if problem is not None:
        logger.warning(problem)
    return str(folder)


def _folder_of_checkpoint(flags: CheckpointConfig) -> Path | None:
    """Return the folder of the run that goes on, or None for one that begins.

    A run that starts from a checkpoint of another, with a --save of its own or with --finetune, begins.
    """
    source = None if flags.load is None else find_source(flags, Path(flags.load))
    if source is None or source.folder.name == paths.RELEASE:
        return None
    goes_on = source.is_own if flags.save is not None else not flags.finetune
    run_dir = flat_config(read_common(source.folder).get("config", "")).get("run_dir") if goes_on else None
    # Earlier versions named every folder runs/latest, which is a link to another run's by now.
    if not run_dir or Path(run_dir).is_symlink():
        return None
    return Path(run_dir)
