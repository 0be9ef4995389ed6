"""Exports a checkpoint as a Hugging Face folder, in one process."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mimo.checkpoint.reader import CheckpointTensors
from mimo.protocols import LANGUAGE, ModelProvider
from mimo.weights.configuration import CONFIG_JSON, exported_configuration
from mimo.weights.match import FLOAT_DTYPES, SHAPE_ERRORS, check_values, fitted, report
from mimo.weights.rules import NamingScheme, Rule, StoredTensor, WeightMap, hf_shapes
from mimo.weights.safetensors_io import (
    MAX_SHARD_BYTES,
    HfSource,
    Progress,
    Shard,
    ShardWriter,
    TensorInfo,
    check_empty,
    is_weights,
    plan_shards,
    write_index,
)

# Keys of the dtype in config.json.
DTYPE_KEYS = ("dtype", "torch_dtype")
# dtypes of weights by the values of --dtype.
WEIGHT_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class PlannedRule:
    """A rule and the tensors that it writes. `infos` are of whole tensors, which may have rows of other rules, too."""

    rule: Rule
    infos: tuple[TensorInfo, ...]


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export.

    Attributes:
        base: folder of the Hugging Face model that this one was made from. Its configuration, tokenizer and processor
            files and its tensors that training does not use are copied, and its naming scheme is used. Empty: the
            provider writes the configuration.
        dtype: `bfloat16`, `float16` or `float32`; empty: each tensor keeps its dtype.
        max_shard_bytes: largest size of a file's tensors.
    """

    base: str = ""
    dtype: str = ""
    max_shard_bytes: int = MAX_SHARD_BYTES

    def __post_init__(self) -> None:
        if self.dtype and self.dtype not in WEIGHT_DTYPES:
            raise ValueError(f"export dtype {self.dtype!r}: known are {', '.join(WEIGHT_DTYPES)}")

    def dtype_of(self, rule: Rule | None, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a tensor of `dtype` is written."""
        if rule is not None and rule.keep_fp32:
            return torch.float32
        return WEIGHT_DTYPES[self.dtype] if self.dtype and dtype in FLOAT_DTYPES else dtype


@dataclass
class ExportPlan:
    """Everything that an export writes, known before the first tensor is read.

    Attributes:
        maps: each module's weight map, encoders first.
        options: options of the export.
        base: the model that this one was made from; None without one.
        configuration: contents of config.json; None if the base has none.
        rules: module -> its rules, in the map's order.
        extras: tensors of the base that are copied.
    """

    maps: Mapping[str, WeightMap]
    options: ExportOptions
    base: HfSource | None = None
    configuration: dict[str, Any] | None = None
    rules: dict[str, list[PlannedRule]] = field(default_factory=dict)
    extras: list[TensorInfo] = field(default_factory=list)

    def open_base(self, out: Path, provider: ModelProvider, family_config: Any) -> None:
        """Check the folder to write, and open the base and its configuration.

        Raises:
            ValueError: the folder has weights already, or the base is no folder of weights or another model.
        """
        check_empty(out)
        self.base = HfSource(self.options.base) if self.options.base else None
        self.configuration = exported_configuration(provider, family_config, self.base.path if self.base else None,
                                                    self.maps)

    def add_module(self, module: str, tensors: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> list[str]:
        """Plan a module's rules under the base's naming scheme. Return a line for each rule that does not fit."""
        weight_map = self.maps[module]
        scheme = weight_map.best_scheme(self.base.tensors) if self.base else weight_map.schemes[0]
        self.rules[module], unfit = plan_rules(module, weight_map, scheme, tensors, self.options)
        return unfit

    def add_base_tensors(self) -> None:
        """Plan the copies from the base: its tensors that no rule makes and that a weight map ignores.

        Raises:
            ValueError: the base is another model, because it lacks tensors, has others, or has them in other shapes.
        """
        if self.base is None:
            return
        written = {info.name: info for info in self.infos}
        problems = []
        for name, info in written.items():
            if name not in self.base.tensors:
                problems.append(f"missing: {name} {list(info.shape)} of the model is not in the base")
            elif self.base.tensors[name].shape != info.shape:
                problems.append(f"shape: {name} is {list(self.base.tensors[name].shape)} in the base, "
                                f"{list(info.shape)} in the model")
        ignored = [pattern for weight_map in self.maps.values() for pattern, _ in weight_map.ignored]
        repeated = [one.pattern for weight_map in self.maps.values() for one in weight_map.repeated]
        for name, entry in self.base.tensors.items():
            if name in written or any(re.search(pattern, name) for pattern in repeated):
                continue
            if entry.dtype is None or not any(re.search(pattern, name) for pattern in ignored):
                problems.append(f"not used: {name} {list(entry.shape)} of the base is not in the model")
            else:
                self.extras.append(TensorInfo(name, self.options.dtype_of(None, entry.dtype), entry.shape))
        report(f"base {self.base.path} is another model", problems)

    @property
    def infos(self) -> list[TensorInfo]:
        """Tensors that rules write."""
        return [info for rules in self.rules.values() for info in infos_of(rules)]

    def base_tensors(self, problems: list[str]) -> Iterator[tuple[str, torch.Tensor, int]]:
        """Yield the tensors to copy, in the form of `converted`, and note wrong values."""
        for info in self.extras:
            assert self.base is not None
            copied = self.base.read(info.name)
            problems += check_values(info.name, copied, info.dtype)
            if not problems:
                yield info.name, copied.to(info.dtype), 0

    def finish(self, out: Path, shards: Iterable[Shard]) -> None:
        """Write everything besides the weights, once their files have their names.

        This is the index, the base's other files, and config.json with the dtype of most of the weights.
        """
        write_index(out, shards)
        if self.base is not None:
            for path in sorted(self.base.path.rglob("*")):
                place = path.relative_to(self.base.path)
                is_hidden = any(part.startswith(".") for part in place.parts)
                if path.is_file() and not is_weights(path.name) and not is_hidden:
                    (out / place).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, out / place)
        if self.configuration is None:
            return
        sizes: Counter[torch.dtype] = Counter()
        for info in self.infos:
            sizes[info.dtype] += info.num_bytes
        changed = _with_dtype(self.configuration, str(sizes.most_common(1)[0][0]).removeprefix("torch."))
        config_file = out / CONFIG_JSON
        # The base's own file stays as it is, with its order and spaces, if nothing in it changes.
        if self.base is None or changed != json.loads(config_file.read_text(encoding="utf-8")):
            config_file.write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")


def converted(wholes: Iterable[tuple[PlannedRule, torch.Tensor]],
              problems: list[str]) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Convert whole Megatron tensors to rows of Hugging Face tensors: name, rows, number of the first.

    Args:
        wholes: each rule's tensor, one at a time.
        problems: notes of values that cannot be written. After the first one, values are only checked.
    """
    for planned, whole in wholes:
        first_row = 0 if planned.rule.rows is None else planned.rule.rows.first
        for info, part in zip(planned.infos, planned.rule.convert.to_hf(whole), strict=True):
            problems += check_values(info.name, part, info.dtype)
            if not problems:
                yield info.name, part.to(info.dtype), first_row


def export_checkpoint(checkpoint_dir: str | Path, out_dir: str | Path, provider: ModelProvider, family_config: Any,
                      options: ExportOptions | None = None, progress: Progress | None = None) -> int:
    """Write the weights of a checkpoint as a Hugging Face folder, with the tensors of one rule in memory at a time.

    Args:
        checkpoint_dir: the checkpoint's own folder (`SAVE/iter_0000010`).
        out_dir: folder to write; may exist, without weights.
        provider: the model family.
        family_config: the configuration that the checkpoint was trained with.
        options: options of the export.
        progress: called after each tensor.

    Returns:
        Number of tensors written.

    Raises:
        ValueError: the checkpoint lacks tensors of the model, has others, or has them in other shapes; the base is
            another model; the folder has weights already; values are not finite, or would not be in the new dtype. The
            message lists everything that does not fit.
        OSError: the folder cannot be written, for example because the disk is full.
    """
    options, out = options or ExportOptions(), Path(out_dir)
    reader = CheckpointTensors(Path(checkpoint_dir))
    plan = ExportPlan({module: provider.weight_map(family_config, module)
                       for module in (*provider.encoders(family_config), LANGUAGE)}, options)
    plan.open_base(out, provider, family_config)
    # Everything is planned from names and shapes, so that whatever does not fit is found before a tensor is read.
    places: dict[str, dict[str, StoredTensor]] = {}
    problems: list[str] = []
    for module, weight_map in plan.maps.items():
        places[module], found = locate(reader.tensors, module, weight_map)
        tensors = {name: reader.tensors[f"{module}.{place.key}"] for name, place in places[module].items()}
        problems += found + plan.add_module(module, {
            name: (shape[len(places[module][name].index):], dtype) for name, (dtype, shape) in tensors.items()})
    report(f"checkpoint {reader.folder} does not fit the model", problems)
    plan.add_base_tensors()
    shards = plan_shards([*plan.infos, *plan.extras], options.max_shard_bytes)
    with ShardWriter(out, shards) as writer:
        # A generator, so that one tensor is in memory at a time.
        wholes = ((rule, reader.read(f"{module}.{places[module][rule.rule.megatron].key}",
                                     places[module][rule.rule.megatron].index))
                  for module, rules in plan.rules.items() for rule in rules)
        count, total = 0, sum(len(shard.tensors) for shard in shards)
        for name, tensor, first_row in itertools.chain(converted(wholes, problems), plan.base_tensors(problems)):
            if writer.write(name, tensor, first_row):
                count += 1
                if progress:
                    progress(count, total, name)
        hint = ""
        if options.dtype == "float16":
            hint = " with --dtype float16 (bfloat16 has the range of float32)"
        report(f"{reader.folder} cannot be exported{hint}", problems)
        writer.finish()
        writer.publish()
    plan.finish(out, shards)
    return count


def locate(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], module: str,
           weight_map: WeightMap) -> tuple[dict[str, StoredTensor], list[str]]:
    """Find the places of a module's tensors in a checkpoint, with a line for each that is missing or left over."""
    stored = weight_map.stored()
    places, problems = {}, []
    for name, place in stored.items():
        key = f"{module}.{place.key}"
        axes = tensors[key][1][:len(place.axes)] if key in tensors else None
        if axes == place.axes:
            places[name] = place
        elif axes is None:
            problems.append(f"missing: {key} (for {name})")
        else:
            problems.append(f"shape: {key} has {list(axes)} on its leading axes, the model {list(place.axes)}")
    known = {f"{module}.{place.key}" for place in stored.values()}
    problems += [f"not used: {key} {list(shape)}" for key, (_, shape) in tensors.items()
                 if key.startswith(f"{module}.") and key not in known]
    return places, problems


def plan_rules(module: str, weight_map: WeightMap, scheme: NamingScheme,
               tensors: Mapping[str, tuple[Sequence[int], torch.dtype]],
               options: ExportOptions) -> tuple[list[PlannedRule], list[str]]:
    """List the tensors that a module's rules write, and a line for each rule that does not take its tensor.

    Rules of tensors that do not exist are left out.
    """
    planned, problems = [], []
    for rule in weight_map.rules:
        if rule.megatron not in tensors:
            continue
        shape, dtype = tensors[rule.megatron]
        rule = fitted(rule, shape)
        try:
            parts = hf_shapes(rule.convert, tuple(shape))
            infos = tuple(TensorInfo(scheme.apply(name), options.dtype_of(rule, dtype), rule.tensor_shape(part))
                          for name, part in zip(rule.hf, parts, strict=True))
        except SHAPE_ERRORS as error:
            problems.append(f"shape: {module} {rule.megatron} {list(shape)}: {error}")
            continue
        planned.append(PlannedRule(rule, infos))
    return planned, problems


def infos_of(planned: Iterable[PlannedRule]) -> list[TensorInfo]:
    """Return the tensors that rules write, each once even if several rules make it."""
    infos: list[TensorInfo] = []
    shared: set[TensorInfo] = set()
    for rule in planned:
        infos += [info for info in rule.infos if info not in shared]
        if rule.rule.rows is not None:
            shared.update(rule.infos)
    return infos


def _with_dtype(configuration: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Set the dtype in a config.json, and in its parts that name one. In transformers 4, the key is torch_dtype."""
    changed: dict[str, Any] = {
        key: _with_dtype(value, dtype) if key.endswith("_config") and isinstance(value, dict)
        and not value.keys().isdisjoint(DTYPE_KEYS) else value for key, value in configuration.items()}
    keys = [key for key in DTYPE_KEYS if key in configuration] or DTYPE_KEYS[:1]
    return changed | dict.fromkeys(keys, dtype)
