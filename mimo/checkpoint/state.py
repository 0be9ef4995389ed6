"""The state of a run as one sharded state dict, the same for saving and for loading in place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mimo import registry
from mimo.checkpoint.differences import flat_config, model_fields
from mimo.checkpoint.entries import Optimized, Saved, optimized, saved_tensors, spread_replicas
from mimo.config.cli import to_toml
from mimo.config.trainer import RunConfig
from mimo.grid.groups import Grids
from mimo.model.build import OPTIMIZER, BuiltModel
from mimo.platform.base import Platform
from mimo.training.optimizer import HeteroOptimizer

# The version that Megatron Core's tools look for, and that of our own layout, of which a newer one is refused.
CHECKPOINT_VERSION = 3.0
FORMAT = 1


@dataclass
class Progress:
    """Progress of a run.

    Attributes:
        iteration: iterations done.
        consumed_samples: samples of successful iterations, which the schedule counts.
        skipped_iterations: iterations without an update.
        bad_samples: samples that the data set has skipped.
        passed_samples: samples of all iterations, those without an update included, which --train-samples counts.
        evaluated_iteration: iteration of the last evaluation that was due and was made.
    """

    iteration: int = 0
    consumed_samples: int = 0
    skipped_iterations: int = 0
    bad_samples: int = 0
    passed_samples: int = 0
    evaluated_iteration: int = 0

    @classmethod
    def of(cls, common: dict[str, Any]) -> Progress:
        """Return the progress of a checkpoint, from its `common_state`."""
        # Checkpoints of older versions have no number of bad samples, and none of samples of all iterations. They do
        # not tell of evaluations, so that none is missing.
        iteration, passed = common["iteration"], common.get("passed_samples")
        if passed is None:
            passed = iteration * flat_config(common["config"]).get("global_batch_size", 0)
        return cls(iteration, common["consumed_samples"], common["skipped_iterations"], common.get("bad_samples", 0),
                   passed, common.get("evaluated_iteration", iteration))


@dataclass(frozen=True)
class Source:
    """The checkpoint that a run starts from.

    Attributes:
        folder: the checkpoint.
        flag: the flag that names its folder: `--save` if the run continues from its own checkpoint although --load
            names another folder, from which it began; otherwise `--load`.
        is_own: whether it is in the folder of --save.
    """

    folder: Path
    flag: str
    is_own: bool


@dataclass
class RunState:
    """The objects whose state a checkpoint holds, on this rank.

    Attributes:
        config: the run's flags.
        grids: process groups.
        platform: owner of the random generators.
        built: the model.
        optimizer: the optimizers of all modules.
        scheduler: the learning-rate schedule.
        streams: state of each open data stream by `module/lane`, and the number of consumed samples.
        source: the checkpoint that the run starts from; None until it is known, and without one.
        references: where weights of the reference policy are from, by the flag that names their folder; see
            `mimo.rl.reference`.
        data: on the first rank, `mimo.checkpoint.differences.data_fields`; empty before the start, and for a run
            without data.
        model: `mimo.checkpoint.differences.model_fields`, read at the start, because the file of --hf-config may change
            during the run.
    """

    config: RunConfig
    grids: Grids
    platform: Platform
    built: BuiltModel
    optimizer: HeteroOptimizer
    scheduler: OptimizerParamScheduler
    streams: dict[str, Any] = field(default_factory=lambda: {"consumed_samples": 0, "streams": {}})
    source: Source | None = None
    references: dict[str, dict[str, str]] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.model = model_fields(registry.model_provider(self.config.model.model_provider), self.config.model_family)

    @cached_property
    def config_toml(self) -> str:
        return to_toml(self.config)

    def saved(self) -> list[Saved]:
        """Return parameters and buffers, complete."""
        self.built.finish_gathers("a checkpoint")
        return saved_tensors(self.built.model, self.grids)

    def held(self, saved: list[Saved]) -> list[Optimized]:
        """Return the optimizers' state, allocated."""
        self.built.residency.require("a checkpoint", OPTIMIZER)
        return optimized(self.optimizer, saved)


def by_index(entries: list[ShardedTensor]) -> dict[str, ShardedTensor]:
    """Return entries as a state dict, under arbitrary names."""
    return {str(index): entry for index, entry in enumerate(entries)}


def model_entries(state: RunState, saved: list[Saved]) -> dict[str, ShardedTensor]:
    """Return entries for weights and buffers."""
    return by_index(spread_replicas(saved, state.grids))


def optimizer_entries(held: list[Optimized]) -> dict[str, ShardedTensor]:
    """Return entries for moments and fp32 copies."""
    return by_index([entry for one in held for entry in one.entries()])


def stream_object(name: str, value: Any, *, main: bool) -> ShardedObject:
    """Return an entry for the state of the data stream `module/lane`. One of the ranks that read it writes it."""
    module, lane = name.split("/")
    return ShardedObject(f"mimo.loader.{module}.{lane}", value, (1,), (0,), replica_id=0 if main else 1)


def common_state(state: RunState, progress: Progress, steps: dict[str, dict[str, int]] | None) -> dict[str, Any]:
    """Return the part of a checkpoint that is plain data and the same on every rank.

    `steps` are Adam's counts of updates by module and part; None if no optimizer is saved.
    """
    config = state.config
    return {
        "checkpoint_version": CHECKPOINT_VERSION,
        "format": FORMAT,
        **asdict(progress),
        "loader_samples": state.streams["consumed_samples"],
        "scheduler": state.scheduler.state_dict(),
        "optimizer_steps": steps,
        "optimizer_dtypes": config.optim.saved_dtypes,
        "frozen": sorted(config.model.frozen),
        "grids": {name: {size: getattr(spec, size) for size in ("tp", "cp", "dp", "pp", "ep", "expt_tp", "offset")}
                  for name, spec in state.grids.layout.grids.items()},
        "lanes": state.grids.layout.num_lanes,
        "config": state.config_toml,
        "model": state.model,
        "data": state.data,
        "references": state.references,
    }


def is_imported(common: dict[str, Any]) -> bool:
    """Return whether a checkpoint with this common state has weights that were not made by a run of this trainer."""
    return "scheduler" in common and common["scheduler"] is None


def weights_only_state(modules: Iterable[str], config: str, model: dict[str, Any]) -> dict[str, Any]:
    """Return a `common_state` for weights that were not made by a run of this trainer.

    `config` has the flags of a run of the model as TOML, and `model` its `mimo.checkpoint.differences.model_fields`.
    """
    return {
        "checkpoint_version": CHECKPOINT_VERSION,
        "format": FORMAT,
        **asdict(Progress()),
        "loader_samples": 0,
        "scheduler": None,
        "optimizer_steps": None,
        "frozen": [],
        "grids": {name: {} for name in modules},
        "lanes": 0,
        "config": config,
        "model": model,
    }


# States of the random generators, one for each rank of each module, as data that loads without running code.


def rng_objects(platform: Platform | None, grids: Grids) -> dict[str, ShardedObject]:
    """Return entries for this rank's generator state, one for each of its modules.

    The shape of an entry has the sizes of the module's grid, so that a grid of other sizes finds no state. Without a
    platform, the entries have no state, for loading.
    """
    state = None if platform is None else _plain(platform.rng_state())
    objects = {}
    for name in grids.modules:
        spec = grids.layout.grids[name]
        place = spec.coordinates(grids.rank)
        shape = (spec.pp, spec.dp * spec.cp, spec.tp)
        offset = (place["pp"], place["dp"] * spec.cp + place["cp"], place["tp"])
        objects[name] = ShardedObject(f"mimo.{name}.rng_state", state, shape, offset, replica_id=0)
    return objects


def restore_rng(platform: Platform, state: dict[str, Any]) -> None:
    """Set every generator to a state that `rng_objects` saved."""
    version, words, gauss = state["python"]
    kind, keys, *rest = state["numpy"]
    platform.set_rng_state({
        **state,
        "python": (version, tuple(words.tolist()), gauss),
        "numpy": (kind, keys.numpy().astype(np.uint32), *rest),
    })


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    version, words, gauss = state["python"]
    kind, keys, *rest = state["numpy"]
    tracker = {name: value.clone() if isinstance(value, torch.Tensor) else value
               for name, value in state["tracker"].items()}
    return {
        "python": [version, torch.tensor(words), gauss],
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), *rest],
        "torch": state["torch"].clone(),
        "device": state["device"].clone(),
        "tracker": tracker,
    }
