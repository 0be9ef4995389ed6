"""Which model a checkpoint or a Hugging Face folder is of."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mimo import registry
from mimo.config.cli import parse
from mimo.config.run import RunConfig

CONFIG_JSON = "config.json"


def config_of_checkpoint(text: str, folder: Path, run_flags: Sequence[str]) -> RunConfig:
    """The configuration that a checkpoint was saved with.

    Args:
        text: it, as TOML.
        folder: the checkpoint, for messages.
        run_flags: flags that replace its own.

    Raises:
        ValueError: it names a provider that is not there, has unknown flags, or there is none.
    """
    if not text.strip():
        raise ValueError(f"{folder} says nothing about the model it holds: it was not made by `mimo import`")
    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        try:
            return parse(["--config", file.name, *run_flags])
        except ValueError as error:
            message = str(error).replace(f"--config {file.name}", "its configuration").replace(file.name, "it")
            raise ValueError(f"{folder}: {message}") from error


def read_config_json(folder: Path) -> dict[str, Any] | None:
    """config.json of a Hugging Face folder, None where it has none. Raises ValueError for what is not JSON."""
    path = folder / CONFIG_JSON
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not the configuration of a model")
    return values


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


def takes_hf_config(provider: Any) -> bool:
    """Whether a provider's sizes can come from a Hugging Face config.json (`--hf-config`)."""
    return any(field.name == "hf_config" for field in dataclasses.fields(provider.Config))
