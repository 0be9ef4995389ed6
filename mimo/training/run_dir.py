"""Choice of the folder of a run without --run-dir, by rank 0 for all ranks."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from mimo.checkpoint import paths
from mimo.checkpoint.differences import flat_config
from mimo.checkpoint.load import find_source
from mimo.checkpoint.reader import read_common
from mimo.comm import broadcast_result
from mimo.config.trainer import CheckpointConfig, RunConfig
from mimo.grid.groups import Grids
from mimo.observability.dated_folder import LATEST, is_chosen, make_run_folder, point_latest_to, refuse_latest

logger = logging.getLogger(__name__)


def with_run_folder[C: RunConfig](config: C, grids: Grids) -> C:
    """Return the configuration with the folder of the run, which rank 0 chooses and makes. Collective over the world.

    Raises:
        ValueError: the folder cannot be made, or the checkpoint that names it cannot be read.
    """
    def choose() -> str:
        try:
            return _choose(config)
        except OSError as problem:
            raise ValueError(f"--run-dir is left out, and its folder cannot be made: {problem}; name another with "
                             "--run-dir") from problem

    return replace(config, observe=replace(config.observe, run_dir=broadcast_result(grids, choose)))


def without_chosen_folder[C: RunConfig](config: C) -> C:
    """Return the configuration without a folder that was chosen for this run, so that another run gets a new one."""
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
        logger.warning("%s, the run's folder according to its checkpoint, is not there; a new one is made, without "
                       "the earlier records", folder)
        folder.mkdir(parents=True)
    logger.info("run folder: %s", folder)
    problem = point_latest_to(folder)
    if problem is not None:
        logger.warning(problem)
    return str(folder)


def _folder_of_checkpoint(flags: CheckpointConfig) -> Path | None:
    """Return the earlier folder of a run that resumes from its own checkpoint, or None for a new run.

    A run that starts from another one's checkpoint, with a --save of its own or with --finetune, is a new run.
    """
    source = None if flags.load is None else find_source(flags, Path(flags.load))
    if source is None or source.folder.name == paths.RELEASE:
        return None
    goes_on = source.is_own if flags.save is not None else not flags.finetune
    run_dir = flat_config(read_common(source.folder).get("config", "")).get("run_dir") if goes_on else None
    if not run_dir:
        return None
    folder = Path(run_dir)
    # Earlier versions called every folder runs/latest. By now that is a link to another run's folder, or will be one.
    return None if folder.is_symlink() or (folder == LATEST and not folder.is_dir()) else folder
