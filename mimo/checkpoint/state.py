"""The state of a run as one sharded state dict, the same for saving and for loading in place."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mimo import registry
from mimo.checkpoint.entries import Saved, saved_tensors, spread_replicas
from mimo.checkpoint.optimizer_state import Optimized, optimized
from mimo.config.cli import to_toml
from mimo.config.rl_run import RlRunConfig
from mimo.config.toml_file import field_name, flag_name
from mimo.config.trainer import RunConfig
from mimo.grid.groups import Grids
from mimo.grid.spec import GridSpec
from mimo.model.build import OPTIMIZER, WEIGHTS, BuiltModel
from mimo.platform.base import Platform
from mimo.protocols import ComparableProvider, MegatronSourceProvider, ModelProvider, RecordedData, RoutedDataProvider
from mimo.training.optimizer import HeteroOptimizer

# Which flags, which model and which data of a run differ from those of a checkpoint.


# The key of `data_fields` that is no flag.
PROGRAM = "program"
UNUSED = "without effect"
Differences = dict[str, tuple[Any, Any]]
"""Field -> its value in the run and in the checkpoint."""

# Flags of one start of a run, which say nothing about the run itself; as those that say what it loads.
_OF_A_START = frozenset({
    "tensorboard_by_samples",
    "load", "save", "ckpt_step", "finetune", "run_dir", "tensorboard_dir", "progress", "log_interval", "device",
    "watchdog_timeout_s", "checkpoint_timeout_s", "exit_duration_in_mins", "save_interval", "keep_last", "async_save",
    "dry_run", "world_size", "ckpt_verify", "allow_difference",
})


def flat_config(text: str) -> dict[str, Any]:
    """A configuration as TOML by flag name. Raises ValueError as `sections_of`."""
    return _flat(sections_of(text))


def sections_of(text: str) -> dict[str, Any]:
    """A configuration as TOML by section. Raises ValueError for what is not TOML."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"the configuration in the checkpoint is not TOML: {error}") from error


def _flat(sections: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("-", "_"): value for section in sections.values() for name, value in section.items()}


def config_differences(saved: str, config: RunConfig) -> list[str]:
    """One line for each flag whose value is not the checkpoint's.

    Left out are flags of a single start, and sections that one of the two has not: those of another program's.
    """
    theirs, own = sections_of(saved), sections_of(to_toml(config))
    before, now = (_flat({name: each[name] for name in theirs.keys() & own.keys()}) for each in (theirs, own))
    lines = []
    for name in sorted(before.keys() | now.keys()):
        # A switch that one of the two does not have is off there; a value that it does not have is not set, which is
        # not 0.
        is_same = (before[name] == now[name] if name in before and name in now
                   else before.get(name, False) is now.get(name, False))
        if not name.startswith("load_") and name not in _OF_A_START and not is_same:
            flag = "--" + name.replace("_", "-")
            lines.append(f"{flag} {_shown(now, name)} (checkpoint: {_shown(before, name)})")
    return lines


def _shown(values: dict[str, Any], name: str) -> str:
    return str(values[name]) if name in values else "not set"


def model_fields(provider: ModelProvider, family_config: Any) -> dict[str, Any]:
    """Every field of a model's configuration as plain data; the values of a config.json (`--hf-config`) stand in the
    fields, so that the file may change or go."""
    resolved = provider.resolved(family_config) if isinstance(provider, ComparableProvider) else family_config
    return _plain_fields(resolved)


def _plain_fields(config: Any) -> dict[str, Any]:
    return {field.name: str(value) if isinstance(value := getattr(config, field.name), Path) else value
            for field in dataclasses.fields(config)}


def model_differences(saved: Mapping[str, Any], provider: ModelProvider, family_config: Any,
                      modules: Iterable[str]) -> Differences:
    """Fields that decide what the modules compute and whose value was another in the checkpoint's model.

    All fields count if the provider does not say which of them decide, except for the one that names the checkpoint to
    start from.

    Args:
        saved: `model_fields` of the checkpoint.
        provider: the model family of the run.
        family_config: its configuration.
        modules: the modules that are loaded.
    """
    if not isinstance(provider, ComparableProvider):
        known = {field.name for field in dataclasses.fields(family_config)}
        theirs = dataclasses.replace(family_config, **{name: saved[name] for name in saved if name in known})
        own, starts = _plain_fields(family_config), _names_of_starts(provider, family_config, theirs)
        return {name: (own[name], saved[name]) for name in own
                if name in saved and name not in starts and own[name] != saved[name]}
    resolved = provider.resolved(family_config)
    # A field that the checkpoint's version of the program did not know had its default's effect.
    values = {field.name: saved.get(field.name, field.default) for field in dataclasses.fields(resolved)
              if field.name in saved or field.default is not dataclasses.MISSING}
    theirs = dataclasses.replace(resolved, **values)
    starts = _names_of_starts(provider, resolved, theirs)
    found: Differences = {}
    for module in modules:
        ours_of, theirs_of = (provider.computed_fields(one, module) for one in (resolved, theirs))
        found |= {name: (ours_of.get(name, UNUSED), theirs_of.get(name, UNUSED)) for name in {**ours_of, **theirs_of}
                  if name not in starts and ours_of.get(name, UNUSED) != theirs_of.get(name, UNUSED)}
    return found


def _names_of_starts(provider: ModelProvider, *family_configs: Any) -> set[str]:
    """Names of the fields that say where a provider's weights come from (`mimo.protocols.MegatronSource`)."""
    if not isinstance(provider, MegatronSourceProvider):
        return set()
    sources = [provider.megatron_source(config) for config in family_configs]
    return {field_name(source.flag) for source in sources if source is not None}


def data_fields(config: RunConfig) -> dict[str, Any]:
    """Fields that decide the samples of a run and their order, as plain data. Reads the files that flags name."""
    name = config.data.dataset_provider
    provider = config.find_dataset(name)
    fields = provider.stream_fields(config.dataset) if isinstance(provider, RecordedData) else (
        _plain_fields(config.dataset))
    built_in = registry.PROMPT_PROVIDERS if isinstance(config, RlRunConfig) else registry.DATASET_PROVIDERS
    fields |= {PROGRAM: type(config).__name__,
               "dataset_provider": next((known for known, target in built_in.items() if target == name), name),
               "seed": config.train.seed}
    if isinstance(provider, RoutedDataProvider):
        fields["seq_length"] = config.train.seq_length  # longer samples are passed over
    if isinstance(config, RlRunConfig):
        fields["skip_long_prompts"] = config.data.skip_long_prompts
        if config.data.skip_long_prompts:
            fields |= {"seq_length": config.train.seq_length,
                       "max_completion_tokens": config.rollout.max_completion_tokens}
    return fields


def data_differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> Differences:
    """Fields that decide the samples and that the checkpoint's run had otherwise; both as `data_fields`.

    None of them where the two are of different programs, train_hetero.py and train_rl.py: the data's state says so.
    """
    if own.get(PROGRAM) != saved.get(PROGRAM):
        return {}
    if own["dataset_provider"] != saved["dataset_provider"]:  # no flag of the one is comparable
        return {"dataset_provider": (own["dataset_provider"], saved["dataset_provider"])}
    return {name: (own.get(name, "not set"), saved.get(name, "not set")) for name in {**own, **saved}
            if own.get(name, "not set") != saved.get(name, "not set")}


def refused(differences: Differences, allowed: Collection[str]) -> tuple[list[str], list[str]]:
    """A line for each difference that is refused, and one for each that --allow-difference names."""
    lines: tuple[list[str], list[str]] = ([], [])
    for name, (ours, theirs) in sorted(differences.items()):
        own, saved = ("not set" if value in (None, "") else value for value in (ours, theirs))
        lines[name in allowed].append(f"{flag_name(name)} {own} (checkpoint: {saved})")
    return lines[0], [f"{line}, which --allow-difference allows" for line in lines[1]]


CHECKPOINT_VERSION = 3.0
FORMAT = 1


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        iteration: iterations done.
        consumed_samples: samples of successful iterations, which the schedule counts.
        skipped_iterations: iterations without an update.
        bad_samples: samples that the data set has passed over on the way to those of the iterations.
    """

    iteration: int = 0
    consumed_samples: int = 0
    skipped_iterations: int = 0
    bad_samples: int = 0

    @classmethod
    def of(cls, common: dict[str, Any]) -> Progress:
        """That of a checkpoint, from its `common_state`."""
        # Checkpoints of older versions do not tell of bad samples.
        return cls(common["iteration"], common["consumed_samples"], common["skipped_iterations"],
                   common.get("bad_samples", 0))


@dataclass(frozen=True)
class Source:
    """The checkpoint that a run starts from.

    Attributes:
        folder: the checkpoint.
        flag: that names its place: `--save` where the run goes on from its own checkpoint although --load names another
            folder, the one where it began; else `--load`.
        is_own: it lies in the folder of --save.
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
        streams: state of each open data stream by `module/lane`, and the samples handed out.
        source: what the run was started from; None before that, and without a checkpoint.
        data: on the first rank what decides the run's samples, as `mimo.checkpoint.state.data_fields`; empty
            before the start, and for a run without data.
        model: the model's sizes, as `mimo.checkpoint.state.model_fields`. They are read when the state is made,
            because the file of --hf-config may change or go while the run goes on.
    """

    config: RunConfig
    grids: Grids
    platform: Platform
    built: BuiltModel
    optimizer: HeteroOptimizer
    scheduler: OptimizerParamScheduler
    streams: dict[str, Any] = field(default_factory=lambda: {"consumed_samples": 0, "streams": {}})
    source: Source | None = None
    data: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.model = model_fields(registry.model_provider(self.config.model.model_provider), self.config.model_family)

    @cached_property
    def config_toml(self) -> str:
        """The flags as TOML."""
        return to_toml(self.config)

    def complete_parameters(self) -> None:
        """Finish a gather of parameters that an overlapped step left open."""
        self.built.residency.require("a checkpoint", WEIGHTS)
        self.built.model.disable_forward_pre_hook()
        self.built.model.enable_forward_pre_hook()

    def saved(self) -> list[Saved]:
        """Parameters and buffers, complete."""
        self.complete_parameters()
        return saved_tensors(self.built.model, self.grids)

    def held(self, saved: list[Saved]) -> list[Optimized]:
        """What the optimizers hold, allocated."""
        self.built.residency.require("a checkpoint", OPTIMIZER)
        return optimized(self.optimizer, saved)


def by_index(entries: list[ShardedTensor]) -> dict[str, ShardedTensor]:
    """Entries as a state dict; the names only tell them apart."""
    return {str(index): entry for index, entry in enumerate(entries)}


def model_entries(state: RunState, saved: list[Saved]) -> dict[str, ShardedTensor]:
    """Weights and buffers."""
    return by_index(spread_replicas(saved, state.grids))


def optimizer_entries(held: list[Optimized]) -> dict[str, ShardedTensor]:
    """Moments and fp32 copies."""
    return by_index([entry for one in held for entry in one.entries()])


def stream_object(name: str, value: Any, *, main: bool) -> ShardedObject:
    """The state of the data stream `module/lane`, written by one of the ranks that read it."""
    module, lane = name.split("/")
    return ShardedObject(f"mimo.loader.{module}.{lane}", value, (1,), (0,), replica_id=0 if main else 1)


def common_state(state: RunState, progress: Progress, steps: dict[str, dict[str, int]] | None) -> dict[str, Any]:
    """What is the same on every rank, of plain data.

    Args:
        state: the run.
        progress: how far it is.
        steps: Adam's counts by module and part; None where no optimizer is saved.
    """
    config = state.config
    return {
        "checkpoint_version": CHECKPOINT_VERSION,
        "format": FORMAT,
        "iteration": progress.iteration,
        "consumed_samples": progress.consumed_samples,
        "skipped_iterations": progress.skipped_iterations,
        "bad_samples": progress.bad_samples,
        "loader_samples": state.streams["consumed_samples"],
        "scheduler": state.scheduler.state_dict(),
        "optimizer_steps": steps,
        "frozen": sorted(config.model.frozen),
        "grids": {name: _sizes(spec) for name, spec in state.grids.layout.grids.items()},
        "lanes": state.grids.layout.num_lanes,
        "config": state.config_toml,
        "model": state.model,
        "data": state.data,
    }


def weights_only_state(modules: Iterable[str], config: str, model: dict[str, Any]) -> dict[str, Any]:
    """`common_state` of weights that no run of this trainer has made.

    Args:
        modules: the modules that the checkpoint holds; no grids wrote them.
        config: flags of a run of the model, as TOML.
        model: its fields, as `mimo.checkpoint.state.model_fields`.
    """
    return {
        "checkpoint_version": CHECKPOINT_VERSION,
        "format": FORMAT,
        "iteration": 0,
        "consumed_samples": 0,
        "skipped_iterations": 0,
        "bad_samples": 0,
        "loader_samples": 0,
        "scheduler": None,
        "optimizer_steps": None,
        "frozen": [],
        "grids": {name: {} for name in modules},
        "lanes": 0,
        "config": config,
        "model": model,
    }


def _sizes(spec: GridSpec) -> dict[str, int]:
    return {"tp": spec.tp, "cp": spec.cp, "dp": spec.dp, "pp": spec.pp, "ep": spec.ep, "expt_tp": spec.expt_tp,
            "offset": spec.offset}


# States of the random generators, one for each rank of each module, as data that loads without running code.


def rng_objects(platform: Platform | None, grids: Grids) -> dict[str, ShardedObject]:
    """This rank's generator state under each of its modules; without `platform` only the places, for loading.

    The key of a module carries its sizes: on a grid with others there is no state to go on from.
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
