"""Exports a checkpoint as a Hugging Face folder, in one process."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mimo.checkpoint.reader import CheckpointTensors
from mimo.protocols import LANGUAGE, ModelProvider
from mimo.weights.configuration import CONFIG_JSON, exported_configuration
from mimo.weights.match import FLOAT_DTYPES, SHAPE_ERRORS, check_values, fitted, report
from mimo.weights.rules import NamingScheme, Rule, SeveralForms, StoredTensor, WeightMap, hf_shapes
from mimo.weights.safetensors_io import (
    MAX_SHARD_BYTES,
    HfSource,
    Progress,
    ShardWriter,
    TensorInfo,
    check_empty,
    is_weights,
    plan_shards,
    write_index,
)

Shapes = Mapping[str, tuple[Sequence[int], torch.dtype]]
"""Shape and dtype of whole tensors, by Megatron name."""

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


@dataclass(frozen=True)
class ExportPlan:
    """Everything that an export writes, known before the first tensor is read. See `plan_export`.

    Attributes:
        options: options of the export.
        base: the model that this one was made from; None without one.
        configuration: contents of config.json; None if the base has none.
        rules: module -> its rules, in the map's order.
        infos: tensors that rules write.
        extras: tensors of the base that are copied.
    """

    options: ExportOptions
    base: HfSource | None
    configuration: dict[str, Any] | None
    rules: Mapping[str, Sequence[PlannedRule]]
    infos: Sequence[TensorInfo]
    extras: Sequence[TensorInfo]

    def write(self, out: Path, source: str, whole: Callable[[str, Rule], torch.Tensor],
              progress: Progress | None = None) -> int:
        """Write the folder, with the tensors of one rule in memory at a time.

        `whole` returns the whole Megatron tensor of a module's rule, and `source` is the name of what is exported, for
        messages.

        Returns:
            Number of tensors written.

        Raises:
            ValueError: values are not finite, or would not be in the new dtype; lists all tensors.
            OSError: the folder cannot be written, for example because the disk is full.
        """
        shards = plan_shards([*self.infos, *self.extras], self.options.max_shard_bytes)
        count, total, problems = 0, sum(len(shard.tensors) for shard in shards), list[str]()
        with ShardWriter(out, shards) as writer:
            for info, tensor, first_row in self._tensors(whole):
                problems += check_values(info.name, tensor, info.dtype)
                # After the first problem, values are only checked.
                if not problems and writer.write(info.name, tensor.to(info.dtype), first_row):
                    count += 1
                    if progress:
                        progress(count, total, info.name)
            hint = ""
            if self.options.dtype == "float16":
                hint = " with --dtype float16 (bfloat16 has the range of float32)"
            report(f"{source} cannot be exported{hint}", problems)
            writer.finish()
            writer.publish()
        write_index(out, shards)
        self._write_other_files(out)
        return count

    def _tensors(self, whole: Callable[[str, Rule], torch.Tensor]) -> Iterator[tuple[TensorInfo, torch.Tensor, int]]:
        """Yield rows of each tensor, in its own dtype, with the number of the first row."""
        for module, rules in self.rules.items():
            for planned in rules:
                rule = planned.rule
                for info, part in zip(planned.infos, rule.convert.to_hf(whole(module, rule)), strict=True):
                    yield info, part, 0 if rule.rows is None else rule.rows.first
        for info in self.extras:
            assert self.base is not None
            yield info, self.base.read(info.name), 0

    def _write_other_files(self, out: Path) -> None:
        """Write the base's other files, and config.json with the dtype of most of the weights."""
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


def plan_export(maps: Mapping[str, WeightMap], options: ExportOptions, out: Path, provider: ModelProvider,
                family_config: Any, tensors: Mapping[str, Shapes], problems: Sequence[str], source: str) -> ExportPlan:
    """Plan an export from names and shapes, so that whatever does not fit is found before a tensor is read.

    `tensors` are the existing whole tensors of each module, and `problems` lines about those that are missing or left
    over. `source` is the name of what is exported, for messages.

    Raises:
        ValueError: the folder has weights already, the base is no folder of weights or another model, or the tensors
            do not fit the weight maps.
    """
    check_empty(out)
    base = HfSource(options.base) if options.base else None
    configuration = exported_configuration(provider, family_config, base.path if base else None, maps)
    rules, lines = {}, [*problems]
    for module, weight_map in maps.items():
        scheme = weight_map.best_scheme(base.tensors) if base else weight_map.schemes[0]
        rules[module], unfit = plan_rules(module, weight_map, scheme, tensors[module], options)
        lines += unfit
    report(f"{source} does not fit the model", lines)
    infos = [info for planned in rules.values() for info in infos_of(planned)]
    planned = [one for of_module in rules.values() for one in of_module]
    return ExportPlan(options, base, configuration, rules, infos, _copied(base, maps, planned, options) if base else [])


def _copied(base: HfSource, maps: Mapping[str, WeightMap], planned: Iterable[PlannedRule],
            options: ExportOptions) -> list[TensorInfo]:
    """Plan the copies from the base: its tensors that no rule makes and that a weight map ignores.

    Raises:
        ValueError: the base is another model, because it lacks tensors, has others, or has them in other shapes.
    """
    written = {info.name: (one.rule, info) for one in planned for info in one.infos}
    problems, copied = [], []
    for name, (rule, info) in written.items():
        forms = rule.convert.forms() if isinstance(rule.convert, SeveralForms) else ()
        if name not in base.tensors:
            problems.append(f"missing: {name} {list(info.shape)} of the model is not in the base")
        elif base.tensors[name].shape not in (info.shape, *map(rule.tensor_shape, forms)):
            problems.append(f"shape: {name} is {list(base.tensors[name].shape)} in the base, "
                            f"{list(info.shape)} in the model")
    ignored = [pattern for weight_map in maps.values() for pattern, _ in weight_map.ignored]
    repeated = [one.pattern for weight_map in maps.values() for one in weight_map.repeated]
    for name, entry in base.tensors.items():
        if name in written or any(re.search(pattern, name) for pattern in repeated):
            continue
        if entry.dtype is None or not any(re.search(pattern, name) for pattern in ignored):
            problems.append(f"not used: {name} {list(entry.shape)} of the base is not in the model")
        else:
            copied.append(TensorInfo(name, options.dtype_of(None, entry.dtype), entry.shape))
    report(f"base {base.path} is another model", problems)
    return copied


def export_checkpoint(checkpoint_dir: str | Path, out_dir: str | Path, provider: ModelProvider, family_config: Any,
                      options: ExportOptions | None = None, progress: Progress | None = None) -> int:
    """Write the weights of a checkpoint as a Hugging Face folder.

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
        ValueError, OSError: as `plan_export` and `ExportPlan.write`. The message lists everything that does not fit.
    """
    reader = CheckpointTensors(Path(checkpoint_dir))
    maps = {module: provider.weight_map(family_config, module)
            for module in (*provider.encoders(family_config), LANGUAGE)}
    places: dict[str, dict[str, StoredTensor]] = {}
    tensors: dict[str, Shapes] = {}
    problems: list[str] = []
    for module, weight_map in maps.items():
        places[module], found = locate(reader.tensors, module, weight_map)
        stored = {name: reader.tensors[f"{module}.{place.key}"] for name, place in places[module].items()}
        tensors[module] = {name: (shape[len(places[module][name].index):], dtype)
                           for name, (dtype, shape) in stored.items()}
        problems += found
    plan = plan_export(maps, options or ExportOptions(), Path(out_dir), provider, family_config, tensors, problems,
                       f"checkpoint {reader.folder}")

    def whole(module: str, rule: Rule) -> torch.Tensor:
        place = places[module][rule.megatron]
        return reader.read(f"{module}.{place.key}", place.index)

    return plan.write(Path(out_dir), str(reader.folder), whole, progress)


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
               tensors: Shapes, options: ExportOptions) -> tuple[list[PlannedRule], list[str]]:
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
