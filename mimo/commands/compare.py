"""What differs between a checkpoint and the configuration of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import torch

from mimo import registry
from mimo.checkpoint.differences import config_differences, model_differences, refused
from mimo.commands.contents import Contents
from mimo.commands.rows import WEIGHTS, Row, rows_of
from mimo.config.run import RunConfig
from mimo.protocols import LANGUAGE, ModelProvider

_NUMBERS = re.compile(r"\.(\d+|\{[\d,-]+\})(?=\.)")


def flag_differences(contents: Contents, config: RunConfig) -> list[str]:
    """One line for each flag whose value is another, and for each size that a config.json (`--hf-config`) gives one of
    the two and that is another in the other."""
    lines = config_differences(contents.common["config"], config)
    listed = {line.split()[0] for line in lines}
    provider = registry.model_provider(config.model.model_provider)
    modules = [module for module in (*provider.encoders(config.model_family), LANGUAGE) if module in contents.modules]
    sizes: list[str] = []
    if contents.common.get("model"):  # older versions did not store it
        sizes, _ = refused(model_differences(contents.common["model"], provider, config.model_family, modules), ())
    return lines + [line for line in sizes if line.split()[0] not in listed]


def tensor_differences(contents: Contents, config: RunConfig) -> list[str]:
    """One line for each tensor that the model of `config` wants and the checkpoint lacks, that the checkpoint has and
    the model does not, or whose shape or dtype is another.

    Names come from the provider's weight map, shapes from its `parameter_shapes`.
    """
    provider = registry.model_provider(config.model.model_provider)
    modules = [LANGUAGE] if config.layout.llm_only else [*provider.encoders(config.model_family), LANGUAGE]
    lines = [f"module {module} is not in the checkpoint" for module in modules if module not in contents.modules]
    lines += [f"module {module} is not in this configuration" for module in contents.modules if module not in modules]
    for module in modules:
        if module in contents.modules:
            lines += _names(contents, provider, config.model_family, module)
            lines += _shapes(contents, provider, config.model_family, module)
    return list(dict.fromkeys([*lines, *_dtypes(contents, config)]))


def _names(contents: Contents, provider: ModelProvider, family: Any, module: str) -> Iterator[str]:
    try:
        weight_map = provider.weight_map(family, module)
    except ValueError as error:
        yield f"names of {module} are not compared: {error}"
        return
    stored = weight_map.stored()
    wanted = {place.key: place.axes for place in stored.values()}
    held = {tensor.name: tensor.shape for tensor in contents.of(module) if tensor.kind == WEIGHTS}
    for name, axes in wanted.items():
        if name not in held:
            yield f"missing: {module}.{name} is not in the checkpoint"
        elif held[name][:len(axes)] != axes:
            yield (f"shape: {module}.{name} has {list(held[name][:len(axes)])} layers (experts), this configuration "
                   f"{list(axes)}")
    for rule in weight_map.rules:
        # A provider's shapes are those of whole parameters, of which this is a part.
        place = stored[rule.megatron]
        shape = held.get(place.key, place.axes)[len(place.axes):]
        if rule.rows is not None and shape and shape[0] != rule.rows.count:
            yield f"shape: {module}.{place.key} has {shape[0]} rows, this configuration {rule.rows.count}"
    for name in held:
        if name not in wanted:
            yield f"not used: {module}.{name} {list(held[name])} is not in this configuration"


def _shapes(contents: Contents, provider: ModelProvider, family: Any, module: str) -> Iterator[str]:
    rows = rows_of(tensor for tensor in contents.of(module) if tensor.kind == WEIGHTS)
    for expected in provider.parameter_shapes(family, module):
        for row in rows:
            if _is_named(row, expected.name) and row.shape != expected.shape:
                yield f"shape: {module}.{row.name} is {list(row.shape)}, this configuration has {list(expected.shape)}"


def _is_named(row: Row, name: str) -> bool:
    """Whether a row's tensors are what a provider's `parameter_shapes` calls `name`, without numbers and blocks."""
    plain = _NUMBERS.sub("", row.name)
    return plain == name or plain.endswith(f".{name}")


def _dtypes(contents: Contents, config: RunConfig) -> Iterator[str]:
    """Whether parameters are of the run's precision; those that always stay in float32 do not count."""
    dtype = "bfloat16" if config.model.bf16 else "float32"
    for module in contents.modules:
        held: dict[str, int] = {}
        for tensor in contents.of(module):
            if tensor.kind == WEIGHTS:
                held[tensor.dtype] = held.get(tensor.dtype, 0) + math.prod(tensor.shape)
        most = max(held, key=lambda name: held[name], default=dtype)
        if most != dtype:
            yield (f"dtype: weights of {module} are {most}, this configuration has {dtype} "
                   f"({'--bf16' if config.model.bf16 else '--no-bf16'})")


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a name without `torch.`."""
    dtype = vars(torch)[name]
    assert isinstance(dtype, torch.dtype), name
    return dtype
