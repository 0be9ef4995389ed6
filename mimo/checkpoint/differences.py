"""Compares the flags, the model and the data of a run with those of a checkpoint."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from mimo import registry
from mimo.config.cli import to_toml
from mimo.config.rl_run import RlRunConfig
from mimo.config.toml_file import field_name, flag_name
from mimo.config.trainer import RunConfig
from mimo.protocols import ComparableProvider, MegatronSourceProvider, ModelProvider, RecordedData, RoutedDataProvider

# The key of `data_fields` that is no flag.
PROGRAM = "program"
UNUSED = "without effect"

Differences = dict[str, tuple[Any, Any]]
"""Field -> its value in the run and in the checkpoint."""

# Flags of a single start, such as where it loads from. They say nothing about the run itself.
_OF_A_START = frozenset({
    "load", "save", "ckpt_step", "finetune", "run_dir", "tensorboard_dir", "tensorboard_by_samples", "progress",
    "log_interval", "device", "watchdog_timeout_s", "checkpoint_timeout_s", "exit_duration_in_mins", "save_interval",
    "keep_last", "async_save", "dry_run", "world_size", "ckpt_verify", "allow_difference",
})


def flat_config(text: str) -> dict[str, Any]:
    """Return the values of a configuration in TOML, by flag name. Raises ValueError like `sections_of`."""
    return _flat(sections_of(text))


def sections_of(text: str) -> dict[str, Any]:
    """Parse a configuration in TOML, by section. Raises ValueError if it is not TOML."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"the configuration in the checkpoint is not TOML: {error}") from error


def _flat(sections: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("-", "_"): value for section in sections.values() for name, value in section.items()}


def config_differences(saved: str, config: RunConfig) -> list[str]:
    """Return a line for each flag whose value is not the checkpoint's.

    Flags that concern a single start do not count, nor do sections that only one of the two has, because it is a
    configuration of another program.
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
            lines.append(f"{flag} {now.get(name, 'not set')} (checkpoint: {before.get(name, 'not set')})")
    return lines


def model_fields(provider: ModelProvider, family_config: Any) -> dict[str, Any]:
    """Return every field of a model's configuration as plain data.

    The fields contain the values of a config.json (`--hf-config`), so that the file may change or be deleted.
    """
    resolved = provider.resolved(family_config) if isinstance(provider, ComparableProvider) else family_config
    return _plain_fields(resolved)


def _plain_fields(config: Any) -> dict[str, Any]:
    return {field.name: str(value) if isinstance(value := getattr(config, field.name), Path) else value
            for field in dataclasses.fields(config)}


def model_differences(saved: Mapping[str, Any], provider: ModelProvider, family_config: Any,
                      modules: Iterable[str]) -> Differences:
    """Find the fields that affect what the modules compute and that differ from those of the checkpoint's model.

    If the provider does not say which fields do, all count, except for the field that names the checkpoint to start
    from. `saved` are the checkpoint's `model_fields`.
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
    """Return the fields that name the source of a provider's weights (`mimo.protocols.MegatronSource`)."""
    if not isinstance(provider, MegatronSourceProvider):
        return set()
    sources = [provider.megatron_source(config) for config in family_configs]
    return {field_name(source.flag) for source in sources if source is not None}


def data_fields(config: RunConfig) -> dict[str, Any]:
    """Return what decides the samples of a run and their order, as plain data. Reads the files that flags name."""
    name = config.data.dataset_provider
    provider = config.find_dataset(name)
    fields = provider.stream_fields(config.dataset) if isinstance(provider, RecordedData) else (
        _plain_fields(config.dataset))
    built_in = registry.PROMPT_PROVIDERS if isinstance(config, RlRunConfig) else registry.DATASET_PROVIDERS
    fields |= {PROGRAM: type(config).__name__,
               "dataset_provider": next((known for known, target in built_in.items() if target == name), name),
               "seed": config.train.seed}
    if isinstance(provider, RoutedDataProvider):
        fields["seq_length"] = config.train.seq_length  # longer samples are skipped
    if isinstance(config, RlRunConfig):
        fields["skip_long_prompts"] = config.data.skip_long_prompts
        if config.data.skip_long_prompts:
            fields |= {"seq_length": config.train.seq_length,
                       "max_completion_tokens": config.rollout.max_completion_tokens}
    return fields


def data_differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> Differences:
    """Compare two results of `data_fields`: the checkpoint's and the run's own.

    Runs of train_hetero.py and train_rl.py are not compared; loading the data's state refuses that.
    """
    if own.get(PROGRAM) != saved.get(PROGRAM):
        return {}
    if own["dataset_provider"] != saved["dataset_provider"]:  # their flags cannot be compared
        return {"dataset_provider": (own["dataset_provider"], saved["dataset_provider"])}
    # A checkpoint of an older version does not know newer flags. They count only where they change samples.
    unused = {"image_grid_pinpoints": not own.get("image_grid_pinpoints"),
              **dict.fromkeys(("mock_video_fraction", "mock_video_frames"), not own.get("mock_video_fraction")),
              "mock_video_min_frames": not own.get("mock_video_fraction") or own.get("mock_video_min_frames") == 1}
    own = {name: value for name, value in own.items()
           if name in saved or not (name.startswith("video_") or unused.get(name, False))}
    return {name: (own.get(name, "not set"), saved.get(name, "not set")) for name in {**own, **saved}
            if own.get(name, "not set") != saved.get(name, "not set")}


def refused(differences: Differences, allowed: Collection[str]) -> tuple[list[str], list[str]]:
    """Return a line for each difference that is refused, and one for each that --allow-difference names."""
    lines: tuple[list[str], list[str]] = ([], [])
    for name, (ours, theirs) in sorted(differences.items()):
        own, saved = ("not set" if value in (None, "") else value for value in (ours, theirs))
        lines[name in allowed].append(f"{flag_name(name)} {own} (checkpoint: {saved})")
    return lines[0], [f"{line}, which --allow-difference allows" for line in lines[1]]
