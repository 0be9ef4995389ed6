"""Which model a checkpoint or a Hugging Face folder is of."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mimo import registry
from mimo.checkpoint.differences import model_differences, refused, sections_of
from mimo.config import toml_file
from mimo.config.cli import config_files, parse, typed_providers
from mimo.config.run import RunConfig
from mimo.protocols import LANGUAGE, SizesProvider
from mimo.weights.configuration import CONFIG_JSON, read_config_json


def config_of_checkpoint(common: Mapping[str, Any], folder: Path, run_flags: Sequence[str]) -> RunConfig:
    """The model that a checkpoint holds, as the configuration of a run.

    Its sizes are those that the checkpoint stores; where it is of an older version, those of the flags that it was
    saved with. The data set is that of the run, and None where its provider is not built in and was not typed, or is
    one of train_rl.py. Everything else that a run has stays at its defaults.

    Args:
        common: the checkpoint's common state.
        folder: the checkpoint, for messages.
        run_flags: flags that replace its own.

    Raises:
        ValueError: it names a provider that is not built in or not there, has unknown flags, or there is none; flags
            make another model of it.
    """
    sections = sections_of(common["config"])
    if not sections:
        raise ValueError(f"{folder} says nothing about the model it holds: it was not made by `mimo import`")
    data, typed = sections.get("data", {}).get("dataset-provider"), typed_providers(run_flags)
    wanted = typed["dataset_provider"] or (data if data in registry.DATASET_PROVIDERS else None)
    has_data = data is not None and data == wanted and "rl" not in sections
    titles = ("model", "model-family", *(("data", "dataset") if has_data else ()))
    flags = {name: value for title in titles for name, value in sections.get(title, {}).items()}
    refuse_named_code({"model_provider": flags.get("model-provider")}, str(folder), run_flags)
    named = [word for field, name in typed.items() if name is not None for word in (toml_file.flag_name(field), name)]
    stored = _parsed(toml_file.dump_values(flags), folder, named)
    if common.get("model"):
        known = {field.name for field in dataclasses.fields(stored.model_family)}
        family = dataclasses.replace(stored.model_family, **{
            name: value for name, value in common["model"].items() if name in known})
        stored = dataclasses.replace(stored, model_family=family)
    config = _parsed(toml_file.dump({"model": stored.model, "model_family": stored.model_family, "data": stored.data,
                                     "dataset": stored.dataset}), folder, run_flags)
    if common.get("model"):
        provider = registry.model_provider(config.model.model_provider)
        modules = (*provider.encoders(config.model_family), LANGUAGE)
        lines, _ = refused(model_differences(common["model"], provider, config.model_family, modules),
                           config.checkpoint.allowed_differences)
        if lines:
            raise ValueError("\n  ".join([
                f"{folder} holds a model that computes something else than the one of the flags; leave them out, or "
                "give --allow-difference with the name of the flag after the lone --", *lines]))
    return config if has_data or typed["dataset_provider"] is not None else dataclasses.replace(config, dataset=None)


def _parsed(text: str, folder: Path, flags: Sequence[str]) -> RunConfig:
    """A configuration as TOML with flags over it. Raises ValueError, naming the checkpoint."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        try:
            return parse(["--config", file.name, *flags])
        except ValueError as error:
            message = str(error).replace(f"--config {file.name}", "its configuration").replace(file.name, "it")
            raise ValueError(f"{folder}: {message}") from error


def refuse_named_code(named: Mapping[str, Any], source: str, run_flags: Sequence[str]) -> None:
    """Refuse to import code that a file names: commands look into files that somebody else may have made.

    Args:
        named: the providers that the file names, by field; None where it names none.
        source: the file, for messages.
        run_flags: flags that a person typed, which replace those of the file.

    Raises:
        ValueError: a provider is not built in, and was not typed.
    """
    built_in = {"model_provider": registry.MODEL_PROVIDERS,
                "dataset_provider": registry.DATASET_PROVIDERS | registry.PROMPT_PROVIDERS}
    typed = typed_providers(run_flags)
    for field, name in named.items():
        if name is not None and name not in built_in[field] and typed.get(field) is None:
            flag = toml_file.flag_name(field)
            raise ValueError(f"{source} names {flag} {name}, which is not built in; code that a file names is not run. "
                             f"If you trust it, type its name: -- {flag} {name}")


def named_providers(files: Sequence[str], run_flags: Sequence[str]) -> dict[str, Any]:
    """The providers that configuration files name, those of `run_flags` too; a later file wins. Raises ValueError."""
    named: dict[str, Any] = {}
    for path in (*files, *config_files(run_flags)):
        values = toml_file.read(path, [field.name for field in dataclasses.fields(RunConfig)])
        named |= {field: values[field] for field in ("model_provider", "dataset_provider") if field in values}
    return named


def provider_name(given: str | None, folder: Path) -> str:
    """The model provider to import a folder with: the one that was given, or that of the folder's architecture.

    Raises:
        ValueError: nothing says which.
    """
    if given is not None:
        return given
    values = read_config_json(folder)
    hint = f"give --model-provider, one of {', '.join(sorted(registry.MODEL_PROVIDERS))} or pkg.module:attr"
    if values is None:
        raise ValueError(f"{folder} has no {CONFIG_JSON}; {hint}")
    architectures = [str(name) for name in values.get("architectures") or []]
    for architecture in architectures:
        name = registry.provider_of(architecture)
        if name is not None:
            return name
    named = f"the architecture {', '.join(architectures)}, of no built-in model" if architectures else "no architecture"
    raise ValueError(f"{folder / CONFIG_JSON} names {named}; {hint}")


def check_hf_config(config: RunConfig, folder: Path) -> None:
    """Raise ValueError where a checkpoint's model is described by a file that is not there any more."""
    path = str(vars(config.model_family).get("hf_config") or "")
    if path and not Path(path).exists():
        raise ValueError(f"{folder} was made with --hf-config {path}, which is not there; give its place at the end "
                         "of the command: -- --hf-config PATH")


def check_sizes(config: RunConfig) -> None:
    """Raise ValueError for a model that no run would accept, whatever its layout."""
    provider = registry.model_provider(config.model.model_provider)
    if isinstance(provider, SizesProvider):
        provider.validate_sizes(config.model_family)


def takes_hf_config(provider: Any) -> bool:
    """Whether a provider's sizes can come from a Hugging Face config.json (`--hf-config`)."""
    return any(field.name == "hf_config" for field in dataclasses.fields(provider.Config))
