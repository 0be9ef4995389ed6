"""Derive from the trainer's flags, without a GPU: the layout, the paths of the run, the size of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from data.energon import provider as energon
from mimo import registry
from mimo.config.trainer import RunConfig
from mimo.config.validate import train_iterations, validate
from mimo.grid.dry_run import dry_run_report, total_parameters
from mimo.grid.lanes import data_request
from mimo.observability.dated_folder import RUNS
from mimo.protocols import StagedProvider
from mimo.weights import hub
from providers.common.hybrid import MAMBA, HybridConfig

# Fields of any section that name a path from which a run reads.
READ_PATHS = ("data_path", "valid_data_path", "image_folder", "tokenizer", "load_nemotron_checkpoint", "load_hf",
              "load_vision_from", "load_language_from", "hf_config")
WRITTEN_PATHS = ("save", "run_dir", "tensorboard_dir")


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run.

    Attributes:
        bytes_each: estimated size of one: weights, and for trained modules two moments and, in bf16, a float32 copy.
        saves: number of times that the run saves.
        kept: number of checkpoints that are kept.
        interval: iterations between two checkpoints; None for one at the end.
    """

    bytes_each: int
    saves: int
    kept: int
    interval: int | None


def plan(config: RunConfig, world_size: int) -> str:
    """Return the topology as text. Opens no data.

    Raises:
        ValueError: flags cannot work. The message names them and their values.
    """
    # The data set's numbers are checked, its files are not: they are on the cluster.
    planned = replace(config, train=replace(config.train, dry_run=True, world_size=world_size),
                      data=replace(config.data, dataset_provider="mock"),
                      dataset=registry.dataset_provider("mock").Config())
    layout = validate(planned, world_size)
    provider, train = registry.model_provider(config.model.model_provider), config.train
    if isinstance(config.dataset, energon.Config):
        energon.check(config.dataset, data_request(
            layout, provider, config.model_family, micro_batch_size=train.micro_batch_size,
            seq_length=train.seq_length, seed=train.seed, split="train"))
    return dry_run_report(planned, layout, provider)


def has_mamba_layers(config: RunConfig) -> bool:
    family = config.model_family
    return isinstance(family, HybridConfig) and MAMBA in family.hybrid_layer_pattern


def read_paths(config: RunConfig) -> dict[str, Path]:
    """Return files and folders that the run reads, by flag. --load counts if it is not the folder of --save."""
    # Each node has a cache of the hub of its own, which the run fills.
    found = {flag: path for flag, path in _paths(config, READ_PATHS).items() if hub.model_of(path) is None}
    load = config.checkpoint.load
    if load is not None and load != config.checkpoint.save:
        found["--load"] = Path(load)
    return found


def written_paths(config: RunConfig) -> dict[str, Path]:
    """Return folders into which the run writes, by flag. Without --run-dir, the run makes one in `runs`."""
    return {"--run-dir": RUNS} | _paths(config, WRITTEN_PATHS)


def checkpoints(config: RunConfig) -> Checkpoints | None:
    """Estimate the checkpoints of the run. None without --save."""
    if config.checkpoint.save is None:
        return None
    provider = registry.model_provider(config.model.model_provider)
    frozen = config.model.frozen
    if isinstance(provider, StagedProvider):
        frozen |= provider.frozen_parts(config.model_family)
    weight, state = (2, 12) if config.model.bf16 else (4, 8)
    size = 0
    for module in ("language", *(() if config.layout.llm_only else provider.encoders(config.model_family))):
        trains = module not in frozen and config.checkpoint.save_optim
        size += total_parameters(provider.parameter_shapes(config.model_family, module)) * (weight + state * trains)
    interval = config.checkpoint.save_interval
    saves = -(-train_iterations(config) // interval) if interval else 1
    return Checkpoints(size, saves, min(saves, config.checkpoint.keep_last or saves), interval)


def _paths(config: RunConfig, names: tuple[str, ...]) -> dict[str, Path]:
    values = {name: value for section in vars(config).values() if section is not None
              for name, value in vars(section).items() if name in names and value and "://" not in str(value)}
    return {"--" + name.replace("_", "-"): Path(values[name]) for name in names if name in values}
