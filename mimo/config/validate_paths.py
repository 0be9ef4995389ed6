"""Checks of the files, folders and packages that a run needs, before it starts anything."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from mimo import registry
from mimo.checkpoint import paths
from mimo.config.checks import check_packages
from mimo.config.rl_run import RlRunConfig
from mimo.config.toml_file import flag_name
from mimo.config.trainer import CheckpointConfig, RunConfig, is_folder
from mimo.observability.dated_folder import RUNS
from mimo.protocols import MegatronSourceProvider
from mimo.weights import hub


def check_paths(config: RunConfig) -> None:
    """Check the paths that flags name on this machine. Reads no tensors, writes nothing, and imports no torch.

    The data set and the model family check the paths of their own flags (`mimo.config.validate`).

    Raises:
        ValueError: a path is missing or cannot be written; the message names the first one with its flag.
    """
    flags = config.checkpoint
    if not _has_checkpoint(flags):
        for name in ("load_hf", "load_vision_from", "load_language_from"):
            if vars(flags)[name]:
                _check_weights(flag_name(name), Path(vars(flags)[name]))
        provider = registry.model_provider(config.model.model_provider)
        source = provider.megatron_source(config.model_family) if isinstance(provider, MegatronSourceProvider) else None
        if source is not None and not Path(source.path).is_dir():
            raise ValueError(f"{source.flag} {source.path}: there is no such folder")
    if isinstance(config, RlRunConfig):
        if config.rl.ref_load:
            _check_checkpoint("--ref-load", Path(config.rl.ref_load), None)
        if config.rl.ref_load_hf:
            _check_weights("--ref-load-hf", Path(config.rl.ref_load_hf))
    observe = config.observe
    check_packages(observe)
    written = {"--save": flags.save, "--run-dir": observe.run_dir or str(RUNS),
               "--tensorboard-dir": observe.tensorboard_dir}
    if observe.mlflow_uri is not None and is_folder(observe.mlflow_uri):
        written["--mlflow-uri"] = urlsplit(observe.mlflow_uri).path
    for flag, path in written.items():
        if path is not None:
            _check_writable(flag, Path(path))


def _has_checkpoint(flags: CheckpointConfig) -> bool:
    """Return whether the run starts from a checkpoint, its own or another. Raises ValueError if one is missing."""
    if flags.load is None:
        return False
    if flags.starts_elsewhere:
        assert flags.save is not None
        own = paths.find(Path(flags.save), None, "--save", repair=False)
        if own is not None and own.name != paths.RELEASE:
            return True
    if flags.load_is_save and (not Path(flags.load).is_dir() or paths.is_interrupted(Path(flags.load))):
        return False
    if flags.load_is_save:
        return paths.find(Path(flags.load), flags.ckpt_step, repair=False) is not None
    _check_checkpoint("--load", Path(flags.load), flags.ckpt_step)
    return True


def _check_checkpoint(flag: str, root: Path, step: int | None) -> None:
    if not paths.is_interrupted(root) and paths.find(root, step, flag, repair=False) is None:
        raise ValueError(f"{flag} {root} " + ("holds no checkpoint" if root.is_dir() else "does not exist")
                         + ("; a run starts from scratch only if --save names the same folder"
                            if flag == "--load" else ""))


def _check_weights(flag: str, folder: Path) -> None:
    """Refuse a folder without Hugging Face weights. The files themselves are checked when they are loaded.

    A folder of the hub's cache may lack the weights as long as the hub has them.
    """
    hub.check_folder(flag, folder)
    if not hub.weights_to_download(f"{flag} {folder}", folder) and not any(folder.glob("*.safetensors")):
        raise ValueError(f"{flag} {folder}: the folder has no weights: no *.safetensors")


def _check_writable(flag: str, path: Path) -> None:
    """Refuse a folder that cannot be made or written. Free space on the disk is not checked."""
    nearest = path.absolute()
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    if not nearest.is_dir():
        raise ValueError(f"{flag} {path}: cannot be written: {nearest}: Not a directory")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"{flag} {path}: cannot be written: {nearest}: Permission denied")
