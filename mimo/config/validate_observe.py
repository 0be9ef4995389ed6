"""Checks of what a run leaves behind and shows."""

from __future__ import annotations

import importlib.util

from mimo.config.observe import ObserveConfig


def check_observe(flags: ObserveConfig, world_size: int, length: int | None, *, dry_run: bool) -> None:
    """Check the flags of logging and measurement.

    Args:
        flags: of the run.
        world_size: number of ranks.
        length: of the run in iterations; None for a dry run without one.
        dry_run: nothing is trained, so packages may be missing here; see `check_packages`.

    Raises:
        ValueError: the first thing found wrong.
    """
    _check_timeline(flags)
    _check_profile(flags, world_size, length)
    _check_trackers(flags)
    if not dry_run:
        check_packages(flags)


def check_device(flags: ObserveConfig, device: str) -> None:
    """Refuse what only a GPU can do on a run without. Raises ValueError.

    Args:
        flags: of the run.
        device: `cuda` or `cpu`.
    """
    if device == "cuda":
        return
    for flag, given in (("--memory-snapshot", flags.memory_snapshot), ("--nvtx", flags.nvtx)):
        if given:
            raise ValueError(f"{flag} needs CUDA, and this run is on {device}: leave it out")


def _check_timeline(flags: ObserveConfig) -> None:
    if flags.log_interval < 1:
        raise ValueError(f"--log-interval {flags.log_interval} is below 1")
    if flags.timeline_interval < 0:
        raise ValueError(f"--timeline-interval {flags.timeline_interval} is below 0")
    if flags.timeline_interval and not flags.timeline:
        raise ValueError(f"--timeline-interval {flags.timeline_interval} needs --timeline, it is --no-timeline")


def _check_profile(flags: ObserveConfig, world_size: int, length: int | None) -> None:
    steps, ranks = flags.profiled_steps, flags.profiled_ranks
    if length is not None and steps and steps.start > length:
        raise ValueError(f"--profile-steps {flags.profile_steps} begins after the run's last iteration, {length}")
    if ranks and max(ranks) >= world_size:
        raise ValueError(f"--profile-ranks {flags.profile_ranks}: this run has ranks 0 to {world_size - 1}")
    if ranks and not steps and not flags.memory_snapshot:
        raise ValueError(f"--profile-ranks {flags.profile_ranks} needs --profile-steps or --memory-snapshot")


def check_packages(flags: ObserveConfig) -> None:
    """Raise ValueError if the package of a tracker that the flags ask for is not installed."""
    for flag, value, package in (("--wandb-project", flags.wandb_project, "wandb"),
                                 ("--mlflow-uri", flags.mlflow_uri, "mlflow"),
                                 ("--tensorboard-dir", flags.tensorboard_dir, "tensorboard")):
        if value is not None and importlib.util.find_spec(package) is None:
            raise ValueError(f"{flag} {value}: the package {package} is not installed; pip install {package}, or leave "
                             "the flag out")


def _check_trackers(flags: ObserveConfig) -> None:
    if flags.tensorboard_by_samples and flags.tensorboard_dir is None:
        raise ValueError("--tensorboard-by-samples needs --tensorboard-dir")
    if flags.wandb_name is not None and flags.wandb_project is None:
        raise ValueError(f"--wandb-name {flags.wandb_name} needs --wandb-project")
    if flags.mlflow_experiment is not None and flags.mlflow_uri is None:
        raise ValueError(f"--mlflow-experiment {flags.mlflow_experiment} needs --mlflow-uri")
