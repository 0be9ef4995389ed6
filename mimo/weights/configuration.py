"""The config.json of a Hugging Face folder against the model that takes the folder's weights."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from mimo.checkpoint.differences import UNUSED
from mimo.config.toml_file import flag_name
from mimo.protocols import LANGUAGE, ComparableProvider, ModelProvider

CONFIG_JSON = "config.json"
# The key of --allow-difference for a config.json that describes a model which the provider cannot build.
WHOLE = "hf_config"
# Keys of a configuration that say what kind of model it is, how many layers a tower has besides those that run, and how
# long sequences may be: an export leaves them as its base has them.
KEPT = frozenset({"architectures", "model_type", "num_hidden_layers", "vision_feature_layer", "dtype", "torch_dtype",
                  "max_position_embeddings", "max_sequence_length", "vision_use_head", "num_nextn_predict_layers"})
ROPE_KEYS = frozenset({"rope_theta", "rope_scaling", "rope_parameters"})
logger = logging.getLogger(__name__)


def read_config_json(folder: Path) -> dict[str, Any] | None:
    """Read config.json of a Hugging Face folder; None if it has none. Raises ValueError for a file that is not JSON."""
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


def differing_fields(provider: ComparableProvider, family_config: Any, values: Mapping[str, Any],
                     module: str) -> dict[str, tuple[Any, Any]]:
    """Find fields that decide what a module computes and differ from config.json: the run's value and its own.

    Raises:
        ValueError: a value of config.json that the model cannot reproduce; the message names the key.
    """
    own = provider.resolved(family_config)
    theirs = provider.computed_fields(provider.with_hf(own, values, module), module)
    ours = provider.computed_fields(own, module)
    return {name: (ours.get(name, UNUSED), theirs.get(name, UNUSED)) for name in {**ours, **theirs}
            if ours.get(name, UNUSED) != theirs.get(name, UNUSED)}


def compare_folder(provider: ModelProvider, family_config: Any, folder: str | Path, modules: Iterable[str],
                   allowed: Collection[str]) -> tuple[list[str], list[str]]:
    """Compare the run's model with the config.json of a folder, module by module.

    `allowed` are the fields that --allow-difference names.

    Returns:
        A line for each difference that is refused. And notes for a person: differences that --allow-difference names,
        and what was not compared.

    Raises:
        ValueError: config.json is not JSON.
    """
    if not isinstance(provider, ComparableProvider):
        return [], [f"the model provider cannot compare its flags with {CONFIG_JSON} of {folder}: check them"]
    values = read_config_json(Path(folder))
    if values is None:
        return [], [f"{folder} has no {CONFIG_JSON}: nothing says whether flags such as --norm-epsilon and "
                    "--rotary-base are those of its weights; check them"]
    problems, notes = [], []
    differing: dict[str, tuple[Any, Any]] = {}
    for module in modules:
        try:
            differing |= differing_fields(provider, family_config, values, module)
        except ValueError as error:
            message = str(error).removeprefix("--hf-config: ")
            if WHOLE in allowed:
                notes.append(f"{folder}: {CONFIG_JSON} is not compared for {module}: {message}")
            else:
                problems.append(
                    f"{CONFIG_JSON}, {module}: {message} (--allow-difference {flag_name(WHOLE)[2:]} takes the weights "
                    "for the model of the flags all the same)")
    for name, (ours, theirs) in differing.items():
        shown = f"{CONFIG_JSON}: {flag_name(name)} {ours}, but {theirs} there ({provider.hf_key(name, values)})"
        if name in allowed:
            notes.append(f"{folder}: {shown}; --allow-difference keeps that of the run")
        else:
            problems.append(f"{shown}; --hf-config {folder} gives its value, --allow-difference "
                            f"{flag_name(name)[2:]} keeps that of the run")
    return list(dict.fromkeys(problems)), notes


def exported_configuration(provider: ModelProvider, family_config: Any, base: Path | None,
                           modules: Iterable[str]) -> dict[str, Any] | None:
    """Return the contents of config.json for an export: the provider's, or the base's with this run's values in it.

    Returns:
        The contents; None where the base has no config.json.

    Raises:
        ValueError: the provider has no Hugging Face counterpart; the base describes another model, or this run has a
            value that cannot be written into its config.json.
    """
    if base is None:
        own = provider.hf_config(family_config)
        text = own.get("text_config") or own.get("llm_config") or own
        # Without these keys, classes of transformers have ids of their own, at which servers would end an answer.
        for key in ("bos_token_id", "eos_token_id"):
            text.setdefault(key, None)
        return own
    values = read_config_json(base)
    if values is None:
        return None
    if not isinstance(provider, ComparableProvider):
        logger.warning("the model provider cannot compare its flags with %s of %s, which is copied as it is: check it",
                       CONFIG_JSON, base)
        return values
    modules = tuple(modules)
    differing = _differing(provider, family_config, values, modules, base)
    if not differing:
        if _has_more(provider, family_config, base, modules):
            provider.hf_config(family_config)  # raises ValueError if no configuration can say it
        return values
    # The base's configuration, with this run's values where they decide what the model computes.
    own = provider.hf_config(family_config)
    towers = [name for name in ("text_config", "llm_config", "vision_config") if name in values]
    changed = dict(values)
    language = [module for module in modules if module == LANGUAGE]
    if towers in ([], ["vision_config"]) and _differing(provider, family_config, values, language, base):
        # A text model, or keys of one at the top, as in the published files of Qwen2.5-VL.
        changed = _replaced(values, own.get("text_config") or own.get("llm_config") or own)
    for tower in towers:
        changed[tower] = _replaced(values[tower], own.get(tower) or own.get("llm_config") or {})
    left = _differing(provider, family_config, changed, modules, base)
    if left:
        lines = [f"{flag_name(name)} {ours}, but {theirs} there ({provider.hf_key(name, values)})"
                 for name, (ours, theirs) in left.items()]
        raise ValueError("\n  ".join([
            f"--hf-base {base}: its {CONFIG_JSON} describes a model that computes something else than the "
            "checkpoint's; leave --hf-base out, or give the right one", *lines]))
    for name, (ours, theirs) in differing.items():
        logger.warning("%s has %s %s of the checkpoint's run in place of %s of --hf-base %s", CONFIG_JSON,
                       provider.hf_key(name, values), ours, theirs, base)
    return changed


def _differing(provider: ComparableProvider, family_config: Any, values: Mapping[str, Any], modules: Iterable[str],
               base: Path) -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    for module in modules:
        try:
            found |= differing_fields(provider, family_config, values, module)
        except ValueError as error:
            message = str(error).removeprefix("--hf-config: ")
            raise ValueError(f"--hf-base {base}: its {CONFIG_JSON} describes a model that the checkpoint cannot be: "
                             f"{message}; leave --hf-base out, or give the right one") from error
    return found


def _has_more(provider: ModelProvider, family_config: Any, base: Path, modules: Iterable[str]) -> bool:
    """Return whether an encoder has a value that config.json leaves out and that is not the family's default.

    `differing_fields` takes such a value for the base's own, because a base may be the encoder alone. Here the base
    counts if it is a whole model of the family, which then computes with the default.
    """
    assert isinstance(provider, ComparableProvider), "checked by the caller"
    encoders = [module for module in modules if module != LANGUAGE]
    own = provider.resolved(family_config)
    if not encoders or not hasattr(own, WHOLE):
        return False
    try:
        ours, theirs = (provider.resolved(dataclasses.replace(each, **{WHOLE: str(base)}))
                        for each in (own, provider.Config()))
    except ValueError:
        return False  # another kind of model, of which `differing_fields` has read each module
    return any(provider.computed_fields(ours, module) != provider.computed_fields(theirs, module)
               for module in encoders)


def _replaced(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Replace values of one level of a configuration. Positions may be written in two ways, of which one remains."""
    kept = {key: value for key, value in base.items() if key not in ROPE_KEYS or "rope_theta" not in own}
    return kept | {key: value for key, value in own.items() if key not in KEPT and not isinstance(value, dict | list)
                   or key in ROPE_KEYS}
