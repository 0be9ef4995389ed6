"""Matches source tensors with Megatron tensors, and describes every way in which they do not fit."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from mimo.boxes import Box
from mimo.checkpoint.entries import sharded_tensors
from mimo.weights.rules import NamingScheme, PaddedRows, Rule, SeveralForms, WeightMap, global_name, is_expert
from mimo.weights.safetensors_io import Catalog, HfSource, SourceTensor

# Errors of a conversion whose tensors have wrong shapes: its own ValueError, or torch's error of a cat or a reshape.
SHAPE_ERRORS = (ValueError, RuntimeError, IndexError)
# Number of rows that are compared at once.
COMPARED_ROWS = 8192
FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass
class ModuleMatch:
    """Match of a module with a source.

    Attributes:
        module: name of the module.
        scheme: naming scheme of the source.
        rules: rules of the tensors to load, by Megatron name, in the map's order.
        absent: Megatron names of the rules whose tensors this kind of source may lack, and does lack.
    """

    module: str
    scheme: NamingScheme
    rules: dict[str, Rule] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)

    def sources(self, rule: Rule) -> list[str]:
        """Return the rule's tensors under the source's names."""
        return [self.scheme.apply(name) for name in rule.hf]


def match_source(catalog: Catalog, wanted: Mapping[str, WeightMap],
                 others: Mapping[str, WeightMap]) -> tuple[dict[str, ModuleMatch], list[str]]:
    """Match a source's names with the maps of the modules that are loaded from it.

    `others` are the maps of the model's other modules, whose tensors may be in the source, too.

    Returns:
        A match for each wanted module, and a line for each tensor that is missing or that nothing uses.
    """
    matches, problems = {}, []
    known: set[str] = set()
    for module, weight_map in wanted.items():
        match = matches[module] = ModuleMatch(module, weight_map.best_scheme(catalog.tensors))
        reported: set[str] = set()  # several rules may want the same tensor
        for rule in weight_map.rules:
            missing = [name for name in match.sources(rule) if name not in catalog.tensors]
            if missing and len(missing) == len(rule.hf) and match.scheme.may_lack(rule):
                match.absent.append(rule.megatron)
                continue
            match.rules[rule.megatron] = rule
            problems += [f"missing: {name} (for {module} {rule.megatron})" for name in missing if name not in reported]
            reported.update(missing)
        known |= {name for rule in weight_map.rules for name in match.sources(rule)}
    for weight_map in others.values():
        scheme = weight_map.best_scheme(catalog.tensors)
        known |= {scheme.apply(name) for rule in weight_map.rules for name in rule.hf}
    ignored = [pattern for weight_map in (*wanted.values(), *others.values())
               for pattern in (*(pattern for pattern, _ in weight_map.ignored),
                               *(repeated.pattern for repeated in weight_map.repeated))]
    for name, entry in catalog.tensors.items():
        if name not in known and not any(re.search(pattern, name) for pattern in ignored):
            problems.append(f"not used: {name} {list(entry.shape)} ({entry.file})")
    return matches, problems


def check_repeated(source: HfSource, match: ModuleMatch, weight_map: WeightMap) -> list[str]:
    """Return a line for each source tensor that should repeat another one and has other values. Reads both."""
    problems = []
    for repeated in weight_map.repeated:
        rule = match.rules.get(repeated.megatron)
        if rule is None:
            continue
        (original,) = match.sources(rule)
        for name in source.tensors:
            if (name != original and original in source.tensors and re.search(repeated.pattern, name)
                    and not _same_values(source, original, name)):
                problems.append(f"values: {name} differs from {original}: {repeated.why}")
    return problems


def _same_values(source: HfSource, first: str, second: str) -> bool:
    """Whether two source tensors are equal, compared in blocks of rows because a vocabulary is large."""
    shape = source.tensors[first].shape
    if shape != source.tensors[second].shape:
        return False
    if not shape:
        return torch.equal(source.read(first).double(), source.read(second).double())
    blocks = (slice(row, row + COMPARED_ROWS) for row in range(0, shape[0], COMPARED_ROWS))
    return all(torch.equal(source.read(first, rows).double(), source.read(second, rows).double()) for rows in blocks)


def check_values(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> list[str]:
    """Return a line if a floating-point tensor is not finite, or would not be after a conversion to `dtype`."""
    if tensor.dtype not in FLOAT_DTYPES or not tensor.numel():
        return []
    low, high = (float(value) for value in torch.aminmax(tensor.detach()))
    if not (math.isfinite(low) and math.isfinite(high)):
        held = "NaN" if math.isnan(low) or math.isnan(high) else f"{low if math.isinf(low) else high}"
        return [f"values: {name} holds {held}"]
    if not dtype.is_floating_point:
        return []
    largest = max(low, high, key=abs)
    if torch.tensor(largest, dtype=torch.float64).to(dtype).isinf():
        return [f"values: {name} holds {largest:g}, and {str(dtype).removeprefix('torch.')} ends at "
                f"{torch.finfo(dtype).max:g}"]
    return []


def check_tensor(match: ModuleMatch, rule: Rule, catalog: Catalog, shape: Sequence[int] | None,
                 dtype: torch.dtype) -> list[str]:
    """Describe why a rule's source tensors do not fit, a line each; empty if one of them is missing.

    `shape` and `dtype` are those of the model's whole tensor; without a shape, only the rule decides.
    """
    names = match.sources(rule)
    if any(name not in catalog.tensors for name in names):
        return []
    entries = [catalog.tensors[name] for name in names]
    problems = []
    if rule.rows is None or rule.rows.first == 0:  # only one of the rules that share a tensor reports it
        for name, entry in zip(names, entries, strict=True):
            # Floating-point dtypes are cast, others must be equal.
            if entry.dtype == dtype or (entry.dtype in FLOAT_DTYPES and dtype in FLOAT_DTYPES):
                continue
            is_quantized = entry.dtype is None or entry.dtype.itemsize == 1
            hint = ": quantized weights are not loaded, dequantize them first" if is_quantized else ""
            problems.append(f"dtype: {name} is {entry.dtype_name} ({entry.file}); {match.module} {rule.megatron} is "
                            f"{str(dtype).removeprefix('torch.')}{hint}")
    if rule.keep_fp32 and dtype is not torch.float32:
        problems.append(f"dtype: {match.module} {rule.megatron} must be float32 in the model, which has it in "
                        f"{str(dtype).removeprefix('torch.')}")
    return problems + check_shape(match, rule, entries, shape)


def fitted(rule: Rule, shape: Sequence[int]) -> Rule:
    """Adapt the rule of a padded vocabulary, whose number of rows depends on the tensor-parallel size."""
    convert = rule.convert
    if not isinstance(convert, PaddedRows) or not shape or shape[0] < convert.rows:
        return rule
    return replace(rule, convert=replace(convert, padded_rows=shape[0]))


def check_shape(match: ModuleMatch, rule: Rule, entries: Sequence[SourceTensor],
                shape: Sequence[int] | None) -> list[str]:
    """Return the lines of `check_tensor` about shapes."""
    names, have, made = match.sources(rule), [entry.shape for entry in entries], f"{match.module} {rule.megatron}"
    try:
        if shape is None:
            shape = rule.convert.to_megatron(_meta(rule.part_shapes(have))).shape
        # The parts of the model's tensor show which of several source tensors has the wrong shape.
        takes = [rule.tensor_shape(part.shape) for part in rule.convert.to_hf(*_meta([shape]))]
        if isinstance(rule.convert, SeveralForms):
            forms = [rule.tensor_shape(form) for form in rule.convert.forms()]
            takes = [entry.shape if entry.shape in forms else take for entry, take in zip(entries, takes, strict=True)]
        # Rules that share a tensor must produce the same line.
        what = f"{made} {list(shape)}" if rule.rows is None else match.module
        wrong = [f"shape: {name} is {list(entry.shape)} ({entry.file}); {what} takes {list(size)}"
                 for name, entry, size in zip(names, entries, takes, strict=True) if entry.shape != size]
        makes = tuple(shape) if wrong else tuple(rule.convert.to_megatron(_meta(rule.part_shapes(have))).shape)
    except SHAPE_ERRORS as error:
        wanted = "" if shape is None else f" {list(shape)}"
        return [f"shape: {_listed(names, have)} do not make {made}{wanted}: {error}"]
    if makes != tuple(shape):
        wrong.append(f"shape: {_listed(names, have)} make {list(makes)}; {made} is {list(shape)}")
    return wrong


def _meta(shapes: Iterable[Sequence[int]]) -> list[torch.Tensor]:
    return [torch.empty(tuple(shape), device="meta") for shape in shapes]


def _listed(names: Iterable[str], shapes: Iterable[Sequence[int]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in zip(names, shapes, strict=True))


def report(what: str, problems: Iterable[str]) -> None:
    """Raise one ValueError with every line, once each, grouped by kind.

    Raises:
        ValueError: there are problems.
    """
    lines = sorted(set(problems))
    if lines:
        raise ValueError(f"{what} ({len(lines)} {'problem' if len(lines) == 1 else 'problems'}):\n  "
                         + "\n  ".join(lines))


@dataclass
class ModelPiece:
    """A slice of one global tensor, held by this rank.

    Attributes:
        name: global name, as in `Rule.megatron`.
        shape: shape of the whole tensor.
        box: box of this piece in the whole tensor.
        tensor: view of the parameter or buffer, so that copying into it changes the model.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor


def module_pieces(module: torch.nn.Module, groups: ProcessGroupCollection) -> list[ModelPiece]:
    """Return every parameter and saved buffer of a rank's part of a module. Gate and up halves are separate pieces."""
    return [ModelPiece(global_name(part.key, part.global_offset[:part.prepend_axis_num]),
                       tuple(part.global_shape[part.prepend_axis_num:]),
                       Box.at(part.global_offset[part.prepend_axis_num:], part.data.shape), part.data)
            for _, parts in sharded_tensors(module, "", groups) for part in parts]


def replica_group(piece: ModelPiece, groups: ProcessGroupCollection) -> Any:
    """Return the group of the ranks that hold the same piece: the module's or the experts' data-parallel group."""
    return groups.expt_dp if is_expert(piece.name) else groups.dp_cp
