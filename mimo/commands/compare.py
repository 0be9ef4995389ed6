"""Differences between a checkpoint and the configuration of a run."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from tqdm import tqdm

from mimo import registry
from mimo.checkpoint.differences import config_differences, model_differences, refused
from mimo.checkpoint.paths import METADATA
from mimo.checkpoint.reader import CHECKSUMS, crc32_of, is_covered, read_common, read_index
from mimo.config.trainer import RunConfig
from mimo.protocols import LANGUAGE, ModelProvider
from mimo.text import ranges
from mimo.weights.rules import Direct, global_name, num_stacked_axes, split_layer

WEIGHTS = "weights"


@dataclass(frozen=True)
class StoredInfo:
    """One global tensor of a checkpoint.

    Attributes:
        key: its key in the checkpoint.
        module: the module it belongs to.
        kind: `weights` (parameters and buffers), or a kind of optimizer state (`exp_avg`, `exp_avg_sq`,
            `fp32_param`, `master_param`).
        name: name inside the module, the same for weights and optimizer state.
        shape: global shape, with the axes of stacked layers and experts in front.
        dtype: name of the dtype, such as `bfloat16`.
        num_pieces: number of stored pieces.
        num_bytes: size of all elements.
    """

    key: str
    module: str
    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    num_pieces: int
    num_bytes: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Row:
    """Tensors of a module that differ only in their layer or expert, as one row of a table.

    Their name has ranges of numbers: `decoder.layers.{0-3}.mlp.experts.{0-7}.linear_fc1.weight`. The shape is that of
    each, and the bytes are those of all together.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int

    @property
    def numel(self) -> int:
        return self.count * math.prod(self.shape)


def rows_of(tensors: Iterable[StoredInfo]) -> list[Row]:
    """Combine tensors that differ only in the number of their layer or expert, in the order of the first of them."""
    # Number of the layer, number of tensors and bytes of each stored tensor.
    groups: dict[tuple[str, str, tuple[int, ...], str], list[tuple[int, int, int]]] = {}
    for tensor in tensors:
        stacked = num_stacked_axes(tensor.name)
        axes, shape = tensor.shape[:stacked], tensor.shape[stacked:]
        # Stacked axes become ranges in the name.
        name = global_name(tensor.name, [_ranges(range(size)) for size in axes])
        prefix, number, rest = split_layer(name) or (name, 0, "")
        groups.setdefault((prefix, rest, shape, tensor.dtype), []).append((number, math.prod(axes), tensor.num_bytes))
    rows = []
    for (prefix, rest, shape, dtype), members in groups.items():
        numbers, counts, sizes = zip(*members, strict=True)
        name = f"{prefix}{_ranges(numbers)}.{rest}" if rest else prefix
        rows.append(Row(name, sum(counts), shape, dtype, sum(sizes)))
    return rows


def _ranges(numbers: Iterable[int]) -> str:
    """Format numbers as `{0-3,7}`, or as `7` if there is only one."""
    text = ranges(numbers).replace(", ", ",")
    return text if text.isdecimal() else f"{{{text}}}"


_OPTIMIZER_STATE = ".optimizer.state."


@dataclass(frozen=True)
class Contents:
    """Contents of a checkpoint, read from its index and `common.pt`, without tensor data.

    Attributes:
        folder: its own folder.
        index: contents of `.metadata`.
        common: contents of `common.pt`.
        tensors: every tensor; weights are in the index's order.
        rng: module -> (pp, dp, tp) sizes of the grid that has saved the generator states.
        streams: names of the data streams, `module/lane`.
        files: size of every file in bytes, by name.
    """

    folder: Path
    index: Metadata
    common: Mapping[str, Any]
    tensors: tuple[StoredInfo, ...]
    rng: Mapping[str, tuple[int, ...]]
    streams: tuple[str, ...]
    files: Mapping[str, int]

    @property
    def modules(self) -> list[str]:
        """Names of the modules, in the order of the grids it was saved on."""
        known = [name for name in self.common["grids"] if any(tensor.module == name for tensor in self.tensors)]
        return list(dict.fromkeys([*known, *(tensor.module for tensor in self.tensors)]))

    def of(self, module: str) -> list[StoredInfo]:
        return [tensor for tensor in self.tensors if tensor.module == module]


def read_contents(folder: Path) -> Contents:
    """Read index and `common.pt`.

    Raises:
        ValueError: one of them is missing, damaged, holds more than data, or is not of this trainer.
    """
    common, index = read_common(folder), read_index(folder)
    lacking = sorted({"iteration", "consumed_samples", "config", "frozen", "grids", "optimizer_steps"} - common.keys())
    if lacking:
        raise ValueError(f"{folder}: common.pt is not that of a checkpoint of this trainer, it lacks "
                         f"{', '.join(lacking)}")
    tensors, rng, streams = [], {}, []
    for key, entry in index.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            tensors.append(_tensor(key, entry))
        elif isinstance(entry, BytesStorageMetadata) and key.startswith("mimo."):
            stored = ShardedObject.empty_from_unique_key(key)
            parts = stored.key.split(".")
            if parts[1] == "loader":
                streams.append("/".join(parts[2:]))
            elif parts[2:] == ["rng_state"]:
                rng[parts[1]] = tuple(stored.global_shape)
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    return Contents(folder, index, common, tuple(tensors), rng, tuple(sorted(streams)), files)


def _tensor(key: str, entry: TensorStorageMetadata) -> StoredInfo:
    dtype, kind = entry.properties.dtype, WEIGHTS
    if key.startswith("mimo.") and _OPTIMIZER_STATE in key:
        module, _, rest = key.removeprefix("mimo.").partition(_OPTIMIZER_STATE)
        kind, _, name = rest.partition(".")
    else:
        module, _, name = key.partition(".")
    return StoredInfo(key, module, kind, name, tuple(entry.size), str(dtype).removeprefix("torch."), len(entry.chunks),
                      math.prod(entry.size) * dtype.itemsize)


_NUMBERS = re.compile(r"\.(\d+|\{[\d,-]+\})(?=\.)")


def flag_differences(contents: Contents, config: RunConfig) -> list[str]:
    """Return a line for each flag, and for each size from a config.json (`--hf-config`), that differs."""
    lines = config_differences(contents.common["config"], config)
    listed = {line.split()[0] for line in lines}
    provider = registry.model_provider(config.model.model_provider)
    modules = [module for module in (*provider.encoders(config.model_family), LANGUAGE) if module in contents.modules]
    sizes: list[str] = []
    if contents.common.get("model"):  # Older versions did not store it.
        sizes, _ = refused(model_differences(contents.common["model"], provider, config.model_family, modules), ())
    return lines + [line for line in sizes if line.split()[0] not in listed]


def tensor_differences(contents: Contents, config: RunConfig) -> list[str]:
    """Return a line for each tensor that only the model of `config` or only the checkpoint has, or that differs.

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
        # A provider's shapes are those of whole parameters, of which this is a part. A converted tensor, such as an
        # expert in a tensor of all experts, is a parameter of its own.
        place = stored[rule.megatron]
        shape = held.get(place.key, place.axes)[len(place.axes):]
        if isinstance(rule.convert, Direct) and rule.rows is not None and shape and shape[0] != rule.rows.count:
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
    """List parameters of another precision than the run's, except those that always stay in float32."""
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


# Every byte of a checkpoint against its checksums, and its index against itself.


def damage(contents: Contents) -> tuple[list[str], list[str]]:
    """Read a whole checkpoint.

    Returns:
        A line for everything that is damaged, missing or left over, with the names of the tensors; and notes on what
        could not be checked.
    """
    problems, notes = [*_incomplete(contents.index), *_uneven_optimizer(contents)], []
    read: dict[str, Any] = {}
    for name in (METADATA, CHECKSUMS):
        try:
            read[name] = json.loads((contents.folder / name).read_bytes())
        except FileNotFoundError:
            # A checkpoint of this trainer has both.
            problems.append(f"{name} is missing")
        except ValueError as error:
            problems.append(f"{name} is damaged: {error}")
    checksums = read.get(CHECKSUMS)
    if checksums is None:
        notes.append("without checksums only the lengths of the files were compared")
    return problems + list(_damaged_items(contents.folder, contents.index, checksums)), notes


def _incomplete(index: Metadata) -> Iterator[str]:
    """List objects and tensors of which a part is in no file."""
    stored = {(place.fqn, place.offset) for place in index.storage_data}
    for key, entry in index.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            if (key, None) not in stored:
                yield f"{key} is in the index and in no file"
            continue
        lacking = [chunk for chunk in entry.chunks if (key, chunk.offsets) not in stored]
        for chunk in lacking:
            yield f"{key}: the piece at {list(chunk.offsets)} of {list(chunk.sizes)} is in no file"
        if not is_covered(entry):
            yield f"{key}: its pieces leave something out or overlap"


def _uneven_optimizer(contents: Contents) -> Iterator[str]:
    """List optimizer state that is incomplete, or belongs to tensors that are not there."""
    for module in contents.modules:
        names: dict[str, set[str]] = defaultdict(set)
        for tensor in contents.of(module):
            names[tensor.kind].add(tensor.name)
        weights = names.pop(WEIGHTS, set())
        moments = {kind: held for kind, held in names.items() if kind.startswith("exp_avg")}
        for name in sorted(set().union(*names.values())):
            if name not in weights:
                yield f"{module}.{name} has optimizer state and no weights"
            for kind in (kind for kind, held in moments.items() if name not in held):
                yield f"{module}.{name} has optimizer state, but no {kind}"


def _damaged_items(folder: Path, index: Metadata, checksums: dict[str, dict[str, int]] | None) -> Iterator[str]:
    by_file: dict[str, list[tuple[str, Any]]] = defaultdict(list)
    for place, stored in index.storage_data.items():
        by_file[stored.relative_path].append((place.fqn, stored))
    total = sum(stored.length for items in by_file.values() for _, stored in items)
    with tqdm(total=total, unit="B", unit_scale=True, desc="verifying", leave=False, disable=None) as bar:
        for name, items in sorted(by_file.items()):
            path = folder / name
            if not path.is_file():
                yield f"{name} is missing; it holds {', '.join(sorted({key for key, _ in items}))}"
                continue
            with path.open("rb") as file:
                size = path.stat().st_size
                for key, stored in sorted(items, key=lambda item: item[1].offset):
                    bar.update(stored.length)
                    wrong = _wrong(file, size, stored, None if checksums is None else checksums.get(name, {}))
                    if wrong:
                        yield f"{key} in {name}: {wrong}"


def _wrong(file: Any, size: int, stored: Any, checksums: dict[str, int] | None) -> str | None:
    """Describe the damage of one stored item; None if there is none."""
    if size < stored.offset + stored.length:
        return f"the file ends {stored.offset + stored.length - size} bytes early"
    if checksums is None:
        return None
    if str(stored.offset) not in checksums:
        return "it has no checksum"
    if crc32_of(file, stored.offset, stored.length) != checksums[str(stored.offset)]:
        return "the bytes are not those that were saved (checksum)"
    return None
